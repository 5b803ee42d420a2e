"""Who takes the place of a stage that is gone, so that a chain serves again soonest. Pure.

Whatever holds the layers already comes first, then whatever leaves most stages as they are: a stage outside the chain
takes the same layers, or a neighbour adds them to its own. Only if neither can, the chain is planned anew. A better
plan may follow later, prepared beside the one that serves.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from potluck.broker import holding, measuring
from potluck.broker.core import Core
from potluck.broker.state import Stage
from potluck.planner.plan import ChainPlan, StagePlan
from potluck.wire.errors import PlanError
from potluck.wire.ids import StageId


@dataclass(frozen=True, slots=True)
class _Option:
    """One way to fill one gap: places [begin, end) of the chain become one."""

    begin: int
    end: int
    place: StagePlan
    warm: bool
    moved: int
    """Layers that would have to be loaded."""


def repaired(
    core: Core,
    chain: ChainPlan,
    there: Collection[StageId],
    others: Collection[Stage],
    *,
    in_advance: bool = False,
) -> ChainPlan | None:
    """The chain without the stages that are not `there`; `others` may join it. None if that takes a plan of its own.

    `in_advance` there is time to load: what is held by chance does not count then.
    """
    if core.config.by_hand:
        return None
    places = list(chain.stages)
    there = _reached(core, places, there)
    spare = [stage for stage in others if all(stage.stage != place.stage for place in places)]
    while True:
        gap = next((index for index, place in enumerate(places) if place.stage not in there), None)
        if gap is None:
            return ChainPlan(tuple(places), chain.layers, chain.users)
        options = [*_joining(core, places, gap, spare), *_growing(core, places, gap, there)]
        if not options:
            return None
        best = min(
            options,
            key=lambda option: (
                not (option.warm or in_advance),
                option.place.end - option.place.first,
                option.moved,
                option.place.device,
            ),
        )
        spare = [stage for stage in spare if stage.stage != best.place.stage]
        there = {*there, best.place.stage}
        places[best.begin : best.end] = [best.place]


def planned(core: Core, stages: Collection[Stage]) -> list[ChainPlan]:
    """Chains of these stages alone, as the planner wants them. Empty if they can't hold the model."""
    try:
        candidates = measuring.candidates(core, list(stages))
        return (
            list(core.planner(core.shape, candidates, measuring.network(core)).chains) if candidates else []
        )
    except PlanError:
        return []


def _joining(core: Core, places: list[StagePlan], gap: int, spare: list[Stage]) -> list[_Option]:
    """A stage outside the chain takes the layers as they are."""
    first, end = places[gap].first, places[gap].end
    found = [_option(core, stage, gap, gap + 1, first, end) for stage in spare]
    return [option for option in found if option is not None and _linked(core, places, option)]


def _growing(core: Core, places: list[StagePlan], gap: int, there: Collection[StageId]) -> list[_Option]:
    """A neighbour adds the layers to its own; it loads all of them anew."""
    found = []
    for begin, until, neighbour in ((gap - 1, gap + 1, gap - 1), (gap, gap + 2, gap + 1)):
        if not 0 <= neighbour < len(places) or places[neighbour].stage not in there:
            continue
        first, end = places[begin].first, places[until - 1].end
        stage = core.state.stages[places[neighbour].stage]
        option = _option(core, stage, begin, until, first, end)
        if option is not None and _linked(core, places, option):
            found.append(option)
    return found


def _reached(core: Core, places: list[StagePlan], there: Collection[StageId]) -> set[StageId]:
    """Those of the chain that are there, without the ones to which the link is cut."""
    cut = {b.stage for a, b in pairwise(places) if {a.stage, b.stage} <= {*there} and _cut(core, a, b)}
    return {*there} - cut


def _linked(core: Core, places: list[StagePlan], option: _Option) -> bool:
    """Whether the stages before and after can be reached from there."""
    row = [*places[: option.begin][-1:], option.place, *places[option.end :][:1]]
    return not any(_cut(core, a, b) for a, b in pairwise(row))


def _cut(core: Core, sender: StagePlan, receiver: StagePlan) -> bool:
    return core.state.links.get((sender.stage, receiver.stage), ...) is None


def _option(core: Core, stage: Stage, begin: int, until: int, first: int, end: int) -> _Option | None:
    place = holding.place(core, stage, first, end)
    slice_ = holding.slice_of(core, place)
    warm = slice_ in stage.held
    if slice_ in stage.unfit or not (warm or holding.has_room(core, stage, [slice_])):
        return None
    return _Option(begin, until, place, warm, 0 if warm else end - first)
