"""Why there is no plan at all, as an error that says what to do. Pure."""

from __future__ import annotations

import numpy as np

from potluck.planner.comparisons import good_plan, reachable
from potluck.planner.cost import offered
from potluck.planner.exact import MOST_DEVICES
from potluck.planner.problem import Problem
from potluck.planner.words import NAMED, gb, listed
from potluck.wire.errors import Phase, PlanError


def refusal(problem: Problem) -> PlanError:
    """Links that carry nothing, too little memory, or runs of layers that fit nowhere."""
    mended = reachable(problem)
    if mended is not None and good_plan(mended):
        silent = _silent(problem)
        shown = listed(silent) if len(silent) <= 3 else f"{silent[0]} and on {len(silent) - 1} other ways"
        return PlanError(
            f"No chain can be made for {problem.model.name}: nothing gets {shown}.",
            hint="See to the network between them: a firewall, a wrong interface, or a cable.",
            phase=Phase.PLAN,
        )
    need = need_bytes(problem)
    offers = [offered(candidate) for candidate in problem.candidates]
    names = f"{problem.count} devices"
    if problem.count <= NAMED:
        names = listed([str(candidate.device) for candidate in problem.candidates])
    offer = "offers" if len(offers) == 1 else "offer"
    exact = problem.count <= MOST_DEVICES
    if 0 in offers or need <= sum(offers):
        # Beyond that many devices not every way to split is tried.
        verdict = (
            f"can't be split over {names}" if exact else f"is split over {names} by no way that was found"
        )
        return PlanError(
            f"{problem.model.name} {verdict}: where it may be cut, the runs of layers do not fit.",
            hint="Give the devices more memory, use a shorter context or fewer slots, or add a device.",
            phase=Phase.PLAN,
            needed_bytes=need,
            offered_bytes=sum(offers),
        )
    return PlanError(
        f"{problem.model.name} does not fit: it needs {gb(need)} with {problem.demand.slots} slots of "
        f"{problem.demand.context_tokens} tokens, {names} {offer} {gb(sum(offers))}.",
        hint="Use a shorter context or fewer slots, a smaller quantization, or add a device.",
        phase=Phase.PLAN,
        needed_bytes=need,
        offered_bytes=sum(offers),
    )


def need_bytes(problem: Problem) -> int:
    """What the whole model takes on one device: the least of all devices' figures."""
    layers = problem.model.layers
    return min(
        round(sum(problem.model.layer_bytes) * (1.0 + cost.profile.extra_weight_share))
        + problem.model.head_bytes
        + cost.kv_bytes * layers
        + cost.compute_bytes(layers)
        for cost in problem.costs
    )


def _silent(problem: Problem) -> list[str]:
    """The ways on which nobody answered: `from a to b`."""
    names = [str(candidate.device) for candidate in problem.candidates]
    send = problem.of_sizes((1,)).send
    return [
        *(f"from the broker to {name}" for name, s in zip(names, problem.first, strict=True) if np.isinf(s)),
        *(f"from {name} to the broker" for name, s in zip(names, problem.last, strict=True) if np.isinf(s)),
        *(
            f"from {names[a]} to {names[b]}"
            for a in range(len(names))
            for b in range(len(names))
            if a != b and np.isinf(send[a, b])
        ),
    ]


__all__ = ["need_bytes", "refusal"]
