"""When a stage counts as slower or faster than its profile."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from potluck.broker.drift import Pace

WINDOW_S, BOUND = 10.0, 0.25


def run(pace: Pace, factors: list[float], start_s: float = 0.0) -> list[float]:
    """One micro-batch of a second per second, each window at its factor. The slowdown after each window."""
    after = []
    now = pace.since_s = start_s
    for factor in factors:
        for _ in range(10):
            now += 1.0
            pace.note(1.0, factor, now, WINDOW_S, BOUND)
        after.append(pace.slowdown)
    return after


def test_a_slow_spell_of_two_windows_changes_nothing():
    assert run(Pace(), [1.0, 2.0, 1.0, 1.0, 2.0, 2.0, 1.0]) == [1.0] * 7


def test_a_stage_that_stays_slow_is_taken_to_be_slow():
    after = run(Pace(), [1.0, 2.0, 2.0, 2.0, 2.0])
    assert after[0] == 1.0
    assert 1.5 < after[-1] <= 2.0


def test_the_mildest_of_the_windows_is_what_counts():
    pace = Pace()
    run(pace, [1.0, 3.0, 1.6, 2.0])
    assert round(pace.slowdown, 6) == 1.6


def test_a_stage_that_recovers_is_taken_to_be_fast_again():
    assert run(Pace(), [2.0] * 4 + [1.0] * 4)[-1] < 1.25


def test_within_the_bound_nothing_changes():
    assert run(Pace(), [1.2, 1.24, 0.9, 1.1] * 3) == [1.0] * 12


@given(st.integers(2, 30))
def test_a_stage_that_flaps_from_window_to_window_never_drifts(count: int):
    pace = Pace()
    now = 0.0
    for index in range(count):
        factor = (0.5, 2.0)[index % 2]
        pace.since_s, pace.expected_s, pace.computed_s = now, 0.0, 0.0
        now += WINDOW_S
        pace.note(10.0, 10.0 * factor, now, WINDOW_S, BOUND)
    assert pace.slowdown == 1.0


def test_a_window_with_hardly_any_work_is_not_judged():
    pace = Pace()
    for second in range(100):
        pace.note(0.001, 0.01, float(second), WINDOW_S, BOUND)
    assert pace.slowdown == 1.0
