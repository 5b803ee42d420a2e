"""Epochs and chains: when to plan, who is assigned what, and how a chain ends. Pure.

How layers are divided is left to the planner, what a break means for requests to `recovery`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from potluck.broker import measuring, moves, recovery
from potluck.broker.core import Core
from potluck.broker.effects import (
    CloseChain,
    Effect,
    Report,
    SendToStage,
)
from potluck.broker.state import Chain, Stage, StageStatus
from potluck.planner.cost import Place, StageCost
from potluck.planner.plan import Network, Plan
from potluck.wire.errors import (
    PlanError,
)
from potluck.wire.ids import ChainId, Epoch
from potluck.wire.messages import (
    Assign,
    HopSums,
    Release,
    StageCounters,
)


def make_plan(core: Core, cause: str) -> Iterator[Effect]:
    """A new epoch, if there are stages for one and it changes anything worth a change."""
    core.plan_due_s = None
    usable = core.usable()
    whole = bool(core.state.chains)
    if len(usable) < core.wanted or (not core.planned_once and measuring.unfinished(core)):
        return
    if whole and (not core.may_change() or core.state.requests or not core.state.ready):
        return  # a chain that serves is changed only between requests; one that loads is left to finish
    moves.forgive(core)
    network = measuring.network(core)
    asked = (measuring.candidates(core, usable), network, tuple(s.stage for s in usable if s.suspect))
    if whole and asked == core.planned_for:
        return
    try:
        plan = best_plan(core, usable, network)
    except PlanError as error:
        if not whole:
            core.last_error = core.plan_error = error
        yield Report("error", str(error))
        return
    core.planned_for = asked
    core.plan_error = None
    wanted = {place.stage for chain in plan.chains for place in chain.stages}
    if whole:
        verdict = moves.worth_it(core, plan)
        if verdict.text:
            yield Report("info", verdict.text)
        if verdict.again_s is not None:
            core.planned_for = None
            core.ask_for_plan(verdict.again_s)
        if not verdict.move:
            return
        moves.note(core)
    core.drifted, core.moving = False, whole
    for chain in list(core.state.chains.values()):
        yield from close(core, chain, cause, "a better plan")
    core.planned_once = True
    core.plan = plan
    core.state.epoch = Epoch(core.state.epoch + 1)
    epoch = core.state.epoch
    for reason in plan.reasons:
        yield Report("info", f"Planned: {reason}")
    costs = {
        candidate.stage: StageCost(replace(candidate, slowdown=1.0), core.shape, core.config.demand)
        for candidate in measuring.candidates(core, usable)
        if candidate.profile is not None
    }
    for index, chain_plan in enumerate(plan.chains):
        chain = Chain(ChainId(index), epoch, chain_plan, [None] * core.config.slots)
        if all(place.stage in costs for place in chain_plan.stages):
            chain.places = tuple(Place(costs[p.stage], p.first, p.end) for p in chain_plan.stages)
        core.state.chains[chain.chain] = chain
        yield from assign(core, chain)
    for stage in usable:
        if stage.stage not in wanted:
            stage.status, stage.chain, stage.place = StageStatus.SPARE, None, None
            yield SendToStage(stage.stage, Release(), epoch)
    core.tell(f"epoch {epoch}", cause, " ".join(plan.reasons))


def best_plan(core: Core, usable: list[Stage], network: Network) -> Plan:
    """The planner's; without the stages at which a micro-batch got stuck, unless it takes them. Raises PlanError."""
    trusted = [stage for stage in usable if not stage.suspect]
    if trusted and len(trusted) < len(usable):
        try:
            return core.planner(core.shape, measuring.candidates(core, trusted), network)
        except PlanError:
            pass  # it takes the others, too
    return core.planner(core.shape, measuring.candidates(core, usable), network)


def assign(core: Core, chain: Chain) -> Iterator[Effect]:
    """Tells every stage of a chain what it is to hold."""
    places = chain.plan.stages
    for index, place in enumerate(places):
        stage = core.state.stages[place.stage]
        stage.status, stage.chain, stage.place = StageStatus.LOADING, chain.chain, place
        stage.last_progress_s, stage.detail = core.now, ""
        stage.hops, stage.counters = HopSums(), StageCounters()
        last = index == len(places) - 1
        stage.assign = Assign(
            chain=chain.chain,
            index=index,
            stages=len(places),
            model=core.model,
            first=place.first,
            end=place.end,
            next_endpoint=(
                core.results_endpoint(place.stage)
                if last
                else core.state.stages[places[index + 1].stage].endpoint
            ),
            results_endpoint=core.results_endpoint(place.stage),
            slots=core.config.slots,
            context_tokens=core.config.context_tokens,
            batch_tokens=max(core.config.chunk_tokens, core.config.slots),
            activation=core.config.activation,
            exact=core.config.exact,
            gpu_layers=place.gpu_layers,
        )
        yield ask_to_load(core, stage)
        yield Report("info", f"{place.device}: layers {place.first}-{place.end - 1} of {core.shape.layers}.")


def ask_to_load(core: Core, stage: Stage) -> SendToStage:
    """What the stage is to hold in this epoch. It answers as often as it is asked."""
    assert stage.assign is not None
    stage.asked_s = core.now
    return SendToStage(stage.stage, stage.assign, core.state.epoch)


def close(core: Core, chain: Chain, cause: str, why: str) -> Iterator[Effect]:
    """Ends a chain: its requests wait again, its stages are spares, its slots and frames are void."""
    for name in recovery.requeue(core.state, chain, core.now):
        core.tell(name, cause, f"off chain {chain.chain}: {why}")
    if chain.open:
        yield CloseChain(chain.chain)
    for member in chain.stages:
        stage = core.state.stages[member]
        stage.chain = stage.place = None
        if stage.status is not StageStatus.FAILED:
            stage.status = StageStatus.SPARE
    del core.state.chains[chain.chain]
    if chain.open and not core.state.ready:
        recovery.restart_waits(core.state, core.now)


def break_chain_of(core: Core, stage: Stage, cause: str, why: str) -> Iterator[Effect]:
    """Ends the chain that a stage is part of; a new plan is due at once."""
    if stage.chain is not None:
        chain = core.state.chains[stage.chain]
        yield Report("warning", f"Chain {chain.chain} is broken: {why}.")
        yield from close(core, chain, cause, why)
        core.moving = False
        core.ask_for_plan(0.0)


def load_deadline(core: Core, chain: Chain) -> float:
    """When a chain that loads has made no progress for too long."""
    waiting = [core.state.stages[name] for name in chain.stages if name not in chain.ready]
    return min(stage.last_progress_s + core.config.load_timeout_s for stage in waiting)
