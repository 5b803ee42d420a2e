"""How often a stage whose engine hangs is started anew."""

from __future__ import annotations

from potluck.stage.restart import MOST, WITHIN_S, times_with


def test_three_restarts_an_hour_are_enough() -> None:
    times: str | None = ""
    for number in range(MOST):
        times = times_with(times, 1000.0 + number)
        assert times is not None
        assert len(times.split()) == number + 1
    assert times_with(times, 1100.0) is None


def test_restarts_of_long_ago_and_nonsense_do_not_count() -> None:
    assert times_with("1000 1001 what 1e999 5000", 1000.0 + WITHIN_S) == f"1001 {1000 + WITHIN_S:.0f}"
