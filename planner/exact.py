"""The best plan of up to ten devices: exact over which devices, their order, the cuts and the number of chains. Pure.

For one user that is the chain with the shortest trip. For several, users are shared out over chains:

1. `_Bounds` gives every set of devices and number of users the two things no chain of it can beat: the smallest
   bottleneck and the shortest trip, each by a sweep over all sets (`sweep`).
2. `_shared_out` combines disjoint sets into the plan with the most tokens per second, as if each set kept its bound.
3. The chains of that plan are solved exactly (`_solved`), their bounds replaced, and 2. is repeated until the best plan
   is made of solved chains only. Every other plan is bounded by less, so it is the best.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from potluck.planner.problem import Chain, Problem
from potluck.planner.sweep import Floats, Sweep

MOST_DEVICES = 10
FEWER = 1e-9
"""A device more must win more than this share: equal plans are decided for fewer devices."""
_CLOSE = 1e-10
"""Two bounds that differ by less than this share are met."""


@dataclass(frozen=True, slots=True)
class Shared:
    """A chain and how many users it is for."""

    chain: Chain
    users: int


def best_chain(problem: Problem) -> Chain | None:
    """The chain with the least time per token for one user; None if no chain can hold the model."""
    tables = problem.of_sizes((1,))
    sweep = Sweep("sum", tables.largest, tables.send, problem.first, problem.last)
    value = sweep.run(min(problem.count, len(problem.positions) - 1))
    sizes = np.array([mask.bit_count() for mask in range(1 << problem.count)])
    trips = sweep.best(value) * (1.0 + FEWER * sizes)
    mask = int(np.argmin(trips))
    return problem.chain(sweep.trace(value, mask)) if np.isfinite(trips[mask]) else None


def best_chains(problem: Problem) -> list[Shared]:
    """The chains with the most tokens per second for all users; none if no chain can hold the model.

    A chain takes up to `slots` users. All users are served, or as many as all chains have slots for.
    """
    demand = problem.demand
    users = min(demand.users, demand.slots * problem.count)
    bounds = _Bounds(problem, min(users, demand.slots))
    while True:
        plan = _shared_out(bounds.rates, users, problem.count)
        if plan is None:
            return []
        open_ = [part for part in plan if part not in bounds.solved]
        if not open_:
            return [Shared(bounds.solved[part], part[1]) for part in plan]
        for mask, count in open_:
            bounds.solve(mask, count)


class _Bounds:
    """Tokens per second of every set of devices with every number of users: a bound at first, exact once solved."""

    def __init__(self, problem: Problem, most_users: int) -> None:
        self._problem = problem
        self._weight = 1.0 - FEWER * np.array([mask.bit_count() for mask in range(1 << problem.count)])
        self.solved: dict[tuple[int, int], Chain] = {}
        self.rates: Floats = np.zeros((1 << problem.count, most_users + 1))
        stages = min(problem.count, len(problem.positions) - 1)
        needed: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for users in range(1, most_users + 1):
            for count in range(1, stages + 1):
                needed.setdefault(problem.sizes(users, count), []).append((users, count))
        sizes = np.array([mask.bit_count() for mask in range(1 << problem.count)])
        for rows, uses in needed.items():
            tables = problem.of_sizes(rows)
            least = max(count for _, count in uses)
            nothing = np.zeros(problem.count)
            busy = Sweep("max", tables.busy, tables.link_busy, nothing, nothing)
            trip = Sweep("sum", tables.largest, tables.send, problem.first, problem.last)
            rounds = np.maximum(busy.best(busy.run(least)), trip.best(trip.run(least)))
            for users, count in uses:
                here = sizes == count
                self.rates[here, users] = users / rounds[here] * self._weight[here]

    def solve(self, mask: int, users: int) -> None:
        """Makes one bound exact."""
        devices = [device for device in range(self._problem.count) if mask >> device & 1]
        chain, round_s = _solved(self._problem, devices, users)
        self.solved[mask, users] = chain
        self.rates[mask, users] = users / round_s * self._weight[mask]


def _solved(problem: Problem, devices: list[int], users: int) -> tuple[Chain, float]:
    """The chain of exactly these devices with the shortest round, and that round in seconds.

    The shortest trip under the condition that nothing is busier than `limit` falls as the limit rises; the best round
    is where the two meet.
    """
    tables = problem.of_sizes(problem.sizes(users, len(devices)))
    index = np.ix_(devices, devices)
    busy = [tables.busy[device] for device in devices]
    links = tables.link_busy[index]
    nothing = np.zeros(len(devices))
    whole = (1 << len(devices)) - 1

    def chain_of(sweep: Sweep, value: Floats) -> Chain:
        return problem.chain([(devices[at], a, b) for at, a, b in sweep.trace(value, whole)])

    def shortest(limit: float) -> tuple[Chain, float] | None:
        steps = [
            np.where(busy[at] <= limit, tables.largest[device], np.inf) for at, device in enumerate(devices)
        ]
        send = np.where(links <= limit, tables.send[index], np.inf)
        sweep = Sweep("sum", steps, send, problem.first[devices], problem.last[devices])
        value = sweep.run(len(devices))
        trip_s = float(sweep.best(value)[whole])
        return (chain_of(sweep, value), trip_s) if np.isfinite(trip_s) else None

    bottleneck = Sweep("max", busy, links, nothing, nothing)
    value = bottleneck.run(len(devices))
    best = chain_of(bottleneck, value)
    best_s = problem.round_s(best, users)
    low_s = float(bottleneck.best(value)[whole])
    found = shortest(low_s)
    if found is not None:
        chain, trip_s = found
        if problem.round_s(chain, users) < best_s:
            best, best_s = chain, problem.round_s(chain, users)
    free = shortest(np.inf)
    if free is not None:
        chain, trip_s = free
        low_s = max(low_s, trip_s)
        if problem.round_s(chain, users) < best_s:
            best, best_s = chain, problem.round_s(chain, users)
    while best_s > low_s * (1.0 + _CLOSE):
        limit = (low_s + best_s) / 2
        found = shortest(limit)
        if found is None or found[1] > limit:
            low_s = limit  # less busy ones take longer, the others are busier
            continue
        chain = found[0]
        best, best_s = chain, min(best_s, problem.round_s(chain, users))
    return best, best_s


def _shared_out(rates: Floats, users: int, devices: int) -> list[tuple[int, int]] | None:
    """Disjoint sets of devices with their numbers of users, of the most tokens per second in all.

    All users are placed, or every chain is full.
    """
    most = rates.shape[1] - 1
    useful = [mask for mask in range(1, 1 << devices) if rates[mask].max() > 0]
    by_lowest: dict[int, list[int]] = {}
    for mask in useful:
        by_lowest.setdefault(mask & -mask, []).append(mask)
    total = np.full((1 << devices, users + 1), -np.inf)
    total[:, 0] = 0.0
    choice: dict[tuple[int, int], tuple[int, int]] = {}
    full = np.full((1 << devices, users // most + 1), -np.inf)
    full[:, 0] = 0.0
    full_choice: dict[tuple[int, int], int] = {}
    for mask in range(1, 1 << devices):
        low = mask & -mask
        best, rest = total[mask], total[mask ^ low]
        np.maximum(best, rest, out=best)
        from_here: dict[int, tuple[int, int]] = {}
        full[mask] = full[mask ^ low]
        for sub in by_lowest.get(low, ()):
            if sub & ~mask:
                continue
            others = total[mask ^ sub]
            for count in range(1, min(most, users) + 1):
                rate = rates[sub, count]
                if rate <= 0:
                    continue
                offer = others[: users + 1 - count] + rate
                better = offer > best[count:]
                if better.any():
                    best[count:][better] = offer[better]
                    for step in np.flatnonzero(better).tolist():
                        from_here[step + count] = (sub, count)
            rate = rates[sub, most]
            if rate > 0:
                offer = full[mask ^ sub][:-1] + rate
                for step in np.flatnonzero(offer > full[mask][1:]).tolist():
                    full[mask, step + 1] = offer[step]
                    full_choice[mask, step + 1] = sub
        for at, picked in from_here.items():
            choice[mask, at] = picked
    return _read_off(total, choice, full, full_choice, users, most)


def _read_off(
    total: Floats,
    choice: dict[tuple[int, int], tuple[int, int]],
    full: Floats,
    full_choice: dict[tuple[int, int], int],
    users: int,
    most: int,
) -> list[tuple[int, int]] | None:
    everyone = len(total) - 1
    chains = int(np.argmax(full[everyone][1:])) + 1 if full.shape[1] > 1 else 0
    parts: list[tuple[int, int]] = []
    if chains and full[everyone, chains] > max(total[everyone, users], 0.0):
        mask = everyone
        while chains:
            sub = full_choice.get((mask, chains))
            if sub is None or full[mask ^ (mask & -mask), chains] == full[mask, chains]:
                mask ^= mask & -mask
                continue
            parts.append((sub, most))
            mask, chains = mask ^ sub, chains - 1
        return parts
    if not total[everyone, users] > 0:
        return None
    mask, left = everyone, users
    while left:
        picked = choice.get((mask, left))
        if picked is None or total[mask ^ (mask & -mask), left] == total[mask, left]:
            mask ^= mask & -mask
            continue
        parts.append(picked)
        mask, left = mask ^ picked[0], left - picked[1]
    return parts
