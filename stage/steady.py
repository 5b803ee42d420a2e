"""When the median of several runs can be believed. Pure.

Machines are shared and noisy: a median settles although single runs do not. Its standard error is what is watched, from
the distance between the quartiles, which a few slow runs do not move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

LEAST_RUNS = 5
LEAST_LONG_RUNS = 3
"""Of calls that use up their time before `LEAST_RUNS`."""
MOST_RUNS = 60
STEADY_SHARE = 0.02
"""Standard error of the median as a share of it."""
POINT_S = 0.3
"""What one point may take; a call that takes longer is still made `LEAST_LONG_RUNS` times."""
_ERROR_OF_QUARTILES = 0.93
"""Standard error of the median of n normal values: 1.2533 s / sqrt(n); their quartiles are 1.349 s apart."""


@dataclass(slots=True)
class Series:
    """Seconds of the runs of one call, in the order they were made."""

    runs: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    """What the runs took on the wall, which is more than their sum where a quota stops the process."""

    def add(self, seconds: float, wall_s: float) -> None:
        """One more run."""
        self.runs.append(seconds)
        self.wall_s += wall_s

    @property
    def median_s(self) -> float:
        """The middle run. Raises StatisticsError without any."""
        return median(self.runs)

    @property
    def spread_s(self) -> float:
        """Between the quartiles; 0 for a single run."""
        if len(self.runs) < 2:
            return 0.0
        low, _, high = quantiles(self.runs, n=4, method="inclusive")
        return high - low

    @property
    def steady(self) -> bool:
        """Whether more runs would hardly move the median."""
        count = len(self.runs)
        error_s = _ERROR_OF_QUARTILES * self.spread_s / count**0.5 if count else 0.0
        return count >= LEAST_RUNS and error_s <= STEADY_SHARE * self.median_s

    @property
    def done(self) -> bool:
        """Whether it is steady, or has had its share of time."""
        count = len(self.runs)
        return self.steady or count >= MOST_RUNS or (self.wall_s >= POINT_S and count >= LEAST_LONG_RUNS)


def paired(combine: Callable[..., float], *series: Series) -> float:
    """The median of what `combine` makes of the runs of each round: a slow moment hits all of a round alike."""
    rounds: Sequence[tuple[float, ...]] = list(zip(*(each.runs for each in series), strict=False))
    return median(combine(*runs) for runs in rounds)


__all__ = ["LEAST_LONG_RUNS", "LEAST_RUNS", "MOST_RUNS", "POINT_S", "STEADY_SHARE", "Series", "paired"]
