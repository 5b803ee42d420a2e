"""How broker and stages name a model to each other. Pure."""

from __future__ import annotations

from potluck.model.facts import ModelFacts
from potluck.wire.messages import ModelRef


def reference(facts: ModelFacts, name: str) -> ModelRef:
    """The model behind a file, under the name that clients use."""
    return ModelRef(name, facts.fingerprint, facts.layers, facts.width, facts.architecture)
