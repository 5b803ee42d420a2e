"""A model as far as its speed and memory can be estimated: from its file, or from a person's description. Pure.

`ModelShape` is what any planner needs; `Anatomy` adds what a measured device would have told by itself: how much of a
layer a token reads, how long its row of the KV cache is, how wide the intermediate results are.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Annotated

import msgspec
from gguf.constants import LlamaFileType
from msgspec import Meta

from potluck.model.architectures import Rules
from potluck.model.facts import ModelFacts, block_of
from potluck.planner.plan import ModelShape
from potluck.planner.quantization import BITS_PER_WEIGHT, HEAD_BITS
from potluck.planner.shape import shape_of
from potluck.wire import limits
from potluck.wire.errors import SettingsError
from potluck.wire.parts import Name

Size = Annotated[int, Meta(ge=1, le=1 << 24)]
Some = Annotated[int, Meta(ge=0, le=1 << 24)]


class ModelEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The section `model` of a described cluster. The sizes stand in the model's config.json or in the GGUF header."""

    name: Name
    layers: Annotated[int, Meta(ge=1, le=limits.LAYERS)]
    width: Size
    feed_forward: Size
    """Of one expert, where there are experts."""
    heads: Size
    vocabulary: Size
    kv_heads: Size | None = None
    """As many as heads, unless said."""
    head_width: Size | None = None
    """width / heads, unless said."""
    quantization: str | None = None
    bits_per_weight: Annotated[float, Meta(ge=1.0, le=32.0)] | None = None
    """Of the whole file: 8 * bytes / weights. Wins over the quantization's usual figure."""
    file_gb: Annotated[float, Meta(gt=0.0, le=1e6)] | None = None
    """Wins over both."""
    tied_head: bool = False
    """Whether the head is the table of embeddings."""
    experts: Some = 0
    experts_used: Some = 0
    """By one token."""
    shared_feed_forward: Some = 0
    """Of the experts that every token passes."""
    cut_every: Size = 1
    """Stages may begin at multiples of this."""


@dataclass(frozen=True, slots=True)
class Anatomy:
    """One model. Numbers of a layer are those of the average layer, of one token."""

    shape: ModelShape
    vocabulary: int
    query_values: int
    """Of all heads together."""
    kv_values: int
    """Key and value of one token in the KV cache."""
    feed_forward: int
    """Width of the intermediate result, over all experts that a token passes."""
    weights: int
    """Of the whole model."""
    expert_share: float = 0.0
    """Of a layer's bytes, those of experts among which a router chooses."""
    experts: int = 0
    experts_used: int = 0
    quantization: str = ""
    """Empty where it is none of the usual ones."""

    @property
    def file_bytes(self) -> int:
        """Weights of all layers, the embeddings and the head."""
        shape = self.shape
        tied = self.weights == sum_of_weights(self)
        return sum(shape.layer_bytes) + shape.embedding_bytes + (0 if tied else shape.head_bytes)
