"""How many sequences one llama_decode takes during decode: measured at load, because more is not always faster.

llama.cpp's matrix kernels for a few rows can be slower than its kernel for one row, row by row (on one machine a Q8_0
head took 1.0 ms for one row, 5.5 ms for two and 8.4 ms for four, but 9.8 ms for sixteen). So a few calls are timed,
and a run of rows is cut where that is cheaper. Pure but for the clock that is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from potluck.wire.measures import seconds_at

TIMED_ROWS = (1, 2, 4, 8, 16)
RUNS = 3
BUDGET_S = 1.5
"""A load spends at most about this on timing; a device on which one row takes longer keeps its rows together."""
GAIN = 0.9
"""Rows are cut only where that takes at most this share of the time, so that noise changes nothing."""


def time_rows(call: Callable[[int], None], most: int, clock: Callable[[], float]) -> dict[int, float]:
    """Seconds of a call with each number of rows up to `most`, the best of a few runs, as far as the budget goes."""
    begun = clock()
    times: dict[int, float] = {}
    last = 0.0
    for rows in TIMED_ROWS:
        if rows > most or clock() - begun + 2 * last * RUNS > BUDGET_S:
            break
        runs = []
        for _ in range(RUNS):
            start = clock()
            call(rows)
            runs.append(clock() - start)
        last = times[rows] = min(runs)
    return times


def best_sizes(times: Mapping[int, float], most: int) -> tuple[int, ...]:
    """For n rows left, n from 0 to `most`, how many the next call takes. () when every run is best kept together.

    Of rows that were not timed, `seconds_at` says what they take.
    """
    if len(times) < 2:
        return ()
    cost = [0.0, *(seconds_at(times, rows) for rows in range(1, most + 1))]
    best, sizes = [0.0], [0]
    for rows in range(1, most + 1):
        first = min(range(1, rows + 1), key=lambda size: cost[size] + best[rows - size])
        cheapest = cost[first] + best[rows - first]
        whole = cheapest > GAIN * cost[rows]
        sizes.append(rows if whole else first)
        best.append(cost[rows] if whole else cheapest)
    return () if sizes == list(range(most + 1)) else tuple(sizes)


__all__ = ["best_sizes", "time_rows"]
