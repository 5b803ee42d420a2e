"""The best plan that measurements allow. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from potluck.planner.cost import Place, StageCost, chain_forecast, plan_forecast
from potluck.planner.even import plan_even
from potluck.planner.plan import Candidate, Demand, ModelShape, Network, Plan
from potluck.wire.forecast import Forecast


def forecast(
    model: ModelShape, candidates: Sequence[Candidate], network: Network, demand: Demand, plan: Plan
) -> Forecast | None:
    """What any plan would do; None unless every device in it has a profile."""
    known = {c.stage: StageCost(c, model, demand) for c in candidates if c.profile is not None}
    if not plan.chains or any(p.stage not in known for chain in plan.chains for p in chain.stages):
        return None
    chains = []
    for chain in plan.chains:
        places = [Place(known[p.stage], p.first, p.end) for p in chain.stages]
        chains.append(chain_forecast(places, network, demand, chain.users or demand.users))
    return plan_forecast(chains, demand)


@dataclass(frozen=True, slots=True)
class MeasuredPlanner:
    """Being built: an even split with a forecast."""

    demand: Demand

    def __call__(self, model: ModelShape, candidates: Sequence[Candidate], network: Network) -> Plan:
        """See Planner."""
        plan = plan_even(model, candidates, network)
        return replace(plan, forecast=forecast(model, candidates, network, self.demand, plan))
