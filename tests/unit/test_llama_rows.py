"""The sizes in which decode rows are computed, from times that were measured."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from potluck.stage.engines.llama_calls import Limits, plan_calls
from potluck.stage.engines.llama_rows import BUDGET_S, RUNS, TIMED_ROWS, best_sizes, time_rows
from potluck.wire.messages import Span


def runs(sizes: tuple[int, ...], rows: int) -> list[int]:
    taken = []
    while rows:
        taken.append(sizes[min(rows, len(sizes) - 1)])
        rows -= taken[-1]
    return taken


def test_a_slow_kernel_for_few_rows_is_avoided_row_by_row() -> None:
    sizes = best_sizes({1: 1.0, 2: 5.5, 4: 8.4, 8: 9.8, 16: 10.0}, 16)
    assert runs(sizes, 2) == [1, 1]
    assert runs(sizes, 4) == [1, 1, 1, 1]
    assert runs(sizes, 16) == [16]


def test_rows_stay_together_when_that_is_faster_or_about_the_same() -> None:
    assert best_sizes({1: 1.0, 2: 1.5, 4: 2.5, 8: 4.0}, 32) == ()
    assert best_sizes({1: 1.0, 2: 2.05, 4: 4.1, 8: 8.2}, 32) == ()


def test_one_measured_time_decides_nothing() -> None:
    assert best_sizes({1: 1.0}, 8) == ()


@given(
    times=st.lists(st.floats(0.001, 10.0), min_size=2, max_size=5),
    most=st.integers(1, 40),
    rows=st.integers(1, 40),
)
def test_the_sizes_always_add_up_and_never_cost_more_than_keeping_together(
    times: list[float], most: int, rows: int
) -> None:
    measured = dict(zip(TIMED_ROWS, times, strict=False))
    sizes = best_sizes(measured, most)
    if not sizes:
        return
    taken = runs(sizes, rows)
    assert sum(taken) == rows
    assert max(taken) <= most


def test_timing_stops_when_the_budget_is_used_up() -> None:
    now = 0.0
    calls: list[int] = []

    def call(rows: int) -> None:
        nonlocal now
        calls.append(rows)
        now += 0.2 * rows

    times = time_rows(call, 16, lambda: now)
    assert list(times) == [1]
    assert len(calls) == RUNS
    assert now <= BUDGET_S


def test_a_run_of_decode_rows_is_cut_and_prompt_chunks_are_not() -> None:
    limits = Limits(batch_rows=64, together_rows=64, slot_rows=64, wants=64, decode_sizes=(0, 1, 1, 1, 2))
    decode = [Span(slot, 9, 1, 1) for slot in range(4)]
    assert [[piece.slot for piece in call] for call in plan_calls(decode, limits)] == [[0, 1], [2], [3]]
    prompts = [Span(slot, 0, 8, 1) for slot in range(4)]
    assert len(plan_calls(prompts, limits)) == 1
