"""The best plan of up to ten devices: exact over which devices, their order, the cuts and the number of chains. Pure.

For one user that is the chain with the shortest trip. For several, users are shared out over chains:

1. `Bounds` gives every set of devices and number of users a rate that no chain of it can beat.
2. `Sharing` combines disjoint sets into the plan with the most tokens per second, as if each set kept its bound, and
   says what all other devices could do beside each set.
3. Sets that can't be part of a plan better than the best one known are given up. For the others bounds are lowered:
   for many at once where that is less work, then for those in the plan of 2. and the most promising others exactly.
4. From 2. again, until the plan is made of exact chains only, or beats the best known one no more. Every other plan is
   bounded by less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from potluck.planner.bounds import CLOSE, FEWER, Bounds
from potluck.planner.problem import Chain, Problem
from potluck.planner.sharing import Sharing
from potluck.planner.sweep import Sweep

MOST_DEVICES = 10
BATCH = 24
"""Chains that are solved before the devices are shared out anew."""
BULK = 3
"""Times that bounds are lowered for many sets at once."""
WORK = 2_000_000
"""Steps of sweeps after which a plan is taken that is not proven to be the best: about 20 s for 126 layers."""


@dataclass(frozen=True, slots=True)
class Shared:
    """A chain and how many users it is for."""

    chain: Chain
    users: int


@dataclass(frozen=True, slots=True)
class Best:
    """Chains with their users; `gap` is the share by which a better plan could be better, 0 where none can be."""

    shared: list[Shared]
    gap: float = 0.0


class Trips:
    """The shortest trip for one user of every set of devices."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        tables = problem.of_sizes((1,))
        self._sweep = Sweep("sum", tables.largest, tables.send, problem.first, problem.last)
        self._value = self._sweep.run(min(problem.count, len(problem.positions) - 1))
        self._masks = np.arange(1 << problem.count)
        self._sizes = np.array([mask.bit_count() for mask in range(1 << problem.count)])
        self._trips = self._sweep.best(self._value) * (1.0 + FEWER * self._sizes)

    def best(self, using: int | None = None, least_devices: int = 1) -> Chain | None:
        """The shortest of all, of those with a certain device, or of those with several; None if there is none."""
        asked = self._sizes >= least_devices
        if using is not None:
            asked &= (self._masks >> using) & 1 == 1
        trips = np.where(asked, self._trips, np.inf)
        mask = int(np.argmin(trips))
        if not np.isfinite(trips[mask]):
            return None
        return self._problem.chain(self._sweep.trace(self._value, mask))


def best_chain(problem: Problem) -> Chain | None:
    """The chain with the least time per token for one user; None if no chain can hold the model."""
    return Trips(problem).best()


def best_chains(problem: Problem, start: Sequence[Shared] = ()) -> Best:
    """The chains with the most tokens per second for all users; none if no chain can hold the model.

    A chain takes up to `slots` users. All users are served, or as many as all chains have slots for. `start` is a plan
    to be beaten, which saves work. After too much of it, the best plan so far is given, with its gap.
    """
    demand = problem.demand
    users = min(demand.users, demand.slots * problem.count)
    most = min(users, demand.slots)
    bounds = Bounds(problem, most)
    sharing = Sharing(problem.count, users, most)
    best = list(start)
    best_rate = sum(bounds.rate(part.chain, part.users) for part in best)
    rounds = 0
    while True:
        shares = sharing.best(bounds.rates)
        if shares.rate <= best_rate * (1.0 + CLOSE):
            return Best(best)
        open_ = [part for part in shares.parts if part not in bounds.solved]
        if not open_:
            return Best([Shared(bounds.solved[part], part[1]) for part in shares.parts])
        if bounds.work > WORK:
            return Best(best, shares.rate / best_rate - 1.0 if best_rate > 0 else 0.0)
        bounds.prune(best_rate, shares.beside, sharing.within(bounds.exact))
        if rounds < BULK and best_rate > 0:
            bounds.narrow()
        else:
            others = [part for part in bounds.open(shares.beside) if part not in open_]
            for part in [*open_, *others[: BATCH if best_rate > 0 else 0]]:
                if bounds.rates[part] > 0:
                    bounds.solve(part)
        rounds += 1
