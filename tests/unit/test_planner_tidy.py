"""Among equally good plans, the one that people would write down."""

from __future__ import annotations

import pytest
from hypothesis import given

from planner_world import DEMANDS, device, households, model, network
from potluck.planner.cost import Place, StageCost, chain_forecast
from potluck.planner.measured import MeasuredPlanner, solve
from potluck.planner.plan import Candidate, Demand, ModelShape, Network
from potluck.planner.problem import Problem
from potluck.planner.tidy import tidy


@pytest.mark.parametrize(
    ("users", "chains"), [(1, [["pi-1", "pi-2"]]), (4, [["pi-1", "pi-2"], ["pi-3", "pi-4"]])]
)
def test_equal_devices_are_used_in_the_order_of_their_names(users: int, chains: list[list[str]]) -> None:
    pis = [device(f"pi-{index}", 0.001, row_s=0.001, memory_mb=75) for index in range(1, 5)]
    plan = MeasuredPlanner(Demand(users=users))(model(), pis, network(pis))
    assert [[place.device for place in chain.stages] for chain in plan.chains] == chains
    assert all(place.end - place.first == 6 for chain in plan.chains for place in chain.stages)


@given(households(4, 8), DEMANDS)
def test_a_tidier_plan_is_as_good(
    household: tuple[ModelShape, list[Candidate], Network], demand: Demand
) -> None:
    problem = Problem(*household, demand)
    found = solve(problem).shared
    rates = [
        sum(part.users / problem.round_s(part.chain, part.users) for part in plan)
        for plan in (found, tidy(problem, found))
    ]
    assert rates[1] == pytest.approx(rates[0], rel=1e-7)


def test_of_cuts_that_cost_one_user_the_same_those_with_the_soonest_first_token_are_made() -> None:
    # Equal speed and different memory: wherever the cut is, a token takes the same.
    small, large = device("a-small", 0.001, memory_mb=75), device("b-large", 0.001, memory_mb=105)
    candidates = [small, large]
    plan = MeasuredPlanner(Demand())(model(), candidates, network(candidates))
    assert plan.forecast is not None
    ((chain, told),) = zip(plan.chains, plan.forecast.chains, strict=True)
    others = []
    for order in (candidates, candidates[::-1]):
        costs = [StageCost(one, model(), Demand()) for one in order]
        for cut in range(1, 12):
            if costs[0].room[0, cut] and costs[1].room[cut, 12]:
                places = [Place(costs[0], 0, cut), Place(costs[1], cut, 12)]
                others.append(chain_forecast(places, network(candidates), Demand(), 1))
    assert len(chain.stages) == 2
    assert told.token_s == pytest.approx(min(other.token_s for other in others))
    assert told.ttft_s == pytest.approx(min(other.ttft_s for other in others))
