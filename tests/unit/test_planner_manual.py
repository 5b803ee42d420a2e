"""A manual assignment wins, and is checked."""

from __future__ import annotations

import pytest

from planner_world import device, model, network
from potluck.planner.manual import ManualPlanner, parse_layers
from potluck.planner.measured import MeasuredPlanner
from potluck.planner.plan import Candidate, Demand, Link, ModelShape, Network
from potluck.wire.errors import PlanError, SettingsError
from potluck.wire.ids import DeviceName, StageId

MODEL = ModelShape("m", 8, 4, (1,) * 8, 1, 1, frozenset({2, 4, 6}))


def candidates(*names: str) -> list[Candidate]:
    return [Candidate(StageId(f"{name}/{index}"), DeviceName(name)) for index, name in enumerate(names)]


def test_layers_go_where_the_owner_says_whatever_the_order_of_joining() -> None:
    planner = ManualPlanner(parse_layers(["b=0-5", "a=6-7"]))
    planner.check(MODEL)
    plan = planner(MODEL, candidates("a", "spare", "b"))
    assert [(s.device, s.first, s.end) for s in plan.chains[0].stages] == [("b", 0, 6), ("a", 6, 8)]
    assert plan.left_out == ("spare/1",)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["a=0-3", "b=6-7"], "layers 4 to 5 are nobody's"),
        (["a=0-5", "b=4-7"], "layer 4 is given twice"),
        (["a=2-7"], "layers 0 to 1 are nobody's"),
        (["a=0-5"], "ends at layer 5"),
        (["a=0-9"], "ends at layer 9"),
        (["a=0-2", "b=3-7"], "can't be cut at layer 3"),
        (["a=5-0"], "begins at layer 5 and ends at 0"),
    ],
)
def test_an_assignment_that_does_not_cover_the_model_once_is_refused_in_words(
    entries: list[str], words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        ManualPlanner(parse_layers(entries)).check(MODEL)


@pytest.mark.parametrize("entries", [["a"], ["a=1"], ["a=1-"], ["=1-2"], ["a=1-2", "a=3-4"], ["a=x-y"]])
def test_an_entry_that_is_none_is_refused(entries: list[str]) -> None:
    with pytest.raises(SettingsError):
        parse_layers(entries)


def test_missing_and_doubled_devices_are_named() -> None:
    planner = ManualPlanner(parse_layers(["a=0-3", "b=4-7"]))
    with pytest.raises(PlanError, match="waits for b"):
        planner(MODEL, candidates("a"))
    with pytest.raises(PlanError, match="Several stages are named a"):
        planner(MODEL, candidates("a", "a", "b"))


def test_a_device_without_room_for_its_layers_is_named_with_need_offer_and_what_it_could_hold() -> None:
    household = [device("desktop", memory_mb=90), device("laptop", memory_mb=60)]
    planner = ManualPlanner(parse_layers(["desktop=0-3", "laptop=4-11"]), Demand())
    words = r"laptop would need 87 MB for layers 4-11, it offers 60 MB"
    with pytest.raises(PlanError, match=words) as caught:
        planner(model(), household, network(household))
    assert "fewer layers" in caught.value.hint
    planner = ManualPlanner(parse_layers(["desktop=0-8", "laptop=9-11"]), Demand())
    with pytest.raises(PlanError, match="layers 0-8") as caught:
        planner(model(), household, network(household))
    assert "it has room for 0-7" in caught.value.hint


def test_the_gpu_alone_counts_where_its_cpu_may_not_compute() -> None:
    profile = device("x").profile
    assert profile is not None
    strict = device("gaming", memory_mb=500, gpu=profile.cpu, vram_mb=60, cpu_fallback=False)
    with pytest.raises(PlanError, match="it offers 60 MB"):
        ManualPlanner({"gaming": (0, 11)}, Demand())(model(), [strict])


def test_what_the_planner_would_have_chosen_is_said_beside_the_forecast() -> None:
    household = [device("fast", 0.001), device("slow", 0.004)]
    planner = ManualPlanner(parse_layers(["fast=0-5", "slow=6-11"]), Demand())
    plan = planner(model(), household, network(household))
    own = MeasuredPlanner(Demand())(model(), household, network(household))
    assert plan.forecast is not None
    assert own.forecast is not None
    assert plan.forecast.token_s > own.forecast.token_s
    assert plan.reasons == (
        "The layers are as layer_assignment says: 31 ms per token; the planner's own choice would take 12.5.",
    )
    alone = ManualPlanner({"fast": (0, 11)}, Demand())(model(), household, network(household))
    assert alone.reasons[0].endswith("12.5 ms per token; the planner knows no better choice.")


def test_a_dead_link_in_the_assignment_is_said() -> None:
    household = [device("a"), device("b")]
    dead = Network({("a/1", "b/1"): Link(float("inf"))})  # type: ignore[dict-item]
    plan = ManualPlanner(parse_layers(["a=0-5", "b=6-11"]), Demand())(model(), household, dead)
    assert "nobody answered" in plan.reasons[0]


def test_without_measurements_the_assignment_is_taken_as_it_is() -> None:
    plan = ManualPlanner({"a": (0, 7)}, Demand())(MODEL, candidates("a"))
    assert plan.forecast is None
    assert plan.reasons == ("The layers are as layer_assignment says.",)
