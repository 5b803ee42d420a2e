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
        self._skipped: set[Point] = set()
        self.series: dict[Point, Series] = {point: Series() for point in self._points}

    @property
    def expected(self) -> int:
        """Runs of which `tick` tells."""
        return LEAST_RUNS * len(self._points)

    def run(self, wanted: Callable[[], bool]) -> bool:
        """Until everything is steady. False if it was no longer `wanted` on the way."""
        wall = self._clocks[0]
        begun_s = wall()
        while True:
            late = wall() - begun_s > TOTAL_S
            left = [point for point in self._points if not self._done(point, late)]
            if not left:
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
        return True

    def _once(self, point: Point) -> None:
        took = self._slices[point.part].time(point, self._clocks)
        self.series[point].add(took[-1], took[0])
        self._tick(sum(self._share(point) for point in self._points))

    def _share(self, point: Point) -> int:
        series = self.series[point]
        return LEAST_RUNS if series.done or point in self._skipped else min(len(series.runs), LEAST_RUNS - 1)

    def stretch(self) -> float:
        """Wall seconds per second of the series, over everything that was timed."""
        computed = sum(sum(series.runs) for series in self.series.values())
        return sum(series.wall_s for series in self.series.values()) / computed if computed > 0 else 1.0


__all__ = ["Rounds"]
