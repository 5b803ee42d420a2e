"""Good plans for more devices than an exact answer has time for: tens of devices, more than a hundred layers. Pure.

A chain over devices in a given order, each of which may be skipped, is found by a dynamic program (`_Ordered`). Orders
are tried by speed and along fast links; several chains come from dealing the devices out, fastest first. What is best
is then improved by exchanging devices, a fixed number of times: the same question always gets the same answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from potluck.planner.exact import Shared
from potluck.planner.problem import Chain, Problem
from potluck.planner.sweep import Floats

CHAIN_TRIES = 60
"""Orders that a single chain is tried with while it is improved."""
GROUP_TRIES = 240
"""Exchanges between chains that are tried."""
FEWER = 1e-9


def search_chain(problem: Problem) -> Chain | None:
    """A chain with a short trip for one user; None if none is found."""
    found = _Orders(problem, 1).best(_orders(problem, range(problem.count)), CHAIN_TRIES)
    return None if found is None else found[0]


def search_chains(problem: Problem) -> list[Shared]:
    """Chains that together make many tokens per second; none if none is found."""
    demand = problem.demand
    best: list[Shared] = []
    best_rate = 0.0
    for count in _chain_counts(problem):
        users = _split(min(demand.users, demand.slots * count), count)
        groups = _deal(problem, count)
        found = _solve_groups(problem, groups, users)
        if found is None:
            continue
        rate = sum(part.users / problem.round_s(part.chain, part.users) for part in found)
        if rate > best_rate * (1.0 + FEWER):
            best, best_rate = found, rate
    return _improved(problem, best) if best else best


# ---- one chain


class _Orders:
    """Finds a good chain for some users by trying orders of devices."""

    def __init__(self, problem: Problem, users: int) -> None:
        self._problem = problem
        self._users = users

    def of(self, order: Sequence[int]) -> tuple[Chain, float] | None:
        """The best chain over devices in this order, and its round in seconds."""
        best: tuple[Chain, float] | None = None
        for rows, stages in _row_choices(self._users, len(order)):
            found = _Ordered(self._problem, order, rows).chain(stages, by_trip=self._users == 1)
            if found is None:
                continue
            round_s = self._problem.round_s(found, self._users)
            if best is None or round_s * (1 + FEWER * len(found)) < best[1] * (1 + FEWER * len(best[0])):
                best = found, round_s
        return best

    def best(self, orders: Iterator[list[int]], tries: int) -> tuple[Chain, float] | None:
        """The best of the given orders, then improved by exchanges within its order."""
        best: tuple[Chain, float] | None = None
        order: list[int] = []
        for candidate in orders:
            found = self.of(candidate)
            if found is not None and (best is None or found[1] < best[1]):
                best, order = found, candidate
        if best is None:
            return None
        for a, b in _exchanges(len(order), tries):
            tried = order.copy()
            tried.insert(b, tried.pop(a))
            found = self.of(tried)
            if found is not None and found[1] < best[1]:
                best, order = found, tried
        return best


class _Ordered:
    """Chains over devices in one order, each used or skipped, for micro-batches of these sizes."""

    def __init__(self, problem: Problem, order: Sequence[int], sizes: tuple[int, ...]) -> None:
        self._problem = problem
        self._order = list(order)
        self._tables = problem.of_sizes(sizes)

    def chain(self, most_stages: int, *, by_trip: bool) -> Chain | None:
        """The shortest trip, or the smallest bottleneck, over at most so many stages."""
        tables, problem = self._tables, self._problem
        order = self._order
        steps = tables.largest if by_trip else tables.busy
        links = tables.send if by_trip else tables.link_busy
        join = np.add if by_trip else np.maximum
        positions = len(problem.positions)
        value = np.full((len(order), positions), np.inf)
        before_all: list[Floats] = []
        for at, device in enumerate(order):
            first = (problem.first if by_trip else problem.never_first)[device]
            before = np.full(positions, np.inf)
            before[0] = first
            if at:
                came = join(value[:at], links[order[:at], device][:, None]).min(axis=0)
                before = np.minimum(before, came)
            before_all.append(before)
            value[at] = join(before[:, None], steps[device]).min(axis=0)
        ends = value[:, -1] + (problem.last if by_trip else problem.never_last)[order]
        at = int(np.argmin(ends))
        if not np.isfinite(ends[at]):
            return None
        spans: list[tuple[int, int, int]] = []
        end = positions - 1
        while True:
            device = order[at]
            start = int(np.argmin(join(before_all[at], steps[device][:, end])))
            spans.append((device, start, end))
            if start == 0:
                break
            came = join(value[:at, start], links[order[:at], device])
            at, end = int(np.argmin(came)), start
        return problem.chain(spans[::-1]) if len(spans) <= most_stages else None


def _row_choices(users: int, devices: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Sizes of micro-batches worth trying, with the most stages for which they are used."""
    seen: set[tuple[int, ...]] = set()
    for stages in range(1, devices + 1):
        rows = -(-users // stages)
        full, rest = divmod(users, rows)
        sizes = (rows,) * full + ((rest,) if rest else ())
        if sizes not in seen:
            seen.add(sizes)
            yield sizes, devices


def _orders(problem: Problem, devices: Sequence[int]) -> Iterator[list[int]]:
    """By speed, fastest first and last; and from each of the fastest along the fastest links."""
    speed = _seconds(problem)
    by_speed = sorted(devices, key=lambda device: (speed[device], device))
    yield by_speed
    yield by_speed[::-1]
    send = problem.of_sizes((1,)).send
    for start in by_speed[:4]:
        order, left = [start], [device for device in by_speed if device != start]
        while left:
            here = order[-1]
            nearest = min(left, key=lambda device: (send[here, device], speed[device], device))
            left.remove(nearest)
            order.append(nearest)
        yield order


def _seconds(problem: Problem) -> Floats:
    """float64[devices]: seconds per layer for one row, from the largest run that the device can hold."""
    tables = problem.of_sizes((1,))
    layers = np.array(problem.positions)
    spans = layers[None, :] - layers[:, None]
    out = np.full(problem.count, np.inf)
    for device, table in enumerate(tables.largest):
        finite = np.isfinite(table)
        if finite.any():
            out[device] = float((table[finite] / spans[finite]).min())
    return out


def _exchanges(count: int, tries: int) -> Iterator[tuple[int, int]]:
    """Pairs of places, spread over all of them."""
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    step = max(1, len(pairs) // max(1, tries))
    yield from pairs[::step][:tries]


# ---- several chains


def _chain_counts(problem: Problem) -> list[int]:
    """How many chains to try."""
    most = min(problem.count, problem.demand.users)
    return sorted({count for count in (*range(1, 17), 20, 24, 32, 48, most) if count <= most})


def _split(users: int, chains: int) -> list[int]:
    """Users per chain, as even as can be."""
    return [users // chains + (index < users % chains) for index in range(chains)]


def _deal(problem: Problem, count: int) -> list[list[int]]:
    """The devices in `count` groups: fastest first, to and fro."""
    speed = _seconds(problem)
    devices = sorted(range(problem.count), key=lambda device: (speed[device], device))
    groups: list[list[int]] = [[] for _ in range(count)]
    for index, device in enumerate(devices):
        turn, at = divmod(index, count)
        groups[at if turn % 2 == 0 else count - 1 - at].append(device)
    return groups


def _solve_groups(problem: Problem, groups: list[list[int]], users: list[int]) -> list[Shared] | None:
    """A chain for each group; None if one has none."""
    shared = []
    for group, count in zip(groups, users, strict=True):
        found = _Orders(problem, count).best(iter(list(_orders(problem, group))[:3]), 0)
        if found is None:
            return None
        shared.append(Shared(found[0], count))
    return shared


def _improved(problem: Problem, shared: list[Shared]) -> list[Shared]:
    """The same number of chains after devices changed places, among chains and with those left out."""
    groups = [[device for device, _, _ in part.chain] for part in shared]
    users = [part.users for part in shared]
    spare = [d for d in range(problem.count) if all(d not in group for group in groups)]
    current = list(shared)
    tries = 0
    for index in sorted(range(len(groups)), key=lambda i: -problem.round_s(current[i].chain, users[i])):
        others = [*spare, *(d for at, group in enumerate(groups) if at != index for d in group)]
        for mine, theirs in ((a, b) for a in list(groups[index]) for b in others):
            tries += 1
            if tries > GROUP_TRIES:
                return current
            better = _exchange(problem, groups, users, current, spare, index, mine, theirs)
            if better is not None:
                current = better
                break
    return current


def _exchange(
    problem: Problem,
    groups: list[list[int]],
    users: list[int],
    current: list[Shared],
    spare: list[int],
    index: int,
    mine: int,
    theirs: int,
) -> list[Shared] | None:
    """The plan after two devices changed places, if it is better; the groups are then changed, too."""
    if mine not in groups[index]:
        return None
    other = next((at for at, group in enumerate(groups) if theirs in group), None)
    changed = {index: [theirs if d == mine else d for d in groups[index]]}
    if other is not None:
        changed[other] = [mine if d == theirs else d for d in groups[other]]
    tried = list(current)
    for at, group in changed.items():
        found = _Orders(problem, users[at]).of(group)
        if found is None:
            return None
        tried[at] = Shared(found[0], users[at])
    before = sum(users[at] / problem.round_s(current[at].chain, users[at]) for at in changed)
    after = sum(users[at] / problem.round_s(tried[at].chain, users[at]) for at in changed)
    if after <= before * (1.0 + FEWER):
        return None
    groups[index] = changed[index]
    if other is not None:
        groups[other] = changed[other]
    else:
        spare[spare.index(theirs)] = mine
    return tried


__all__ = ["search_chain", "search_chains"]
