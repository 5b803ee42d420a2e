"""Who is alive, from the time of the last frame alone. Pure.

Any frame counts as a beat. Beats only move a stage's limit further away, so the earliest limit that was found at the
last check stays a safe time for the next check: a beat costs nothing here, however many stages there are.
"""

from __future__ import annotations

from collections.abc import Iterable

from potluck.broker.state import Stage
from potluck.wire.ids import StageId


def silent(stages: Iterable[Stage], now: float, lost_after_s: float) -> list[StageId]:
    """Stages that have said nothing for `lost_after_s` seconds or longer."""
    return [stage.stage for stage in stages if now >= stage.last_heard_s + lost_after_s]


def next_check_s(stages: Iterable[Stage], lost_after_s: float) -> float | None:
    """The earliest moment at which one of them could be lost."""
    return min((stage.last_heard_s + lost_after_s for stage in stages), default=None)
