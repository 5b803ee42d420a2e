"""What the answers to pings say of a link: sizes to try, and figures from the times. Pure.

Small frames give the round trip. Large ones give the bandwidth: what a large frame takes longer than a small one is the
time its bytes needed. Frames grow until one takes `TARGET_S` or is as large as activations get here, so that a slow
link is measured as exactly as a fast one, and neither for long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from potluck.wire.measures import LinkTiming

SMALL_BYTES = 64
FIRST_BYTES = 16 << 10
GROWTH = 8
TARGET_S = 0.1
"""A large frame that takes this long tells enough."""
WARM_UPS = 3
SMALL_FRAMES = 20
LARGE_FRAMES = 10
BUDGET_S = 1.5
"""No more frames are begun after this long."""
NOTICEABLE = 0.05
"""Bytes that lengthen a round trip by less than this share are not what limits the link."""


@dataclass(frozen=True, slots=True)
class LargePing:
    """One large frame's answer."""

    frame_bytes: int
    seconds: float


def next_bytes(last: LargePing | None, most: int) -> int:
    """How large the next large frame is to be; the same size again once it is large enough."""
    if last is None:
        return min(FIRST_BYTES, most)
    if last.seconds >= TARGET_S:
        return last.frame_bytes
    room = TARGET_S / max(last.seconds, 1e-6)
    return min(most, max(last.frame_bytes, int(last.frame_bytes * min(GROWTH, room))))


def link_timing(small_s: Sequence[float], large: Sequence[LargePing]) -> LinkTiming:
    """The link's figures from seconds of at least one small frame. Large frames of the final size only are counted."""
    rtt_s = _quantile(small_s, 0.5)
    size = large[-1].frame_bytes if large else 0
    rates = [_rate(ping, rtt_s) for ping in large if ping.frame_bytes == size]
    median = _quantile(rates, 0.5) if rates else math.inf
    worst = _quantile(rates, 0.05) if rates else math.inf
    return LinkTiming(
        rtt_s=rtt_s,
        rtt_p95_s=_quantile(small_s, 0.95),
        bytes_per_s=median if median < math.inf else 0.0,
        bytes_per_s_p5=worst if worst < math.inf else 0.0,
    )


def _rate(ping: LargePing, rtt_s: float) -> float:
    longer_s = ping.seconds - rtt_s
    return ping.frame_bytes / longer_s if longer_s > NOTICEABLE * rtt_s else math.inf


def _quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the others lie: the nearest one, so that it is one that was seen."""
    return float(np.quantile(values, share, method="nearest"))
