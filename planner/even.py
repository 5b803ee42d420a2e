"""An even split: every stage gets as near as can be the same share of the model. Knows nothing of any device's speed.

A share is counted in the multiply-adds of one token where they are known, otherwise in bytes. The two agree for layers
of one kind; a head of another quantization has another share of the bytes than of the time.

The cuts minimise the largest share (exact, by dynamic programming over the allowed cuts); of equal ones the first
found wins, so the same devices always get the same plan. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from potluck.planner.plan import NO_NETWORK, Candidate, ChainPlan, ModelShape, Network, Plan, StagePlan
from potluck.wire.errors import Phase, PlanError

MOST_TRIES = 10_000
"""Orders of devices that are tried, where links are cut."""


def even_cuts(model: ModelShape, stages: int) -> tuple[int, ...]:
    """Bounds of `stages` runs of layers, first 0 and last `model.layers`, with the smallest largest run.

    Raises PlanError when the architecture allows fewer runs than that.
    """
    bounds = [0, *sorted(cut for cut in model.cuts if 0 < cut < model.layers), model.layers]
    if stages > len(bounds) - 1:
        raise PlanError(
            f"{model.name} can be cut into at most {len(bounds) - 1} stages, not {stages}.", phase=Phase.PLAN
        )
    known = len(model.layer_work) == model.layers
    head = model.head_work if known else model.head_bytes
    total = [0]
    for share in model.layer_work if known else model.layer_bytes:
        total.append(total[-1] + share)

    def weight(first: int, end: int) -> int:
        return total[end] - total[first] + (head if end == model.layers else 0)

    # best[k][j]: the smallest largest run when k runs cover bounds[0..j], and where the last of them began
    best: list[dict[int, tuple[int, int]]] = [{0: (0, -1)}]
    for k in range(1, stages + 1):
        row: dict[int, tuple[int, int]] = {}
        for j in range(k, len(bounds)):
            options = [
                (max(best[k - 1][i][0], weight(bounds[i], bounds[j])), i)
                for i in range(k - 1, j)
                if i in best[k - 1]
            ]
            if options:
                row[j] = min(options)
        best.append(row)
    cuts = [len(bounds) - 1]
    for k in range(stages, 0, -1):
        cuts.append(best[k][cuts[-1]][1])
    return tuple(bounds[i] for i in reversed(cuts))


def _in_reach(named: Sequence[Candidate], most: int, network: Network) -> list[Candidate]:
    """As many candidates as can be, each reached by the one before it, otherwise in the order of their names."""
    cut = {pair for pair, link in network.links.items() if link.one_way_s == math.inf}
    if not cut:
        return list(named[:most])
    best: list[Candidate] = []
    row: list[Candidate] = []
    tries = MOST_TRIES

    def extend() -> None:
        nonlocal best, tries
        if len(row) > len(best):
            best = list(row)
        for candidate in named:
            if len(best) == min(most, len(named)) or tries == 0:
                return
            if candidate not in row and (not row or (row[-1].stage, candidate.stage) not in cut):
                tries -= 1
                row.append(candidate)
                extend()
                row.pop()

    extend()
    return best


def plan_even(model: ModelShape, candidates: Sequence[Candidate], network: Network = NO_NETWORK) -> Plan:
    """One chain over all candidates, in the order of their device names, each with an even share."""
    if not candidates:
        raise PlanError(
            "No stage has joined.", hint="Start potluck-stage on at least one device.", phase=Phase.PLAN
        )
    most = len([cut for cut in model.cuts if 0 < cut < model.layers]) + 1
    named = sorted(candidates, key=lambda c: (c.device, c.stage))
    used = _in_reach(named, most, network)
    spare = [candidate for candidate in named if candidate not in used]
    bounds = even_cuts(model, len(used))
    chain = ChainPlan(
        tuple(StagePlan(c.stage, c.device, a, b) for c, (a, b) in zip(used, pairwise(bounds), strict=True)),
        model.layers,
    )
    if len(used) == 1:
        reasons = [f"{used[0].device} holds all {model.layers} layers."]
    else:
        reasons = [f"{len(used)} stages share {model.layers} layers evenly."]
    if spare:
        names = ", ".join(c.device for c in spare)
        why = (
            f"the model can be cut into at most {most} stages" if len(used) == most else "a link to it is cut"
        )
        reasons.append(f"{names} left out: {why}.")
    return Plan((chain,), tuple(reasons), tuple(c.stage for c in spare))
