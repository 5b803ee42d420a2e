"""What happens because nothing else did: everything that the core waits for has an end. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from potluck.broker import (
    closing,
    liveness,
    measuring,
    members,
    plans,
    recovery,
    requests,
    serving,
    switching,
    timeouts,
)
from potluck.broker.core import Core
from potluck.broker.effects import (
    Effect,
)
from potluck.broker.events import (
    BatchBroke,
    StageBroke,
    TimePassed,
)
from potluck.broker.state import Chain, InFlight, Stage
from potluck.wire.errors import (
    Phase,
    StageError,
    UnavailableError,
)


def time_passed(core: Core, event: TimePassed) -> Iterator[Effect]:
    """Who is lost, which micro-batch and which load is overdue, who has waited too long."""
    if core.check_due_s is not None and core.now >= core.check_due_s:
        lost_after = core.config.lost_after_s
        for name in liveness.silent(core.state.stages.values(), core.now, lost_after):
            yield from members.remove(core, name, event.cause, f"no sign of life for {lost_after:g} s")
        members.watch(core)
    yield from measuring.time_passed(core, event.cause)
    move_due_s = switching.deadline(core)
    if move_due_s is not None and core.now >= move_due_s:
        yield from switching.give_up(core, event.cause, f"no progress for {core.config.load_timeout_s:g} s")
    yield from timeouts.time_passed(core, event.cause)
    yield from closing.time_passed(core, event.cause)
    for chain in list(core.state.chains.values()):
        if chain.in_flight:
            oldest = next(iter(chain.in_flight.values()))
            allowed = allowed_s(core, chain, oldest)
            if core.now >= max(oldest.sent_s, chain.moved_s) + allowed:
                stage = stuck_at(core, chain)
                stage.suspect, stage.suspect_since_s = True, core.now
                error = StageError(
                    f"A micro-batch of {oldest.tokens} tokens did not come back within {allowed:.0f} s.",
                    hint="This stage hangs, or a link to or from it is cut; others are preferred until it joins anew.",
                    device=stage.device,
                    stage=stage.stage,
                    phase=Phase.SERVE,
                )
                yield from measuring.doubt(core, chain, stage)
                yield from serving.batch_broke(
                    core, BatchBroke(cause=event.cause, epoch=chain.epoch, batch=oldest.batch, error=error)
                )
        elif not chain.open and core.now >= plans.load_deadline(core, chain):
            yield from give_up_loading(core, chain, event.cause)
    if not core.state.ready:
        for request in recovery.overdue(core.state, core.now, core.config.wait_limit_s):
            failure = UnavailableError(
                f"No chain could take the request within {core.config.wait_limit_s:g} s. {core.missing}",
                hint="Start more stages, or wait for the lost ones.",
                phase=Phase.SERVE,
                retry_after_s=30,
            )
            core.tell(request.request, event.cause, "waited too long for a chain")
            yield requests.fail(core.state, request, failure)


def allowed_s(core: Core, chain: Chain, flight: InFlight) -> float:
    """How long the next micro-batch may take to come out, by what the chain has needed per token so far."""
    config = core.config
    if chain.slowest_token_s is None:
        return config.batch_timeout_s
    floor = min(config.least_batch_timeout_s, config.batch_timeout_s)
    return max(floor, config.patience * chain.slowest_token_s * flight.tokens)


def stuck_at(core: Core, chain: Chain) -> Stage:
    """The first stage that has not computed the oldest micro-batch in flight, as of its last beat; the last one if all
    have, for then the result was lost behind it. Micro-batches keep their order, so counting them is enough.
    """
    stages = [core.state.stages[name] for name in chain.stages]
    return next((stage for stage in stages if stage.counters.batches <= chain.returned), stages[-1])


def give_up_loading(core: Core, chain: Chain, cause: str) -> Iterator[Effect]:
    """Leaves out the first stage of a chain that makes no progress."""
    for name in chain.stages:
        stage = core.state.stages[name]
        if name in chain.ready or core.now < stage.last_progress_s + core.config.load_timeout_s:
            continue
        error = StageError(
            f"{stage.device} made no progress while loading for {core.config.load_timeout_s:g} s.",
            hint="Look at its log; restart potluck-stage there.",
            device=stage.device, stage=name, phase=Phase.LOAD,
        )  # fmt: skip
        yield from members.broke(core, StageBroke(cause=cause, stage=name, epoch=chain.epoch, error=error))
        return


def next_deadline(core: Core) -> float | None:
    """When TimePassed is due, on the clock of `now`; None while nothing is waited for."""
    times = [
        core.plan_due_s,
        core.check_due_s,
        core.measure_check_s,
        core.look_again_s,
        switching.deadline(core),
        closing.next_s(core),
        timeouts.next_s(core),
    ]
    for chain in core.state.chains.values():
        if chain.in_flight:
            oldest = next(iter(chain.in_flight.values()))
            times.append(max(oldest.sent_s, chain.moved_s) + allowed_s(core, chain, oldest))
        elif not chain.open:
            times.append(plans.load_deadline(core, chain))
    if not core.state.ready and core.state.waiting:
        first = min(core.state.requests[name].waiting_since_s for name in core.state.waiting)
        times.append(first + core.config.wait_limit_s)
    return min((time for time in times if time is not None), default=None)
