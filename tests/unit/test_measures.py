"""What is measured, and what follows for sizes that were not."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from potluck.wire.measures import seconds_at

TIMED = st.dictionaries(st.integers(1, 512), st.floats(0.0, 10.0), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("size", "seconds"),
    [(1, 2.0), (2, 2.0), (3, 3.0), (4, 4.0), (6, 3.0), (8, 2.0), (32, 2.0)],
)
def test_beyond_the_largest_size_the_time_does_not_fall(size: int, seconds: float) -> None:
    assert seconds_at({2: 2.0, 8: 2.0, 4: 4.0}, size) == seconds


def test_beyond_the_largest_size_the_time_grows_as_between_the_last_two() -> None:
    assert seconds_at({1: 1.0, 2: 1.5, 4: 2.5}, 10) == 5.5


@given(timed=TIMED)
def test_a_size_that_was_timed_takes_what_it_took(timed: dict[int, float]) -> None:
    assert {size: seconds_at(timed, size) for size in timed} == timed


@given(seconds=st.floats(0.0, 10.0), timed=st.integers(1, 512), size=st.integers(1, 512))
def test_one_time_stands_for_every_size(seconds: float, timed: int, size: int) -> None:
    assert seconds_at({timed: seconds}, size) == seconds
