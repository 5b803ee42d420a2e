"""Why a plan is as it is, in sentences with figures. Pure.

What is compared is computed with the same model of cost as the plan itself; numbers are rounded for people.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from potluck.planner.exact import MOST_DEVICES, Shared
from potluck.planner.problem import Chain, Problem
from potluck.planner.sweep import Floats
from potluck.wire.errors import Phase, PlanError

SLOW_LINK_SHARE = 0.25
"""A link is worth a sentence when a micro-batch spends this share of the time per token on it."""


@dataclass(frozen=True, slots=True)
class _Option:
    """Another plan, for comparison."""

    shared: tuple[Shared, ...]
    figure: float
    """Seconds per token for one user, otherwise tokens per second."""


def explain(problem: Problem, shared: Sequence[Shared]) -> list[str]:
    """The sentences, the most important first."""
    talk = _Talk(problem, shared)
    return [
        sentence
        for sentence in (
            talk.what(),
            *talk.against(),
            talk.limit(),
            *talk.links(),
            *talk.left_out(),
        )
        if sentence
    ]


class _Talk:
    """One plan that is talked about."""

    def __init__(self, problem: Problem, shared: Sequence[Shared]) -> None:
        self.problem = problem
        self.shared = list(shared)
        self.one = problem.demand.users == 1
        self.figure = self._figure(shared)
        self.used = {device for part in shared for device, _, _ in part.chain}
        self.single = self._single()

    # ---- sentences

    def what(self) -> str:
        """What the plan is."""
        names = [self._chain_names(part.chain) for part in self.shared]
        if len(self.shared) == 1:
            (part,) = self.shared
            if len(part.chain) == 1:
                return f"{names[0]} alone takes all {self.problem.model.layers} layers: {self._say(self.figure)}."
            return f"One chain, {names[0]}: {self._say(self.figure)}."
        alone = all(len(part.chain) == 1 for part in self.shared)
        kind = "replicas" if alone else "chains"
        listed = "; ".join(f"{name} for {part.users}" for name, part in zip(names, self.shared, strict=True))
        return f"{len(self.shared)} {kind} ({listed} users): {self._say(self.figure)}."

    def against(self) -> list[str]:
        """What plans of another kind would give."""
        problem, shared = self.problem, self.shared
        sentences: list[str] = []
        split = len(shared) > 1 or len(shared[0].chain) > 1
        if split and self.single is not None:
            name = self._chain_names(self.single.shared[0].chain)
            sentences.append(f"{name} alone: {self._say(self.single.figure)}.")
        elif split:
            sentences.append(self._needs())
        elif problem.count > 1:
            option = self._best_split()
            if option is None:
                sentences.append("No split over several devices is possible.")
            else:
                names = self._chain_names(option.shared[0].chain)
                worse = "slower for one user" if self.one else "slower"
                sentences.append(
                    f"Splitting would be {worse}: the best chain, {names}, {self._would(option.figure)}."
                )
        if len(shared) > 1:
            option = self._one_chain()
            if option is not None and len(option.shared[0].chain) > 1:
                names = self._chain_names(option.shared[0].chain)
                sentences.append(f"One chain, {names}, {self._would(option.figure)}.")
        even = self._even()
        if even is not None and split and self._worse(even.figure):
            sentences.append(f"An even split over the same devices {self._would(even.figure)}.")
        return sentences

    def limit(self) -> str:
        """What a faster plan would need first."""
        if self.problem.demand.users == 1 and len(self.shared[0].chain) == 1:
            return ""
        part = max(self.shared, key=lambda part: self.problem.round_s(part.chain, part.users))
        forecast = self.problem.forecast(part.chain, part.users)
        round_ms = _ms(forecast.token_s)
        if " to " in forecast.limit and forecast.limit not in {c.device for c in self.problem.candidates}:
            return f"Limited by the link from {forecast.limit}."
        slowest = max(forecast.stages, key=lambda stage: stage.busy)
        if len(part.chain) == 1:
            return ""
        return (
            f"Limited by {slowest.device}: it computes {_ms(slowest.busy * forecast.token_s)} of every {round_ms}"
            f" ({100 * slowest.busy:.0f} % busy)."
        )

    def links(self) -> list[str]:
        """Links that cost much, or that the plan stays away from."""
        problem = self.problem
        sentences: list[str] = []
        for part in self.shared:
            tables = problem.of_sizes(problem.sizes(part.users, len(part.chain)))
            round_s = problem.round_s(part.chain, part.users)
            for (a, *_), (b, *_) in pairwise(part.chain):
                if tables.send[a, b] > SLOW_LINK_SHARE * round_s:
                    sentences.append(
                        f"The link from {self._name(a)} to {self._name(b)} takes {_ms(tables.send[a, b])} of every "
                        f"{_ms(round_s)}{self._rate_of(a, b)}."
                    )
        avoided = self._avoided()
        if avoided is not None:
            sentences.append(avoided)
        return sentences[:3]

    def left_out(self) -> list[str]:
        """Each device that is not used, those of one reason together."""
        problem = self.problem
        out = [device for device in range(problem.count) if device not in self.used]
        grouped: dict[str, list[str]] = {}
        for device in out:
            grouped.setdefault(self._why_not(device, len(out)), []).append(self._name(device))
        return [f"{_listed(names)} left out: {why}." for why, names in grouped.items()]

    # ---- comparisons

    def _figure(self, shared: Sequence[Shared]) -> float:
        rounds = [(part.users, self.problem.round_s(part.chain, part.users)) for part in shared]
        return rounds[0][1] if self.one else sum(users / round_s for users, round_s in rounds)

    def _option(self, shared: Sequence[Shared]) -> _Option | None:
        figure = self._figure(shared)
        return _Option(tuple(shared), figure) if 0 < figure < np.inf else None

    def _single(self) -> _Option | None:
        """The best device alone, with as many users as it has slots for."""
        problem = self.problem
        users = min(problem.demand.users, problem.demand.slots)
        layers = problem.model.layers
        options = [
            option
            for device in range(problem.count)
            if (option := self._option([Shared(((device, 0, layers),), users)])) is not None
        ]
        return self._better(options)

    def _best_split(self) -> _Option | None:
        """The best single chain of two or more devices."""
        problem = self.problem
        users = min(problem.demand.users, problem.demand.slots)
        options = []
        for chain in _pairs(problem, users):
            option = self._option([Shared(chain, users)])
            if option is not None:
                options.append(option)
        return self._better(options)

    def _one_chain(self) -> _Option | None:
        """The best that a single chain does for all users, or as many as it has slots for."""
        problem = self.problem
        users = min(problem.demand.users, problem.demand.slots)
        options = [self.single] if self.single is not None else []
        for chain in _pairs(problem, users):
            option = self._option([Shared(chain, users)])
            if option is not None:
                options.append(option)
        return self._better(options)

    def _even(self) -> _Option | None:
        """The same devices in the same order, with the same number of layers each."""
        problem = self.problem
        shared = []
        for part in self.shared:
            bounds = [round(problem.model.layers * i / len(part.chain)) for i in range(len(part.chain) + 1)]
            if any(bound not in problem.positions for bound in bounds):
                return None
            chain = tuple(
                (device, a, b) for (device, _, _), (a, b) in zip(part.chain, pairwise(bounds), strict=True)
            )
            shared.append(Shared(chain, part.users))
        return self._option(shared)

    def _better(self, options: Sequence[_Option]) -> _Option | None:
        if not options:
            return None
        return min(options, key=lambda option: option.figure if self.one else -option.figure)

    def _worse(self, figure: float) -> bool:
        return figure > 1.02 * self.figure if self.one else figure < 0.98 * self.figure

    def _why_not(self, device: int, others: int) -> str:
        problem = self.problem
        if not problem.costs[device].room.any():
            return f"its {_gb(problem.candidates[device].memory_bytes)} have no room for a single layer"
        if problem.count > MOST_DEVICES or others > 4:
            return "no plan with it was better"
        layer = _seconds_per_layer(problem, device)
        forced = self._with(device)
        speed = f"{_ms(layer)} per layer; " if layer is not None else ""
        if forced is None:
            return f"{speed}no plan with it is possible"
        return f"{speed}with it {self._say(forced.figure)}, without it {self._say(self.figure)}"

    def _with(self, device: int) -> _Option | None:
        """The best plan that uses the device, beside those of the plan, in its chain."""
        problem = self.problem
        index = max(
            range(len(self.shared)),
            key=lambda at: problem.round_s(self.shared[at].chain, self.shared[at].users),
        )
        base = [d for d, _, _ in self.shared[index].chain]
        best = None
        for at in range(len(base) + 1):
            order = [*base[:at], device, *base[at:]]
            chain = _fixed_order(problem, order, self.shared[index].users)
            if chain is None:
                continue
            shared = list(self.shared)
            shared[index] = Shared(chain, self.shared[index].users)
            option = self._option(shared)
            if option is not None:
                best = option if best is None else self._better([best, option])
        return best

    def _avoided(self) -> str | None:
        """The slowest link that no chain goes over, if one that does would be slower by it."""
        problem = self.problem
        used = {(a[0], b[0]) for part in self.shared for a, b in pairwise(part.chain)}
        rows = problem.sizes(self.shared[0].users, max(2, len(self.shared[0].chain)))
        send = problem.of_sizes(rows).send
        typical = float(np.median(send[np.isfinite(send)])) if np.isfinite(send).any() else 0.0
        worst: tuple[float, int, int] | None = None
        for a in range(problem.count):
            for b in range(problem.count):
                if a == b or (a, b) in used:
                    continue
                cost = float(send[a, b])
                if cost > max(3 * typical, 0.001) and (worst is None or cost > worst[0]):
                    worst = cost, a, b
        if worst is None:
            return None
        cost, a, b = worst
        if not np.isfinite(cost):
            return f"No link from {self._name(a)} to {self._name(b)}: the plan goes without it."
        return (
            f"The link from {self._name(a)} to {self._name(b)} is avoided: a micro-batch would take {_ms(cost)}"
            f"{self._rate_of(a, b)}."
        )

    def _needs(self) -> str:
        """Why one device is not enough."""
        problem = self.problem
        need = _need_bytes(problem)
        most = max(candidate.memory_bytes + candidate.vram_bytes for candidate in problem.candidates)
        return (
            f"No device can hold the model alone: it needs {_gb(need)} with this context and these slots, "
            f"the largest offers {_gb(most)}."
        )

    # ---- words

    def _say(self, figure: float) -> str:
        return f"{_ms(figure)} per token" if self.one else f"{_rate(figure)} tokens/s"

    def _would(self, figure: float) -> str:
        return f"would take {_ms(figure)} per token" if self.one else f"would make {_rate(figure)} tokens/s"

    def _name(self, device: int) -> str:
        return str(self.problem.candidates[device].device)

    def _chain_names(self, chain: Chain) -> str:
        return " > ".join(self._name(device) for device, _, _ in chain)

    def _rate_of(self, a: int, b: int) -> str:
        candidates = self.problem.candidates
        rate = self.problem.network.link(candidates[a].stage, candidates[b].stage).bytes_per_s
        return f" at {8 * rate / 1e6:.0f} Mbit/s" if rate > 0 else ""


def too_little(problem: Problem) -> PlanError:
    """Why there is no plan."""
    need = _need_bytes(problem)
    offered = sum(candidate.memory_bytes + candidate.vram_bytes for candidate in problem.candidates)
    names = _listed([str(candidate.device) for candidate in problem.candidates])
    unlimited = any(candidate.memory_bytes == 0 for candidate in problem.candidates)
    if unlimited or need <= offered:
        return PlanError(
            f"{problem.model.name} can't be split over {names}: where it may be cut, the runs of layers do not fit.",
            hint="Give the devices more memory, use a shorter context or fewer slots, or add a device.",
            phase=Phase.PLAN,
            needed_bytes=need,
            offered_bytes=offered,
        )
    return PlanError(
        f"{problem.model.name} does not fit: it needs {_gb(need)} with {problem.demand.slots} slots of "
        f"{problem.demand.context_tokens} tokens, {names} offer {_gb(offered)}.",
        hint="Use a shorter context or fewer slots, a smaller quantization, or add a device.",
        phase=Phase.PLAN,
        needed_bytes=need,
        offered_bytes=offered,
    )


def _need_bytes(problem: Problem) -> int:
    """What the whole model takes on one device: the least of all devices' figures."""
    layers = problem.model.layers
    return min(
        sum(problem.model.layer_bytes)
        + problem.model.head_bytes
        + cost.kv_bytes * layers
        + cost.compute_bytes(layers)
        for cost in problem.costs
    )


def _seconds_per_layer(problem: Problem, device: int) -> float | None:
    table = problem.costs[device].decode(1)
    layers = np.arange(len(table))
    spans = layers[None, :] - layers[:, None]
    finite = np.isfinite(table) & (spans > 0)
    return float((table[finite] / spans[finite]).min()) if finite.any() else None


def _pairs(problem: Problem, users: int) -> list[Chain]:
    """The best chain of each ordered pair of devices, for comparisons; of the first few where there are many."""
    count = min(problem.count, MOST_DEVICES)
    chains = []
    for a in range(count):
        for b in range(count):
            if a != b:
                chain = _fixed_order(problem, [a, b], users)
                if chain is not None:
                    chains.append(chain)
    return chains


def _fixed_order(problem: Problem, order: Sequence[int], users: int) -> Chain | None:
    """The best chain of exactly these devices in this order."""
    tables = problem.of_sizes(problem.sizes(users, len(order)))
    by_trip = users == 1
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


def _ms(seconds: float) -> str:
    ms = 1000 * seconds
    return f"{ms:.0f} ms" if ms >= 20 else f"{ms:.1f} ms" if ms >= 1 else f"{ms:.2g} ms"


def _rate(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}" if rate >= 1 else f"{rate:.2g}"


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


__all__ = ["explain", "too_little"]
