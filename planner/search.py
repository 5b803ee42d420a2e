"""Good chains for more devices than an exact answer has time for: tens of devices, more than a hundred layers. Pure.

A chain over devices in a given order, each of which may be skipped, is found by a dynamic program (`_Ordered`). What is
searched for are orders, a fixed number of them: the same question always gets the same answer. `groups` searches for
several chains with this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from potluck.planner.cost import batch_rows
from potluck.planner.problem import Chain, Problem
from potluck.planner.sweep import Floats, Ints

ORDER_TRIES = 240
"""Orders that a single chain is tried with while it is improved."""
NEIGHBOURS = 12
"""Fast devices that a chain does without, and that are tried in it."""
NARROWINGS = 2
"""How often the limit on what may be busy is halved where the trip is what limits."""
FEWER = 1e-9
"""A device more must win more than this share."""


@dataclass(frozen=True, slots=True)
class Found:
    """A chain, and seconds for one token of each user."""

    chain: Chain
    round_s: float


def search_chain(problem: Problem) -> Chain | None:
    """A chain with a short trip for one user; None if none is found."""
    return search_one(problem, 1)


def search_one(problem: Problem, users: int, tries: int | None = None) -> Chain | None:
    """A chain with a short round for some users; None if none is found."""
    orders = Orders(problem)
    tries = min(ORDER_TRIES, 4 * problem.count**2) if tries is None else tries
    best: Found | None = None
    for order in orders.starts(range(problem.count)):
        best = shorter(best, orders.best(order, users))
    for order in orders.by_last() if best is None else ():
        best = orders.best(order, users)
        if best is not None:
            break
    if best is None:
        return None
    used = {device for device, _, _ in best.chain}
    spare = [device for device in orders.by_speed if device not in used][:NEIGHBOURS]
    return orders.improved(best, users, tries, spare).chain


class Orders:
    """Chains over devices in given orders, for one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    @cached_property
    def seconds(self) -> Floats:
        """float64[devices]: seconds per layer for one row, from the largest run that the device can hold."""
        tables = self._problem.of_sizes((1,))
        layers = np.array(self._problem.positions)
        spans = layers[None, :] - layers[:, None]
        out = np.full(self._problem.count, np.inf)
        for device, table in enumerate(tables.largest):
            finite = np.isfinite(table)
            if finite.any():
                out[device] = float((table[finite] / spans[finite]).min())
        return out

    @cached_property
    def by_speed(self) -> list[int]:
        """All devices, the fastest first."""
        return sorted(range(self._problem.count), key=lambda device: (self.seconds[device], device))

    def starts(self, devices: Sequence[int]) -> Iterator[list[int]]:
        """By speed, fastest first and last; and from each of the fastest along the fastest links."""
        wanted = set(devices)
        by_speed = [device for device in self.by_speed if device in wanted]
        yield by_speed
        yield by_speed[::-1]
        for start in by_speed[:4]:
            yield self.nearest(by_speed, start)

    def by_last(self) -> Iterator[list[int]]:
        """Every device as the last one, which holds the head as well: where nearly all memory is needed, that matters.

        Nothing if the longest runs of all devices together are shorter than the model.
        """
        if self.room.sum() < self._problem.model.layers:
            return
        by_room = sorted(self.by_speed, key=lambda device: -self.room[device])
        for others in (self.by_speed, by_room, by_room[::-1]):
            for last in by_room:
                yield [*(device for device in others if device != last), last]

    @cached_property
    def room(self) -> Ints:
        """int64[devices]: layers of the longest run that each can hold."""
        layers = np.array(self._problem.positions)
        spans = np.maximum(layers[None, :] - layers[:, None], 0)
        tables = self._problem.of_sizes((1,)).largest
        return np.array([np.where(np.isfinite(table), spans, 0).max() for table in tables], np.int64)

    def nearest(self, by_speed: Sequence[int], start: int) -> list[int]:
        """From one device to the one that is reached soonest, and so on; the fastest of those alike."""
        send = self._problem.of_sizes((1,)).send
        left = np.array([device for device in by_speed if device != start], np.intp)
        order = [start]
        while len(left):
            at = int(np.argmin(send[order[-1], left]))
            order.append(int(left[at]))
            left = np.delete(left, at)
        return order

    def best(self, order: Sequence[int], users: int, near: int | None = None) -> Found | None:
        """The best chain over devices in this order. `near`: only for about so many stages."""
        best: Found | None = None
        for sizes in self._sizes(users, len(order), near):
            best = shorter(best, _Ordered(self._problem, order, sizes, users).best())
        return best

    def _sizes(self, users: int, devices: int, near: int | None) -> Iterator[tuple[int, ...]]:
        counts = range(1, devices + 1) if near is None else (near, near - 1, near + 1)
        seen: set[tuple[int, ...]] = set()
        for stages in counts:
            sizes = batch_rows(users, stages) if 1 <= stages <= devices else ()
            if sizes and sizes not in seen:
                seen.add(sizes)
                yield sizes

    def improved(self, best: Found, users: int, tries: int, spare: Sequence[int]) -> Found:
        """After a fixed number of other orders: a device of the chain, or a spare one, at another place."""
        used = [device for device, _, _ in best.chain]
        left = tries
        changed = True
        while changed and left > 0:
            changed = False
            for device, place in [(d, p) for d in [*used, *spare] for p in range(len(used) + 1)]:
                if left <= 0:
                    break
                left -= 1
                others = [one for one in used if one != device]
                order = [*others[:place], device, *others[place:]]
                found = self.best(order, users, len(used)) if order != used else None
                if found is not None and found.round_s < best.round_s * (1.0 - FEWER):
                    best, changed = found, True
                    used = [device for device, _, _ in best.chain]
        return best


class _Ordered:
    """Chains over devices in one order, each used or skipped, for micro-batches of these sizes."""

    def __init__(self, problem: Problem, order: Sequence[int], sizes: tuple[int, ...], users: int) -> None:
        self._problem, self._users = problem, users
        self._order = list(order)
        self._bottleneck = np.inf
        self._tables = problem.of_sizes(sizes)
        self._index: Ints = np.asarray(self._order, np.int64)

    def best(self) -> Found | None:
        """The shortest round that is found: the smallest bottleneck, or the shortest trip with nothing too busy."""
        if self._users == 1:
            return self._found(self._run(by_trip=True))
        narrow = self._found(self._run(by_trip=False))
        if narrow is None:
            return None
        busiest_s = self._bottleneck
        if narrow.round_s <= busiest_s * (1.0 + 1e-6):
            return narrow
        best = shorter(narrow, self._found(self._run(by_trip=True)))
        low, high = busiest_s, narrow.round_s
        for _ in range(NARROWINGS):
            assert best is not None
            limit = (low + min(high, best.round_s)) / 2
            found = self._found(self._run(limit, by_trip=True))
            best = shorter(best, found)
            if found is None or found.round_s > limit:
                low = limit
            else:
                high = limit
        return best

    def _found(self, chain: Chain | None) -> Found | None:
        if chain is None:
            return None
        round_s = self._problem.round_s(chain, self._users)
        return Found(chain, round_s) if np.isfinite(round_s) else None

    def _run(self, limit: float = np.inf, *, by_trip: bool) -> Chain | None:
        """The shortest trip in which nothing is busier than `limit`, or the smallest bottleneck."""
        tables, problem, order = self._tables, self._problem, self._order
        steps = tables.largest if by_trip else tables.busy
        links = (tables.send if by_trip else tables.link_busy)[np.ix_(self._index, self._index)]
        if limit < np.inf:
            steps = list(steps)
            for device in order:
                steps[device] = np.where(tables.busy[device] <= limit, tables.largest[device], np.inf)
            links = np.where(tables.link_busy[np.ix_(self._index, self._index)] <= limit, links, np.inf)
        join = np.add if by_trip else np.maximum
        first = (problem.first if by_trip else problem.never_first)[self._index]
        last = (problem.last if by_trip else problem.never_last)[self._index]
        positions = len(problem.positions)
        value = np.full((len(order), positions), np.inf)
        before: Floats = np.full((len(order), positions), np.inf)
        before[:, 0] = first
        room = np.empty((positions, positions))
        for at, device in enumerate(order):
            if at:
                came = join(value[:at], links[:at, at][:, None]).min(axis=0)
                np.minimum(before[at], came, out=before[at])
            join(before[at][:, None], steps[device], out=room)
            room.min(axis=0, out=value[at])
        ends = value[:, -1] + last
        at = int(np.argmin(ends))
        if not np.isfinite(ends[at]):
            return None
        if not by_trip:
            self._bottleneck = float(ends[at])
        spans: list[tuple[int, int, int]] = []
        end = positions - 1
        while True:
            device = order[at]
            start = int(np.argmin(join(before[at], steps[device][:, end])))
            spans.append((device, start, end))
            if start == 0:
                return problem.chain(spans[::-1])
            came = join(value[:at, start], links[:at, at])
            at, end = int(np.argmin(came)), start


def fixed_order(
    problem: Problem, order: Sequence[int], users: int, steps: Sequence[Floats] | None = None
) -> Chain | None:
    """The best chain of exactly these devices in this order, by its trip for one user and its bottleneck for more.

    `steps`: per device float64[positions, positions] that takes the place of what its layers cost.
    """
    tables = problem.of_sizes(batch_rows(users, len(order)))
    by_trip = users == 1
    if steps is None:
        steps = tables.largest if by_trip else tables.busy
    links = tables.send if by_trip else tables.link_busy
    join = np.add if by_trip else np.maximum
    values = [steps[order[0]][0]]
    befores: list[Floats | None] = [None]
    for a, b in pairwise(order):
        before = join(values[-1], links[a, b])
        befores.append(before)
        values.append(join(before[:, None], steps[b]).min(axis=0))
    if not np.isfinite(values[-1][-1]):
        return None
    spans: list[tuple[int, int, int]] = []
    end = len(problem.positions) - 1
    for device, before in zip(reversed(order), reversed(befores), strict=True):
        start = 0 if before is None else int(np.argmin(join(before, steps[device][:, end])))
        spans.append((device, start, end))
        end = start
    return problem.chain(spans[::-1])


def shorter(one: Found | None, other: Found | None) -> Found | None:
    """The one with the shorter round; of two alike the one with fewer devices, then the first."""
    if one is None or other is None:
        return one or other
    weigh = [found.round_s * (1.0 + FEWER * len(found.chain)) for found in (one, other)]
    return other if weigh[1] < weigh[0] else one


__all__ = ["Found", "Orders", "fixed_order", "search_chain", "search_one", "shorter"]
