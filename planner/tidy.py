"""Among plans that are equally good, the one that people would write down. Pure.

A plan is changed only where its figure stays as it is: equal devices are used in the order of their names, one user's
cuts are those with the soonest first token, neighbours that are equal hold equal numbers of layers, and users are
shared out so that the slowest waits least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from potluck.planner.exact import Shared
from potluck.planner.plan import Candidate
from potluck.planner.problem import Chain, Problem
from potluck.planner.search import fixed_order

SAME = 1e-8
"""Two figures that differ by less than this share are the same: less than any planner's tests tell apart."""
ROUNDS = 3
"""How often all changes are tried."""


def alike(one: Candidate, other: Candidate) -> bool:
    """Whether two devices have the same figures; their links may differ."""
    return _figures(one) == _figures(other)


def tidy(problem: Problem, shared: Sequence[Shared]) -> list[Shared]:
    """The plan, or a tidier one that is as good."""
    plan = sorted(shared, key=lambda part: part.chain)
    if not plan:
        return plan
    least = _figure(problem, plan) * (1.0 - SAME)
    for _ in range(ROUNDS):
        before = plan
        for step in (_by_name, _sooner, _evened, _fairer):
            for tried in step(problem, plan):
                if _figure(problem, tried) >= least:
                    plan = sorted(tried, key=lambda part: part.chain)
                    break
        if plan == before:
            break
    return plan


def _figure(problem: Problem, plan: Sequence[Shared]) -> float:
    """Tokens per second; what one user waits is its inverse."""
    return sum(part.users / problem.round_s(part.chain, part.users) for part in plan)


def _by_name(problem: Problem, plan: Sequence[Shared]) -> Iterator[list[Shared]]:
    """Equal devices in the order of their names, the first ones used: all kinds at once, or each kind."""
    kinds = _kinds(problem)
    yield _renamed(plan, kinds)
    for kind in kinds:
        yield _renamed(plan, [kind])


def _kinds(problem: Problem) -> list[list[int]]:
    """Devices with the same figures, where there are several."""
    kinds: list[list[int]] = []
    for device, candidate in enumerate(problem.candidates):
        for kind in kinds:
            if alike(problem.candidates[kind[0]], candidate):
                kind.append(device)
                break
        else:
            kinds.append([device])
    return [kind for kind in kinds if len(kind) > 1]


def _renamed(plan: Sequence[Shared], kinds: Sequence[Sequence[int]]) -> list[Shared]:
    nexts: dict[int, Iterator[int]] = {}
    for kind in kinds:
        fresh = iter(kind)
        nexts.update(dict.fromkeys(kind, fresh))
    return [
        replace(
            part,
            chain=tuple(
                (next(nexts[device]) if device in nexts else device, first, end)
                for device, first, end in part.chain
            ),
        )
        for part in plan
    ]


def _sooner(problem: Problem, plan: Sequence[Shared]) -> Iterator[list[Shared]]:
    """One user's chain with other cuts, so that its slowest stage takes the least time for a chunk of a prompt."""
    if problem.demand.users > 1 or len(plan[0].chain) == 1:
        return
    (part,) = plan
    demand, used = problem.demand, [device for device, _, _ in part.chain]
    index = np.ix_(problem.positions, problem.positions)
    chunk = min(demand.chunk_tokens, demand.prompt_tokens)
    prefill = {device: problem.costs[device].prefill(chunk)[index] for device in used}
    largest = problem.of_sizes((1,)).largest
    slowest = max(stage.prefill_s for stage in problem.forecast(part.chain, 1).stages)
    limits = np.unique([float(value) for table in prefill.values() for value in table[table < slowest]])
    longest = problem.round_s(part.chain, 1) * (1.0 + SAME / 2)
    low, high, found = 0, len(limits), part.chain
    while low < high:
        middle = (low + high) // 2
        steps = list(largest)
        for device, table in prefill.items():
            steps[device] = np.where(table <= limits[middle], largest[device], np.inf)
        chain = fixed_order(problem, used, 1, steps)
        if chain is not None and problem.round_s(chain, 1) <= longest:
            high, found = middle, chain
        else:
            low = middle + 1
    if problem.forecast(found, 1).ttft_s < problem.forecast(part.chain, 1).ttft_s:
        yield [replace(part, chain=found)]


def _evened(problem: Problem, plan: Sequence[Shared]) -> Iterator[list[Shared]]:
    """Runs of equal neighbours with equal numbers of layers: of all chains, or of each."""
    even = [replace(part, chain=_even(problem, part.chain)) for part in plan]
    yield even
    for at, part in enumerate(even):
        yield [*plan[:at], part, *plan[at + 1 :]]


def _even(problem: Problem, chain: Chain) -> Chain:
    """The chain with its runs of equal neighbours cut evenly, as far as cuts are allowed."""
    stages: list[tuple[int, int, int]] = []
    at = 0
    while at < len(chain):
        until = at + 1
        while until < len(chain) and alike(
            problem.candidates[chain[at][0]], problem.candidates[chain[until][0]]
        ):
            until += 1
        first, end, count = chain[at][1], chain[until - 1][2], until - at
        wanted = [first + (end - first) * index / count for index in range(1, count)]
        cuts = [_nearest(problem.positions, want) for want in wanted]
        bounds = [first, *cuts, end]
        if any(a >= b for a, b in pairwise(bounds)):
            return chain
        stages += [(chain[at + index][0], bounds[index], bounds[index + 1]) for index in range(count)]
        at = until
    return tuple(stages)


def _nearest(cuts: Sequence[int], wanted: float) -> int:
    """The allowed cut that is closest."""
    return min(cuts, key=lambda cut: (abs(cut - wanted), cut))


def _fairer(problem: Problem, plan: Sequence[Shared]) -> Iterator[list[Shared]]:
    """One user of the slowest chain on another one, where nobody then waits as long."""
    if len(plan) < 2:
        return
    rounds = [problem.round_s(part.chain, part.users) for part in plan]
    slow = max(range(len(plan)), key=lambda at: rounds[at])
    if plan[slow].users < 2:
        return
    for at, part in enumerate(plan):
        if at != slow and part.users < problem.demand.slots:
            tried = list(plan)
            tried[slow] = replace(plan[slow], users=plan[slow].users - 1)
            tried[at] = replace(part, users=part.users + 1)
            if max(problem.round_s(one.chain, one.users) for one in tried) < rounds[slow]:
                yield tried


def _figures(candidate: Candidate) -> tuple[object, ...]:
    return (
        candidate.memory_bytes,
        candidate.vram_bytes,
        candidate.cpu_fallback,
        candidate.profile,
        candidate.slowdown,
    )


__all__ = ["alike", "tidy"]
