"""The planner that knows the machines: the best plan that measurements allow. Pure.

Up to ten devices it is exact, beyond that it searches; both count with the same model of cost, and `explain` puts what
they found into words. Among equally good plans, `tidy` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from potluck.planner.cost import Place, StageCost, chain_forecast, plan_forecast
from potluck.planner.even import plan_even
from potluck.planner.exact import MOST_DEVICES, Best, Shared, best_chain, best_chains
from potluck.planner.explain import explain
from potluck.planner.groups import search_chains
from potluck.planner.plan import Candidate, ChainPlan, Demand, ModelShape, Network, Plan
from potluck.planner.problem import Problem
from potluck.planner.refusal import refusal
from potluck.planner.search import search_chain
from potluck.planner.tidy import tidy
from potluck.wire.errors import Phase, PlanError
from potluck.wire.forecast import Forecast


@dataclass(frozen=True, slots=True)
class MeasuredPlanner:
    """The best plan for a demand: the least time per token for one user, the most tokens per second for several."""

    demand: Demand

    def __call__(self, model: ModelShape, candidates: Sequence[Candidate], network: Network) -> Plan:
        """See Planner. Stages that were not measured are left out, unless none was: then the split is even."""
        if not candidates:
            raise PlanError(
                "No stage has joined.", hint="Start potluck-stage on at least one device.", phase=Phase.PLAN
            )
        known = [candidate for candidate in candidates if candidate.profile is not None]
        if not known:
            plan = plan_even(model, candidates, network)
            return replace(plan, reasons=("No device could be measured.", *plan.reasons))
        problem = Problem(model, known, network, self.demand)
        best = solve(problem)
        shared = tidy(problem, best.shared)
        if not shared:
            raise refusal(problem)
        plan = as_plan(problem, shared)
        unmeasured = sorted(c.device for c in candidates if c.profile is None)
        reasons = explain(problem, shared)
        if best.gap > 0.001:
            reasons.append(
                f"The search was ended early: a plan better by up to {100 * best.gap:.1f} % is not ruled out."
            )
        if unmeasured:
            reasons.append(f"{', '.join(unmeasured)} left out: not measured.")
        used = {place.stage for chain in plan.chains for place in chain.stages}
        left_out = tuple(c.stage for c in sorted(candidates, key=lambda c: (c.device, c.stage)))
        return replace(
            plan,
            reasons=tuple(reasons),
            left_out=tuple(stage for stage in left_out if stage not in used),
        )


def solve(problem: Problem) -> Best:
    """The best chains with their users; none if the model fits nowhere. Of a search no gap is known: it is 0 there."""
    exact = problem.count <= MOST_DEVICES
    if problem.demand.users == 1:
        chain = best_chain(problem) if exact else search_chain(problem)
        return Best([] if chain is None else [Shared(chain, 1)])
    found = search_chains(problem)
    return best_chains(problem, found) if exact else Best(found)


def as_plan(problem: Problem, shared: Sequence[Shared]) -> Plan:
    """The chains as they are assigned, in the order of their devices' names, with what they are predicted to do."""
    ordered = sorted(shared, key=lambda part: part.chain)
    chains = tuple(
        ChainPlan(
            tuple(place.plan() for place in problem.places(part.chain)), problem.model.layers, part.users
        )
        for part in ordered
    )
    forecasts = [problem.forecast(part.chain, part.users) for part in ordered]
    return Plan(chains, forecast=plan_forecast(forecasts, problem.demand))


def forecast(
    model: ModelShape, candidates: Sequence[Candidate], network: Network, demand: Demand, plan: Plan
) -> Forecast | None:
    """What any plan would do; None unless every device in it has a profile. Users are shared out as the plan says."""
    known = {c.stage: StageCost(c, model, demand) for c in candidates if c.profile is not None}
    if not plan.chains or any(p.stage not in known for chain in plan.chains for p in chain.stages):
        return None
    chains = []
    for chain in plan.chains:
        places = [Place(known[p.stage], p.first, p.end) for p in chain.stages]
        chains.append(chain_forecast(places, network, demand, chain.users or demand.users))
    return plan_forecast(chains, demand)
