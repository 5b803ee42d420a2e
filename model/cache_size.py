"""How much a model's KV cache takes, by what the file says of its attention. Pure.

An upper bound: layers without attention, or with a compressed cache, take less. What is really taken is measured.
"""

from __future__ import annotations

from potluck.model.facts import ModelFacts

_NUMBER_BYTES = 2
"""Keys and values are kept as f16."""


def cache_token_bytes(facts: ModelFacts) -> int:
    """Bytes that one token of one sequence takes in all layers of the file; 0 if it does not say."""
    query_heads = _per_layer(facts, "attention.head_count")
    heads = _per_layer(facts, "attention.head_count_kv") or query_heads
    usual = facts.width // max(query_heads[0], 1) if query_heads else 0
    lengths = [facts.of_architecture(f"attention.{part}_length") for part in ("key", "value")]
    return sum(heads) * _NUMBER_BYTES * sum(n if isinstance(n, int) else usual for n in lengths)


def _per_layer(facts: ModelFacts, key: str) -> list[int]:
    """One number per layer, from a number or a list; empty if the file does not say."""
    value = facts.of_architecture(key)
    values = value if isinstance(value, tuple) else (value,) * facts.layers
    return [number for number in values if isinstance(number, int)]


__all__ = ["cache_token_bytes"]
