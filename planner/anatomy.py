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
    file_bytes: int
    expert_share: float = 0.0
    """Of a layer's bytes, those of experts among which a router chooses."""
    experts: int = 0
    experts_used: int = 0
    """By one token."""
    quantization: str = ""
    """Empty where it is none of the usual ones."""

    @property
    def bits_per_weight(self) -> float:
        """Of the file, on average."""
        return 8 * self.file_bytes / self.weights

    @property
    def layer_bytes(self) -> float:
        """Of the average layer."""
        return sum(self.shape.layer_bytes) / self.shape.layers

    @property
    def layer_work(self) -> float:
        """Multiply-adds of the average layer."""
        return sum(self.shape.layer_work) / self.shape.layers


def anatomy_of_entry(entry: ModelEntry, source: str) -> Anatomy:
    """A model that is only described: layers that are all alike, gated feed-forward. Raises SettingsError."""
    _check(entry, source)
    head_width = entry.head_width or entry.width // entry.heads
    query, kv = entry.heads * head_width, 2 * (entry.kv_heads or entry.heads) * head_width
    attention = entry.width * (2 * query + kv)  # query, key, value and output
    expert = 3 * entry.width * entry.feed_forward  # up, gate and down
    always = attention + 3 * entry.width * entry.shared_feed_forward + entry.width * entry.experts
    chosen = expert * max(1, entry.experts)
    layer = always + chosen
    table = entry.width * entry.vocabulary
    weights = entry.layers * layer + table * (1 if entry.tied_head else 2)
    bits = 8e9 * entry.file_gb / weights if entry.file_gb else entry.bits_per_weight
    bits = bits or BITS_PER_WEIGHT[entry.quantization or ""]
    head_bits = max(bits, HEAD_BITS)
    head_bytes = table * head_bits / 8
    embedding_bytes = head_bytes if entry.tied_head else table * bits / 8
    outside = head_bytes + (0 if entry.tied_head else embedding_bytes)
    file_bytes = weights * bits / 8
    layer_bytes = (file_bytes - outside) / entry.layers
    if layer_bytes <= 0:
        raise SettingsError(
            f"{source}: model.file_gb or model.bits_per_weight is too small for {weights / 1e9:.1f} billion weights.",
            hint="Compare the sizes of the model with its config.json.",
        )
    shape = ModelShape(
        name=entry.name,
        layers=entry.layers,
        width=entry.width,
        layer_bytes=(round(layer_bytes),) * entry.layers,
        head_bytes=round(head_bytes),
        embedding_bytes=round(embedding_bytes),
        cuts=frozenset(range(entry.cut_every, entry.layers, entry.cut_every)),
        layer_work=(always + expert * max(1, entry.experts_used),) * entry.layers,
        head_work=table,
    )
    return Anatomy(
        shape=shape,
        vocabulary=entry.vocabulary,
        query_values=query,
        kv_values=kv,
        feed_forward=entry.feed_forward * max(1, entry.experts_used) + entry.shared_feed_forward,
        weights=weights,
        file_bytes=round(file_bytes),
        expert_share=chosen / layer if entry.experts else 0.0,
        experts=entry.experts,
        experts_used=entry.experts_used,
        quantization=entry.quantization or "",
    )


def anatomy_of_file(facts: ModelFacts, rules: Rules, name: str) -> Anatomy:
    """A model whose file is at hand."""
    tensors = facts.tensors.values()
    heads = _usual(facts, "attention.head_count", 1)
    kv_heads = _usual(facts, "attention.head_count_kv", heads)
    head_width = facts.width // max(1, round(heads))
    key, value = (_usual(facts, f"attention.{part}_length", head_width) for part in ("key", "value"))
    experts, used = (round(_usual(facts, f"expert_{part}", 0)) for part in ("count", "used_count"))
    forward = _usual(facts, "expert_feed_forward_length", 0) or _usual(
        facts, "feed_forward_length", facts.width
    )
    stacks = sum(t.bytes for t in tensors if len(t.shape) == 3 and block_of(t.name) is not None)
    kind = facts.metadata.get("general.file_type")
    names = {int(known): known.name.removeprefix("MOSTLY_") for known in LlamaFileType}
    return Anatomy(
        shape=shape_of(facts, rules, name),
        vocabulary=facts.vocab,
        query_values=round(heads * key),
        kv_values=round(kv_heads * (key + value)),
        feed_forward=round(forward * max(1, used) + _usual(facts, "expert_shared_feed_forward_length", 0)),
        weights=sum(prod(tensor.shape) for tensor in tensors),
        file_bytes=sum(tensor.bytes for tensor in tensors),
        expert_share=stacks / sum(facts.block_bytes),
        experts=experts,
        experts_used=used,
        quantization=names.get(kind, "") if isinstance(kind, int) else "",
    )


def _usual(facts: ModelFacts, key: str, default: float) -> float:
    """A number of the metadata; of a list with one per layer, the average."""
    value = facts.of_architecture(key)
    numbers = [n for n in (value if isinstance(value, tuple) else (value,)) if isinstance(n, int)]
    return sum(numbers) / len(numbers) if numbers else default


def _check(entry: ModelEntry, source: str) -> None:
    """Raises SettingsError for sizes that contradict each other."""
    if not (entry.quantization or entry.bits_per_weight or entry.file_gb):
        raise SettingsError(
            f"{source}: model has none of quantization, bits_per_weight and file_gb.",
            hint="Give one, for example quantization: Q4_K_M.",
        )
    sized = entry.bits_per_weight or entry.file_gb
    if entry.quantization and entry.quantization not in BITS_PER_WEIGHT and not sized:
        raise SettingsError(
            f"{source}: model.quantization {entry.quantization!r} is not in the table.",
            hint=f"Give bits_per_weight or file_gb, or one of {', '.join(BITS_PER_WEIGHT)}.",
        )
    if bool(entry.experts) != bool(entry.experts_used) or entry.experts_used > entry.experts:
        raise SettingsError(
            f"{source}: model.experts is {entry.experts} and model.experts_used is {entry.experts_used}.",
            hint="Of 8 experts a token passes 2, say. Leave both out for a model without experts.",
        )
    if entry.head_width is None and entry.width % entry.heads:
        raise SettingsError(
            f"{source}: model.width {entry.width} is no multiple of model.heads {entry.heads}.",
            hint="Give model.head_width.",
        )
    if entry.heads % (entry.kv_heads or entry.heads):
        raise SettingsError(
            f"{source}: model.heads {entry.heads} is no multiple of model.kv_heads {entry.kv_heads}.",
            hint="Both stand in the model's config.json.",
        )
