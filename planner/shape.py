"""A model file as a planner sees it. Pure."""

from __future__ import annotations

from potluck.model.architectures import Rules
from potluck.model.facts import ModelFacts
from potluck.planner.plan import ModelShape


def shape_of(facts: ModelFacts, rules: Rules, name: str) -> ModelShape:
    """Bytes per layer, and where the architecture may be cut."""
    return ModelShape(
        name=name,
        layers=facts.layers,
        width=facts.width,
        layer_bytes=facts.block_bytes,
        head_bytes=facts.head_bytes,
        embedding_bytes=facts.embedding_bytes,
        cuts=frozenset(rules.cuts()),
    )
