"""Good plans of several chains for tens of devices: which device is in which chain, and who serves how many. Pure.

Devices are dealt out in a few ways for each number of chains. The best of these plans are then changed step by step:
devices change places or leave, users go to another chain, chains are split and joined; what is better stays. The steps
are drawn from a fixed sequence and their work is counted, so the same question always gets the same answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from potluck.planner.exact import Shared
from potluck.planner.problem import Chain, Problem
from potluck.planner.search import FEWER, Found, Orders, search_one, shorter

WORK = 40
"""Devices that chains are tried over while a plan is improved, for each pair of devices that there is."""
MOST_WORK = 6000
TOLERANCE = 0.02
"""The share by which a step may be worse at first: a way out of plans that no single step improves."""
PATIENT_BELOW = 17
"""Devices for which the work is enough to try worse steps, too."""
PATIENCE = 400
"""Steps without gain after which no more are tried."""
STARTS = 2
"""Plans that are improved, each with another number of chains."""

Group = frozenset[int]
Plan = dict[Group, int]
"""Users by the devices of each chain."""


def search_chains(problem: Problem, work: int | None = None) -> list[Shared]:
    """Chains that together make many tokens per second; none if none is found. `work`: see WORK."""
    search = _Search(problem)
    plans = [plan for count in search.counts() for plan in search.dealt(count)]
    one = search_one(problem, min(problem.demand.users, problem.demand.slots), 20)
    if one is not None:
        plans.append(search.of_chain(one))
    plans.append(search.replicas())
    of_counts: dict[int, Plan] = {}
    for plan in plans:
        if plan and search.rate(plan) > search.rate(of_counts.get(len(plan), {})):
            of_counts[len(plan)] = plan
    best = sorted(of_counts.values(), key=lambda plan: (-search.rate(plan), len(plan)))[:STARTS]
    work = min(MOST_WORK, WORK * problem.count**2) if work is None else work
    improved = [search.improved(plan, work // len(best)) for plan in best]
    return search.shared(max(improved, key=search.rate)) if improved else []


def search_count(problem: Problem, count: int) -> list[Shared] | None:
    """A plan of so many chains, dealt out and not improved; None if there is none."""
    search = _Search(problem)
    plans = [plan for plan in search.dealt(count) if search.rate(plan) > 0]
    return search.shared(max(plans, key=search.rate)) if plans else None


class _Dice:
    """Numbers that are always the same: a linear congruential generator with Knuth's constants for 64 bits."""

    def __init__(self) -> None:
        self._state = 1

    def below(self, count: int) -> int:
        """One of 0 to count - 1."""
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        return (self._state >> 33) % count


class _Search:
    """Chains of groups of devices, each computed once."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._orders = problem, Orders(problem)
        self._found: dict[tuple[Group, int], Found | None] = {}
        self._work = 0
        """Devices that chains were tried over."""

    def counts(self) -> list[int]:
        """Numbers of chains to try."""
        most = min(self._problem.count, self._problem.demand.users)
        usual = (1, 2, 3, 4, 5, 6, 8, 11, 16, 22, 32, 45)
        least = -(-self._problem.demand.users // self._problem.demand.slots)
        return sorted({count for count in (*usual, least, most) if count <= most})

    def served(self, chains: int) -> int:
        """Users of so many chains."""
        return min(self._problem.demand.users, self._problem.demand.slots * chains)

    def dealt(self, count: int) -> Iterator[Plan]:
        """The devices in so many groups: fastest first, to and fro; neighbours in speed; or equal room."""
        devices = [d for d in self._orders.by_speed if np.isfinite(self._orders.seconds[d])]
        if len(devices) < count:
            return
        groups: list[list[int]] = [[] for _ in range(count)]
        for index, device in enumerate(devices):
            turn, at = divmod(index, count)
            groups[at if turn % 2 == 0 else count - 1 - at].append(device)
        blocks = [devices[len(devices) * i // count : len(devices) * (i + 1) // count] for i in range(count)]
        users = self.served(count)
        for way in (groups, blocks, self._by_room(devices, count)) if count > 1 else (groups,):
            yield {
                frozenset(group): users // count + (index < users % count) for index, group in enumerate(way)
            }

    def replicas(self) -> Plan:
        """Each chain one device, with the best shares of the users."""
        problem = self._problem
        layers, slots = problem.model.layers, problem.demand.slots
        most = min(slots, problem.demand.users)
        alone = [d for d in range(problem.count) if np.isfinite(problem.round_s(((d, 0, layers),), 1))]
        if not alone:
            return {}
        rates = np.array(
            [[n / problem.round_s(((d, 0, layers),), n) for n in range(1, most + 1)] for d in alone]
        )
        users = self.served(len(alone))
        total = np.full(users + 1, -np.inf)
        total[0] = 0.0
        choices = []
        for device_rates in rates:
            offers = np.full((len(device_rates) + 1, users + 1), -np.inf)
            offers[0] = total
            for count, rate in enumerate(device_rates[:users], 1):
                offers[count, count:] = total[: users + 1 - count] + rate
            choices.append(offers.argmax(axis=0))
            total = offers.max(axis=0)
        plan: Plan = {}
        for device, choice in zip(reversed(alone), reversed(choices), strict=True):
            mine = int(choice[users])
            if mine:
                plan[frozenset([device])] = mine
                users -= mine
        return plan

    def _by_room(self, devices: list[int], count: int) -> list[list[int]]:
        """Each device, those with most room first, where the least room is."""
        groups: list[list[int]] = [[] for _ in range(count)]
        room = [0] * count
        for device in sorted(devices, key=lambda device: -self._most_layers[device]):
            at = room.index(min(room))
            groups[at].append(device)
            room[at] += self._most_layers[device]
        return groups

    @cached_property
    def _most_layers(self) -> list[int]:
        """Of each device, the layers that it has room for at the model's beginning."""
        return [int(cost.room[0].sum()) for cost in self._problem.costs]

    # ---- figures

    def of_chain(self, chain: Chain) -> Plan:
        """One chain that was found elsewhere, perhaps in an order that is not tried here."""
        users = self.served(1)
        group = frozenset(device for device, _, _ in chain)
        self._found[group, users] = Found(chain, self._problem.round_s(chain, users))
        return {group: users}

    def chain(self, group: Group, users: int) -> Found | None:
        """A good chain over some devices of a group."""
        key = (group, users)
        if key not in self._found:
            self._found[key] = self._chain(group, users)
        return self._found[key]

    def _chain(self, group: Group, users: int) -> Found | None:
        if users == 0 or not group:
            return None
        self._work += 2 + len(group)
        if len(group) == 1:
            (device,) = group
            alone = ((device, 0, self._problem.model.layers),)
            round_s = self._problem.round_s(alone, users)
            return Found(alone, round_s) if np.isfinite(round_s) else None
        by_speed = sorted(group, key=lambda device: (self._orders.seconds[device], device))
        best = self._orders.best(self._orders.nearest(by_speed, by_speed[0]), users, len(group))
        if best is None:
            self._work += len(group)
            best = self._orders.best(by_speed[::-1], users)
        return best

    def rate(self, plan: Plan) -> float:
        """Tokens per second; 0 if a group has no chain."""
        rate = 0.0
        for group, users in plan.items():
            found = self.chain(group, users)
            if found is None:
                return 0.0
            rate += users / found.round_s
        return rate

    def shared(self, plan: Plan) -> list[Shared]:
        """The chains, each tried in a few more orders."""
        parts = []
        for group, users in plan.items():
            found = self.chain(group, users)
            assert found is not None, "a plan with a rate has its chains"
            if len(group) > 1:
                for order in list(self._orders.starts(sorted(group)))[:3]:
                    found = shorter(found, self._orders.best(order, users, len(found.chain))) or found
                if len(found.chain) > 1 and len(plan) <= 4:
                    found = self._orders.improved(found, users, 30, ())
            parts.append(Shared(found.chain, users))
        return parts

    # ---- steps

    def improved(self, plan: Plan, work: int) -> Plan:
        """After as many steps as the work allows."""
        dice, begun = _Dice(), self._work
        plan = self._settled(plan)
        rate = self.rate(plan)
        tolerance = TOLERANCE if self._problem.count < PATIENT_BELOW else 0.0
        best, best_rate = plan, rate
        idle = 0
        pairs = (self._exchange, self._move, self._users)
        kinds = (*pairs, *pairs, self._split, self._join)
        while self._work < begun + work and idle < PATIENCE:
            idle += 1
            self._work += 1
            tried = kinds[dice.below(len(kinds))](plan, dice)
            if tried is None:
                continue
            gone = [group for group in plan if tried.get(group) != plan[group]]
            came = [group for group in tried if plan.get(group) != tried[group]]
            found = [self.chain(group, tried[group]) for group in came]
            if any(one is None for one in found):
                continue
            before = sum(self._rate_of(group, plan[group]) for group in gone)
            after = sum(self._rate_of(group, tried[group]) for group in came)
            allowed = tolerance * max(0.0, 1.0 - 1.5 * (self._work - begun) / work)
            if after > before + rate * (FEWER if allowed == 0 else -allowed):
                plan, rate = self._settled(tried), rate + after - before
                if rate > best_rate * (1.0 + FEWER):
                    best, best_rate, idle = plan, rate, 0
        return best

    def _settled(self, plan: Plan) -> Plan:
        """The same chains; devices that they do without are not theirs any more."""
        settled: Plan = {}
        for group, users in plan.items():
            used, found = frozenset(self._used(group, users)), self.chain(group, users)
            self._found[used, users] = shorter(self._found.get((used, users)), found)
            settled[used] = users
        return settled

    def _rate_of(self, group: Group, users: int) -> float:
        found = self.chain(group, users)
        return users / found.round_s if found is not None else 0.0

    def _spare(self, plan: Plan) -> list[int]:
        """Devices that no chain uses, those that could be of use."""
        used = {d for group, users in plan.items() for d in self._used(group, users)}
        return [
            d for d in range(self._problem.count) if d not in used and np.isfinite(self._orders.seconds[d])
        ]

    def _used(self, group: Group, users: int) -> list[int]:
        found = self.chain(group, users)
        return [] if found is None else [device for device, _, _ in found.chain]

    def _exchange(self, plan: Plan, dice: _Dice) -> Plan | None:
        """A device of a chain and one of another, or a spare one."""
        groups = list(plan)
        a = groups[dice.below(len(groups))]
        mine = sorted(self._used(a, plan[a]))
        spare = self._spare(plan)
        at = dice.below(len(groups) + (1 if spare else 0))
        b = groups[at] if at < len(groups) else None
        theirs = spare if b is None else sorted(self._used(b, plan[b]))
        if b == a:
            return None
        x, y = mine[dice.below(len(mine))], theirs[dice.below(len(theirs))]
        changes = {a: frozenset(mine) - {x} | {y}}
        if b is not None:
            changes[b] = frozenset(theirs) - {y} | {x}
        return _changed(plan, changes)

    def _move(self, plan: Plan, dice: _Dice) -> Plan | None:
        """A device leaves its chain for another one, or for good; or a spare one comes."""
        groups = list(plan)
        spare = self._spare(plan)
        to = groups[dice.below(len(groups))]
        if spare and dice.below(2):
            device = spare[dice.below(len(spare))]
            return _changed(plan, {to: frozenset(self._used(to, plan[to])) | {device}})
        source = groups[dice.below(len(groups))]
        mine = sorted(self._used(source, plan[source]))
        if len(mine) == 1:
            return None
        device = mine[dice.below(len(mine))]
        changes = {source: frozenset(mine) - {device}}
        if to != source:
            changes[to] = frozenset(self._used(to, plan[to])) | {device}
        return _changed(plan, changes)

    def _users(self, plan: Plan, dice: _Dice) -> Plan | None:
        """Some users go to another chain."""
        groups = list(plan)
        a, b = groups[dice.below(len(groups))], groups[dice.below(len(groups))]
        moved = 1 + dice.below(max(1, plan[a] // 2))
        if a == b or plan[b] + moved > self._problem.demand.slots or plan[a] < moved:
            return None
        tried = dict(plan)
        tried[a], tried[b] = plan[a] - moved, plan[b] + moved
        if tried[a] == 0:
            del tried[a]
        return tried

    def _split(self, plan: Plan, dice: _Dice) -> Plan | None:
        """A chain becomes two; or a spare device that can hold everything becomes one."""
        groups = list(plan)
        a = groups[dice.below(len(groups))]
        mine = sorted(self._used(a, plan[a]), key=lambda device: (self._orders.seconds[device], device))
        users = self.served(len(plan) + 1) - sum(plan.values()) + plan[a]
        share = users // 2
        if share == 0 or users - share > self._problem.demand.slots:
            return None
        spare = self._spare(plan)
        if spare and dice.below(2):
            mine = sorted(
                [*mine, *spare[: len(mine) + 1]], key=lambda device: (self._most_layers[device], device)
            )
            spare = [device for device in spare if device not in mine]
        if spare and dice.below(3) == 0:
            halves = (mine, [spare[dice.below(len(spare))]])
        else:
            halves = (
                (mine[::2], mine[1::2]) if dice.below(2) else (mine[: len(mine) // 2], mine[len(mine) // 2 :])
            )
        if not halves[0] or not halves[1]:
            return None
        tried = {group: count for group, count in plan.items() if group != a}
        tried[frozenset(halves[0])] = users - share
        tried[frozenset(halves[1])] = share
        return tried

    def _join(self, plan: Plan, dice: _Dice) -> Plan | None:
        """Two chains become one."""
        groups = list(plan)
        a, b = groups[dice.below(len(groups))], groups[dice.below(len(groups))]
        users = plan[a] + plan[b]
        if a == b or users > self._problem.demand.slots:
            return None
        tried = {group: count for group, count in plan.items() if group not in (a, b)}
        tried[frozenset(self._used(a, plan[a])) | frozenset(self._used(b, plan[b]))] = users
        return tried


def _changed(plan: Plan, changes: dict[Group, Group]) -> Plan:
    """The plan with other devices in some chains."""
    tried: Plan = {}
    for group, users in plan.items():
        tried[changes.get(group, group)] = users
    return tried


__all__ = ["search_chains", "search_count"]
