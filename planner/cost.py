"""What layers cost a device: seconds from its profile, bytes from what llama.cpp took there. Pure.

`StageCost` answers for one candidate and any run of layers, `chain_forecast` for stages in order. All planners and all
predictions count with these two, so what is compared is always the same thing.

The model of a chain. n sequences decode; with S stages they travel in m = ceil(n / r) micro-batches of r = ceil(n / S)
rows, the last one of what is left. A sequence's next token can't leave before its last one is back (`trip_s`), a stage
and a link take one micro-batch at a time, so one token of each sequence takes

    round_s = max(trip_s of the largest micro-batch, the busiest stage's sum over all m, the busiest link's sum)

Sending overlaps computing. This is the bound for any pipeline that keeps one micro-batch per stage in flight. A link on
which nobody answered has an infinite one_way_s, and so has every chain that goes over it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from potluck.planner.plan import FREE, Candidate, Demand, Link, ModelShape, Network, StagePlan
from potluck.wire.forecast import ChainForecast, Forecast, StageForecast
from potluck.wire.ids import StageId
from potluck.wire.measures import Profile, Speed, Timing, seconds_at

SKIPPED = 0.7
"""Of the model's last layer, the share that is not computed for a row of a prompt that wants no result: llama.cpp drops
these rows after that layer's attention. Measured on a CPU with llama.cpp's own decode.
"""

Table = NDArray[np.float64]
"""float64[layers + 1, layers + 1]: a figure for the layers [first, end); infinite where they can't be held."""
Layers = NDArray[np.intp]
"""First layers or ends of runs, of any shape."""


def time_at(timings: Sequence[Timing], rows: int, context_tokens: int) -> float:
    """Seconds at this size and context: between two measured ones in proportion, beyond them as the last two say."""
    by_rows: dict[int, dict[int, float]] = {}
    for timing in timings:
        by_rows.setdefault(timing.rows, {})[timing.context_tokens] = timing.seconds
    points = {size: seconds_at(found, context_tokens) for size, found in by_rows.items()}
    return seconds_at(points, rows) if points else 0.0


def offered(candidate: Candidate) -> int:
    """Bytes that layers may take there: memory and its GPU's, or only its GPU's where the CPU may not compute.

    0 where the memory is not known, and then limits nothing.
    """
    if candidate.profile is None or candidate.profile.gpu is None:
        return candidate.memory_bytes
    if not candidate.cpu_fallback:
        return candidate.vram_bytes
    return candidate.memory_bytes + candidate.vram_bytes if candidate.memory_bytes else 0


@dataclass(frozen=True)
class StageCost:
    """One candidate with a profile, at one model and demand. Layers [first, end) throughout."""

    candidate: Candidate
    model: ModelShape
    demand: Demand
    _tables: dict[tuple[str, int], Table] = field(default_factory=dict, repr=False, compare=False)
    _singles: dict[tuple[int, int, int], float] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def profile(self) -> Profile:
        """The candidate's. Raises ValueError for one that was not measured."""
        if self.candidate.profile is None:
            raise ValueError(f"{self.candidate.device} has no profile")
        return self.candidate.profile

    # ---- memory

    @cached_property
    def kv_bytes(self) -> int:
        """Of one layer, at the demand's slots and context."""
        measured = self.profile
        cells = self.demand.slots * self.demand.context_tokens
        return round(measured.kv_bytes * cells / (measured.slots * measured.context_tokens))

    def compute_bytes(self, end: int) -> int:
        """Buffers besides weights and cache."""
        return self.profile.head_compute_bytes if end == self.model.layers else self.profile.compute_bytes

    def needed_bytes(self, first: int, end: int) -> int:
        """Weights, cache and compute buffers of these layers, of its memory and its GPU's together."""
        return int(self._prefix_bytes[end] - self._prefix_bytes[first]) + int(self._other_bytes[end])

    @cached_property
    def _prefix_bytes(self) -> NDArray[np.int64]:
        """int64[layers + 1]: weights and cache of the layers before each."""
        share = 1.0 + self.profile.extra_weight_share
        per_layer = np.asarray(self.model.layer_bytes, np.float64) * share + self.kv_bytes
        return np.concatenate([[0], np.cumsum(per_layer)]).astype(np.int64)

    def _head_bytes(self, end: int) -> int:
        return self.model.head_bytes if end == self.model.layers else 0

    @cached_property
    def _other_bytes(self) -> NDArray[np.int64]:
        """int64[layers + 1]: for layers that end there, the head and the buffers."""
        ends = range(self.model.layers + 1)
        return np.array([self._head_bytes(end) + self.compute_bytes(end) for end in ends], np.int64)

    @cached_property
    def _gpu_starts(self) -> NDArray[np.intp]:
        """intp[layers + 1]: for layers that end there, the first one for which the GPU still has room."""
        ends = range(self.model.layers + 1)
        if self.profile.gpu is None:
            return np.arange(self.model.layers + 1, dtype=np.intp)
        starts = []
        for end in ends:
            room = self.candidate.vram_bytes - int(self._other_bytes[end])
            least = int(self._prefix_bytes[end]) - room
            starts.append(min(end, int(np.searchsorted(self._prefix_bytes, least))) if room >= 0 else end)
        return np.array(starts, np.intp)

    def gpu_layers(self, first: int, end: int) -> int:
        """How many of the layers, the last ones, the GPU takes."""
        return end - max(first, int(self._gpu_starts[end]))

    @cached_property
    def room(self) -> NDArray[np.bool_]:
        """bool[layers + 1, layers + 1]: whether it can hold them, and may be cut there."""
        return self._fits(*self._runs())

    def _fits(self, first: Layers, end: Layers) -> NDArray[np.bool_]:
        """For each run of layers whether it can hold it, and may be cut there."""
        split = np.maximum(first, self._gpu_starts[end])
        ram = self._prefix_bytes[split] - self._prefix_bytes[first]
        ram = ram + np.where(end > split, 0, self._other_bytes[end])
        fits = (first < end) & self._allowed[first] & self._allowed[end]
        if self.candidate.memory_bytes > 0:
            fits = fits & (ram <= self.candidate.memory_bytes)
        if self.profile.gpu is not None and not self.candidate.cpu_fallback:
            fits = fits & (split == first)
        return np.asarray(fits)

    @cached_property
    def _allowed(self) -> NDArray[np.bool_]:
        """bool[layers + 1]: where the model may be cut."""
        cuts = {0, self.model.layers, *self.model.cuts}
        return np.array([layer in cuts for layer in range(self.model.layers + 1)])

    def _runs(self) -> tuple[Layers, Layers]:
        """intp[layers + 1, layers + 1] each: first layer and end of every run."""
        size = np.arange(self.model.layers + 1)
        first, end = np.meshgrid(size, size, indexing="ij")
        return first, end

    # ---- time

    def decode(self, rows: int) -> Table:
        """Seconds of a decode micro-batch of `rows` sequences. Source: the profile, at the demand's `held_tokens`."""
        return self._table("decode", rows)

    def decode_s(self, rows: int, first: int, end: int) -> float:
        """What `decode` says of one run of layers, for callers that need no others: no table is made."""
        found = self._singles.get((rows, first, end))
        if found is None:
            seconds = self._seconds("decode", rows, np.asarray(first), np.asarray(end))
            found = self._singles[rows, first, end] = float(seconds)
        return found

    def prefill(self, rows: int) -> Table:
        """Seconds of a chunk of `rows` tokens in the middle of the demand's prompt; the head for one of them.

        The others want no result, so the model's last layer is cheaper by `SKIPPED` of it for each.
        """
        return self._table("prefill", rows)

    def _table(self, kind: str, rows: int) -> Table:
        found = self._tables.get((kind, rows))
        if found is None:
            found = self._tables[kind, rows] = self._seconds(kind, rows, *self._runs())
        return found

    def _seconds(self, kind: str, rows: int, first: Layers, end: Layers) -> NDArray[np.float64]:
        """For each run of layers the seconds of a micro-batch; infinite where it can't be held."""
        cpu, gpu = self.profile.cpu, self.profile.gpu
        split = np.maximum(first, self._gpu_starts[end])
        on_gpu, has_cpu = end > split, split > first
        seconds = np.zeros(first.shape)
        for speed, low, high, used in ((cpu, first, split, has_cpu), (gpu, split, end, on_gpu)):
            if speed is None:
                seconds = np.where(used, np.inf, seconds)
                continue
            prefix = self._prefix_s(speed, kind, rows)
            seconds = seconds + np.where(used, prefix[high] - prefix[low] + speed.call_s, 0.0)
        results = rows if kind == "decode" else 1
        head = [0.0 if speed is None else time_at(speed.head, results, 0) for speed in (cpu, gpu)]
        look_up = rows * max((speed.embedding_s for speed in (cpu, gpu) if speed is not None), default=0.0)
        seconds = seconds + np.where(end == self.model.layers, np.where(on_gpu, head[1], head[0]), 0.0)
        seconds = seconds + np.where(first == 0, look_up, 0.0)
        if kind == "prefill":
            last = [0.0 if speed is None else self._last_layer_s(speed, rows) for speed in (cpu, gpu)]
            saved = SKIPPED * (rows - 1) / rows
            skipped = saved * np.where(on_gpu, last[1], last[0])
            seconds = seconds - np.where(end == self.model.layers, skipped, 0.0)
        return np.where(self._fits(first, end), seconds * self.candidate.slowdown, np.inf)

    def _last_layer_s(self, speed: Speed, rows: int) -> float:
        """Seconds of a chunk in the model's last layer, if all its rows go through it."""
        prefix = self._prefix_s(speed, "prefill", rows)
        return float(prefix[-1] - prefix[-2])

    def _prefix_s(self, speed: Speed, kind: str, rows: int) -> Table:
        """float64[layers + 1]: seconds of the layers before each; a layer counts by its share of the bytes."""
        if kind == "decode":
            layer_s = time_at(speed.decode, rows, self.demand.held_tokens)
        else:
            layer_s = time_at(speed.prefill, rows, self.demand.prompt_tokens // 2)
        usual = speed.layer_bytes
        shares = (
            np.asarray(self.model.layer_bytes, np.float64) / usual if usual else np.ones(self.model.layers)
        )
        return np.concatenate([[0.0], np.cumsum(layer_s * shares)])


@dataclass(frozen=True, slots=True)
class Place:
    """A stage of a chain, with what it costs."""

    cost: StageCost
    first: int
    end: int

    def plan(self) -> StagePlan:
        """As it is assigned."""
        candidate = self.cost.candidate
        return StagePlan(
            candidate.stage,
            candidate.device,
            self.first,
            self.end,
            self.cost.gpu_layers(self.first, self.end),
        )


def batch_rows(users: int, stages: int) -> tuple[int, ...]:
    """Rows of the micro-batches in which `users` sequences travel down `stages` stages, the largest first."""
    rows = -(-users // stages)
    full, rest = divmod(users, rows)
    return (rows,) * full + ((rest,) if rest else ())


def send_bytes(model: ModelShape, demand: Demand, rows: int) -> int:
    """Bytes of the activations of `rows` tokens between two stages."""
    return rows * model.width * demand.value_bytes


def chain_forecast(places: Sequence[Place], network: Network, demand: Demand, users: int) -> ChainForecast:
    """What a chain does with `users` sequences at the same time. Infinite seconds where it can't hold its layers."""
    model = places[0].cost.model
    sizes = batch_rows(users, len(places))
    links = _links(places, network)
    busy = [sum(float(p.cost.decode(rows)[p.first, p.end]) for rows in sizes) for p in places]
    link_busy = [sum(link.busy_s(send_bytes(model, demand, rows)) for rows in sizes) for link in links]
    largest = [float(p.cost.decode(sizes[0])[p.first, p.end]) for p in places]
    sends = [link.send_s(send_bytes(model, demand, sizes[0])) for link in links]
    ends = _broker_legs(places, network)
    trip_s = sum(largest) + sum(sends) + sum(ends)
    round_s = max(trip_s, *busy, *link_busy)
    names = [str(place.cost.candidate.device) for place in places]
    slowest = max(range(len(places)), key=lambda index: busy[index])
    limit = names[slowest]
    if link_busy and max(link_busy) > busy[slowest]:
        index = max(range(len(links)), key=lambda at: link_busy[at])
        limit = f"{names[index]} to {names[index + 1]}"
    return ChainForecast(
        users=users,
        rows=sizes[0],
        token_s=_finite(round_s),
        tokens_per_s=users / round_s if 0 < round_s < np.inf else 0.0,
        ttft_s=_finite(_ttft_s(places, links, ends, demand)),
        bubble=_share(1.0 - busy[slowest] / round_s) if 0 < round_s < np.inf else 0.0,
        limit=limit,
        stages=tuple(
            _stage_forecast(place, largest[index], [*sends, ends[1]][index], busy[index] / round_s, demand)
            for index, place in enumerate(places)
        ),
    )


def plan_forecast(chains: Sequence[ChainForecast], demand: Demand) -> Forecast:
    """All chains together."""
    users = sum(chain.users for chain in chains)
    return Forecast(
        users=users,
        token_s=sum(chain.token_s * chain.users for chain in chains) / max(1, users),
        tokens_per_s=sum(chain.tokens_per_s for chain in chains),
        ttft_s=max(chain.ttft_s for chain in chains),
        prompt_tokens=demand.prompt_tokens,
        chains=tuple(chains),
    )


def _links(places: Sequence[Place], network: Network) -> list[Link]:
    ids: Iterable[tuple[StageId, StageId]] = pairwise(place.cost.candidate.stage for place in places)
    return [network.link(a, b) for a, b in ids]


def _broker_legs(places: Sequence[Place], network: Network) -> tuple[float, float]:
    """Seconds from the broker to the first stage and back from the last one. Tokens are a few bytes."""
    first, last = places[0].cost.candidate.stage, places[-1].cost.candidate.stage
    return (
        network.from_broker.get(first, FREE).one_way_s,
        network.to_broker.get(last, FREE).one_way_s,
    )


def _ttft_s(
    places: Sequence[Place], links: Sequence[Link], ends: tuple[float, float], demand: Demand
) -> float:
    """The prompt's chunks follow one another: all stages once, and the slowest one for every further chunk."""
    model = places[0].cost.model
    rows = min(demand.chunk_tokens, demand.prompt_tokens)
    chunks = -(-demand.prompt_tokens // rows)
    count = send_bytes(model, demand, rows)
    stages = [float(place.cost.prefill(rows)[place.first, place.end]) for place in places]
    slowest = max([*stages, *(link.busy_s(count) for link in links)])
    return sum(stages) + sum(link.send_s(count) for link in links) + sum(ends) + (chunks - 1) * slowest


def _stage_forecast(
    place: Place, decode_s: float, send_s: float, busy: float, demand: Demand
) -> StageForecast:
    cost, first, end = place.cost, place.first, place.end
    rows = min(demand.chunk_tokens, demand.prompt_tokens)
    weights = sum(cost.model.layer_bytes[first:end]) * (1.0 + cost.profile.extra_weight_share)
    return StageForecast(
        stage=cost.candidate.stage,
        device=cost.candidate.device,
        first=first,
        end=end,
        gpu_layers=cost.gpu_layers(first, end),
        decode_s=_finite(decode_s),
        prefill_s=_finite(float(cost.prefill(rows)[first, end])),
        send_s=_finite(send_s),
        busy=_share(busy) if busy < np.inf else 0.0,
        weights_bytes=round(weights) + (cost.model.head_bytes if end == cost.model.layers else 0),
        kv_bytes=cost.kv_bytes * (end - first),
        compute_bytes=cost.compute_bytes(end),
        memory_bytes=offered(cost.candidate),
    )


def _finite(seconds: float) -> float:
    """As it travels: 1e9 s stands for never."""
    return min(seconds, 1e9)


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))
