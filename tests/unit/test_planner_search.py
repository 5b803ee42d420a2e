"""Plans for tens of devices: within 5 % of the best that is known, and the same every time.

The best is known where it follows from the figures, where the exact planner finds it, or else from a search that is
allowed many times the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from planner_world import device, model, network
from potluck.planner.exact import Shared, best_chain, best_chains
from potluck.planner.groups import search_chains
from potluck.planner.measured import MeasuredPlanner
from potluck.planner.plan import Candidate, ChainPlan, Demand, ModelShape, Network, Plan, StagePlan
from potluck.planner.problem import Problem
from potluck.planner.search import search_chain, search_one
from potluck.wire.errors import PlanError
from potluck.wire.ids import DeviceName, StageId

CLOSE = 0.95
LAYERS = 126
Household = tuple[ModelShape, list[Candidate], Network]


def trip_s(problem: Problem, *, tries: int | None = None) -> float:
    chain = search_one(problem, 1, tries)
    assert chain is not None
    return problem.round_s(chain, 1)


def rate(problem: Problem, shared: Sequence[Shared]) -> float:
    """Tokens per second, of a plan that may be: no device twice, no chain with more users than slots."""
    devices = [device for part in shared for device, _, _ in part.chain]
    assert len(set(devices)) == len(devices)
    assert all(0 < part.users <= problem.demand.slots for part in shared)
    assert sum(part.users for part in shared) <= problem.demand.users
    return sum(part.users / problem.round_s(part.chain, part.users) for part in shared)


def alike(count: int, layer_s: float, *, memory_mb: float = 0, name: str = "d") -> list[Candidate]:
    """Devices that compute one row after another: two rows take twice as long."""
    return [
        device(f"{name}{index:02d}", layer_s, row_s=layer_s, memory_mb=memory_mb) for index in range(count)
    ]


def mixed(count: int, layers: int, seed: int, memory_mb: float = 0) -> Household:
    """Devices and links of all kinds."""
    dice = Random(seed)
    household = [
        device(
            f"d{index:02d}",
            dice.uniform(0.001, 0.01),
            row_s=dice.uniform(0.0001, 0.002),
            memory_mb=memory_mb * dice.uniform(0.5, 1.5),
            kv_mb=1.0,
        )
        for index in range(count)
    ]
    special = {
        (a.device, b.device): (dice.uniform(0.0003, 0.003), dice.choice([100.0, 300.0, 1000.0]))
        for a in household
        for b in household
        if a is not b
    }
    return model(layers), household, network(household, special=special)


# ---- where the best follows from the figures


def test_one_user_of_equal_devices_gets_as_few_of_them_as_can_hold_the_model() -> None:
    household = alike(64, 0.005, memory_mb=210 + 10)  # 21 layers with the buffers: 6 devices, 7 with the head
    links = network(household)
    problem = Problem(model(LAYERS), household, links, Demand())
    chain = search_chain(problem)
    assert chain is not None
    assert len(chain) == 6
    send_s = links.link(household[0].stage, household[1].stage).send_s(4000)
    assert problem.round_s(chain, 1) == pytest.approx(LAYERS * 0.005 + 5 * send_s + 0.0005)


@pytest.mark.parametrize("users", [16, 64])
def test_many_users_of_equal_devices_get_nearly_what_all_of_them_can_compute(users: int) -> None:
    household = alike(64, 0.005, memory_mb=220)
    problem = Problem(model(LAYERS), household, network(household), Demand(users=users))
    # No device computes more than one row at a time, and a user has one row on its way.
    most = min(64, users) / (LAYERS * 0.005)
    assert rate(problem, search_chains(problem)) >= CLOSE * most


def test_two_kinds_of_devices_are_both_used_as_far_as_they_go() -> None:
    household = [*alike(32, 0.004, name="fast"), *alike(32, 0.012, name="slow")]
    problem = Problem(model(LAYERS), household, network(household), Demand(users=64))
    most = 32 / (LAYERS * 0.004) + 32 / (LAYERS * 0.012)
    assert rate(problem, search_chains(problem)) >= CLOSE * most


@pytest.mark.parametrize("users", [1, 8])
def test_a_fast_group_among_many_slow_devices_is_found(users: int) -> None:
    fast = [device(f"fast{i}", 0.001, row_s=0.0002, memory_mb=330) for i in range(8)]
    slow = [device(f"slow{i:02d}", 0.03, row_s=0.01, memory_mb=330) for i in range(56)]
    near = {(a.device, b.device): (0.0002, 10_000.0) for a in fast for b in fast}
    links = network([*slow, *fast], rtt_s=0.02, mbit_s=50, special=near)
    problem = Problem(model(LAYERS), [*slow, *fast], links, Demand(users=users))
    few = Problem(model(LAYERS), fast, links, Demand(users=users))
    if users == 1:
        chain = best_chain(few)
        assert chain is not None
        assert trip_s(problem) <= few.round_s(chain, 1) / CLOSE
    else:
        assert rate(problem, search_chains(problem)) >= CLOSE * rate(few, best_chains(few).shared)


@pytest.mark.parametrize("users", [1, 6])
@pytest.mark.parametrize("roomy", range(12))
def test_where_all_memory_is_needed_the_device_with_room_for_the_head_is_the_last(
    roomy: int, users: int
) -> None:
    # 40 MB are room for 3 layers and buffers, not for the head, too; only one device has that as well.
    household = [
        device(f"d{index:02d}", 0.001 * (1 + 5 * index % 7), memory_mb=40 if index == roomy else 33)
        for index in range(12)
    ]
    plan = MeasuredPlanner(Demand(users=users))(model(36), household, network(household))
    (chain,) = plan.chains
    assert len(chain.stages) == 12
    assert chain.stages[-1].device == household[roomy].device


def test_many_devices_that_are_too_few_are_counted_and_not_named() -> None:
    household = alike(20, 0.005, memory_mb=33)
    with pytest.raises(PlanError, match="20 devices offer 660 MB"):
        MeasuredPlanner(Demand())(model(LAYERS), household, network(household))


# ---- where the exact planner finds it


@pytest.mark.parametrize("memory_mb", [0, 70, 150])
@pytest.mark.parametrize("count", [6, 7, 8])
def test_few_devices_are_planned_almost_as_well_as_exactly(count: int, memory_mb: float) -> None:
    shape, household, links = mixed(count, 20, seed=count, memory_mb=memory_mb)
    one = Problem(shape, household, links, Demand())
    chain = best_chain(one)
    if chain is None:
        assert search_chain(one) is None
        return
    assert trip_s(one) <= one.round_s(chain, 1) / CLOSE
    for users in (2, 5, 12):
        many = Problem(shape, household, links, Demand(users=users))
        found = search_chains(many)
        assert rate(many, found) >= CLOSE * rate(many, best_chains(many, found).shared)


# ---- where only much more work tells


@pytest.mark.parametrize("memory_mb", [200, 1600])
def test_one_user_of_a_mixed_household_gets_a_chain_that_no_long_search_beats(memory_mb: float) -> None:
    shape, household, links = mixed(64, LAYERS, seed=3, memory_mb=memory_mb)
    problem = Problem(shape, household, links, Demand())
    assert trip_s(problem) <= trip_s(problem, tries=2500) / CLOSE


@pytest.mark.parametrize(("users", "memory_mb"), [(4, 200), (16, 200), (64, 1600)])
def test_many_users_of_a_mixed_household_get_chains_that_no_long_search_beats(
    users: int, memory_mb: float
) -> None:
    shape, household, links = mixed(64, LAYERS, seed=users, memory_mb=memory_mb)
    problem = Problem(shape, household, links, Demand(users=users))
    found = rate(problem, search_chains(problem))
    assert found >= CLOSE * rate(problem, search_chains(problem, work=30_000))


def test_the_same_question_gets_the_same_answer() -> None:
    shape, household, links = mixed(20, 40, seed=5, memory_mb=200)
    plans = [MeasuredPlanner(Demand(users=8))(shape, way, links) for way in (household, household[::-1])]
    assert plans[0] == plans[1]


@pytest.mark.parametrize(("count", "seed"), [(3, 22), (4, 0), (4, 38), (5, 35), (5, 1)])
def test_search_over_few_devices_and_few_slots_puts_none_of_them_in_two_chains(count: int, seed: int) -> None:
    demand = Demand(users=6, slots=3, context_tokens=2048, held_tokens=100)
    problem = Problem(*mixed(count, 8, seed), demand)
    assert rate(problem, search_chains(problem)) > 0


def test_plan_that_has_a_stage_in_two_chains_is_refused() -> None:
    chain = ChainPlan((StagePlan(StageId("a/1"), DeviceName("a"), 0, 8),), 8)
    with pytest.raises(ValueError, match="more than one place"):
        Plan((chain, chain))
