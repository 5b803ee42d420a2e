"""The rounds in which points are timed: one run of each per round, until each is steady or has had its time. Pure.

The clocks come in. A device that is too slow for a size skips it and larger ones: what they would take follows from the
smaller ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from potluck.stage.bench_plan import Part, Point
from potluck.stage.bench_slice import TimedSlice
from potluck.stage.steady import LEAST_RUNS, Series

CALL_S = 3.0
"""A micro-batch that would take longer is not timed, unless it is one of the two smallest of its kind."""
TOTAL_S = 40.0
"""After this every point that has one run is done."""
LEAST_SIZES = 2

Clock = Callable[[], float]


class Rounds:
    """Runs of all points. `tick` is told after each run how many of the expected ones are done."""

    def __init__(
        self,
        slices: Mapping[Part, TimedSlice],
        points: Iterable[Point],
        wall: Clock,
        busy: Clock | None,
        tick: Callable[[int], None],
    ) -> None:
        """`busy` gives the seconds that the process computed, per thread, where the wall's would be misleading."""
        self._slices = slices
        self._points = list(points)
        self._clocks = [wall] if busy is None else [wall, busy]
        self._tick = tick
        self._shares: dict[Point, int] = {}
        self._took = [0.0] * len(self._clocks)
        self._skipped: set[Point] = set()
        self.series: dict[Point, Series] = {point: Series() for point in self._points}

    @property
    def expected(self) -> int:
        """Runs of which `tick` tells."""
        return LEAST_RUNS * len(self._points)

    def run(self, wanted: Callable[[], bool]) -> bool:
        """Until everything is steady. False if it was no longer `wanted` on the way."""
        begun = [clock() for clock in self._clocks]
        try:
            return self._run(wanted, begun[0] + TOTAL_S)
        finally:
            self._took = [clock() - begin for clock, begin in zip(self._clocks, begun, strict=True)]

    def _run(self, wanted: Callable[[], bool], end_s: float) -> bool:
        while True:
            late = self._clocks[0]() > end_s
            left = [point for point in self._points if not self._done(point, late)]
            if not left:
                self._tick(self.expected)
                self.series = {point: series for point, series in self.series.items() if series.runs}
                return True
            before: Part | None = None
            for point in left:
                if not wanted():
                    return False
                if point.part is not before:
                    # What the other slice left in the processor's caches is not what a stage finds there.
                    before = point.part
                    self._slices[before].time(Point(before, False, 1), self._clocks)
                if not self._too_slow(point):
                    self._once(point)

    def _done(self, point: Point, late: bool) -> bool:
        series = self.series[point]
        return series.done or point in self._skipped or (late and bool(series.runs))

    def _too_slow(self, point: Point) -> bool:
        """Whether a first run would take too long, by what the next smaller size took."""
        if self.series[point].runs:
            return False
        sizes = sorted({p.rows for p in self._points if p.part is point.part and p.chunk == point.chunk})
        at = sizes.index(point.rows)
        if at < LEAST_SIZES:
            return False
        below = self.series[Point(point.part, point.chunk, sizes[at - 1])]
        if below.runs and below.median_s * point.rows / sizes[at - 1] <= CALL_S:
            return False
        self._skipped.add(point)
        self._say(point)
        return True

    def _once(self, point: Point) -> None:
        took = self._slices[point.part].time(point, self._clocks)
        self.series[point].add(took[-1], took[0])
        self._say(point)

    def _say(self, point: Point) -> None:
        series = self.series[point]
        full = series.done or point in self._skipped
        share = LEAST_RUNS if full else min(len(series.runs), LEAST_RUNS - 1)
        if share > self._shares.get(point, 0):
            self._shares[point] = share
            self._tick(sum(self._shares.values()))

    def stretch(self) -> float:
        """Wall seconds per computed second, from the first run to the last."""
        return self._took[0] / self._took[-1] if self._took[-1] > 0 else 1.0


__all__ = ["Rounds"]
