"""The best plan of up to ten devices: exact over which devices, their order, the cuts and the number of chains. Pure.

For one user that is the chain with the shortest trip. For several, users are shared out over chains:

1. `_Bounds` gives every set of devices and number of users the two things no chain of it can beat: the smallest
   bottleneck and the shortest trip, each by a sweep over all sets (`sweep`).
2. `_Sharing` combines disjoint sets into the plan with the most tokens per second, as if each set kept its bound.
3. The chains of that plan are solved exactly (`Solver`), their bounds replaced, and 2. is repeated until the best plan
   is made of solved chains only. Every other plan is bounded by less, so it is the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from potluck.planner.problem import Chain, Problem
from potluck.planner.sweep import Floats, Ints, Sweep

MOST_DEVICES = 10
FEWER = 1e-9
"""A device more must win more than this share: equal plans are decided for fewer devices."""
_CLOSE = 1e-10
"""Two bounds that differ by less than this share are met."""
TIGHTENINGS = 3
"""How often all bounds are lowered by what a better plan would need, before chains are solved one by one."""
PATIENCE = {8: 150, 9: 80, 10: 30}
"""Rounds of step 3 after which a plan is taken that is not proven to be the best, by number of devices. There are hard
cases, of many plans that are equal within a fraction of a per cent; a household does not wait a minute for that.
"""


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
    to be beaten, which saves work. Out of patience, the best plan so far is given, with its gap.
    """
    demand = problem.demand
    users = min(demand.users, demand.slots * problem.count)
    bounds = _Bounds(problem, min(users, demand.slots))
    sharing = _Sharing(problem.count)
    best = list(start)
    best_rate = bounds.rate_of(best)
    for _ in range(TIGHTENINGS if problem.count > 4 else 0):
        bounds.tighten(best_rate, sharing.limits(bounds.rates, users))
    for _ in range(PATIENCE.get(problem.count, 1_000_000)):
        plan, limit = sharing.best(bounds.rates, users)
        if limit <= best_rate * (1.0 + _CLOSE):
            return Best(best)
        open_ = [part for part in plan if part not in bounds.solved]
        for mask, count in open_:
            spare = limit - best_rate  # a bound that falls by this much takes the plan out of the race
            limit -= bounds.solve(mask, count, bounds.rates[mask, count] - spare)
            if limit <= best_rate:
                break
        else:
            best = [Shared(bounds.solved[part], part[1]) for part in plan]
            best_rate = max(best_rate, limit)
    limit = sharing.best(bounds.rates, users)[1]
    return Best(best, max(0.0, limit / best_rate - 1.0) if best_rate > 0 else 0.0)


class _Bounds:
    """Tokens per second of every set of devices with every number of users: a bound at first, exact once solved."""

    def __init__(self, problem: Problem, most_users: int) -> None:
        self._problem = problem
        self._sizes = np.array([mask.bit_count() for mask in range(1 << problem.count)])
        self._weight = 1.0 - FEWER * self._sizes
        self._solvers: dict[tuple[int, int], Solver] = {}
        self.solved: dict[tuple[int, int], Chain] = {}
        self.rates: Floats = np.zeros((1 << problem.count, most_users + 1))
        stages = min(problem.count, len(problem.positions) - 1)
        self._uses: dict[tuple[int, ...], list[int]] = {}
        """Numbers of stages by the sizes of micro-batches. The sizes add up to the users."""
        for users in range(1, most_users + 1):
            for count in range(1, stages + 1):
                self._uses.setdefault(problem.sizes(users, count), []).append(count)
        self._bottlenecks: dict[tuple[int, ...], Floats] = {}
        for rows, counts in self._uses.items():
            tables = problem.of_sizes(rows)
            busy = Sweep("max", tables.busy, tables.link_busy, problem.never_first, problem.never_last)
            self._bottlenecks[rows] = busy.best(busy.run(max(counts)))
            rounds = np.maximum(self._bottlenecks[rows], self._trips(rows, np.inf))
            here = np.isin(self._sizes, counts)
            self.rates[here, sum(rows)] = (sum(rows) / rounds * self._weight)[here]

    def _trips(self, rows: tuple[int, ...], limit: float) -> Floats:
        """float64[sets]: the shortest trips if nothing may be busier than `limit`."""
        problem, tables = self._problem, self._problem.of_sizes(rows)
        steps = [
            np.where(busy <= limit, largest, np.inf)
            for busy, largest in zip(tables.busy, tables.largest, strict=True)
        ]
        send = np.where(tables.link_busy <= limit, tables.send, np.inf)
        sweep = Sweep("sum", steps, send, problem.first, problem.last)
        return sweep.best(sweep.run(max(self._uses[rows])))

    def tighten(self, best_rate: float, limits: Floats) -> None:
        """Lowers the bounds of sets that can't be part of a plan better than `best_rate`.

        `limits[n]` bounds what all devices do for n users. Beside it, a chain for the others has to do the rest of
        `best_rate`, so its round may only be so long; what is busier for longer than that is of no use to it.
        """
        users = len(limits) - 1
        for rows, counts in self._uses.items():
            mine = sum(rows)
            rest = float(limits[users - mine])
            least = best_rate - rest if np.isfinite(rest) else 0.0
            if mine > users or least <= 0:
                continue
            longest = mine / least
            rounds = np.maximum(self._bottlenecks[rows], self._trips(rows, longest))
            bound = np.maximum(mine / rounds, least * (1.0 - _CLOSE)) * self._weight
            here = np.isin(self._sizes, counts) & (self.rates[:, mine] > 0)
            self.rates[here, mine] = np.minimum(self.rates[here, mine], bound[here])

    def rate_of(self, shared: Sequence[Shared]) -> float:
        """Tokens per second of a plan, as the bounds count."""
        rate = 0.0
        for part in shared:
            mask = sum(1 << device for device, _, _ in part.chain)
            rate += part.users / self._problem.round_s(part.chain, part.users) * float(self._weight[mask])
        return rate

    def solve(self, mask: int, users: int, least_rate: float) -> float:
        """Makes one bound exact, or at least smaller than `least_rate`. Returns by how much it fell."""
        solver = self._solvers.get((mask, users))
        if solver is None:
            devices = [device for device in range(self._problem.count) if mask >> device & 1]
            solver = self._solvers[mask, users] = Solver(self._problem, devices, users)
        weight = float(self._weight[mask])
        solver.run(users / least_rate * weight if least_rate > 0 else np.inf)
        before = float(self.rates[mask, users])
        if solver.closed:
            self.solved[mask, users] = solver.chain
            self.rates[mask, users] = users / solver.best_s * weight
        else:
            self.rates[mask, users] = min(before, users / solver.low_s * weight)
        return before - float(self.rates[mask, users])


class Solver:
    """The chain of exactly these devices with the shortest round, found step by step.

    The shortest trip under the condition that nothing is busier than a limit falls as the limit rises; the best round
    is where the two meet. `low_s` and `best_s` close in on it from both sides.
    """

    def __init__(self, problem: Problem, devices: list[int], users: int) -> None:
        self._problem, self._devices, self._users = problem, devices, users
        tables = problem.of_sizes(problem.sizes(users, len(devices)))
        index = np.ix_(devices, devices)
        self._busy = [tables.busy[device] for device in devices]
        self._largest = [tables.largest[device] for device in devices]
        self._link_busy, self._send = tables.link_busy[index], tables.send[index]
        self._whole = (1 << len(devices)) - 1
        bottleneck = Sweep(
            "max", self._busy, self._link_busy, problem.never_first[devices], problem.never_last[devices]
        )
        value = bottleneck.run(len(devices))
        self.low_s = float(bottleneck.best(value)[self._whole])
        self.best_s = np.inf
        self.chain: Chain = ()
        self._try(self._chain_of(bottleneck, value))
        self._shortest(self.low_s)
        trip_s = self._shortest(np.inf)
        self.low_s = max(self.low_s, trip_s)

    @property
    def closed(self) -> bool:
        """Whether the best is found."""
        return self.best_s <= self.low_s * (1.0 + _CLOSE)

    def run(self, hopeless_s: float) -> None:
        """Goes on until the best is found, or is known to be longer than `hopeless_s`."""
        while not self.closed and self.low_s <= hopeless_s:
            limit = (self.low_s + min(self.best_s, 4.0 * self.low_s)) / 2
            if self._shortest(limit) > limit:
                self.low_s = limit  # less busy ones take longer, the others are busier

    def _shortest(self, limit: float) -> float:
        """The shortest trip if nothing may be busier than `limit`; infinite if there is none. Keeps the best chain."""
        steps = [
            np.where(busy <= limit, largest, np.inf)
            for busy, largest in zip(self._busy, self._largest, strict=True)
        ]
        send = np.where(self._link_busy <= limit, self._send, np.inf)
        problem, devices = self._problem, self._devices
        sweep = Sweep("sum", steps, send, problem.first[devices], problem.last[devices])
        value = sweep.run(len(devices))
        trip_s = float(sweep.best(value)[self._whole])
        if np.isfinite(trip_s):
            self._try(self._chain_of(sweep, value))
        return trip_s

    def _chain_of(self, sweep: Sweep, value: Floats) -> Chain:
        return self._problem.chain(
            [(self._devices[at], a, b) for at, a, b in sweep.trace(value, self._whole)]
        )

    def _try(self, chain: Chain) -> None:
        round_s = self._problem.round_s(chain, self._users)
        if round_s < self.best_s:
            self.chain, self.best_s = chain, round_s


class _Sharing:
    """Disjoint sets of devices with their numbers of users, of the most tokens per second in all.

    total[set, n] is the best that the devices of a set do for exactly n users. Its lowest device is left out, or it is
    in one of the set's subsets, which becomes a chain.
    """

    def __init__(self, devices: int) -> None:
        self._everyone = (1 << devices) - 1
        self._subsets: list[Ints] = [np.zeros(0, np.int64)]
        for mask in range(1, 1 << devices):
            low = mask & -mask
            rest = mask ^ low
            subs, sub = [], rest
            while True:
                subs.append(sub | low)
                if sub == 0:
                    break
                sub = (sub - 1) & rest
            self._subsets.append(np.array(sorted(subs, key=lambda s: (s.bit_count(), s)), np.int64))

    def limits(self, rates: Floats, users: int) -> Floats:
        """float64[users + 1]: the most tokens per second of all devices for each number of users."""
        most = rates.shape[1] - 1
        rates = np.where(rates > 0, rates, -np.inf)
        limits = self._totals(rates, range(1, min(most, users) + 1), users)[self._everyone]
        return np.asarray(np.maximum.accumulate(limits))

    def best(self, rates: Floats, users: int) -> tuple[list[tuple[int, int]], float]:
        """The sets with their users, and their tokens per second: all users placed, or every chain full."""
        most = rates.shape[1] - 1
        rates = np.where(rates > 0, rates, -np.inf)
        total = self._totals(rates, range(1, min(most, users) + 1), users)
        plan, rate = self._read(total, rates, range(1, min(most, users) + 1), users)
        chains = (users - 1) // most
        if chains:
            full = self._totals(rates, [most], chains * most)
            for count in range(1, chains + 1):
                if full[self._everyone, count * most] > rate:
                    plan, rate = self._read(full, rates, [most], count * most)
        return plan, rate

    def _totals(self, rates: Floats, counts: Sequence[int], users: int) -> Floats:
        total = np.full((self._everyone + 1, users + 1), -np.inf)
        total[:, 0] = 0.0
        for mask in range(1, self._everyone + 1):
            best = total[mask]
            best[:] = total[mask & (mask - 1)]
            subs = self._subsets[mask]
            others = total[mask ^ subs]
            for count in counts:
                offer = (others[:, : users + 1 - count] + rates[subs, count][:, None]).max(axis=0)
                np.maximum(best[count:], offer, out=best[count:])
        return total

    def _read(
        self, total: Floats, rates: Floats, counts: Sequence[int], users: int
    ) -> tuple[list[tuple[int, int]], float]:
        """Goes back from the best total to the sets it is made of."""
        rate = float(total[self._everyone, users])
        if not rate > 0:
            return [], 0.0
        parts: list[tuple[int, int]] = []
        mask, left = self._everyone, users
        while left:
            without = mask & (mask - 1)
            if total[without, left] == total[mask, left]:
                mask = without
                continue
            subs = self._subsets[mask]
            found = None
            for count in counts:
                if count <= left:
                    offer = total[mask ^ subs, left - count] + rates[subs, count]
                    at = int(np.argmax(offer))
                    if offer[at] == total[mask, left]:
                        found = int(subs[at]), count
                        break
            assert found is not None, "a total came from somewhere"
            parts.append(found)
            mask, left = mask ^ found[0], left - found[1]
        return parts, rate
