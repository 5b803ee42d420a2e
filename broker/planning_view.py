"""The plan in force as people and programs ask for it. Pure."""

from __future__ import annotations

from dataclasses import replace

from potluck.broker import measuring
from potluck.broker.core import Core
from potluck.broker.state import BROKER
from potluck.planner.plan import ChainPlan
from potluck.wire import limits
from potluck.wire.ids import StageId
from potluck.wire.messages import LinkView, PlanQuery, PlanView


def plan_view(core: Core, query: PlanQuery) -> PlanView:
    """What serves now, with today's measurements; and what it would do for other numbers of users."""
    chains = tuple(chain.plan for chain in core.state.chains.values())
    stages = core.state.stages
    plan = core.plan
    demand = core.config.demand
    if query.held_tokens:
        demand = replace(demand, held_tokens=query.held_tokens)
    if query.prompt_tokens:
        demand = replace(demand, prompt_tokens=query.prompt_tokens)
    in_use = {name for chain in core.state.chains.values() for name in chain.stages}
    return PlanView(
        epoch=core.state.epoch,
        model=core.model.name,
        users=core.config.users,
        reasons=() if plan is None else tuple(reason[: limits.TEXT_CHARS] for reason in plan.reasons),
        left_out=tuple(sorted(stage.device for stage in stages.values() if stage.stage not in in_use)),
        forecast=measuring.predicted(core, chains, demand),
        at=tuple(
            found
            for users in query.users
            if (found := measuring.predicted(core, _shared(chains, users), replace(demand, users=users)))
        ),
        links=tuple(
            LinkView(_device(core, sender), _device(core, receiver), link)
            for (sender, receiver), link in core.state.links.items()
        ),
        detail="" if chains else core.missing,
    )


def _shared(chains: tuple[ChainPlan, ...], users: int) -> tuple[ChainPlan, ...]:
    """The chains with so many users, shared out as the scheduler does: each to the least loaded one."""
    weights = [max(1, chain.users) for chain in chains]
    counts = [0] * len(chains)
    for _ in range(users):
        counts[min(range(len(chains)), key=lambda i: (counts[i] + 1) / weights[i])] += 1
    return tuple(replace(chain, users=count) for chain, count in zip(chains, counts, strict=True) if count)


def _device(core: Core, stage: StageId) -> str:
    return "" if stage == BROKER else core.state.stages[stage].device
