"""Which further slices stages keep loaded, so that the loss of another one costs a re-prefill and not a load. Pure.

For every stage that serves, `takeover` says who would take its place, and with which layers; those are loaded in
advance as far as memory allows, spares first. What is not covered is said, with what it would cost.
"""

from __future__ import annotations

from collections.abc import Iterator

from potluck.broker import holding, takeover
from potluck.broker.core import Core
from potluck.broker.effects import Effect, Report
from potluck.broker.moves import USUAL_LOAD_S
from potluck.broker.state import Chain, Stage
from potluck.planner.plan import ChainPlan
from potluck.wire.ids import StageId
from potluck.wire.messages import Slice


def arrange(core: Core) -> Iterator[Effect]:
    """Tells the stages what to keep loaded, once everything that is planned serves."""
    stages = core.usable()
    lists: dict[StageId, list[Slice]] = {stage.stage: [] for stage in stages}
    losses: dict[StageId, str] = {}
    for chain in core.state.chains.values():
        for name in chain.stages:
            losses[name] = _cover(core, chain, core.state.stages[name], lists)
    for stage in stages:
        yield from holding.ask(core, stage, tuple(lists[stage.stage]))
    if losses != core.losses:
        core.losses = losses
        for text in losses.values():
            yield Report("info", text)


def _cover(core: Core, chain: Chain, lost: Stage, lists: dict[StageId, list[Slice]]) -> str:
    """Adds to the lists what takes over from one stage. Returns what its loss costs, in words."""
    after = replacement(core, chain, lost)
    if after is None:
        elsewhere = [other for other in core.state.chains.values() if other.open and other is not chain]
        if elsewhere:
            return f"If {lost.device} is lost, its requests go on on the other chains."
        why = "its layers are given by hand" if core.config.by_hand else "nobody else has room for its layers"
        return f"If {lost.device} is lost, nothing can serve: {why}."
    loaders: list[str] = []
    layers = [(place.stage, holding.slice_of(core, place)) for place in after.stages]
    fresh = [(core.state.stages[name], slice_) for name, slice_ in layers if not _serves(core, name, slice_)]
    for stage, slice_ in fresh:
        mine = lists[stage.stage]
        if slice_ in mine:
            continue
        active = holding.serves(stage)
        besides = [*mine, *([] if active is None else [active])]
        if (
            core.config.standby
            and slice_ not in stage.unfit
            and holding.has_room(core, stage, [*besides, slice_])
        ):
            mine.append(slice_)
        else:
            loaders.append(stage.device)
    takers = ", ".join(sorted({stage.device for stage, _ in fresh}))
    if not loaders:
        return f"If {lost.device} is lost, {takers} takes over at once."
    load_s = max((stage.load_s for stage in core.state.stages.values()), default=0.0) or USUAL_LOAD_S
    return f"If {lost.device} is lost, {takers} takes over after loading for about {load_s:.0f} s."


def replacement(core: Core, chain: Chain, lost: Stage) -> ChainPlan | None:
    """The chain that would follow the loss of a stage; None if it takes a new plan."""
    there = {name for name in chain.stages if name != lost.stage and not core.goes(core.state.stages[name])}
    others = [stage for stage in core.free() if not stage.suspect]
    return takeover.repaired(core, chain.plan, there, others, in_advance=True)


def _serves(core: Core, name: StageId, slice_: Slice) -> bool:
    return holding.serves(core.state.stages[name]) == slice_


def text(stage: Stage) -> str:
    """What a stage keeps loaded, and what it still loads, for people."""
    if not stage.listed:
        return ""
    ready = [s for s in stage.listed if s in stage.held]
    said = ", ".join(f"{s.first}-{s.end - 1}" for s in sorted(ready, key=lambda s: (s.first, s.end)))
    left = len(stage.owed)
    if not ready:
        return f"loads {left} for standby" if left else ""
    return f"standby: layers {said}" + (f"; loads {left} more" if left else "")
