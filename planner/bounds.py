"""What every set of devices can do as one chain, for every number of users: a bound first, exact where asked. Pure.

A chain's round is limited by its trip and by what is busiest. Two sweeps over all sets (`sweep`) give the shortest trip
and the smallest bottleneck; no chain beats either, but one chain seldom has both. So bounds are lowered by a third kind
of sweep, the shortest trip if nothing may be busier than a limit: where that trip is longer than the limit, so is the
round. `exact` says how long a round may be for a set to be of use in a better plan; that is the limit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from potluck.planner.problem import Chain, Problem
from potluck.planner.sharing import Part
from potluck.planner.sweep import Bools, Floats, Ints, Sweep

FEWER = 1e-9
"""A device more must win more than this share: equal plans are decided for fewer devices."""
CLOSE = 1e-10
"""Two bounds that differ by less than this share are met."""
LIMITS = 3
"""Limits with which all sets of one size are swept at most, before chains are solved one by one."""
OVERHEAD = 8
"""What a small sweep costs besides its sets, in steps of a sweep, for each pair of its devices."""

Sizes = tuple[int, ...]
"""Rows of a chain's micro-batches, the largest first. They add up to its users."""


class Bounds:
    """`rates` float64[sets, users + 1]: tokens per second, never too low; 0 for what can't be or is of no use.

    The rate of a chain counts a little less for each device, so that equal ones are decided for fewer.
    """

    def __init__(self, problem: Problem, most_users: int) -> None:
        self._problem = problem
        self._count = np.array([mask.bit_count() for mask in range(1 << problem.count)])
        self._weight = 1.0 - FEWER * self._count
        self.solved: dict[Part, Chain] = {}
        self.work = 0
        """Steps of sweeps so far: a measure of time that is always the same."""
        self.rates: Floats = np.zeros((1 << problem.count, most_users + 1))
        self._longest: Floats = np.full(self.rates.shape, np.inf)
        self._stages: dict[Sizes, list[int]] = {}
        """Numbers of stages by the sizes of micro-batches."""
        for users in range(1, most_users + 1):
            for stages in range(1, min(problem.count, len(problem.positions) - 1) + 1):
                self._stages.setdefault(problem.sizes(users, stages), []).append(stages)
        self._begin()

    def _begin(self) -> None:
        """The first bounds. All sizes with the same largest micro-batch share their sweeps."""
        most: dict[tuple[int, bool], int] = {}
        for sizes, stages in self._stages.items():
            for key in {(sizes[0], False), (sizes[0], sizes[-1] < sizes[0])}:
                most[key] = max(most.get(key, 0), *stages)
        trips = {
            rows: self._trips((rows,), count, np.inf, None)[1]
            for (rows, uneven), count in most.items()
            if not uneven
        }
        bottlenecks = {key: self._bottlenecks(*key, count) for key, count in most.items()}
        for sizes, stages in self._stages.items():
            uneven = sizes[-1] < sizes[0]
            times = len(sizes) - 1 + self._least_share(sizes) if uneven else len(sizes)
            rounds = np.maximum(times * bottlenecks[sizes[0], uneven], trips[sizes[0]])
            here = np.isin(self._count, stages)
            self.rates[here, sum(sizes)] = (sum(sizes) / rounds * self._weight)[here]
        for device in range(self._problem.count):
            for users in np.flatnonzero(self.rates[1 << device]).tolist():
                self.solved[1 << device, users] = ((device, 0, self._problem.model.layers),)

    def _bottlenecks(self, rows: int, uneven: bool, most: int) -> Floats:
        """float64[sets]: the smallest bottleneck for one micro-batch; of more of them, as many times that.

        An uneven last one makes a stage less busy by another share than a link. Its times are the stages'; that may be
        too often for a link, but never twice as often as is right, so half of a link is counted.
        """
        problem, tables = self._problem, self._problem.of_sizes((rows,))
        links = tables.link_busy / 2 if uneven else tables.link_busy
        sweep = Sweep("max", tables.busy, links, problem.never_first, problem.never_last)
        self.work += int(self._count[self._count <= most].sum())
        return sweep.best(sweep.run(most))

    def _least_share(self, sizes: Sizes) -> float:
        """Of what the largest micro-batch takes on any stage, the least share that the last one takes; at most 1."""
        least = 1.0
        for largest, last in zip(
            *(self._problem.decode(rows) for rows in (sizes[0], sizes[-1])), strict=True
        ):
            used = np.isfinite(largest) & (largest > 0)
            least = min(least, float((last[used] / largest[used]).min(initial=1.0)))
        return least

    def _trips(
        self, sizes: Sizes, most: int, limit: float, wanted: Bools | None
    ) -> tuple[Sweep, Floats, Floats]:
        """The sweep, float64[sets] shortest trips if nothing may be busier than `limit`, and all its values."""
        problem, tables = self._problem, self._problem.of_sizes(sizes)
        steps, send = tables.within(limit)
        sweep = Sweep("sum", steps, send, problem.first, problem.last, limit)
        value = sweep.run(most, wanted)
        swept = self._count <= most if wanted is None else wanted & (self._count <= most)
        self.work += int(self._count[swept].sum())
        return sweep, sweep.best(value), value

    def rate(self, chain: Chain, users: int) -> float:
        """A chain's tokens per second, as bounds count."""
        mask = sum(1 << device for device, _, _ in chain)
        return users / self._problem.round_s(chain, users) * float(self._weight[mask])

    @property
    def exact(self) -> Floats:
        """As `rates`, of solved chains only."""
        rates = np.zeros(self.rates.shape)
        for part in self.solved:
            rates[part] = self.rates[part]
        return rates

    # ---- lower

    def prune(self, best_rate: float, beside: Floats, within: Floats) -> None:
        """Gives up all that can't be part of a plan better than `best_rate`; `beside`: see Shares.

        And all that the same devices, or some of them, are known to do as well (`within`, see Sharing).
        """
        self.rates[self.rates + beside <= best_rate * (1.0 + CLOSE)] = 0.0
        known = self.exact > 0
        self.rates[(self.rates <= within * (1.0 + CLOSE)) & ~known] = 0.0
        least = np.maximum(best_rate - beside, within) * (1.0 + CLOSE)
        users = np.arange(self.rates.shape[1])
        with np.errstate(divide="ignore", invalid="ignore"):
            longest = users[None, :] * self._weight[:, None] / least
        self._longest = np.where(least > 0, longest, np.inf)

    def open(self, beside: Floats) -> list[Part]:
        """Sets that may still be of use and are not solved, the most promising first."""
        masks, users = np.nonzero(self.rates)
        order = np.argsort(-(self.rates + beside)[masks, users], kind="stable")
        parts = zip(masks[order].tolist(), users[order].tolist(), strict=True)
        return [part for part in parts if part not in self.solved]

    def narrow(self) -> None:
        """Sweeps all sets of one size at once, where there are so many that this is less work than each alone."""
        for sizes, stages in self._stages.items():
            users = sum(sizes)
            open_ = np.array(list(self._of(users, stages)), np.int64)
            open_ = open_[np.argsort(self._longest[open_, users], kind="stable")]
            for masks in np.array_split(open_, LIMITS):
                wanted = _with_subsets(masks, self._problem.count)
                alone = sum(_steps(int(count)) for count in self._count[masks])
                if alone > int(self._count[wanted].sum()):
                    self._sweep(sizes, masks, wanted)

    def _of(self, users: int, stages: list[int]) -> Iterator[int]:
        for mask in np.flatnonzero(np.isin(self._count, stages) & (self.rates[:, users] > 0)).tolist():
            if (mask, users) not in self.solved:
                yield mask

    def _sweep(self, sizes: Sizes, masks: Ints, wanted: Bools) -> None:
        """One limit for all these sets: the longest of their rounds that are of use."""
        users = sum(sizes)
        limit = float(self._longest[masks, users].max())
        if not np.isfinite(limit):
            return
        sweep, trips, value = self._trips(sizes, int(self._count[masks].max()), limit, wanted)
        for mask in masks.tolist():
            trip_s = float(trips[mask])
            if not trip_s <= min(limit, float(self._longest[mask, users])):
                self.rates[mask, users] = 0.0
                continue
            chain = self._problem.chain(sweep.trace(value, mask))
            self._lower(mask, users, trip_s)
            if self._problem.round_s(chain, users) <= trip_s * (1.0 + CLOSE):
                self.solved[mask, users] = chain

    def _lower(self, mask: int, users: int, round_s: float) -> None:
        bound = users / round_s * float(self._weight[mask])
        self.rates[mask, users] = min(bound, float(self.rates[mask, users]))

    # ---- exact

    def solve(self, part: Part) -> float:
        """Makes one bound exact, or 0 if it is then of no use. Returns by how much it fell."""
        mask, users = part
        before = float(self.rates[part])
        solver = Solver(self._problem, [d for d in range(self._problem.count) if mask >> d & 1], users)
        solver.low_s = users * float(self._weight[mask]) / before * (1.0 - CLOSE)
        solver.run(float(self._longest[part]))
        self.work += solver.sweeps * _steps(mask.bit_count())
        if solver.closed:
            self.solved[part] = solver.chain
            self.rates[part] = self.rate(solver.chain, users)
        else:
            self.rates[part] = 0.0
        return before - float(self.rates[part])


class Solver:
    """The chain of exactly these devices with the shortest round, found step by step.

    The shortest trip under the condition that nothing is busier than a limit falls as the limit rises; the best round
    is where the two meet. `low_s` and `best_s` close in on it from both sides.
    """

    def __init__(self, problem: Problem, devices: list[int], users: int) -> None:
        self._problem, self._devices, self._users = problem, devices, users
        self._tables = problem.of_sizes(problem.sizes(users, len(devices)))
        self._everyone = (1 << len(devices)) - 1
        self.low_s = 0.0
        self.best_s = np.inf
        self.chain: Chain = ()
        self.sweeps = 0

    @property
    def closed(self) -> bool:
        """Whether the best is found."""
        return self.chain != () and self.best_s <= self.low_s * (1.0 + CLOSE)

    def run(self, hopeless_s: float) -> None:
        """Goes on until the best is found, or is known to be longer than `hopeless_s`."""
        while not self.closed and self.low_s <= hopeless_s and self.low_s < np.inf:
            limit = (self.low_s + self.best_s) / 2 if self.best_s <= hopeless_s else hopeless_s
            trip_s = self._shortest(limit)
            if trip_s > limit:
                # What is no busier than this takes longer, and what is busier takes at least the next step of busy.
                trip_s = max(limit, min(trip_s, self._busier(limit)))
            self.low_s = max(self.low_s, trip_s)

    def _shortest(self, limit: float) -> float:
        """The shortest trip if nothing may be busier than `limit`; infinite if there is none. Keeps the best chain."""
        self.sweeps += 1
        problem, devices = self._problem, self._devices
        steps, send = self._tables.within(limit, devices)
        sweep = Sweep("sum", steps, send, problem.first[devices], problem.last[devices])
        value = sweep.run(len(devices))
        trip_s = float(sweep.best(value)[self._everyone])
        if np.isfinite(trip_s):
            spans = [(devices[at], a, b) for at, a, b in sweep.trace(value, self._everyone)]
            chain = problem.chain(spans)
            round_s = problem.round_s(chain, self._users)
            if round_s < self.best_s:
                self.chain, self.best_s = chain, round_s
        return trip_s

    def _busier(self, limit: float) -> float:
        """The least above `limit` for which a device or a link can be busy."""
        least = np.inf
        index = np.ix_(self._devices, self._devices)
        for busy in (*(self._tables.busy[device] for device in self._devices), self._tables.link_busy[index]):
            least = min(least, float(busy.min(initial=np.inf, where=busy > limit)))
        return least


def _steps(devices: int) -> int:
    """What a sweep over all sets of so many devices costs."""
    return (1 << devices) * devices // 2 + OVERHEAD * devices**2


def _with_subsets(masks: Ints, devices: int) -> Bools:
    """bool[sets]: these and all their subsets."""
    wanted = np.zeros(1 << devices, np.bool_)
    wanted[masks] = True
    for device in range(devices):
        pairs = wanted.reshape(-1, 2, 1 << device)
        pairs[:, 0] |= pairs[:, 1]
    return wanted
