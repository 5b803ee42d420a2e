"""Figures and names as sentences have them: three digits that count, units spelt out, no name shortened. Pure."""

from __future__ import annotations

from collections.abc import Sequence

NAMED = 6
"""Of a longer chain the number of devices and its ends are named."""


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


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def route(names: Sequence[str]) -> str:
    """A chain's devices in the order in which a token passes them: `a, b, then c`."""
    if len(names) > NAMED:
        return f"{len(names)} devices, from {names[0]} to {names[-1]}"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, then {names[-1]}"
