"""Devices shared out over chains, and the bounds on what each set of them can do: against trying everything."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brute import Brute, partitions, shares
from planner_world import households
from potluck.planner.bounds import Bounds
from potluck.planner.plan import Candidate, Demand, ModelShape, Network
from potluck.planner.problem import Problem
from potluck.planner.sharing import Sharing
from potluck.planner.sweep import Floats, Sweep

Household = tuple[ModelShape, list[Candidate], Network]


@st.composite
def rates(draw: st.DrawFn) -> tuple[int, int, int, Floats]:
    """Devices, users, most users of a chain, and tokens per second of every set, some of them 0."""
    devices, most = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    users = draw(st.integers(most, most * devices))
    figures = st.lists(st.integers(0, 20), min_size=most, max_size=most)
    rows = [[0, *draw(figures)] if mask else [0] * (most + 1) for mask in range(1 << devices)]
    return devices, users, most, np.array(rows, float)


def all_rates(devices: int, users: int, most: int, figures: Floats) -> Iterator[float]:
    for groups in partitions(list(range(devices))):
        masks = [sum(1 << device for device in group) for group in groups]
        for counts in shares(users, most, len(groups)):
            parts = [float(figures[mask, count]) for mask, count in zip(masks, counts, strict=True)]
            if all(parts):
                yield sum(parts)


@given(rates())
def test_the_parts_are_the_best_of_all_ways_to_share_devices_and_users(
    drawn: tuple[int, int, int, Floats],
) -> None:
    devices, users, most, figures = drawn
    found = Sharing(devices, users, most).best(figures)
    assert found.rate == pytest.approx(max(all_rates(*drawn), default=0.0))
    assert sum(float(figures[part]) for part in found.parts) == pytest.approx(found.rate)
    taken = [device for mask, _ in found.parts for device in range(devices) if mask >> device & 1]
    assert len(set(taken)) == len(taken)


@given(rates())
def test_with_what_is_beside_it_no_set_beats_the_best_parts_and_theirs_equal_them(
    drawn: tuple[int, int, int, Floats],
) -> None:
    devices, users, most, figures = drawn
    found = Sharing(devices, users, most).best(figures)
    whole = np.where(figures > 0, figures + found.beside, -np.inf)
    if found.parts:
        assert whole.max() == pytest.approx(found.rate)
        assert [float(whole[part]) for part in found.parts] == pytest.approx([found.rate] * len(found.parts))


@given(households(4, 7), st.integers(1, 5))
def test_bounds_are_never_too_low_and_solved_ones_are_what_trying_everything_finds(
    household: Household, users: int
) -> None:
    demand = Demand(users=users, slots=users)
    bounds = Bounds(Problem(*household, demand), users)
    brute = Brute(household[0], sorted(household[1], key=lambda c: c.device), household[2], demand)
    for mask in range(1, 1 << len(household[1])):
        devices = frozenset(device for device in range(len(household[1])) if mask >> device & 1)
        for count in range(1, users + 1):
            round_s = brute.round_s(devices, count)
            rate = count / round_s if round_s < 1e8 else 0.0
            assert bounds.rates[mask, count] >= rate * (1 - 1e-7)
            if bounds.rates[mask, count] > 0:
                bounds.solve((mask, count))
                assert bounds.rates[mask, count] == pytest.approx(rate, rel=1e-7)


@given(households(5, 10), st.floats(1.0, 3.0))
def test_what_a_capped_sweep_gives_below_its_cap_is_what_a_whole_one_gives(
    household: Household, share: float
) -> None:
    problem = Problem(*household, Demand())
    tables = problem.of_sizes((1,))
    figures = (tables.largest, tables.send, problem.first, problem.last)
    whole = Sweep("sum", *figures)
    trips = whole.best(whole.run(problem.count))
    cap = float(trips.min()) * share
    if np.isfinite(cap):
        capped = Sweep("sum", *figures, cap)
        found = capped.best(capped.run(problem.count))
        below = trips <= cap
        assert np.array_equal(found[below], trips[below])
        assert (found[~below] > cap).all()
