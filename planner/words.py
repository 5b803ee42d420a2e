"""Figures and names as people read them. Pure.

Sentences have three digits that count, units spelt out, no name shortened. Below one another, in the cells of a table,
figures have the same number of decimals, and the unit stands in the column's title.
"""

from __future__ import annotations

from collections.abc import Sequence

NEVER_S = 1e8
"""What takes longer does not work at all."""
NAMED = 6
"""Of a longer chain the number of devices and its ends are named."""


# ---- figures in sentences


def ms(seconds: float) -> str:
    """`1640 ms`, `130 ms`, `79 ms`, `12.7 ms`, `3.5 ms`, `0.25 ms`."""
    return f"{ms_figure(seconds)} ms"


def ms_figure(seconds: float) -> str:
    """Milliseconds without the unit."""
    value = 1000 * seconds
    if value >= 1000:
        return str(round(float(f"{value:.3g}")))
    return f"{value:.0f}" if value >= 20 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def per_s(rate: float) -> str:
    """Tokens per second without the unit: `128`, `49.2`, `0.61`."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}" if rate >= 1 else f"{rate:.2g}"


def seconds(value: float) -> str:
    """`13 s`, `2.3 s`, `400 ms`."""
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s" if value >= 1 else ms(value)


def gb(count: float) -> str:
    """`6.8 GB`, `139 MB`; 1 GB is 10^9 bytes."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def size(count: float) -> str:
    """`96 B`, `4.2 kB`, `139.0 MB`, `6.8 GB`: as long in a column as in a sentence."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def size_of(part: float, whole: float) -> str:
    """`4.2 of 24.0 GB`; both with a unit of their own where those differ."""
    first, last = size(part), size(whole)
    number, unit = first.split()
    return f"{number} of {last}" if last.endswith(f" {unit}") else f"{first} of {last}"


def delay(seconds: float) -> str:
    """`0.41 s`, `12 s`, or `never`."""
    if seconds >= NEVER_S:
        return "never"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"


# ---- figures in cells


def ms_cell(seconds: float) -> str:
    """Milliseconds: `1636`, `42.1`, `<0.1`; `never` for what the planner calls infinite."""
    if seconds >= NEVER_S:
        return "never"
    value = 1000 * seconds
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 0.05 or value == 0 else "<0.1"


def gb_cell(count: float) -> str:
    """Bytes in GB: `6.8`, `0.04`."""
    return f"{count / 1e9:.2f}" if count < 0.995e8 else f"{count / 1e9:.1f}"


# ---- names and numbers of things


def counted(count: int, thing: str) -> str:
    """`1 user`, `2 users`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def route(names: Sequence[str]) -> str:
    """A chain's devices in the order in which a token passes them: `a, b, then c`."""
    if len(names) > NAMED:
        return f"{len(names)} devices, from {names[0]} to {names[-1]}"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, then {names[-1]}"
