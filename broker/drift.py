"""Whether a stage has become slower or faster than its profile says: heat, a battery, another program. Pure.

Only decode micro-batches count, whose cost the plan predicts. A stage's pace is averaged over windows; it has drifted
when three windows in a row lie outside the bound on the same side of what was last accepted. What is accepted then is
the mildest of them, so a device that flaps between fast and slow moves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_S = 0.5
"""Seconds of expected computing below which a window says nothing."""
IN_A_ROW = 3
"""A slow spell of one window's length may touch two."""


@dataclass(slots=True)
class Pace:
    """One stage's pace. Times in seconds, on the core's clock."""

    slowdown: float = 1.0
    """How many times slower than its profile it is taken to be."""
    since_s: float | None = None
    """When the window began."""
    expected_s: float = 0.0
    computed_s: float = 0.0
    outside: tuple[float, ...] = ()
    """The paces of the windows before, as far back as they were outside the bound on one side."""

    def note(self, expected_s: float, computed_s: float, now: float, window_s: float, bound: float) -> bool:
        """Counts one micro-batch. Whether another slowdown has been accepted by it."""
        if self.since_s is None:
            self.since_s = now
        self.expected_s += expected_s
        self.computed_s += computed_s
        if now < self.since_s + window_s or self.expected_s < min(LEAST_S, window_s / 4):
            return False
        pace = self.computed_s / self.expected_s
        self.since_s, self.expected_s, self.computed_s = now, 0.0, 0.0
        return self._judge(pace, bound)

    def _judge(self, pace: float, bound: float) -> bool:
        before, self.outside = self.outside, ()
        if 1.0 / (1.0 + bound) <= pace / self.slowdown <= 1.0 + bound:
            return False
        same_side = bool(before) and (before[0] > self.slowdown) == (pace > self.slowdown)
        paces = (*before, pace) if same_side else (pace,)
        if len(paces) < IN_A_ROW:
            self.outside = paces
            return False
        self.slowdown = min(paces) if pace > self.slowdown else max(paces)
        return True
