"""The model of cost: what a device offers, what a prompt's last layer costs, and links on which nobody answered."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner_world import MB, device, model, network, speed
from potluck.planner.cost import SKIPPED, Place, StageCost, chain_forecast, offered
from potluck.planner.measured import MeasuredPlanner
from potluck.planner.plan import Candidate, Demand, Link, Network
from potluck.wire.errors import PlanError
from potluck.wire.ids import StageId

NEVER = Link(float("inf"))


def gaming(*, cpu_fallback: bool, memory_mb: float = 100) -> Candidate:
    return device("gaming", gpu=speed(0.0002), vram_mb=70, memory_mb=memory_mb, cpu_fallback=cpu_fallback)


def test_memory_and_gpu_memory_are_offered_unless_only_the_gpu_may_compute() -> None:
    assert offered(gaming(cpu_fallback=True)) == 170 * MB
    assert offered(gaming(cpu_fallback=False)) == 70 * MB
    assert offered(gaming(cpu_fallback=True, memory_mb=0)) == 0
    assert offered(device("office", memory_mb=30)) == 30 * MB


def test_a_forecast_shows_what_may_be_taken() -> None:
    strict = gaming(cpu_fallback=False)
    cost = StageCost(strict, model(4), Demand())
    (stage,) = chain_forecast([Place(cost, 0, 4)], Network(), Demand(), 1).stages
    assert stage.memory_bytes == 70 * MB
    assert stage.weights_bytes + stage.kv_bytes + stage.compute_bytes == cost.needed_bytes(0, 4)


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_rows_of_a_prompt_that_want_no_result_skip_most_of_the_last_layer(rows: int) -> None:
    cost = StageCost(device("a", head_s=0.0), model(12), Demand())
    layer = cost.prefill(rows)[0, 1]
    inner, last = cost.prefill(rows)[4, 8], cost.prefill(rows)[8, 12]
    assert inner - last == pytest.approx(SKIPPED * layer * (rows - 1) / rows)


def test_decoding_skips_nothing() -> None:
    cost = StageCost(device("a", head_s=0.0), model(12), Demand())
    assert cost.decode(8)[8, 12] == pytest.approx(cost.decode(8)[4, 8])


@pytest.mark.parametrize("cpu_fallback", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_one_run_of_layers_costs_what_the_table_says(rows: int, cpu_fallback: bool) -> None:
    cost = StageCost(gaming(cpu_fallback=cpu_fallback), replace(model(12), cuts=frozenset({3, 7})), Demand())
    table = cost.decode(rows)
    assert [[cost.decode_s(rows, first, end) for end in range(13)] for first in range(13)] == table.tolist()
    assert 0 < np.isfinite(table).sum() < table.size / 2


def test_a_chain_over_a_link_on_which_nobody_answered_takes_for_ever_and_can_still_be_sent() -> None:
    a, b = device("a"), device("b")
    places = [Place(StageCost(a, model(), Demand()), 0, 6), Place(StageCost(b, model(), Demand()), 6, 12)]
    found = chain_forecast(places, Network({(a.stage, b.stage): NEVER}), Demand(), 4)
    assert (found.token_s, found.ttft_s, found.tokens_per_s) == (1e9, 1e9, 0.0)
    assert all(np.isfinite(stage.send_s) and stage.busy == 0.0 for stage in found.stages)


@pytest.mark.parametrize("users", [1, 3])
@pytest.mark.parametrize("count", [3, 12])
def test_no_chain_goes_over_a_dead_link(users: int, count: int) -> None:
    household = [device(f"d{index:02d}", memory_mb=90) for index in range(count)]
    links = dict(network(household).links)
    for other in household[1:]:
        links[household[0].stage, other.stage] = NEVER
    whole = network(household)
    plan = MeasuredPlanner(Demand(users=users))(
        model(), household, Network(links, whole.from_broker, whole.to_broker)
    )
    for chain in plan.chains:
        assert all(place.stage != household[0].stage for place in chain.stages[:-1])


@pytest.mark.parametrize("users", [1, 3])
@pytest.mark.parametrize("count", [3, 12])
def test_a_device_that_the_broker_does_not_reach_begins_no_chain(users: int, count: int) -> None:
    household = [device(f"d{index:02d}", memory_mb=90) for index in range(count)]
    whole = network(household)
    legs: dict[StageId, Link] = {**whole.from_broker, household[0].stage: NEVER}
    plan = MeasuredPlanner(Demand(users=users))(
        model(), household, Network(whole.links, legs, whole.to_broker)
    )
    assert all(chain.stages[0].stage != household[0].stage for chain in plan.chains)


def test_a_dead_link_that_costs_something_is_said_with_what_would_be_possible() -> None:
    household = [
        device("a", 0.001, memory_mb=90),
        device("b", 0.001, memory_mb=90),
        device("c", 0.01, memory_mb=90),
    ]
    links = dict(network(household).links)
    for pair in (("a/1", "b/1"), ("b/1", "a/1")):
        links[StageId(pair[0]), StageId(pair[1])] = NEVER
    whole = network(household)
    plan = MeasuredPlanner(Demand())(model(), household, Network(links, whole.from_broker, whole.to_broker))
    (said,) = [reason for reason in plan.reasons if reason.startswith("Nothing gets")]
    assert said.startswith("Nothing gets through between a and b: this plan goes without; otherwise ")
    assert "ms per token would be possible." in said


def test_where_dead_links_leave_no_plan_the_error_names_them_and_not_memory() -> None:
    household = [device("a", memory_mb=90), device("b", memory_mb=90)]
    links = {(a.stage, b.stage): NEVER for a in household for b in household if a != b}
    with pytest.raises(PlanError, match="nothing gets from a to b and from b to a") as caught:
        MeasuredPlanner(Demand())(model(), household, Network(links))
    assert "firewall" in caught.value.hint
    alone = replace(household[0], memory_bytes=0)
    with pytest.raises(PlanError, match="nothing gets from the broker to a"):
        MeasuredPlanner(Demand())(model(), [alone], Network(from_broker={alone.stage: NEVER}))
