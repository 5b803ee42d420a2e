"""When to plan, and what: after a loss, at first, and when something better may be found. Pure.

A loss is mended at once by whoever is next (`takeover`); chains that lost nobody go on. A better plan is sought when
nothing else is being done, and `moves` says whether it is worth it; `switching` brings it into force, `standby`
prepares for the next loss.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from potluck.broker import draining, holding, measuring, mirroring, moves, standby, switching, takeover
from potluck.broker.core import Core, Question
from potluck.broker.effects import ComputePlan, Effect, Report
from potluck.broker.events import PlanComputed, PlanNotFound
from potluck.broker.state import Chain, Seat, Stage
from potluck.planner.plan import Candidate, ChainPlan, ModelShape, Network, Plan, Planner
from potluck.wire.errors import PlanError
from potluck.wire.ids import StageId


def make_plan(core: Core, cause: str) -> Iterator[Effect]:
    """Whatever is to be planned now."""
    core.plan_due_s = None
    usable = core.usable()
    if not core.planned_once and (len(usable) < core.wanted or measuring.unfinished(core)):
        return
    if core.broken:
        yield from _mend(core, cause)
    if core.state.chains:
        yield from _improve(core, usable, cause)
    elif usable:
        yield from _first(core, usable)


def _mend(core: Core, cause: str) -> Iterator[Effect]:
    """Chains take the place of those that broke, as few stages as possible doing anything else than before."""
    broken, core.broken = core.broken, []
    yield from switching.give_up(core, cause, "a chain broke")
    chains: list[ChainPlan] = []
    reasons: list[str] = []
    seats: dict[ChainPlan, dict[Seat, int]] = {}
    for old in broken:
        taken = {place.stage for chain in chains for place in chain.stages}
        free = [stage for stage in core.free() if stage.stage not in taken and not stage.suspect]
        after = _after(core, old.plan, free, alone=not core.state.chains)
        chains += after
        reasons += [_change(old.plan, chain) for chain in after]
        seats |= {chain: mirroring.kept(core, old, chain) for chain in after if len(after) == 1}
    if chains:
        in_force = tuple(chain.plan for chain in core.state.chains.values())
        core.plan = Plan((*in_force, *chains), tuple(reasons))
        core.planned_for = None
        core.moving = all(
            holding.slice_of(core, place) in core.state.stages[place.stage].held
            for chain in chains
            for place in chain.stages
        )
        yield from switching.open_chains(core, chains, reasons, cause, seats)
    elif core.state.chains:
        yield Report(
            "warning", "Nobody can take the place of what is lost; the other chains take its requests."
        )
        core.ask_for_plan(core.config.settle_s)


def _after(core: Core, old: ChainPlan, free: Collection[Stage], *, alone: bool) -> list[ChainPlan]:
    """What follows a chain. Nothing if it is `alone` and takes a plan of its own: then all is planned anew."""
    there = {stage.stage for stage in free} & {place.stage for place in old.stages}
    new = takeover.repaired(core, old, there, free)
    if new is not None:
        return [new]
    return [] if alone else takeover.planned(core, free)


def _change(old: ChainPlan, new: ChainPlan) -> str:
    """Who takes over from whom, in words."""
    before = {place.stage: place for place in old.stages}
    gone = sorted(place.device for place in old.stages if place.stage not in {p.stage for p in new.stages})
    takers = sorted(
        f"{place.device} (layers {place.first}-{place.end - 1})"
        for place in new.stages
        if place.stage not in before
        or (before[place.stage].first, before[place.stage].end) != (place.first, place.end)
    )
    if not gone:
        return "The same stages serve again."
    return f"{', '.join(takers)} takes over from {', '.join(gone)}."


def _first(core: Core, usable: list[Stage]) -> Iterator[Effect]:
    """Nothing serves or loads: the best plan, at once."""
    moves.forgive(core)
    network = measuring.network(core)
    yield from _ask(core, usable, network)


def _ask(core: Core, usable: list[Stage], network: Network) -> Iterator[Effect]:
    """Asks the planner, unless it is busy with just that."""
    asked = _asked(core, usable, network)
    if core.question is not None and core.question.asked == asked:
        return
    core.questions += 1
    core.question = Question(core.questions, asked, network)
    choices = tuple(tuple(measuring.candidates(core, choice)) for choice in choices_of(core, usable))
    yield ComputePlan(core.questions, choices, network)


def computed(core: Core, event: PlanComputed) -> Iterator[Effect]:
    """The planner's answer: the first plan, or perhaps a better one."""
    question = _answered(core, event)
    if question is None:
        return
    free = {stage.stage for stage in core.usable()}
    if any(place.stage not in free for chain in event.plan.chains for place in chain.stages):
        core.ask_for_plan(0.0)  # somebody left meanwhile
    elif not core.state.chains:
        core.planned_for, core.plan_error, core.drifted = question.asked, None, False
        yield from switching.switch(core, event.plan, event.cause, "the first plan")
    elif not _under_way(core):
        yield from _weigh(core, question, event)
        if not _under_way(core):
            yield from standby.arrange(core)
            yield from mirroring.arrange(core)


def not_found(core: Core, event: PlanNotFound) -> Iterator[Effect]:
    """The planner has no plan for these stages."""
    question = _answered(core, event)
    if question is None:
        return
    core.planned_for = question.asked
    if not core.state.chains:
        core.last_error = core.plan_error = event.error
    yield Report("error", str(event.error))


def _answered(core: Core, event: PlanComputed | PlanNotFound) -> Question | None:
    question = core.question
    if question is None or question.number != event.number:
        return None
    core.question = None
    return question


def _improve(core: Core, usable: list[Stage], cause: str) -> Iterator[Effect]:
    """Chains that serve are replaced by better ones, once nothing loads and nothing else is prepared for."""
    if _under_way(core):
        return
    left = [
        chain for chain in core.state.chains.values() if draining.going(core, chain) and not chain.closing
    ]
    if left:
        yield from _without(core, left, cause)
        return
    if any(request.replaying for request in core.state.requests.values()):
        core.ask_for_plan(core.config.settle_s)  # whoever waits for the next token comes first
        return
    if usable and core.may_change():
        yield from _better(core, usable)
    if not _under_way(core) and core.question is None:
        yield from standby.arrange(core)
        yield from mirroring.arrange(core)


def _under_way(core: Core) -> bool:
    """Whether a plan is being brought into force, or prepared for."""
    return core.move is not None or not all(chain.open for chain in core.state.chains.values())


def _better(core: Core, usable: list[Stage]) -> Iterator[Effect]:
    moves.forgive(core)
    network = measuring.network(core)
    if _asked(core, usable, network) != core.planned_for:
        yield from _ask(core, usable, network)


def _weigh(core: Core, question: Question, event: PlanComputed) -> Iterator[Effect]:
    """Whether the plan is worth it, and if so, the way there."""
    core.planned_for, core.plan_error = question.asked, None
    closing = tuple(chain.plan for chain in core.state.chains.values() if chain.closing)
    verdict = moves.worth_it(core, event.plan)
    if verdict.text:
        yield Report("info", verdict.text)
    if verdict.again_s is not None:
        core.planned_for = None
        core.ask_for_plan(verdict.again_s)
    if verdict.move:
        moves.note(core)
        core.drifted = False
        plan = replace(event.plan, chains=(*closing, *event.plan.chains))
        yield from switching.begin(core, plan, event.cause, "a better plan", forced=False)


def _without(core: Core, left: list[Chain], cause: str) -> Iterator[Effect]:
    """Chains with stages that are to have no work are replaced, if anybody can take that over."""
    new: list[ChainPlan] = []
    reasons: list[str] = []
    for chain in left:
        taken = {place.stage for plan in new for place in plan.stages}
        mine = [core.state.stages[name] for name in chain.stages]
        free = [
            stage
            for stage in (*core.free(), *mine)
            if stage.stage not in taken and not stage.suspect and not core.goes(stage)
        ]
        after = _after(core, chain.plan, free, alone=False)
        if after:
            new += after
            reasons += [_change(chain.plan, plan) for plan in after]
        else:
            yield from draining.keep_until_empty(core, chain)
    if new:
        kept = tuple(c.plan for c in core.state.chains.values() if c not in left or c.closing)
        yield from switching.begin(
            core, Plan((*kept, *new), tuple(reasons)), cause, "a plan without what is drained", forced=True
        )


def choices_of(core: Core, usable: list[Stage]) -> list[list[Stage]]:
    """Whom to plan with: without the stages that are kept in reserve and those at which a micro-batch got stuck, as
    long as there is a plan without them.
    """
    choices = [
        [stage for stage in usable if not stage.suspect and stage.device not in core.config.reserve],
        [stage for stage in usable if not stage.suspect],
        usable,
    ]
    return [choice for at, choice in enumerate(choices) if choice and choice not in choices[:at]]


def choose(
    planner: Planner, model: ModelShape, choices: Sequence[Sequence[Candidate]], network: Network
) -> Plan:
    """The plan of the first choice that has one. Raises the last one's PlanError."""
    for choice in choices[:-1]:
        try:
            return planner(model, choice, network)
        except PlanError:
            continue
    return planner(model, choices[-1], network)


def _asked(core: Core, usable: list[Stage], network: Network) -> object:
    suspects: tuple[StageId, ...] = tuple(stage.stage for stage in usable if stage.suspect)
    return measuring.candidates(core, usable), network, suspects
