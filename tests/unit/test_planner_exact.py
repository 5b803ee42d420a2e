"""Exact plans: equal to trying everything, within memory, and never worse for more or faster devices."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brute import Brute
from planner_world import DEMANDS, MB, device, households, model, network, speed
from potluck.planner.cost import StageCost
from potluck.planner.exact import best_chains
from potluck.planner.groups import search_chains
from potluck.planner.measured import MeasuredPlanner, forecast
from potluck.planner.plan import Candidate, Demand, ModelShape, Network, Plan
from potluck.planner.problem import Problem
from potluck.wire.errors import PlanError
from potluck.wire.measures import Speed

Household = tuple[ModelShape, list[Candidate], Network]
SCARCE = st.builds(
    Demand,
    users=st.integers(2, 6),
    slots=st.integers(1, 3),
    context_tokens=st.just(2048),
    held_tokens=st.just(100),
)
"""Often more users than one chain, or all of them, have slots for."""


def plan_of(household: Household, demand: Demand) -> Plan | None:
    shape, candidates, links = household
    try:
        return MeasuredPlanner(demand)(shape, candidates, links)
    except PlanError:
        return None


def figure(plan: Plan | None, demand: Demand) -> float | None:
    """What is optimised: seconds per token for one user, otherwise tokens per second."""
    if plan is None or plan.forecast is None:
        return None
    return plan.forecast.token_s if demand.users == 1 else plan.forecast.tokens_per_s


def at_least_as_good(now: float | None, before: float | None, demand: Demand) -> bool:
    if before is None or now is None:
        return before is None
    return now <= before * (1 + 1e-6) if demand.users == 1 else now >= before * (1 - 1e-6)


@given(households(4, 8), DEMANDS)
def test_the_plan_is_as_good_as_the_best_of_all(household: Household, demand: Demand):
    plan = plan_of(household, demand)
    best = Brute(*household, demand).best()
    mine = figure(plan, demand)
    if best is None or mine is None:
        assert (best is None) == (mine is None)
    else:
        assert mine == pytest.approx(best, rel=1e-6)


@settings(max_examples=15)
@given(households(5, 12, least_devices=5, least_layers=9), DEMANDS)
def test_five_devices_and_up_to_twelve_layers_are_planned_as_well(household: Household, demand: Demand):
    best = Brute(*household, demand).best()
    mine = figure(plan_of(household, demand), demand)
    assert mine == (None if best is None else pytest.approx(best, rel=1e-6))


@given(households(4, 7), SCARCE)
def test_with_fewer_slots_than_users_the_plan_is_as_good_as_the_best_of_all(
    household: Household, demand: Demand
):
    best = Brute(*household, demand).best()
    mine = figure(plan_of(household, demand), demand)
    assert mine == (None if best is None else pytest.approx(best, rel=1e-6))


@given(households(4), SCARCE, st.data())
def test_one_more_device_is_never_worse_where_slots_are_short(
    household: Household, demand: Demand, data: st.DataObject
):
    shape, candidates, links = household
    fewer = candidates[:]
    fewer.pop(data.draw(st.integers(0, len(candidates) - 1)))
    before = figure(plan_of((shape, fewer, links), demand), demand) if fewer else None
    assert at_least_as_good(figure(plan_of(household, demand), demand), before, demand)


@pytest.mark.parametrize("users", [3, 10])
@pytest.mark.parametrize("memory_mb", [0, 60])
def test_ten_devices_are_planned_to_the_end(users: int, memory_mb: float):
    # Figures without a pattern: many sets are nearly as good as one another, and none may be left open.
    candidates = [
        device(
            f"d{n}",
            0.001 * (1 + (7 * n % 10)),
            row_s=0.0002 * (1 + (3 * n % 10)),
            memory_mb=memory_mb * (0.6 + 0.1 * (9 * n % 10)),
        )
        for n in range(10)
    ]
    special = {
        (a.device, b.device): (0.0003 * (1 + (i * j) % 9), (100.0, 300.0, 1000.0)[(i + 2 * j) % 3])
        for i, a in enumerate(candidates, 1)
        for j, b in enumerate(candidates, 1)
    }
    problem = Problem(model(20), candidates, network(candidates, special=special), Demand(users=users))
    alone, helped = best_chains(problem), best_chains(problem, search_chains(problem))
    rates = [
        sum(part.users / problem.round_s(part.chain, part.users) for part in best.shared)
        for best in (alone, helped)
    ]
    assert (alone.gap, helped.gap) == (0.0, 0.0)
    assert rates[0] == pytest.approx(rates[1], rel=1e-8)


@given(households(), DEMANDS)
def test_no_device_is_given_more_than_it_can_hold_and_none_twice(household: Household, demand: Demand):
    shape, candidates, _ = household
    plan = plan_of(household, demand)
    if plan is None:
        return
    costs = {c.stage: StageCost(c, shape, demand) for c in candidates}
    places = [place for chain in plan.chains for place in chain.stages]
    assert len({place.stage for place in places}) == len(places)
    for place in places:
        assert costs[place.stage].room[place.first, place.end]
        assert place.first in {0, *shape.cuts}
    assert plan.forecast is not None
    for chain in plan.forecast.chains:
        for stage in chain.stages:
            if stage.memory_bytes:
                assert stage.weights_bytes + stage.kv_bytes + stage.compute_bytes <= stage.memory_bytes + 10


@given(households(4), DEMANDS, st.data())
def test_one_more_device_is_never_worse(household: Household, demand: Demand, data: st.DataObject):
    shape, candidates, links = household
    fewer = candidates[:]
    fewer.pop(data.draw(st.integers(0, len(candidates) - 1)))
    before = figure(plan_of((shape, fewer, links), demand), demand) if fewer else None
    assert at_least_as_good(figure(plan_of(household, demand), demand), before, demand)


@given(households(4), DEMANDS, st.data())
def test_a_faster_device_is_never_worse(household: Household, demand: Demand, data: st.DataObject):
    shape, candidates, links = household
    index = data.draw(st.integers(0, len(candidates) - 1))
    faster = candidates[:]
    faster[index] = replace(candidates[index], slowdown=data.draw(st.sampled_from([0.3, 0.7, 0.95])))
    before = figure(plan_of(household, demand), demand)
    assert at_least_as_good(figure(plan_of((shape, faster, links), demand), demand), before, demand)


@given(households(5), DEMANDS, st.randoms(use_true_random=False))
def test_the_order_in_which_devices_are_named_changes_nothing(household: Household, demand: Demand, dice):
    shape, candidates, links = household
    mixed = candidates[:]
    dice.shuffle(mixed)
    one, other = plan_of(household, demand), plan_of((shape, mixed, links), demand)
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert (one.chains, one.reasons) == (other.chains, other.reasons)


@given(households(4), DEMANDS)
def test_the_forecast_of_the_plan_is_that_of_any_plan(household: Household, demand: Demand):
    shape, candidates, links = household
    plan = plan_of(household, demand)
    if plan is not None:
        assert forecast(shape, candidates, links, demand, Plan(plan.chains)) == plan.forecast


# ---- what a person would expect


def test_one_user_and_a_model_that_fits_means_one_device_and_it_says_why():
    candidates = [device("laptop", 0.001), device("mini", 0.0012), device("old", 0.004)]
    plan = MeasuredPlanner(Demand())(model(), candidates, network(candidates))
    assert [[place.device for place in chain.stages] for chain in plan.chains] == [["laptop"]]
    text = " ".join(plan.reasons)
    assert text.startswith("laptop alone: 12.5 ms per token. ")
    assert "Splitting would be slower: a chain with mini would take" in text
    assert "since each token passes both in turn" in text
    assert "old left out" in text


def test_a_model_that_fits_nowhere_alone_is_split_by_speed():
    candidates = [device("fast", 0.001, memory_mb=110), device("slow", 0.003, memory_mb=110)]
    plan = MeasuredPlanner(Demand())(model(), candidates, network(candidates))
    (chain,) = plan.chains
    layers = {place.device: place.end - place.first for place in chain.stages}
    assert layers["fast"] > layers["slow"]
    assert any("No device can hold the model alone" in reason for reason in plan.reasons)


def test_many_users_on_equal_devices_get_replicas():
    candidates = [device(name, 0.001, row_s=0.001) for name in ("a", "b")]
    plan = MeasuredPlanner(Demand(users=8))(model(), candidates, network(candidates))
    assert [len(chain.stages) for chain in plan.chains] == [1, 1]
    assert [chain.users for chain in plan.chains] == [4, 4]
    assert "2 replicas" in plan.reasons[0]


def test_many_users_on_unequal_devices_that_can_not_hold_the_model_get_a_balanced_chain():
    candidates = [
        device("fast", 0.001, row_s=0.001, memory_mb=115),
        device("slow", 0.003, row_s=0.003, memory_mb=115),
    ]
    plan = MeasuredPlanner(Demand(users=4))(model(), candidates, network(candidates))
    (chain,) = plan.chains
    assert {place.device: place.end - place.first for place in chain.stages} == {"fast": 9, "slow": 3}


def test_a_device_that_would_slow_the_rest_is_left_out_with_the_figures():
    candidates = [
        device("a", 0.001, memory_mb=90),
        device("b", 0.001, memory_mb=90),
        device("slug", 0.038, memory_mb=90),
    ]
    plan = MeasuredPlanner(Demand())(model(), candidates, network(candidates))
    assert "slug" not in {place.device for chain in plan.chains for place in chain.stages}
    (why,) = [reason for reason in plan.reasons if reason.startswith("slug left out")]
    assert "38 ms per layer" in why
    assert "with it" in why


def test_a_slow_link_is_avoided_and_said():
    candidates = [device(name, 0.001, memory_mb=90) for name in ("a", "b", "c")]
    slow = {("a", "b"): (0.001, 1.0), ("b", "a"): (0.001, 1.0)}
    links = network(candidates, special=slow)
    plan = MeasuredPlanner(Demand())(model(), candidates, links)
    order = [place.device for place in plan.chains[0].stages]
    assert "c" in order
    assert any("1 Mbit/s" in reason and "avoided" in reason for reason in plan.reasons)


def test_layers_go_to_the_gpu_as_far_as_it_has_room():
    gaming = device("gaming", 0.004, gpu=speed(0.0002), vram_mb=70)
    plan = MeasuredPlanner(Demand())(model(), [gaming], network([gaming]))
    assert plan.chains[0].stages[0].gpu_layers == 6  # 70 MB less 2 MB of buffers and 5 MB of head


def test_without_fallback_the_gpus_layers_are_all():
    strict = device("gaming", 0.004, gpu=speed(0.0002), vram_mb=70, cpu_fallback=False)
    other = device("office", 0.002)
    plan = MeasuredPlanner(Demand())(model(), [strict, other], network([strict, other]))
    for chain in plan.chains:
        for place in chain.stages:
            assert place.device != "gaming" or place.gpu_layers == place.end - place.first


def test_what_does_not_fit_is_refused_with_the_figures_and_what_to_do():
    candidates = [device("a", memory_mb=40, kv_mb=1.0), device("b", memory_mb=40, kv_mb=1.0)]
    with pytest.raises(PlanError, match=r"needs 139 MB .* a and b offer 80 MB") as caught:
        MeasuredPlanner(Demand())(model(), candidates, network(candidates))
    assert "context" in caught.value.hint


def test_devices_that_were_not_measured_are_left_out_unless_none_was():
    known, unknown = device("known"), replace(device("unknown"), profile=None)
    plan = MeasuredPlanner(Demand())(model(), [known, unknown], Network())
    assert "unknown left out: not measured." in plan.reasons
    plan = MeasuredPlanner(Demand())(model(), [unknown], Network())
    assert plan.reasons[0] == "No device could be measured."


def test_no_stage_at_all_is_an_error():
    with pytest.raises(PlanError, match="No stage has joined"):
        MeasuredPlanner(Demand())(model(), [], Network())


def test_a_drawn_profile_survives_the_wire():
    drawn = speed(0.001, row_s=0.001)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(drawn), type=Speed) == drawn
    assert drawn.layer_bytes == 10 * MB
