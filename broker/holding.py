"""What each stage holds loaded: told by Prepare, and what that takes of its memory. Pure.

The rule that both sides keep: a stage holds what it serves and what it was last told to hold besides. An Assign of
another slice, or a Prepare, closes everything else before it loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from potluck.broker import measuring
from potluck.broker.core import Core
from potluck.broker.effects import Effect, Report, SendToStage
from potluck.broker.events import StageNotPrepared, StagePrepared
from potluck.broker.state import Stage
from potluck.planner.cost import StageCost, offered
from potluck.planner.plan import StagePlan
from potluck.wire import limits
from potluck.wire.messages import Prepare, Slice


def slice_of(core: Core, place: StagePlan) -> Slice:
    """What a place in a plan means for the stage that gets it."""
    config = core.config
    return Slice(
        core.model,
        place.first,
        place.end,
        config.slots,
        config.context_tokens,
        max(config.chunk_tokens, config.slots),
        config.exact,
        place.gpu_layers,
    )


def cost_of(core: Core, stage: Stage) -> StageCost | None:
    """What layers cost the stage at its own pace; None if it was not measured."""
    (candidate,) = measuring.candidates(core, [stage])
    return None if candidate.profile is None else StageCost(candidate, core.shape, core.config.demand)


def needed_bytes(core: Core, stage: Stage, first: int, end: int) -> int:
    """What layers take there. Where it was not measured, their bytes in the file."""
    cost = cost_of(core, stage)
    if cost is not None:
        return cost.needed_bytes(first, end)
    head = core.shape.head_bytes if end == core.shape.layers else 0
    return sum(core.shape.layer_bytes[first:end]) + head


def has_room(core: Core, stage: Stage, slices: Sequence[Slice]) -> bool:
    """Whether it can hold all of these at once. A stage that does not say what it offers is taken to have room."""
    (candidate,) = measuring.candidates(core, [stage])
    room = offered(candidate)
    return room == 0 or sum(needed_bytes(core, stage, s.first, s.end) for s in set(slices)) <= room


def serves(stage: Stage) -> Slice | None:
    """What it was assigned, as long as it belongs to a chain."""
    return stage.assign.slice if stage.assign is not None and stage.chain is not None else None


def ask(core: Core, stage: Stage, slices: tuple[Slice, ...]) -> Iterator[Effect]:
    """Tells a stage what to hold besides what it serves, unless it was told just that already."""
    slices = slices[: limits.SLICES]
    if slices == stage.listed:
        return
    active = serves(stage)
    core.state.next_prepare += 1
    stage.prepare, stage.listed = core.state.next_prepare, slices
    _still_holds(stage, {held for held in stage.held if held == active or held in slices})
    stage.owed = set(range(len(slices)))
    yield tell(core, stage)


def tell(core: Core, stage: Stage) -> SendToStage:
    """The Prepare that is in force. It is answered as often as it is sent."""
    stage.asked_s = stage.last_progress_s = core.now
    return SendToStage(stage.stage, Prepare(stage.prepare, stage.listed), stage.epoch)


def assigned(stage: Stage) -> None:
    """Notes what an Assign leaves loaded there."""
    active = serves(stage)
    _still_holds(stage, {held for held in stage.held if held == active or held in stage.listed})
    stage.copies = {key: copy for key, copy in stage.copies.items() if key[0] != active}


def _still_holds(stage: Stage, slices: set[Slice]) -> None:
    stage.held = slices
    stage.copies = {key: copy for key, copy in stage.copies.items() if key[0] in slices}


def prepared(core: Core, event: StagePrepared) -> Iterator[Effect]:
    """A stage holds one more slice, or held it already."""
    stage = _asked(core, event)
    if stage is None:
        return
    slice_ = stage.listed[event.index]
    stage.held.add(slice_)
    stage.unfit.discard(slice_)
    stage.last_progress_s = core.now
    stage.load_s = event.load_s or stage.load_s
    layers = f"layers {slice_.first}-{slice_.end - 1}"
    core.tell(event.stage, event.cause, f"holds {layers} ready")
    if event.load_s > 0:
        yield Report("info", f"{stage.device} holds {layers} ready ({event.load_s:.1f} s).")


def not_prepared(core: Core, event: StageNotPrepared) -> Iterator[Effect]:
    """A stage can't hold a slice besides what it serves."""
    stage = _asked(core, event)
    if stage is None:
        return
    slice_ = stage.listed[event.index]
    stage.unfit.add(slice_)
    core.tell(
        event.stage, event.cause, f"can't hold layers {slice_.first}-{slice_.end - 1}: {event.error.what}"
    )
    yield Report("warning", f"{stage.device} can't hold more layers ready: {event.error}")


def _asked(core: Core, event: StagePrepared | StageNotPrepared) -> Stage | None:
    stage = core.state.stages.get(event.stage)
    if stage is None or event.number != stage.prepare or event.index not in stage.owed:
        return None
    stage.owed.discard(event.index)
    stage.last_heard_s = core.now
    return stage


def place(core: Core, stage: Stage, first: int, end: int) -> StagePlan:
    """The stage with these layers, on its GPU as far as they have room there."""
    cost = cost_of(core, stage)
    return StagePlan(
        stage.stage, stage.device, first, end, 0 if cost is None else cost.gpu_layers(first, end)
    )
