"""How a plan comes into force: at once, or prepared beside the chains that serve and then switched to. Pure.

A chain that the new plan has, too, goes on undisturbed. The requests of the others are computed again on the new
chains from the tokens they have; nothing else stops.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from potluck.broker import draining, holding, measuring, mirroring, plans
from potluck.broker.core import Core, Move
from potluck.broker.effects import Effect, Report, SendToStage
from potluck.broker.state import Chain, Seat, StageStatus
from potluck.planner.cost import Place, StageCost
from potluck.planner.plan import ChainPlan, Plan
from potluck.wire.ids import ChainId, Epoch, StageId
from potluck.wire.messages import Release, Slice


def begin(core: Core, plan: Plan, cause: str, why: str, *, forced: bool) -> Iterator[Effect]:
    """Prepares for a plan. Where memory has no room for both, it waits until nothing runs, unless it is `forced`."""
    wanted = {
        place.stage: holding.slice_of(core, place)
        for chain in plan.chains
        if not _in_force(core, chain)
        for place in chain.stages
    }
    missing = {name for name, slice_ in wanted.items() if slice_ not in core.state.stages[name].held}
    if not missing:
        yield from switch(core, plan, cause, why)
        return
    if not _room_for_both(core, wanted):
        if forced or not core.state.requests:
            yield from switch(core, plan, cause, why)
        else:
            core.planned_for = None
        return
    core.move = Move(plan, wanted, core.now, why)
    core.tell(f"epoch {core.state.epoch}", cause, f"prepares for {why}")
    names = ", ".join(sorted(core.state.stages[name].device for name in missing))
    yield Report("info", f"Preparing for {why}: {names} loads beside what it serves.")
    for name, slice_ in wanted.items():
        stage = core.state.stages[name]
        yield from holding.ask(core, stage, _listed(core, name, slice_))


def go_on(core: Core, cause: str) -> Iterator[Effect]:
    """Switches once every stage holds what it is to serve; gives up if one can't."""
    move = core.move
    if move is None:
        return
    stages = core.state.stages
    if any(name not in stages or core.goes(stages[name]) for name in move.slices):
        yield from give_up(core, cause, "a stage of it is gone")
    elif any(slice_ in stages[name].unfit for name, slice_ in move.slices.items()):
        yield from give_up(core, cause, "a stage of it could not load its layers")
    elif all(slice_ in stages[name].held for name, slice_ in move.slices.items()):
        core.move = None
        yield from switch(core, move.plan, cause, move.why)


def give_up(core: Core, cause: str, why: str) -> Iterator[Effect]:
    """The plan that is prepared for does not come into force."""
    if core.move is not None:
        core.tell(f"epoch {core.state.epoch}", cause, f"gives up {core.move.why}: {why}")
        yield Report("warning", f"{core.move.why[:1].upper()}{core.move.why[1:]} is given up: {why}.")
        core.move = None
        core.ask_for_plan(core.config.settle_s)


def deadline(core: Core) -> float | None:
    """When those who prepare have made no progress for too long."""
    move = core.move
    if move is None:
        return None
    asked = [core.state.stages[name] for name in move.slices if name in core.state.stages]
    waiting = [stage.last_progress_s for stage in asked if stage.owed]
    return max(move.since_s, min(waiting, default=move.since_s)) + core.config.load_timeout_s


def switch(core: Core, plan: Plan, cause: str, why: str) -> Iterator[Effect]:
    """The plan comes into force in a new epoch."""
    core.move = None
    core.moving = bool(core.state.chains)
    for chain in list(core.state.chains.values()):
        same = next((new for new in plan.chains if new.stages == chain.plan.stages), None)
        if same is None:
            yield from plans.close(core, chain, cause, why)
        else:
            chain.plan = same
    core.plan = plan
    yield from open_chains(core, [c for c in plan.chains if not _in_force(core, c)], plan.reasons, cause)
    yield from draining.let_go(core)


def open_chains(
    core: Core,
    chains: Collection[ChainPlan],
    reasons: Collection[str],
    cause: str,
    seats: Mapping[ChainPlan, dict[Seat, int]] | None = None,
) -> Iterator[Effect]:
    """Assigns new chains in a new epoch, and releases the stages that have nothing to do.

    `seats` has the requests that go on where they were.
    """
    core.planned_once = True
    core.state.epoch = Epoch(core.state.epoch + 1)
    epoch = core.state.epoch
    core.tell(f"epoch {epoch}", cause, " ".join(reasons))
    for reason in reasons:
        yield Report("info", f"Planned: {reason}")
    usable = core.usable()
    costs = {
        candidate.stage: StageCost(replace(candidate, slowdown=1.0), core.shape, core.config.demand)
        for candidate in measuring.candidates(core, usable)
        if candidate.profile is not None
    }
    for plan in chains:
        chain = Chain(_free_id(core), epoch, plan, [None] * core.config.slots)
        if all(place.stage in costs for place in plan.stages):
            chain.places = tuple(Place(costs[p.stage], p.first, p.end) for p in plan.stages)
        core.state.chains[chain.chain] = chain
        kept = (seats or {}).get(plan, {})
        mirroring.sit(core, chain, kept)
        yield from plans.assign(core, chain, mirroring.keep_of(kept))
    for stage in core.state.stages.values():
        idle = stage.chain is None and stage.status in (
            StageStatus.SPARE,
            StageStatus.LOADING,
            StageStatus.READY,
        )
        if idle and (stage.assign is not None or stage.epoch == 0):
            stage.status, stage.place, stage.assign, stage.epoch = StageStatus.SPARE, None, None, epoch
            yield SendToStage(stage.stage, Release(), epoch)


def _in_force(core: Core, chain: ChainPlan) -> bool:
    return any(old.plan.stages == chain.stages for old in core.state.chains.values())


def _free_id(core: Core) -> ChainId:
    return next(ChainId(n) for n in range(len(core.state.chains) + 1) if n not in core.state.chains)


def _room_for_both(core: Core, wanted: dict[StageId, Slice]) -> bool:
    """Whether every stage has room for what it serves and what it is to serve."""
    for name, slice_ in wanted.items():
        stage = core.state.stages[name]
        active = holding.serves(stage)
        if not holding.has_room(core, stage, [slice_] if active is None else [active, slice_]):
            return False
    return True


def _listed(core: Core, name: StageId, slice_: Slice) -> tuple[Slice, ...]:
    """What comes next first, then as much of what it keeps for others as there is room for."""
    stage = core.state.stages[name]
    active = holding.serves(stage)
    kept: list[Slice] = [slice_]
    for other in stage.listed:
        besides = [*kept, other, *([] if active is None else [active])]
        if other in stage.held and other not in kept and holding.has_room(core, stage, besides):
            kept.append(other)
    return tuple(kept)
