"""The plans that a plan is compared with, and what each would do. Pure.

Everything is computed with the same model of cost as the plan itself. Where an exact answer takes too long, another
plan is the best one of its kind that was found: it is then named with its figure, and nothing is said of better ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from potluck.planner.cost import Place, chain_forecast
from potluck.planner.exact import MOST_DEVICES, Shared, Trips
from potluck.planner.groups import search_chains, search_count
from potluck.planner.plan import FREE, Link, Network
from potluck.planner.problem import Chain, Problem
from potluck.planner.search import fixed_order, search_chain, search_one

WORTH_SAYING = 0.003
"""A share of the figure below which one layer more or less is no reason for anything."""
ALMOST = 0.02
"""Other shares of the users are worth a sentence if they cost less than this share of the tokens per second."""
MUCH_SOONER = 0.95
"""What the slowest user must then wait at most, as a share of what it waits now."""


@dataclass(frozen=True, slots=True)
class Option:
    """Another plan."""

    shared: tuple[Shared, ...]
    figure: float
    """Seconds per token for one user, otherwise tokens per second."""


@dataclass(frozen=True, slots=True)
class Full:
    """A device whose memory sets a cut: one layer more on it, fewer on its neighbour, would be better."""

    device: int
    neighbour: int
    figure: float
    """Of the plan with that layer moved."""


class Comparisons:
    """One plan, beside others for the same problem."""

    def __init__(self, problem: Problem, shared: Sequence[Shared]) -> None:
        self.problem = problem
        self.shared = list(shared)
        self.one = problem.demand.users == 1
        self.figure = self._figure(self.shared)
        self.used = {device for part in self.shared for device, _, _ in part.chain}
        self.exact = problem.count <= MOST_DEVICES
        self._users = min(problem.demand.users, problem.demand.slots)
        """That one chain can serve."""

    def gain(self, figure: float) -> float:
        """The share by which a plan with this figure is better than this one; negative for a worse one."""
        return self.figure / figure - 1.0 if self.one else figure / self.figure - 1.0

    @cached_property
    def trips(self) -> Trips:
        """For one user and few devices: the best chain of every set."""
        return Trips(self.problem)

    # ---- plans of another kind

    @cached_property
    def single(self) -> Option | None:
        """The best device alone, with as many users as it has slots for."""
        whole = self.problem.model.layers
        return self._best(
            [Shared(((device, 0, whole),), self._users)] for device in range(self.problem.count)
        )

    @cached_property
    def split(self) -> Option | None:
        """The best chain of several devices."""
        if self.one and self.exact:
            return self._of_chain(self.trips.best(least_devices=2))
        return self._best([Shared(chain, self._users)] for chain in self._pairs())

    @cached_property
    def one_chain(self) -> Option | None:
        """A good single chain of several devices, for all users or as many as it has slots for."""
        found = search_one(self.problem, self._users, None if self.exact else 10)
        several = self._of_chain(found) if found is not None and len(found) > 1 else None
        return self._better(several, self.split)

    @cached_property
    def several_chains(self) -> Option | None:
        """Two chains or more, for several users."""
        demand = self.problem.demand
        most = min(self.problem.count, demand.users)
        return self._best(
            found
            for count in range(2, min(most, 4 if self.exact else 2) + 1)
            if (found := self._of_count(count))
        )

    def _of_count(self, count: int) -> list[Shared] | None:
        return search_count(self.problem, count)

    @cached_property
    def even(self) -> Option | None:
        """The same devices in the same order, with the same number of layers each; None where cuts forbid that."""
        problem, shared = self.problem, []
        for part in self.shared:
            count = len(part.chain)
            bounds = [round(problem.model.layers * at / count) for at in range(count + 1)]
            if any(bound not in problem.positions for bound in bounds):
                return None
            spans = zip(part.chain, pairwise(bounds), strict=True)
            shared.append(Shared(tuple((device, a, b) for (device, _, _), (a, b) in spans), part.users))
        return self._option(shared)

    @cached_property
    def fairer(self) -> Option | None:
        """The same chains with other shares of the users: almost as many tokens, and the slowest user much faster."""
        best: tuple[float, list[Shared]] | None = None
        limit = MUCH_SOONER * self.slowest_s(self.shared)
        for a in range(len(self.shared)):
            for b in range(len(self.shared)):
                for moved in range(1, self.shared[a].users) if a != b else ():
                    tried = list(self.shared)
                    tried[a] = replace(tried[a], users=tried[a].users - moved)
                    tried[b] = replace(tried[b], users=tried[b].users + moved)
                    if tried[b].users > self.problem.demand.slots:
                        break
                    slowest = self.slowest_s(tried)
                    if slowest < (limit if best is None else best[0]) and (
                        self._figure(tried) > (1.0 - ALMOST) * self.figure
                    ):
                        best = slowest, tried
        return None if best is None else self._option(best[1])

    def slowest_s(self, shared: Sequence[Shared]) -> float:
        """Seconds per token of the users of the slowest chain."""
        return max(self.problem.round_s(part.chain, part.users) for part in shared)

    def ttft_s(self, shared: Sequence[Shared]) -> float:
        """Seconds to the first token on the slowest chain."""
        return max(self.problem.forecast(part.chain, part.users).ttft_s for part in shared)

    # ---- with a device more, with more memory, with a link more

    def with_device(self, device: int) -> Option | None:
        """The best plan that uses the device, too, for one user; otherwise this one with the device put in."""
        if self.one and self.exact:
            return self._of_chain(self.trips.best(using=device))
        return self._best([*self._inserted(device), *self._beside(device)])

    def _inserted(self, device: int) -> Iterator[list[Shared]]:
        """At every place of the slowest chain."""
        at = max(range(len(self.shared)), key=lambda i: self.problem.round_s(*_of(self.shared[i])))
        part = self.shared[at]
        base = [used for used, _, _ in part.chain]
        for place in range(len(base) + 1):
            order = [*base[:place], device, *base[place:]]
            chain = fixed_order(self.problem, order, part.users)
            if chain is not None:
                yield [*self.shared[:at], Shared(chain, part.users), *self.shared[at + 1 :]]

    def _beside(self, device: int) -> Iterator[list[Shared]]:
        """As one more chain, which takes users from the slowest chain."""
        at = max(range(len(self.shared)), key=lambda i: self.problem.round_s(*_of(self.shared[i])))
        part = self.shared[at]
        for moved in range(1, part.users):
            fewer = replace(part, users=part.users - moved)
            alone = Shared(((device, 0, self.problem.model.layers),), moved)
            yield [*self.shared[:at], fewer, *self.shared[at + 1 :], alone]

    def full(self) -> list[Full]:
        """Devices that are full, and would take a layer from a neighbour if they were not."""
        found = []
        for at, part in enumerate(self.shared):
            for index in range(len(part.chain)):
                options = [
                    Full(part.chain[index][0], part.chain[other][0], option.figure)
                    for other in (index - 1, index + 1)
                    if 0 <= other < len(part.chain)
                    and (option := self._with_memory(at, index, other)) is not None
                    and self.gain(option.figure) > WORTH_SAYING
                ]
                if options:
                    found.append(max(options, key=lambda full: self.gain(full.figure)))
        return found

    def _with_memory(self, at: int, index: int, other: int) -> Option | None:
        """The plan with a layer of a neighbour on a device that has no room for it; None if it has."""
        problem, part = self.problem, self.shared[at]
        device, first, end = part.chain[index]
        positions = problem.positions
        moved = list(part.chain)
        neighbour, low, high = part.chain[other]
        if other < index:
            first = positions[positions.index(first) - 1]
            moved[other] = (neighbour, low, first)
        else:
            end = positions[positions.index(end) + 1]
            moved[other] = (neighbour, end, high)
        moved[index] = (device, first, end)
        if moved[other][1] >= moved[other][2] or problem.costs[device].room[first, end]:
            return None
        candidate = problem.candidates[device]
        if candidate.profile is not None and candidate.profile.gpu is not None and not candidate.cpu_fallback:
            larger = replace(candidate, vram_bytes=1 << 50)
        else:
            larger = replace(candidate, memory_bytes=0)
        cost = replace(problem.costs[device], candidate=larger, _tables={})
        places = [Place(cost if used == device else problem.costs[used], a, b) for used, a, b in moved]
        found = chain_forecast(places, problem.network, problem.demand, part.users)
        if not 0 < found.token_s < 1e8:
            return None
        if self.one:
            return Option((), found.token_s)
        others = self.shared[:at] + self.shared[at + 1 :]
        return Option((), found.tokens_per_s + (self._figure(others) if others else 0.0))

    @cached_property
    def if_reached(self) -> Option | None:
        """A plan that would be possible if every link on which nobody answered were like the others."""
        problem = reachable(self.problem)
        if problem is None:
            return None
        other = Comparisons(problem, self.shared)
        found = good_plan(problem)
        return other._option(found) if found else None

    # ---- figures

    def _figure(self, shared: Sequence[Shared]) -> float:
        rounds = [(part.users, self.problem.round_s(part.chain, part.users)) for part in shared]
        return rounds[0][1] if self.one else sum(users / round_s for users, round_s in rounds)

    def _option(self, shared: Sequence[Shared]) -> Option | None:
        figure = self._figure(shared)
        return Option(tuple(shared), figure) if 0 < figure < np.inf else None

    def _of_chain(self, chain: Chain | None) -> Option | None:
        return None if chain is None else self._option([Shared(chain, self._users)])

    def _best(self, plans: Iterator[list[Shared]] | Sequence[list[Shared]]) -> Option | None:
        best = None
        for shared in plans:
            best = self._better(best, self._option(shared))
        return best

    def _better(self, one: Option | None, other: Option | None) -> Option | None:
        if one is None or other is None:
            return one or other
        return other if self.gain(other.figure) > self.gain(one.figure) else one

    def _pairs(self) -> Iterator[Chain]:
        """The best chain of each ordered pair of devices; of the first few where there are many."""
        count = min(self.problem.count, MOST_DEVICES)
        for a in range(count):
            for b in range(count):
                chain = fixed_order(self.problem, [a, b], self._users) if a != b else None
                if chain is not None:
                    yield chain


def _of(part: Shared) -> tuple[Chain, int]:
    return part.chain, part.users


def good_plan(problem: Problem) -> list[Shared]:
    """A good plan for comparison, soon found: the best for one user and few devices. Empty if none is found."""
    if problem.demand.users > 1:
        return search_chains(problem)
    chain = Trips(problem).best() if problem.count <= MOST_DEVICES else search_chain(problem)
    return [] if chain is None else [Shared(chain, 1)]


def reachable(problem: Problem) -> Problem | None:
    """The same problem where links on which nobody answered are as good as the middle one of the others.

    None if all links carry something.
    """
    network, stages = problem.network, [candidate.stage for candidate in problem.candidates]
    ways = [(a, b) for a in stages for b in stages if a != b]
    links = {way: network.link(*way) for way in ways}
    legs = [
        {stage: way.get(stage, FREE) for stage in stages} for way in (network.from_broker, network.to_broker)
    ]
    usable = sorted(
        (
            link
            for link in [*links.values(), *legs[0].values(), *legs[1].values()]
            if np.isfinite(link.one_way_s)
        ),
        key=lambda link: link.send_s(1_000_000),
    )
    if len(usable) == len(links) + 2 * len(stages):
        return None
    usual = usable[len(usable) // 2] if usable else FREE

    def mended(link: Link) -> Link:
        return link if np.isfinite(link.one_way_s) else usual

    whole = Network(
        {way: mended(link) for way, link in links.items()},
        *({stage: mended(link) for stage, link in leg.items()} for leg in legs),
    )
    return Problem(problem.model, problem.candidates, whole, problem.demand)
