"""A model that the devices can't hold: how much is missing, and what would help. Pure.

Every piece of advice has been tried: the planner found a plan for it. Sizes of other quantizations are estimates
(`quantization`), scaled to this model where its own quantization is a usual one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from potluck.planner.cost import StageCost, offered
from potluck.planner.plan import Candidate, Demand, ModelShape
from potluck.planner.quantization import BITS_PER_WEIGHT

LEAST_CONTEXT = 512
"""A shorter one is no advice."""

Fits = Callable[[ModelShape, Demand], bool]
"""Whether there is a plan."""


@dataclass(frozen=True, slots=True)
class Need:
    """Memory of a model over all devices, and what they offer."""

    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    """One set of buffers on each device."""
    offered_bytes: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.weights_bytes + self.kv_bytes + self.compute_bytes

    @property
    def missing_bytes(self) -> int:
        """0 where the sum would do: then it is the way in which it is spread over the devices that does not."""
        return max(0, self.bytes - self.offered_bytes)


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something that makes the model fit."""

    text: str
    model: ModelShape
    demand: Demand
    quantization: str = ""
    """Another one than the model's, if it takes one."""


def need(model: ModelShape, candidates: Sequence[Candidate], demand: Demand) -> Need:
    """What all layers and the head take on devices with a profile; of several profiles the larger figure counts."""
    costs = [StageCost(candidate, model, demand) for candidate in candidates]
    share = max(cost.profile.extra_weight_share for cost in costs)
    buffers = sorted(cost.compute_bytes(0) for cost in costs)
    last = max(cost.compute_bytes(model.layers) for cost in costs)
    return Need(
        weights_bytes=round(sum(model.layer_bytes) * (1.0 + share)) + model.head_bytes,
        kv_bytes=max(cost.kv_bytes for cost in costs) * model.layers,
        compute_bytes=sum(buffers[1:]) + last,
        offered_bytes=sum(offered(candidate) for candidate in candidates),
    )


def remedies(
    model: ModelShape, demand: Demand, bits: float, quantization: str, fits: Fits
) -> tuple[Remedy, ...]:
    """What would help, the least sacrifice first: fewer slots, a shorter context, another quantization.

    `bits` is the file's per weight; `quantization` its name, empty where it is none of the usual ones. Where nothing
    helps alone, the quantization is looked for with as few slots as there are users.
    """
    found = []
    fewest = replace(demand, slots=min(demand.slots, demand.users))
    for slots in _halves(demand.slots, fewest.slots):
        if fits(model, replace(demand, slots=slots)):
            text = f"--slots {slots} instead of {demand.slots}: the KV cache is then {slots}/{demand.slots} of the size"
            found.append(Remedy(text, model, replace(demand, slots=slots)))
            break
    for context in _halves(demand.context_tokens, LEAST_CONTEXT):
        shorter = _with_context(demand, context)
        if fits(model, shorter):
            text = f"--context {context} instead of {demand.context_tokens}"
            found.append(Remedy(text, model, shorter))
            break
    for wanted in (demand,) if fewest == demand else (demand, fewest):
        smaller = _largest(model, wanted, bits, quantization, fits)
        if smaller is not None and wanted is fewest and fewest.slots < demand.slots:
            smaller = replace(smaller, text=f"{smaller.text} with --slots {fewest.slots}")
        if smaller is not None:
            found.append(smaller)
    return tuple(found)


def rescaled(model: ModelShape, factor: float) -> ModelShape:
    """The same model in files of `factor` times the bytes."""
    return replace(
        model,
        layer_bytes=tuple(round(count * factor) for count in model.layer_bytes),
        head_bytes=round(model.head_bytes * factor),
        embedding_bytes=round(model.embedding_bytes * factor),
    )


def _largest(model: ModelShape, demand: Demand, bits: float, quantization: str, fits: Fits) -> Remedy | None:
    """The largest usual quantization below the model's that fits, found by halving the list."""
    usual = BITS_PER_WEIGHT.get(quantization, bits)
    names = [name for name, value in BITS_PER_WEIGHT.items() if value < usual * 0.999]
    low, high = 0, len(names)
    while low < high:
        middle = (low + high) // 2
        if fits(rescaled(model, BITS_PER_WEIGHT[names[middle]] / usual), demand):
            high = middle
        else:
            low = middle + 1
    if low == len(names):
        return None
    name = names[low]
    factor = BITS_PER_WEIGHT[name] / usual
    smaller = rescaled(model, factor)
    weights = sum(smaller.layer_bytes) + smaller.head_bytes
    text = (
        f"the quantization {name} ({bits * factor:.1f} bits per weight, about {weights / 1e9:.0f} GB to hold)"
    )
    return Remedy(text, smaller, demand, name)


def _halves(most: int, least: int) -> list[int]:
    """Numbers below `most`, each half of the one before, down to `least`."""
    found = []
    while most > least:
        most = max(least, most // 2)
        found.append(most)
    return found


def _with_context(demand: Demand, context: int) -> Demand:
    return replace(
        demand,
        context_tokens=context,
        held_tokens=min(demand.held_tokens, context),
        prompt_tokens=min(demand.prompt_tokens, context),
    )
