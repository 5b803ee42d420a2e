"""The even split, against every split there is."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from potluck.model.architectures import rules_for
from potluck.model.facts import read_facts
from potluck.planner.even import even_cuts, plan_even
from potluck.planner.plan import Candidate, ChainPlan, ModelShape, StagePlan
from potluck.planner.shape import shape_of
from potluck.wire.errors import PlanError
from potluck.wire.ids import DeviceName, StageId
from tiny_models import write_tiny


def shape(sizes: list[int], head: int, cuts: set[int]) -> ModelShape:
    return ModelShape("m", len(sizes), 8, tuple(sizes), head, 1, frozenset(cuts))


def largest(sizes: list[int], head: int, bounds: tuple[int, ...]) -> int:
    return max(sum(sizes[a:b]) + (head if b == len(sizes) else 0) for a, b in pairwise(bounds))


def candidates(*names: str) -> list[Candidate]:
    return [Candidate(StageId(f"{name}/1"), DeviceName(name)) for name in names]


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=9), head=st.integers(0, 80), data=st.data())
def test_no_other_split_has_a_smaller_largest_share(sizes: list[int], head: int, data: st.DataObject) -> None:
    cuts = data.draw(st.sets(st.integers(1, len(sizes))))
    allowed = sorted(cut for cut in cuts if cut < len(sizes))
    stages = data.draw(st.integers(1, len(allowed) + 1))
    bounds = even_cuts(shape(sizes, head, cuts), stages)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(sizes), stages + 1)
    assert set(bounds[1:-1]) <= set(allowed)
    every = [(0, *inner, len(sizes)) for inner in combinations(allowed, stages - 1)]
    assert largest(sizes, head, bounds) == min(largest(sizes, head, other) for other in every)


def test_more_stages_than_the_architecture_allows_is_an_error_for_cuts_and_a_spare_for_a_plan() -> None:
    model = shape([1, 1, 1, 1], 0, {2})
    with pytest.raises(PlanError, match="at most 2 stages"):
        even_cuts(model, 3)
    plan = plan_even(model, candidates("a", "b", "c"))
    assert [place.device for place in plan.chains[0].stages] == ["a", "b"]
    assert plan.left_out == ("c/1",)
    assert any("c left out" in reason for reason in plan.reasons)


def test_the_same_devices_in_another_order_get_the_same_plan() -> None:
    model = shape([3, 1, 4, 1, 5], 2, {1, 2, 3, 4})
    assert plan_even(model, candidates("a", "b", "c")) == plan_even(model, candidates("c", "a", "b"))


def test_without_stages_there_is_no_plan_and_the_error_says_what_to_start() -> None:
    with pytest.raises(PlanError, match="potluck-stage"):
        plan_even(shape([1], 0, set()), [])


@pytest.mark.parametrize("places", [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 2)], [(1, 3)], [(0, 0), (0, 3)]])
def test_a_chain_with_a_gap_or_an_overlap_can_not_be_made(places: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="layer"):
        ChainPlan(tuple(StagePlan(StageId("a/1"), DeviceName("a"), *place) for place in places), 3)


def test_work_is_counted_per_token_so_unused_experts_weigh_nothing(tmp_path: Path) -> None:
    dense, moe = tmp_path / "dense.gguf", tmp_path / "moe.gguf"
    write_tiny(dense, "qwen3", layers=2)
    write_tiny(moe, "qwen3moe", layers=2)
    for path in (dense, moe):
        facts = read_facts(path)
        found = shape_of(facts, rules_for(facts), "m")
        assert len(found.layer_work) == 2
        assert found.head_work == facts.vocab * facts.width
        weights = sum(
            t.shape[0] * t.shape[1] * (t.shape[2] if len(t.shape) == 3 else 1)
            for t in facts.tensors.values()
            if t.name.startswith("blk.0.") and len(t.shape) > 1
        )
        vectors = sum(
            t.shape[0] for t in facts.tensors.values() if t.name.startswith("blk.0.") and len(t.shape) == 1
        )
        if path is dense:
            assert found.layer_work[0] == weights + vectors
        else:
            assert found.layer_work[0] < weights
