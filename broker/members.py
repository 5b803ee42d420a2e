"""Who belongs to the cluster: stages that join, beat, load, fail and leave. Pure.

What their coming and going means for the chains is left to `plans`.
"""

from __future__ import annotations

from collections.abc import Iterator

from potluck.broker import holding, liveness, measuring, mirroring, plans
from potluck.broker.core import Core
from potluck.broker.effects import (
    Effect,
    OpenChain,
    Report,
    SendToStage,
)
from potluck.broker.events import (
    StageBeat,
    StageBroke,
    StageLoaded,
    StageProgressed,
    StageRegistered,
)
from potluck.broker.state import Stage, StageStatus
from potluck.wire.errors import (
    Phase,
    PotluckError,
    StageError,
)
from potluck.wire.ids import StageId
from potluck.wire.messages import (
    ErrorInfo,
    Refused,
    Welcome,
)


def register(core: Core, event: StageRegistered) -> Iterator[Effect]:
    """Lets a stage in, or refuses it with the reason."""
    if event.stage in core.state.stages:
        yield from remove(core, event.stage, event.cause, "registered again")
    if core.model.fingerprint not in event.models:
        offered = ", ".join(fingerprint[:12] for fingerprint in event.models[:3]) or "none"
        error = PotluckError(
            f"{event.device} has no copy of {core.model.name} (fingerprint {core.model.fingerprint[:12]}); "
            f"fingerprints of its files: {offered}.",
            hint="Copy the model file to that device and name it with potluck-stage --model PATH.",
            device=event.device,
            phase=Phase.JOIN,
        )
        core.tell(event.stage, event.cause, "refused: no copy of the model")
        yield SendToStage(event.stage, Refused(ErrorInfo.of(error)), core.state.epoch)
        yield Report("warning", str(error))
        return
    core.state.stages[event.stage] = Stage(
        event.stage,
        event.device,
        event.endpoint,
        event.capabilities,
        last_heard_s=core.now,
        version=event.version,
    )
    core.tell(event.stage, event.cause, f"joined from {event.endpoint}")
    welcome = Welcome(core.version, core.config.heartbeat_s, core.config.misses)
    yield SendToStage(event.stage, welcome, core.state.epoch)
    yield Report("info", f"{event.device} joined ({event.endpoint}).")
    watch(core)
    yield from measuring.begin(core, core.state.stages[event.stage])
    core.ask_for_plan(core.config.settle_s)


def beat(core: Core, event: StageBeat) -> Iterator[Effect]:
    """A sign of life; one of a stranger is answered by asking it to register."""
    stage = core.state.stages.get(event.stage)
    if stage is None:
        error = StageError(
            "This broker does not know the stage.", hint="It has to register again.", phase=Phase.JOIN
        )
        yield SendToStage(event.stage, Refused(ErrorInfo.of(error)), core.state.epoch)
        return
    stage.last_heard_s = core.now
    if event.counters is None:
        return
    stage.holds = event.holds
    if event.epoch == stage.epoch:
        stage.counters = event.counters
    if core.now < stage.asked_s + core.config.lost_after_s:
        return
    # a link that broke may have lost what was asked, or its answer
    if stage.status is StageStatus.LOADING:
        yield plans.ask_to_load(core, stage)
    elif stage.status is StageStatus.MEASURING:
        yield measuring.ask(core, stage)
    elif stage.owed and core.now >= stage.last_progress_s + core.config.lost_after_s:
        yield holding.tell(core, stage)


def progressed(core: Core, event: StageProgressed) -> Iterator[Effect]:
    """A stage is part of the way through getting ready."""
    yield from beat(core, StageBeat(cause=event.cause, stage=event.stage, epoch=event.epoch))
    stage = core.state.stages.get(event.stage)
    if stage is not None and (event.epoch == stage.epoch or stage.status is StageStatus.MEASURING):
        stage.last_progress_s, stage.detail = core.now, event.detail


def loaded(core: Core, event: StageLoaded) -> Iterator[Effect]:
    """A stage is ready; with the last one of a chain, the chain serves."""
    yield from beat(core, StageBeat(cause=event.cause, stage=event.stage, epoch=event.epoch))
    stage = core.state.stages.get(event.stage)
    if stage is None or event.epoch != stage.epoch or stage.chain is None or stage.assign is None:
        return
    chain = core.state.chains[stage.chain]
    if stage.stage in chain.ready:
        return
    stage.status, stage.weights_bytes, stage.detail = StageStatus.READY, event.weights_bytes, ""
    stage.load_s, stage.kv_bytes, stage.compute_bytes = event.load_s, event.kv_bytes, event.compute_bytes
    chain.ready.add(stage.stage)
    chain.kept = chain.kept and (event.kept or not stage.assign.keep)
    stage.held.add(stage.assign.slice)
    core.tell(event.stage, event.cause, f"ready after {event.load_s:.1f} s")
    yield Report("info", f"{stage.device} is ready ({event.load_s:.1f} s).")
    if chain.ready == set(chain.stages):
        if not chain.kept:
            mirroring.stand_up(core, chain)
        chain.open, core.last_error, core.moving = True, None, False
        yield OpenChain(chain.chain, chain.epoch, core.state.stages[chain.stages[0]].endpoint)
        yield Report("info", f"Chain {chain.chain} serves.")
        core.ask_for_plan(core.settle_s)


def broke(core: Core, event: StageBroke) -> Iterator[Effect]:
    """A stage can't do what was assigned to it: it is left out until it joins anew."""
    stage = core.state.stages.get(event.stage)
    if stage is None or event.epoch != stage.epoch:
        return
    stage.last_heard_s = core.now
    stage.status, stage.error, stage.detail = StageStatus.FAILED, event.error, event.error.what
    core.last_error = event.error
    core.tell(event.stage, event.cause, f"failed: {event.error}")
    yield Report("error", str(event.error))
    yield from plans.break_chain_of(core, stage, event.cause, f"{stage.device} failed")


def remove(core: Core, name: StageId, cause: str, reason: str, *, lost: bool = True) -> Iterator[Effect]:
    """A stage is gone, and its chain with it. Not `lost`: it had nothing to do and left in order."""
    stage = core.state.stages.get(name)
    if stage is None:
        return
    core.tell(name, cause, f"gone: {reason}")
    if lost:
        core.note_loss(stage, reason)
    yield from plans.break_chain_of(core, stage, cause, f"{stage.device} is gone ({reason})")
    del core.state.stages[name]
    measuring.forget(core, name)
    yield Report("warning" if lost else "info", f"{stage.device} is gone: {reason}.")
    if core.config.measure:
        yield from measuring.go_on(core)
    if not core.state.chains:  # whatever kept a plan from being made may be gone with it
        core.ask_for_plan(0.0)
    elif core.plan_due_s is None:  # what it kept ready for others is gone with it
        core.ask_for_plan(core.config.settle_s)


def watch(core: Core) -> None:
    """Sets when somebody could next be lost."""
    core.check_due_s = liveness.next_check_s(core.state.stages.values(), core.config.lost_after_s)
