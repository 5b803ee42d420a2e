"""A planning problem as arrays: what each device takes for any run of layers, and each link for a micro-batch. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from itertools import pairwise

import numpy as np

from potluck.planner.cost import Place, StageCost, batch_rows, chain_forecast, send_bytes
from potluck.planner.plan import FREE, Candidate, Demand, ModelShape, Network
from potluck.planner.sweep import Floats
from potluck.wire.forecast import ChainForecast

Chain = tuple[tuple[int, int, int], ...]
"""Device, first layer and end of each stage, in order."""


class Problem:
    """One model, the measured candidates in the order of their names, the network, and the demand."""

    def __init__(
        self, model: ModelShape, candidates: Sequence[Candidate], network: Network, demand: Demand
    ) -> None:
        self.model = model
        self.candidates = sorted(candidates, key=lambda c: (c.device, c.stage))
        self.network = network
        self.demand = demand
        self.costs = [StageCost(candidate, model, demand) for candidate in self.candidates]
        self._forecasts: dict[tuple[Chain, int], ChainForecast] = {}
        self.of_sizes = cache(self._of_sizes)

    @property
    def count(self) -> int:
        """Devices."""
        return len(self.candidates)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Where a stage may begin or end: 0, the allowed cuts, and the end."""
        layers = self.model.layers
        return (0, *sorted(cut for cut in self.model.cuts if 0 < cut < layers), layers)

    @cached_property
    def first(self) -> Floats:
        """float64[devices]: seconds from the broker."""
        legs = self.network.from_broker
        return np.array([legs.get(c.stage, FREE).one_way_s for c in self.candidates])

    @cached_property
    def last(self) -> Floats:
        """float64[devices]: seconds to the broker."""
        legs = self.network.to_broker
        return np.array([legs.get(c.stage, FREE).one_way_s for c in self.candidates])

    @cached_property
    def never_first(self) -> Floats:
        """float64[devices]: infinite for one that the broker does not reach, otherwise 0."""
        return np.where(np.isfinite(self.first), 0.0, np.inf)

    @cached_property
    def never_last(self) -> Floats:
        """float64[devices]: infinite for one that does not reach the broker, otherwise 0."""
        return np.where(np.isfinite(self.last), 0.0, np.inf)

    @cached_property
    def links(self) -> tuple[Floats, Floats]:
        """float64[devices, devices] each: seconds one way, infinite from a device to itself; seconds per byte."""
        one_way = np.full((self.count, self.count), np.inf)
        per_byte = np.zeros((self.count, self.count))
        for a, sender in enumerate(self.candidates):
            for b, receiver in enumerate(self.candidates):
                if a != b:
                    link = self.network.link(sender.stage, receiver.stage)
                    one_way[a, b], per_byte[a, b] = link.one_way_s, link.busy_s(1)
        return one_way, per_byte

    def decode(self, rows: int) -> list[Floats]:
        """Per device float64[positions, positions]: seconds of a micro-batch of so many rows."""
        if len(self.positions) == self.model.layers + 1:
            return [cost.decode(rows) for cost in self.costs]
        index = np.ix_(self.positions, self.positions)
        return [cost.decode(rows)[index] for cost in self.costs]

    def _of_sizes(self, sizes: tuple[int, ...]) -> Tables:
        return Tables(self, sizes)

    def sizes(self, users: int, stages: int) -> tuple[int, ...]:
        """Rows of the micro-batches, the largest first."""
        return batch_rows(users, stages)

    def places(self, chain: Chain) -> list[Place]:
        """The chain's stages with their costs."""
        return [Place(self.costs[device], first, end) for device, first, end in chain]

    def forecast(self, chain: Chain, users: int) -> ChainForecast:
        """What a chain does."""
        key = (chain, users)
        if key not in self._forecasts:
            self._forecasts[key] = chain_forecast(self.places(chain), self.network, self.demand, users)
        return self._forecasts[key]

    def round_s(self, chain: Chain, users: int) -> float:
        """Seconds for one token of each user; infinite where the chain can't be."""
        tables = self.of_sizes(self.sizes(users, len(chain)))
        at = {position: index for index, position in enumerate(self.positions)}
        spans = [(device, at[first], at[end]) for device, first, end in chain]
        trip_s = self.first[chain[0][0]] + self.last[chain[-1][0]]
        trip_s += sum(float(tables.largest[d][a, b]) for d, a, b in spans)
        trip_s += sum(float(tables.send[a[0], b[0]]) for a, b in pairwise(chain))
        busy = [float(tables.busy[d][a, b]) for d, a, b in spans]
        busy += [float(tables.link_busy[a[0], b[0]]) for a, b in pairwise(chain)]
        return float(max(trip_s, *busy))

    def chain(self, spans: Sequence[tuple[int, int, int]]) -> Chain:
        """Spans of positions as spans of layers."""
        return tuple((device, self.positions[a], self.positions[b]) for device, a, b in spans)


class Tables:
    """What micro-batches of these sizes cost: per device over positions, per link."""

    def __init__(self, problem: Problem, sizes: tuple[int, ...]) -> None:
        self.largest: list[Floats] = problem.decode(sizes[0])
        """Seconds of the largest micro-batch."""
        self.busy: list[Floats] = self.largest
        """Seconds of all of them."""
        if len(sizes) > 1:
            equal = sizes.count(sizes[0])
            self.busy = [equal * table for table in self.largest]
            if equal < len(sizes):
                rest = problem.decode(sizes[-1])
                self.busy = [table + rest[at] for at, table in enumerate(self.busy)]
        one_way, per_byte = problem.links
        self.send: Floats = one_way + per_byte * send_bytes(problem.model, problem.demand, sizes[0])
        self.link_busy: Floats = np.where(
            np.isfinite(one_way), per_byte * send_bytes(problem.model, problem.demand, sum(sizes)), np.inf
        )

    def within(self, limit: float, devices: Sequence[int] | None = None) -> tuple[list[Floats], Floats]:
        """`largest` and `send` of some devices, or all, infinite where that keeps something busy beyond the limit."""
        wanted = range(len(self.largest)) if devices is None else devices
        index = np.ix_(wanted, wanted)
        if limit == np.inf:
            return [self.largest[device] for device in wanted], self.send[index]
        steps = [np.where(self.busy[device] <= limit, self.largest[device], np.inf) for device in wanted]
        return steps, np.where(self.link_busy[index] <= limit, self.send[index], np.inf)
