"""From timed micro-batches to the speed of one layer, of a call, of the head. Pure.

A slice of B bytes takes call + B x (seconds per byte): two slices of different sizes give both. Attention depends on
what the cache holds and not on the bytes of the weights, so its part comes from one slice with and without tokens.
Differences are taken within each round of runs, and then the median of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from potluck.stage.bench_plan import Part, Point, Window, Windows
from potluck.stage.steady import Series, paired
from potluck.wire.measures import Speed, Timing, seconds_at


@dataclass(frozen=True, slots=True)
class Readings:
    """What was timed. Points that a slow device skipped are not among the series."""

    windows: Windows
    series: Mapping[Point, Series]
    full_tokens: int
    """What each of the filled sequences held."""
    embedding_s: float
    """Looking one token up."""
    scale: float = 1.0
    """Seconds in service per second of the series: more than 1 where a quota stops the process."""

    def get(self, part: Part, chunk: bool, rows: int, full: bool = False) -> Series | None:
        """The runs of one point."""
        return self.series.get(Point(part, chunk, rows, full))

    def sizes(self, part: Part, chunk: bool) -> list[int]:
        """Rows that were timed with an empty cache, ascending."""
        return sorted(p.rows for p in self.series if p.part is part and p.chunk == chunk and not p.full)


def speed_of(read: Readings) -> Speed:
    """The speed that explains the readings. Raises KeyError if the smallest points are not among them."""
    deep, scale = read.windows.deep, read.scale
    call_s = _call_s(read)
    empty = {rows: _layer(read, Part.DEEP, False, rows, call_s) for rows in read.sizes(Part.DEEP, False)}
    more = _attention(read)
    decode: list[Timing] = []
    for rows, (seconds, spread) in empty.items():
        decode.append(Timing(rows, 0, seconds * scale, spread * scale))
        if more:
            held = read.full_tokens
            decode.append(Timing(rows, held, (seconds + _at(more, rows)) * scale, spread * scale))
    return Speed(
        decode=tuple(decode),
        prefill=tuple(_prefill(read, call_s)),
        call_s=call_s * scale,
        head=tuple(_heads(read, call_s, {rows: seconds for rows, (seconds, _) in empty.items()})),
        embedding_s=read.embedding_s * scale,
        layer_bytes=round(deep.layer_bytes),
    )


def _series(read: Readings, part: Part, chunk: bool, rows: int, full: bool = False) -> Series:
    return read.series[Point(part, chunk, rows, full)]


def _look_up(read: Readings, window: Window, rows: int) -> float:
    """What of the slice's time is not its layers': only a first slice looks tokens up."""
    return rows * read.embedding_s if window.first == 0 else 0.0


def _call_s(read: Readings) -> float:
    """What one micro-batch of one row costs besides its layers; 0 where there is only one size of slice."""
    deep, short = read.windows.deep, read.windows.short
    more = deep.bytes - short.bytes
    if more <= 0:
        return 0.0
    in_deep, in_short = (_series(read, part, False, 1) for part in (Part.DEEP, Part.SHORT))
    found = paired(lambda d, s: (deep.bytes * s - short.bytes * d) / more, in_deep, in_short)
    return min(max(0.0, found), in_short.median_s)


def _layer(read: Readings, part: Part, chunk: bool, rows: int, call_s: float) -> tuple[float, float]:
    """Seconds of one layer of the slice, and their spread."""
    window, series = read.windows.of(part), _series(read, part, chunk, rows)
    rest = series.median_s - call_s - _look_up(read, window, rows)
    return max(0.0, rest) / window.layers, series.spread_s / window.layers


def _attention(read: Readings) -> dict[int, float]:
    """By the number of sequences, what one layer takes longer when each of them holds `full_tokens`."""
    found = {}
    for rows in read.sizes(Part.SHORT, False):
        full = read.get(Part.SHORT, False, rows, full=True)
        if full is not None:
            less = _series(read, Part.SHORT, False, rows)
            found[rows] = max(0.0, paired(lambda a, b: a - b, full, less)) / read.windows.short.layers
    return found


def _at(more: Mapping[int, float], rows: int) -> float:
    """Between what was timed in a straight line; outside of it each sequence costs the same."""
    nearest = min(max(rows, min(more)), max(more))
    return seconds_at(more, nearest) * rows / nearest


def _prefill(read: Readings, call_s: float) -> list[Timing]:
    """Of the short slice's chunks, in proportion to those that the deep slice computed, too."""
    ratios = _deep_per_short(read, call_s)
    timings = []
    for rows in read.sizes(Part.SHORT, True):
        ratio = _ratio(ratios, rows) * read.scale
        seconds, spread = (value * ratio for value in _layer(read, Part.SHORT, True, rows, call_s))
        timings.append(Timing(rows, 0, seconds, spread))
        full = read.get(Part.SHORT, True, rows, full=True)
        if full is not None:
            less = _series(read, Part.SHORT, True, rows)
            more = max(0.0, paired(lambda a, b: a - b, full, less)) / read.windows.short.layers
            timings.append(Timing(rows, read.full_tokens, seconds + more * read.scale, spread))
    return timings


def _deep_per_short(read: Readings, call_s: float) -> dict[int, float]:
    """By the length of the chunk, how much longer a layer takes in the deep slice; {0: 1.0} if that is not known."""
    ratios = {}
    for rows in set(read.sizes(Part.DEEP, True)) & set(read.sizes(Part.SHORT, True)):
        (deep, _), (short, _) = (_layer(read, part, True, rows, call_s) for part in (Part.DEEP, Part.SHORT))
        if deep > 0 and short > 0:
            ratios[rows] = deep / short
    return ratios or {0: 1.0}


def _ratio(ratios: Mapping[int, float], rows: int) -> float:
    """In a straight line between the two nearest; the nearest one beyond them."""
    known = sorted(ratios)
    return float(np.interp(rows, known, [ratios[size] for size in known]))


def _heads(read: Readings, call_s: float, layer_s: Mapping[int, float]) -> list[Timing]:
    """What the last slice takes besides its layers and the call."""
    last = read.windows.last
    if last is None:
        return []
    layers = last.bytes / read.windows.deep.layer_bytes
    timings = []
    for rows in read.sizes(Part.LAST, False):
        if rows in layer_s:
            series = _series(read, Part.LAST, False, rows)
            seconds = max(0.0, series.median_s - call_s - layers * layer_s[rows])
            timings.append(Timing(rows, 0, seconds * read.scale, series.spread_s * read.scale))
    return timings


__all__ = ["Readings", "speed_of"]
