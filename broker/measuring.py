"""Devices and links are measured before they are planned with: who is asked, what is known, what is overdue. Pure.

A stage that joins times layers of the model (`Measure`). Then each link between two measured stages, in both
directions, and each stage's link to the broker is probed (`Probe`): as many at the same time as there are pairs of
stages that do nothing else, so that no two probes share a device. What the figures mean is left to the planner.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from potluck.broker import hop_costs
from potluck.broker.core import Core
from potluck.broker.effects import Effect, Report, SendToStage
from potluck.broker.events import LinkProbed, LinkSilent, StageMeasured, StageNotMeasured
from potluck.broker.state import BROKER, Chain, Probing, Stage, StageStatus
from potluck.planner.cost import send_bytes
from potluck.planner.measured import forecast
from potluck.planner.plan import Candidate, ChainPlan, Demand, Link, Network, Plan
from potluck.wire import limits
from potluck.wire.errors import Phase, PotluckError, StageError
from potluck.wire.forecast import Forecast
from potluck.wire.ids import StageId
from potluck.wire.measures import LinkTiming
from potluck.wire.messages import Measure, Probe

UNREACHABLE = Link(one_way_s=math.inf)


# ---- devices


def begin(core: Core, stage: Stage) -> Iterator[Effect]:
    """A stage has joined: it is measured first, if anything is."""
    if core.config.measure:
        stage.status, stage.detail, stage.last_progress_s = StageStatus.MEASURING, "", core.now
        _expect(core, core.config.measure_timeout_s)
        yield ask(core, stage)


def ask(core: Core, stage: Stage) -> SendToStage:
    """What the stage is to time. It answers as often as it is asked."""
    stage.asked_s = core.now
    config = core.config
    message = Measure(
        model=core.model,
        slots=config.slots,
        context_tokens=config.context_tokens,
        batch_tokens=max(config.chunk_tokens, config.slots),
        exact=config.exact,
    )
    return SendToStage(stage.stage, message, core.state.epoch)


def measured(core: Core, event: StageMeasured) -> Iterator[Effect]:
    """A stage's profile has come."""
    stage = core.state.stages.get(event.stage)
    if stage is None or stage.status is not StageStatus.MEASURING:
        return
    if event.profile.fingerprint != core.model.fingerprint:
        error = StageError(
            f"{stage.device} measured another model than {core.model.name}.",
            hint="Restart potluck-stage there, of the same version as this broker.",
            device=stage.device, stage=stage.stage, phase=Phase.MEASURE,
        )  # fmt: skip
        yield from _give_up(core, stage, event.cause, error)
        return
    stage.profile, stage.status, stage.detail = event.profile, StageStatus.SPARE, ""
    took = "known from before" if event.profile.kept else f"took {event.profile.took_s:.1f} s"
    core.tell(event.stage, event.cause, f"measured ({took})")
    yield Report("info", f"{stage.device} is measured ({took}).")
    yield from go_on(core)


def not_measured(core: Core, event: StageNotMeasured) -> Iterator[Effect]:
    """A stage could not be measured: it serves only if nothing is known of the others either."""
    stage = core.state.stages.get(event.stage)
    if stage is not None and stage.status is StageStatus.MEASURING:
        yield from _give_up(core, stage, event.cause, event.error)


def _give_up(core: Core, stage: Stage, cause: str, error: PotluckError) -> Iterator[Effect]:
    stage.status, stage.detail = StageStatus.SPARE, f"not measured: {error.what}"
    core.tell(stage.stage, cause, stage.detail)
    yield Report("warning", f"{stage.device} could not be measured: {error}")
    yield from go_on(core)


# ---- links


def go_on(core: Core) -> Iterator[Effect]:
    """Starts the probes that can run now; once nothing is left to measure, a plan is due."""
    yield from _start_probes(core)
    if not unfinished(core):
        core.ask_for_plan(0.0 if core.enough_joined() else core.config.settle_s)


def _start_probes(core: Core) -> Iterator[Effect]:
    state = core.state
    busy = {end for probe in state.probes.values() for end in (probe.sender, probe.receiver)}
    idle = [stage for stage in _measured(core) if stage.stage not in busy]
    for sender in idle:
        if sender.stage in busy:
            continue
        for receiver in (BROKER, *(stage.stage for stage in idle)):
            pair = (sender.stage, receiver)
            if receiver in busy or receiver == sender.stage or pair in state.links:
                continue
            busy |= {sender.stage, receiver}
            yield from _probe(core, sender.stage, receiver)
            break


def _probe(core: Core, sender: StageId, receiver: StageId) -> Iterator[Effect]:
    state = core.state
    frame_bytes = min(
        send_bytes(core.shape, core.config.demand, core.config.chunk_tokens), limits.PROBE_BYTES
    )
    endpoint = core.results_endpoint(sender) if receiver == BROKER else state.stages[receiver].endpoint
    state.next_probe += 1
    state.probes[state.next_probe] = Probing(sender, receiver, core.now)
    _expect(core, core.config.probe_timeout_s)
    yield SendToStage(sender, Probe(state.next_probe, endpoint, max(1, frame_bytes)), state.epoch)


def probed(core: Core, event: LinkProbed) -> Iterator[Effect]:
    """A link's figures have come."""
    yield from _ended(core, event.stage, event.number, event.link, event.cause)


def silent(core: Core, event: LinkSilent) -> Iterator[Effect]:
    """Nobody answered at the other end of a link."""
    yield from _ended(core, event.stage, event.number, None, event.cause)


def _ended(core: Core, by: StageId, number: int, link: LinkTiming | None, cause: str) -> Iterator[Effect]:
    probe = core.state.probes.get(number)
    if probe is None or probe.sender != by:
        return
    del core.state.probes[number]
    core.state.links[probe.sender, probe.receiver] = link
    receiver = core.state.stages.get(probe.receiver)
    if link is None:
        core.look_again_s = core.now + core.config.look_again_s
        if receiver is not None:
            receiver.suspect = False  # it does not hang, it can't be reached from there
    there = "the broker" if probe.receiver == BROKER else core.state.stages[probe.receiver].device
    core.tell(by, cause, f"link to {there}: {'no answer' if link is None else f'{1000 * link.rtt_s:.2f} ms'}")
    if link is None:
        device = core.state.stages[by].device
        yield Report("warning", f"{device} gets no answer from {there}: a firewall, or another network?")
    yield from go_on(core)


def doubt(core: Core, chain: Chain, stage: Stage) -> Iterator[Effect]:
    """A micro-batch got stuck on its way to or in a stage: whether the link to it still works is found out."""
    index = chain.stages.index(stage.stage)
    if index > 0:
        yield from _probe(core, chain.stages[index - 1], stage.stage)


def forget(core: Core, name: StageId) -> None:
    """A stage is gone, and what was known of its links with it."""
    core.state.links = {pair: link for pair, link in core.state.links.items() if name not in pair}
    core.state.probes = {
        number: probe
        for number, probe in core.state.probes.items()
        if name not in (probe.sender, probe.receiver)
    }


def _measured(core: Core) -> list[Stage]:
    return [
        stage
        for stage in core.state.stages.values()
        if stage.profile is not None and stage.status is not StageStatus.FAILED
    ]


# ---- time


def unfinished(core: Core) -> bool:
    """Whether something is still being measured."""
    return bool(core.state.probes) or any(
        stage.status is StageStatus.MEASURING for stage in core.state.stages.values()
    )


def _watch(core: Core) -> None:
    """Sets when something that is measured could next have taken too long. Progress only moves that further away."""
    due = [
        stage.last_progress_s + core.config.measure_timeout_s
        for stage in core.state.stages.values()
        if stage.status is StageStatus.MEASURING
    ]
    due += [probe.began_s + core.config.probe_timeout_s for probe in core.state.probes.values()]
    core.measure_check_s = min(due, default=None)


def _expect(core: Core, within_s: float) -> None:
    """Something has begun that is to end within this time."""
    due_s = core.now + within_s
    core.measure_check_s = due_s if core.measure_check_s is None else min(core.measure_check_s, due_s)


def time_passed(core: Core, cause: str) -> Iterator[Effect]:
    """Gives up what has taken too long, and looks again at links that are cut."""
    if core.look_again_s is not None and core.now >= core.look_again_s:
        core.look_again_s = None
        for pair in [pair for pair, link in core.state.links.items() if link is None]:
            yield from _probe(core, *pair)
    if core.measure_check_s is None or core.now < core.measure_check_s:
        return
    for stage in list(core.state.stages.values()):
        limit_s = core.config.measure_timeout_s
        if stage.status is StageStatus.MEASURING and core.now >= stage.last_progress_s + limit_s:
            error = StageError(
                f"{stage.device} made no progress while it was measured for {limit_s:g} s.",
                hint="Look at its log; restart potluck-stage there.",
                device=stage.device, stage=stage.stage, phase=Phase.MEASURE,
            )  # fmt: skip
            yield from _give_up(core, stage, cause, error)
    for number, probe in list(core.state.probes.items()):
        if core.now >= probe.began_s + core.config.probe_timeout_s:
            yield from _ended(core, probe.sender, number, None, cause)
    _watch(core)


# ---- what a planner is given, and says with it


def candidates(core: Core, stages: list[Stage]) -> list[Candidate]:
    """The stages as a planner sees them."""
    return [
        Candidate(
            stage.stage,
            stage.device,
            stage.capabilities.offered_bytes,
            stage.capabilities.offered_vram_bytes,
            stage.capabilities.allow_cpu_fallback,
            stage.profile,
            stage.pace.slowdown,
        )
        for stage in stages
    ]


def network(core: Core) -> Network:
    """The links as a planner sees them. A link that was never probed costs nothing, one without an answer is cut."""
    links, from_broker, to_broker = {}, {}, {}
    hop_s = {stage.stage: hop_costs.hop_s(core, stage) for stage in core.state.stages.values()}
    for (sender, receiver), timing in core.state.links.items():
        between_s = (hop_s[sender] + hop_s.get(receiver, hop_s[sender])) / 2
        link = UNREACHABLE if timing is None else Link(timing.rtt_s / 2 + between_s, timing.bytes_per_s)
        if receiver == BROKER:
            to_broker[sender] = from_broker[sender] = link
        else:
            links[sender, receiver] = link
    return Network(links, from_broker, to_broker)


def predicted(core: Core, chains: Sequence[ChainPlan], demand: Demand) -> Forecast | None:
    """What the chains would do with today's measurements; None unless all their stages are measured."""
    known = candidates(core, list(core.state.stages.values()))
    return forecast(core.shape, known, network(core), demand, Plan(tuple(chains)))
