"""Why a plan is as it is: which sentences are said, the most important first. Pure.

`comparisons` has the other plans and their figures, `words` how figures and names are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from potluck.planner.comparisons import Comparisons, Full, Option
from potluck.planner.cost import offered
from potluck.planner.exact import Shared
from potluck.planner.problem import Chain, Problem
from potluck.planner.refusal import need_bytes
from potluck.planner.tidy import alike
from potluck.planner.words import NAMED, counted, gb, listed, ms, ms_figure, per_s, route, seconds
from potluck.wire.forecast import ChainForecast, StageForecast

SLOW_LINK_SHARE = 0.25
"""A link is worth a sentence when a micro-batch spends this share of the time per token on it."""
ALL_THE_TIME = 0.99
MOST_NAMED = 4
NEARLY_ALL = 0.95
CLOSE = 0.02
"""Plans of another kind that are this close are compared by their first token, too."""
MOST_GROUPS = 3
"""Devices left out that get a sentence of their own; the rest shares one."""


def explain(problem: Problem, shared: Sequence[Shared]) -> list[str]:
    """The sentences for this plan."""
    talk = _Talk(Comparisons(problem, shared))
    sentences = (
        talk.what(),
        *talk.other_kinds(),
        *talk.shares(),
        *talk.even(),
        *talk.limit(),
        *talk.links(),
        *talk.left_out(),
    )
    return [sentence for sentence in sentences if sentence]


class _Talk:
    """One plan that is talked about."""

    def __init__(self, beside: Comparisons) -> None:
        self.beside = beside
        self.problem, self.shared, self.one = beside.problem, beside.shared, beside.one
        self._spoken_of: set[int] = set()
        """Devices left out of which a sentence has already said what a plan with them would do."""

    # ---- what it is, and what else there could be

    def what(self) -> str:
        """The decision."""
        if len(self.shared) > 1:
            return f"{self._chains(self.shared)}: {self._figure(self.beside.figure)}."
        (part,) = self.shared
        alone = " alone" if len(part.chain) == 1 else ""
        return f"{self._route(part.chain)}{alone}: {self._figure(self.beside.figure)}."

    def other_kinds(self) -> Iterator[str]:
        """One device alone, a split, fewer or more chains."""
        if len(self.shared) == 1 and len(self.shared[0].chain) == 1:
            yield self._splitting()
        else:
            yield self._alone()
        if len(self.shared) > 1:
            other = self.beside.one_chain
            if other is not None and len(other.shared[0].chain) > 1:
                chain = other.shared[0].chain
                comma = " of" if len(chain) > NAMED else ","
                yield f"One chain{comma} {self._route(chain)}, {self._would(other)}."
        elif not self.one:
            other = self.beside.several_chains
            if other is not None and self.beside.gain(other.figure) <= 0:
                yield f"{self._chains(other.shared)} {self._would(other)}."

    def _splitting(self) -> str:
        problem = self.problem
        if problem.count == 1 or problem.model.layers == 1:
            return ""
        split = self.beside.split
        if split is None:
            return "No split over several devices is possible." if self.beside.exact and self.one else ""
        (part,) = split.shared
        mine, theirs = self.beside.used, {device for device, _, _ in part.chain}
        others = theirs - mine
        if len(others) == 1:
            self._spoken_of |= others
        together = "both" if len(part.chain) == 2 else "all"
        who = f"{self._route(part.chain)}, " if mine - theirs or len(others) > 1 else ""
        who = who or f"a chain with {self._name(next(iter(others)))} "
        why = f", since each token passes {together} in turn" if self.one else ""
        worse = "slower" if self.beside.gain(split.figure) < -1e-3 else "no faster"
        return f"Splitting would be {worse}: {who}{self._would(split)}{why}."

    def _alone(self) -> str:
        single = self.beside.single
        if single is None:
            return self._needs()
        (part,) = single.shared
        ((device, first, end),) = part.chain
        cost = self.problem.costs[device]
        on_cpu = end - cost.gpu_layers(first, end)
        where = f", with {on_cpu} of its {end} layers on its CPU" if cost.profile.gpu and on_cpu else ""
        return f"{self._name(device)} alone {self._would(single)}{where}."

    def _needs(self) -> str:
        """Why no device alone is enough."""
        problem = self.problem
        need = need_bytes(problem)
        offers = [offered(candidate) for candidate in problem.candidates]
        if 0 in offers:
            return ""
        most = int(np.argmax(offers))
        if need > offers[most]:
            equals = sum(
                alike(problem.candidates[most], problem.candidates[other]) for other in range(problem.count)
            )
            largest = (
                f"none offers more than {gb(offers[most])}"
                if equals > 1
                else f"{self._name(most)}, which offers most, gives {gb(offers[most])}"
            )
            return f"No device can hold the model alone: it takes {gb(need)}, and {largest}."
        return f"No device can hold the model alone: it takes {gb(need)}, in pieces that do not fill what one gives."

    def shares(self) -> Iterator[str]:
        """Other shares of the users, where they would treat the slowest user much better."""
        fairer = self.beside.fairer if len(self.shared) > 1 else None
        if fairer is None:
            return
        changed = [
            (now, then)
            for now, then in zip(self.shared, fairer.shared, strict=True)
            if now.users != then.users
        ]
        who = listed([f"{then.users} users on {self._route(then.chain)}" for _, then in changed])
        yield (
            f"With {who} it would be {per_s(fairer.figure)} tokens/s, and {ms(self.beside.slowest_s(fairer.shared))} "
            f"per token for the slowest users instead of {ms_figure(self.beside.slowest_s(self.shared))}."
        )

    def even(self) -> Iterator[str]:
        """The same devices with equal numbers of layers."""
        even = self.beside.even if any(len(part.chain) > 1 for part in self.shared) else None
        if even is not None and self.beside.gain(even.figure) < -0.02:
            yield f"An even split over the same devices {self._would(even)}."

    # ---- what limits it

    def limit(self) -> Iterator[str]:
        """What a faster plan would need first: memory where that sets a cut, otherwise a device or a link."""
        full = self.beside.full()
        if full:
            yield self._full(full)
            return
        if all(len(part.chain) == 1 for part in self.shared):
            return
        forecasts = [self.problem.forecast(part.chain, part.users) for part in self.shared]
        stages = [stage for forecast in forecasts for stage in forecast.stages]
        if not self.one and len(stages) > 1 and min(stage.busy for stage in stages) >= NEARLY_ALL:
            everyone = "Both devices compute" if len(stages) == 2 else f"All {len(stages)} devices compute"
            yield f"{everyone} nearly all the time."
            return
        tireless = [str(stage.device) for stage in stages if stage.busy >= ALL_THE_TIME]
        if len(tireless) > MOST_NAMED:
            yield f"Limited by {len(tireless)} of the {len(stages)} devices, which compute all the time."
        elif tireless and len(self.shared) > 1:
            yield _tireless(tireless)
        else:
            yield self._slowest(max(forecasts, key=lambda forecast: forecast.token_s))

    def _slowest(self, forecast: ChainForecast) -> str:
        busiest = max(forecast.stages, key=lambda stage: stage.busy)
        if forecast.limit not in {stage.device for stage in forecast.stages}:
            return f"Limited by the link from {forecast.limit}."
        if busiest.busy >= ALL_THE_TIME:
            names = [str(stage.device) for stage in forecast.stages if stage.busy >= ALL_THE_TIME]
            return _tireless(names)
        computes = ms_figure(busiest.busy * forecast.token_s)
        return (
            f"Limited by {busiest.device}: it computes {computes} of the {ms(forecast.token_s)} of a token."
        )

    def _full(self, full: Sequence[Full]) -> str:
        """Memory that sets cuts."""
        if len(full) > 1:
            names = [self._name(one.device) for one in full]
            return f"{listed(names)} are full; with more memory they would take more layers, and the plan be faster."
        (one,) = full
        stage = self._stage(one.device)
        layers = next(
            end - first
            for part in self.shared
            for device, first, end in part.chain
            if device == one.neighbour
        )
        taken = stage.weights_bytes + stage.kv_bytes + stage.compute_bytes
        saving = abs(self.beside.figure - one.figure)
        gain = f"save {ms(saving)} per token" if self.one else f"give {per_s(saving)} tokens/s"
        return (
            f"{self._name(one.neighbour)} holds {counted(layers, 'layer')} only because "
            f"{self._name(one.device)} is full ({taken / 1e9:.1f} of {gb(stage.memory_bytes)}): "
            f"room for one more there would {gain}."
        )

    # ---- links

    def links(self) -> Iterator[str]:
        """Links that cost much, that the plan stays away from, and those on which nobody answered."""
        yield from [*self._slow_links(), *self._avoided()][:3]
        yield from self._silent()

    def _slow_links(self) -> Iterator[str]:
        problem = self.problem
        for part in self.shared:
            send = problem.of_sizes(problem.sizes(part.users, len(part.chain))).send
            round_s = problem.round_s(part.chain, part.users)
            for (a, *_), (b, *_) in pairwise(part.chain):
                if send[a, b] > SLOW_LINK_SHARE * round_s:
                    yield (
                        f"The link from {self._name(a)} to {self._name(b)} takes {ms_figure(send[a, b])} of the "
                        f"{ms(round_s)} of a token{self._rate_of(a, b)}."
                    )

    def _avoided(self) -> Iterator[str]:
        """The slowest link of a device in the plan that no chain goes over, if it is much slower than those in use."""
        problem, used = self.problem, self.beside.used
        gone = {(a[0], b[0]) for part in self.shared for a, b in pairwise(part.chain)}
        part = self.shared[0]
        send = problem.of_sizes(problem.sizes(part.users, max(2, len(part.chain)))).send
        finite = np.isfinite(send)
        typical = max((float(send[a, b]) for a, b in gone), default=0.0)
        slow = [
            (float(send[a, b]), a, b)
            for a in range(problem.count)
            for b in range(problem.count)
            if finite[a, b] and (a, b) not in gone and used & {a, b} and send[a, b] > max(2 * typical, 0.001)
        ]
        if slow and len(part.chain) > 1:
            cost, a, b = max(slow, key=lambda found: (found[0], -found[1], -found[2]))
            yield (
                f"The link from {self._name(a)} to {self._name(b)} is avoided: a micro-batch would take {ms(cost)} "
                f"on it{self._rate_of(a, b)}."
            )

    def _silent(self) -> Iterator[str]:
        """Links on which nobody answered."""
        problem = self.problem
        send, count = problem.of_sizes((1,)).send, problem.count
        dead = [(a, b) for a in range(count) for b in range(count) if a != b and np.isinf(send[a, b])]
        facts = []
        if dead:
            a, b = dead[0]
            if len(dead) == 1 or (len(dead) == 2 and dead[1] == (b, a)):
                way = "gets" if len(dead) == 1 else "gets through"
                ends = "from {} to {}" if len(dead) == 1 else "between {} and {}"
                facts.append(f"nothing {way} {ends.format(self._name(a), self._name(b))}")
            else:
                facts.append(
                    f"nothing gets through on {len(dead)} links between devices, such as from {self._name(a)} to "
                    f"{self._name(b)}"
                )
        for legs, words in (
            (problem.first, "from the broker to {}"),
            (problem.last, "from {} to the broker"),
        ):
            cut = [self._name(device) for device in range(count) if np.isinf(legs[device])]
            if cut:
                facts.append(f"nothing gets {words.format(listed(cut))}")
        if not facts:
            return
        text = listed(facts)
        better = self.beside.if_reached
        rest = "no chain goes that way"
        if better is not None and self.beside.gain(better.figure) > 1e-3:
            rest = f"this plan goes without; otherwise {self._figure(better.figure)} would be possible"
        yield f"{text[0].upper()}{text[1:]}: {rest}."

    # ---- devices left out

    def left_out(self) -> Iterator[str]:
        """Each device that is not used, those of one reason together."""
        grouped: dict[str, list[int]] = {}
        for device in range(self.problem.count):
            if device not in self.beside.used and device not in self._spoken_of:
                grouped.setdefault(self._why_not(device), []).append(device)
        for why, devices in list(grouped.items())[:MOST_GROUPS]:
            with_it = "with it" if len(devices) == 1 else "with any of them"
            yield f"{self._names(devices)} left out{why.format(with_it=with_it)}."
        rest = sorted(device for devices in list(grouped.values())[MOST_GROUPS:] for device in devices)
        if rest:
            them = "it" if len(rest) == 1 else "any of them"
            yield f"{self._names(rest)} left out: no better plan with {them} was found."

    def _why_not(self, device: int) -> str:
        problem, beside = self.problem, self.beside
        if not problem.costs[device].room.any():
            return f": {gb(offered(problem.candidates[device]))} are no room for a single layer"
        found = beside.with_device(device)
        if found is None:
            sure = "possible" if self.one and beside.exact else "found"
            return f": no plan {{with_it}} is {sure}"
        more = any(alike(problem.candidates[device], problem.candidates[other]) for other in beside.used)
        layer = self._seconds_per_layer(device)
        speed = "" if more or layer is None else f" ({ms(layer)} per layer)"
        with_it, without = self._short(found.figure), self._short(beside.figure)
        hop = "one more of the same only adds a hop: " if more and self.one else ""
        if with_it == without:
            return f"{speed}: {hop}{{with_it}} it would be {self._figure(found.figure)} as well"
        return f"{speed}: {hop}{{with_it}} {self._figure(found.figure)}, without {without}"

    def _seconds_per_layer(self, device: int) -> float | None:
        table = self.problem.costs[device].decode(1)
        layers = np.arange(len(table))
        spans = layers[None, :] - layers[:, None]
        finite = np.isfinite(table) & (spans > 0)
        return float((table[finite] / spans[finite]).min()) if finite.any() else None

    # ---- words

    def _short(self, figure: float) -> str:
        return ms_figure(figure) if self.one else per_s(figure)

    def _figure(self, figure: float) -> str:
        return f"{ms(figure)} per token" if self.one else f"{per_s(figure)} tokens/s"

    def _would(self, option: Option) -> str:
        """What another plan would do, and at the same rate what its users would wait."""
        if self.one:
            return f"would take {ms(option.figure)} per token"
        text = f"would make {per_s(option.figure)} tokens/s"
        theirs, mine = self.beside.ttft_s(option.shared), self.beside.ttft_s(self.shared)
        if abs(self.beside.gain(option.figure)) > CLOSE or abs(theirs - mine) < 0.1 * mine:
            return text
        return f"{text}, with the first token after {seconds(theirs)} instead of {seconds(mine)}"

    def _chains(self, shared: Sequence[Shared]) -> str:
        """`2 replicas (a for 4 users, b for 4)`."""
        alone = all(len(part.chain) == 1 for part in shared)
        kind = "replicas, each device with the whole model" if alone else "chains"
        if len(shared) > 4:
            least, *_, most = sorted(len(part.chain) for part in shared)
            size = f" of {least} devices" if least == most else f" of {least} to {most} devices"
            return (
                f"{len(shared)} {kind}{'' if alone else size}, for {sum(part.users for part in shared)} users"
            )
        first, *others = (f"{self._route(part.chain)} for {part.users}" for part in shared)
        plural = "user" if shared[0].users == 1 else "users"
        return f"{len(shared)} {kind} ({'; '.join([f'{first} {plural}', *others])})"

    def _route(self, chain: Chain) -> str:
        return route([self._name(device) for device, _, _ in chain])

    def _name(self, device: int) -> str:
        return str(self.problem.candidates[device].device)

    def _names(self, devices: Iterable[int]) -> str:
        return listed([self._name(device) for device in devices])

    def _stage(self, device: int) -> StageForecast:
        forecasts = [self.problem.forecast(part.chain, part.users) for part in self.shared]
        name = self.problem.candidates[device].stage
        return next(stage for found in forecasts for stage in found.stages if stage.stage == name)

    def _rate_of(self, a: int, b: int) -> str:
        candidates = self.problem.candidates
        rate = self.problem.network.link(candidates[a].stage, candidates[b].stage).bytes_per_s
        return f" ({8 * rate / 1e6:.3g} Mbit/s)" if rate > 0 else ""


def _tireless(names: Sequence[str]) -> str:
    does = "which computes" if len(names) == 1 else "which compute"
    return f"Limited by {listed(names)}, {does} all the time."


__all__ = ["explain"]
