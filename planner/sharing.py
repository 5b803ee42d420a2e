"""Which disjoint sets of devices become chains, and for how many users each, if every set's figures are known. Pure.

total[set, n] is the most tokens per second that the devices of a set make for exactly n users. The lowest device of the
set is left out, or it is in one of the set's subsets, which becomes a chain; what is then left has only higher devices.
So the sets are gone through by their lowest device, the highest first, all sets of one lowest device at once.

All users are placed, or, where there are more users than slots, every chain is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from potluck.planner.sweep import Floats, Ints

Part = tuple[int, int]
"""The devices of a chain, as a bit mask, and its users."""


@dataclass(frozen=True, slots=True)
class Shares:
    """The best parts by the given rates."""

    parts: list[Part]
    rate: float
    """Of all parts together."""
    beside: Floats
    """float64[sets, users + 1]: the most that all other devices make for all other users, beside a chain of a set."""


@dataclass(frozen=True, slots=True)
class _Level:
    """All sets with one lowest device, each with its subsets that have the device, too; sorted by set."""

    sets: Ints
    subs: Ints


class Sharing:
    """For so many devices and users, with up to `most` users in a chain."""

    def __init__(self, devices: int, users: int, most: int) -> None:
        self._everyone = (1 << devices) - 1
        self._users, self._most = users, min(most, users)
        self._levels = [_level(lowest, devices) for lowest in range(devices)]

    def best(self, rates: Floats) -> Shares:
        """The best parts, by float64[sets, users + 1] tokens per second, 0 for what can't be."""
        rates = np.where(rates > 0, rates, -np.inf)
        users, most = self._users, self._most
        every = range(1, most + 1)
        total = self._totals(rates, every, users)
        parts, rate = self._read(total, rates, every, users)
        beside = total[::-1][:, users - np.arange(most + 1)]
        full_chains = (users - 1) // most  # fewer than this many users are left when all of these are full
        if full_chains:
            full = self._totals(rates, [most], full_chains * most)
            for count in range(1, full_chains + 1):
                np.maximum(beside[:, most], full[::-1][:, (count - 1) * most], out=beside[:, most])
                if full[self._everyone, count * most] > rate:
                    parts, rate = self._read(full, rates, [most], count * most)
        return Shares(parts, rate, beside)

    def within(self, rates: Floats) -> Floats:
        """float64[sets, most + 1]: the most that the devices of a set, or some of them, make for so many users."""
        rates = np.where(rates > 0, rates, -np.inf)
        users, most = self._users, self._most
        total = self._totals(rates, range(1, most + 1), most)
        if users > most:  # a chain that has to be full can't be replaced by two that are not
            full = rates[:, most].copy()
            for device in range(len(self._levels)):
                pairs = full.reshape(-1, 2, 1 << device)
                np.maximum(pairs[:, 0], pairs[:, 1], out=pairs[:, 1])
            total[:, most] = full
        return total

    def _totals(self, rates: Floats, counts: Sequence[int], users: int) -> Floats:
        total = np.full((self._everyone + 1, users + 1), -np.inf)
        total[:, 0] = 0.0
        for level in reversed(self._levels):
            sets = np.unique(level.sets)
            best = total[sets & (sets - 1)]
            for count in counts:
                can = np.isfinite(rates[level.subs, count])
                mine, subs = level.sets[can], level.subs[can]
                if len(mine):
                    offers = total[mine ^ subs, : users + 1 - count] + rates[subs, count][:, None]
                    starts = np.flatnonzero(np.diff(mine, prepend=-1))
                    at = np.searchsorted(sets, mine[starts])
                    best[at, count:] = np.maximum(
                        best[at, count:], np.maximum.reduceat(offers, starts, axis=0)
                    )
            total[sets] = best
        return total

    def _read(
        self, total: Floats, rates: Floats, counts: Sequence[int], users: int
    ) -> tuple[list[Part], float]:
        """Goes back from the best total to the sets it is made of."""
        rate = float(total[self._everyone, users])
        if not rate > 0:
            return [], 0.0
        parts: list[Part] = []
        mask, left = self._everyone, users
        while left:
            without = mask & (mask - 1)
            if total[without, left] == total[mask, left]:
                mask = without
                continue
            part = self._part(total, rates, [count for count in counts if count <= left], mask, left)
            parts.append(part)
            mask, left = mask ^ part[0], left - part[1]
        return parts, rate

    def _part(self, total: Floats, rates: Floats, counts: Sequence[int], mask: int, left: int) -> Part:
        """The chain with the lowest device of a set."""
        level = self._levels[(mask & -mask).bit_length() - 1]
        subs = level.subs[slice(*np.searchsorted(level.sets, [mask, mask + 1]))]
        for count in counts:
            offers = total[mask ^ subs, left - count] + rates[subs, count]
            at = int(np.argmax(offers))
            if offers[at] == total[mask, left]:
                return int(subs[at]), count
        raise AssertionError("a total came from somewhere")


def _level(lowest: int, devices: int) -> _Level:
    sets, subs = np.array([1 << lowest]), np.array([1 << lowest])
    for device in range(lowest + 1, devices):
        bit = 1 << device
        sets, subs = np.concatenate([sets, sets | bit, sets | bit]), np.concatenate([subs, subs, subs | bit])
    sizes = np.array([sub.bit_count() for sub in subs.tolist()])
    order = np.lexsort((subs, sizes, sets))
    return _Level(sets[order], subs[order])
