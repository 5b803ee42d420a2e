"""A model file as a planner sees it. Pure."""

from __future__ import annotations

from math import prod

from potluck.model.architectures import Rules
from potluck.model.container import Tensor
from potluck.model.facts import EMBEDDINGS, HEAD, ModelFacts, block_of
from potluck.planner.plan import ModelShape


def shape_of(facts: ModelFacts, rules: Rules, name: str) -> ModelShape:
    """Bytes and multiply-adds per layer, and where the architecture may be cut."""
    used = _share_of_experts(facts)
    layer_work = [0] * facts.layers
    for tensor in facts.tensors.values():
        block = block_of(tensor.name)
        if block is not None and block < facts.layers:
            layer_work[block] += _work(tensor, used)
    head = facts.tensors.get(HEAD) or facts.tensors[EMBEDDINGS]
    return ModelShape(
        name=name,
        layers=facts.layers,
        width=facts.width,
        layer_bytes=facts.block_bytes,
        head_bytes=facts.head_bytes,
        embedding_bytes=facts.embedding_bytes,
        cuts=frozenset(rules.cuts()),
        layer_work=tuple(layer_work),
        head_work=prod(head.shape),
    )


def _work(tensor: Tensor, used: float) -> int:
    """One multiply-add per weight; of a stack of experts (three dimensions) only those that a token uses."""
    weights = prod(tensor.shape)
    return round(weights * used) if len(tensor.shape) == 3 else weights


def _share_of_experts(facts: ModelFacts) -> float:
    used, count = facts.of_architecture("expert_used_count"), facts.of_architecture("expert_count")
    if isinstance(used, int) and isinstance(count, int) and 0 < used <= count:
        return used / count
    return 1.0
