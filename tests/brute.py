"""Plans by trying everything: every set, order, cut, partition and share of users. Slow, and plain enough to trust."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations

from potluck.planner.cost import Place, StageCost, chain_forecast
from potluck.planner.plan import Candidate, Demand, ModelShape, Network


class Brute:
    """The best figure for one problem: least seconds per token for one user, otherwise most tokens per second."""

    def __init__(
        self, model: ModelShape, candidates: Sequence[Candidate], network: Network, demand: Demand
    ) -> None:
        self.model, self.network, self.demand = model, network, demand
        self.costs = [StageCost(candidate, model, demand) for candidate in candidates]
        self._rounds: dict[tuple[frozenset[int], int], float] = {}

    def best(self) -> float | None:
        """None if nothing fits."""
        devices = range(len(self.costs))
        if self.demand.users == 1:
            rounds = [
                self.round_s(frozenset(subset), 1)
                for size in range(1, len(self.costs) + 1)
                for subset in combinations(devices, size)
            ]
            least = min(rounds)
            return least if least < 1e8 else None
        most = 0.0
        for sets in partitions(list(devices)):
            for users in shares(self.demand.users, self.demand.slots, len(sets)):
                rates = [
                    n / self.round_s(frozenset(subset), n) for subset, n in zip(sets, users, strict=True)
                ]
                if all(rate > 1e-7 for rate in rates):
                    most = max(most, sum(rates))
        return most or None

    def round_s(self, devices: frozenset[int], users: int) -> float:
        """The shortest round of a chain of exactly these devices."""
        key = (devices, users)
        if key not in self._rounds:
            self._rounds[key] = min(self._all_rounds(devices, users), default=1e9)
        return self._rounds[key]

    def _all_rounds(self, devices: frozenset[int], users: int) -> Iterator[float]:
        layers = self.model.layers
        cuts = sorted(cut for cut in self.model.cuts if 0 < cut < layers)
        for inner in combinations(cuts, len(devices) - 1):
            spans = list(pairwise((0, *inner, layers)))
            for order in permutations(sorted(devices)):
                if all(self.costs[d].room[a, b] for d, (a, b) in zip(order, spans, strict=True)):
                    places = [Place(self.costs[d], a, b) for d, (a, b) in zip(order, spans, strict=True)]
                    yield chain_forecast(places, self.network, self.demand, users).token_s


def partitions(devices: list[int]) -> Iterator[list[list[int]]]:
    """Every way to put some of the devices into groups."""
    if not devices:
        yield []
        return
    first, rest = devices[0], devices[1:]
    for groups in partitions(rest):
        yield groups  # left out
        yield [[first], *groups]
        for at in range(len(groups)):
            yield [*groups[:at], [first, *groups[at]], *groups[at + 1 :]]


def shares(users: int, slots: int, chains: int) -> Iterator[tuple[int, ...]]:
    """Every way to share all users out, each chain at least one; all chains full if there are more users than slots."""
    if chains == 0:
        return
    if users >= slots * chains:
        yield (slots,) * chains
        return
    if chains == 1:
        yield (users,)
        return
    for mine in range(1, min(slots, users - chains + 1) + 1):
        for rest in shares_exact(users - mine, slots, chains - 1):
            yield (mine, *rest)


def shares_exact(users: int, slots: int, chains: int) -> Iterator[tuple[int, ...]]:
    if chains == 1:
        if 1 <= users <= slots:
            yield (users,)
        return
    for mine in range(1, min(slots, users) + 1):
        for rest in shares_exact(users - mine, slots, chains - 1):
            yield (mine, *rest)
