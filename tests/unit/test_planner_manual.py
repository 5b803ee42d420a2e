"""A manual assignment wins, and is checked."""

from __future__ import annotations

import pytest

from potluck.planner.manual import ManualPlanner, parse_layers
from potluck.planner.plan import Candidate, ModelShape
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
