"""What is known about cutting each architecture, in one table.

A slice is loaded by llama.cpp as if it were a whole model, so anything llama.cpp derives from a layer's index, from the
number of layers or from the kind of input has to be undone. Each row of the table was read off the architecture's file
in llama.cpp's src/models/ (of llama-cpp-python 0.3.36) and is tested with a tiny random model. What is not in the
table is refused, unless `potluck verify` has passed on it; what can't work at all is refused even then.

Decides where a model may be cut and what must be said differently in a slice. Leaves the writing to `slices`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from potluck.model.facts import ModelFacts
from potluck.wire.errors import ForbiddenCutError, ModelError, UnsupportedArchitectureError

VERIFY_HINT: Final = "`potluck verify MODEL` tests whether it can be cut; if that passes, it is served."

WIDE_TOKENS: Final = 1 << 20
"""A window that no context outgrows; times the 1,024 slots it still fits llama.cpp's 32-bit sizes."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How one model file is cut.

    `token_scale`: looked-up rows of token_embd are multiplied by this before they go into the first stage.
    `handover_divisor`: activations from the stage before are divided by this before they go in, because llama.cpp will
    multiply them. Both are exact in float32 when they are powers of two; `exact` is False when a chain's logits can
    differ from the whole model's by float32 rounding.
    `hidden_tensor`: the graph's name for the output of a block, followed by "-" and the index inside the slice.
    `head_as_embeddings`: an untied head may be stored as token_embd in the last slice, as if it were tied.
    `weight_factors`: tensors inside blocks, by the end of their name, that a slice stores multiplied.
    """

    architecture: str
    layers: int
    cut_every: int = 1
    uncuttable: str = ""
    """Why the model can only be used whole, or empty."""
    forbidden_counts: frozenset[int] = frozenset()
    """Slices with this many blocks would be taken for another model."""
    token_scale: float = 1.0
    handover_divisor: float = 1.0
    windowed: tuple[bool, ...] | None = None
    """For each block whether it sees only a sliding window; None if the model has no windows."""
    window_optional: bool = False
    """Whether llama.cpp runs the architecture without windows when the metadata says that they are 0 tokens wide."""
    hidden_tensor: str = "l_out"
    head_as_embeddings: bool = True
    weight_factors: tuple[tuple[str, float], ...] = ()
    exact: bool = True
    listed: bool = True
    """False for an architecture outside the table, let in because `verify` passed or is running."""

    def cuts(self) -> tuple[int, ...]:
        """Every layer at which a stage may begin, 0 and the number of layers left out."""
        if self.uncuttable:
            return ()
        return tuple(range(self.cut_every, self.layers, self.cut_every))

    def check_cut(self, layer: int) -> None:
        """Raises ForbiddenCutError, naming the nearest allowed cuts, unless a stage may begin at `layer`."""
        if layer in (0, self.layers):
            return
        if self.uncuttable:
            raise ForbiddenCutError(
                f"This {self.architecture} model can't be cut: {self.uncuttable}.",
                hint="Give the whole model to one device (several devices may each hold all of it).",
            )
        if not 0 < layer < self.layers:
            raise ForbiddenCutError(
                f"There is no cut at layer {layer} in a model of {self.layers} layers.",
                hint=f"Cut between 1 and {self.layers - 1}.",
            )
        if layer % self.cut_every:
            below = layer - layer % self.cut_every
            near = [cut for cut in (below, below + self.cut_every) if 0 < cut < self.layers]
            raise ForbiddenCutError(
                f"{self.architecture} can be cut at multiples of {self.cut_every} only, not at layer {layer}.",
                hint=f"Cut at {' or '.join(map(str, near))}." if near else "Use the model whole.",
            )

    def check_slice(self, first: int, end: int) -> None:
        """Raises ForbiddenCutError unless the blocks [first, end) may be one stage."""
        if not 0 <= first < end <= self.layers:
            raise ForbiddenCutError(
                f"There are no layers [{first}, {end}) in a model of {self.layers} layers.",
                hint=f"Use 0 <= first < end <= {self.layers}.",
            )
        self.check_cut(first)
        self.check_cut(end)
        if end - first != self.layers and end - first in self.forbidden_counts:
            raise ForbiddenCutError(
                f"llama.cpp takes a {self.architecture} model of {end - first} layers for another one.",
                hint=f"Give this stage {end - first - 1} or {end - first + 1} layers.",
            )

    def window_metadata(self, first: int, end: int) -> dict[str, int | tuple[bool, ...]]:
        """What a slice's metadata says of sliding windows, by key without the architecture.

        llama.cpp aborts on a model that could have windowed layers and has none. A slice of full layers therefore has
        its windows turned off, or, where that can't be said, so wide that nothing ever leaves them.
        """
        if self.windowed is None:
            return {}
        pattern = self.windowed[first:end]
        if any(pattern):
            return {"attention.sliding_window_pattern": pattern}
        if self.window_optional:
            return {"attention.sliding_window": 0, "attention.sliding_window_pattern": pattern}
        return {
            "attention.sliding_window": WIDE_TOKENS,
            "attention.sliding_window_pattern": (True,) * len(pattern),
        }

    def scale_tokens(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Rows of token_embd, float32[n, width], as the first stage's input."""
        return rows if self.token_scale == 1.0 else rows * np.float32(self.token_scale)

    def scale_handover(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Activations of the stage before, float32[n, width], as a later stage's input."""
        return rows if self.handover_divisor == 1.0 else rows / np.float32(self.handover_divisor)


def rules_for(facts: ModelFacts, *, allow_unlisted: bool = False) -> Rules:
    """The rules for one model file.

    `allow_unlisted` lets an architecture outside the table in with the plain rules: for `verify`, and for files on
    which it has passed. Raises UnsupportedArchitectureError with the reason.
    """
    reason = _impossible(facts)
    if reason:
        raise UnsupportedArchitectureError(
            f"{facts.path} ({facts.architecture}) can't be split over devices: {reason}.",
            hint=f"Supported are {', '.join(sorted(_TABLE))}.",
        )
    base = Rules(architecture=facts.architecture, layers=facts.layers)
    rule = _TABLE.get(facts.architecture)
    if rule is not None:
        return rule(facts, base)
    if allow_unlisted:
        return replace(base, head_as_embeddings=False, listed=False, windowed=_window_list(facts))
    raise UnsupportedArchitectureError(
        f"{facts.path} has the architecture {facts.architecture!r}, and nobody has checked how to cut it.",
        hint=f"Supported are {', '.join(sorted(_TABLE))}. {VERIFY_HINT}",
    )


def supported() -> tuple[str, ...]:
    """The architectures of the table, sorted."""
    return tuple(sorted(_TABLE))


# ---- the rows


def _plain(_facts: ModelFacts, base: Rules) -> Rules:
    """Blocks know neither their index nor their number.

    llama (also Mistral, Mixtral, SmolLM and SmolLM2, which are stored as llama), mistral3, qwen2, qwen3, qwen3moe, and
    phi3, whose rope factors lie outside the blocks and are chosen by the context length, the same on every stage.
    """
    return base


def _qwen2moe(_facts: ModelFacts, base: Rules) -> Rules:
    """llama.cpp insists on an output tensor beside token_embd."""
    return replace(base, head_as_embeddings=False)


def _smollm3(_facts: ModelFacts, base: Rules) -> Rules:
    """Every 4th layer, counted from the slice's first, goes without RoPE."""
    return replace(base, cut_every=4)


def _gemma(facts: ModelFacts, base: Rules) -> Rules:
    """Whatever comes in is multiplied by sqrt(width): right for token rows, to be undone for activations."""
    root = _root(facts)
    return replace(base, handover_divisor=root, exact=_is_power_of_two(root))


def _gemma2(facts: ModelFacts, base: Rules) -> Rules:
    """As gemma; every 2nd layer is full; 46 layers mean the 27B model, whose attention has a scale of its own.

    A slice of the 27B has another number of layers and so another scale, and gemma2 has no norm on the queries that
    could make up for it: the whole model only.
    """
    rules = replace(_gemma(facts, base), windowed=_pattern(facts, 2), forbidden_counts=frozenset({46}))
    head = _head_width(facts)
    if facts.layers == 46 and facts.width // _heads(facts) != head:
        return replace(rules, uncuttable="llama.cpp takes its attention scale from the count of 46 layers")
    return rules


def _gemma3(facts: ModelFacts, base: Rules) -> Rules:
    """Tokens are multiplied by sqrt(width), other input is not; every 6th layer is full; 62 layers mean the 27B model.

    The 27B's attention scale is 1/sqrt(width / heads), a slice's is 1/sqrt(head width). The queries are linear in the
    weights of their norm, so slices store these multiplied by the quotient. That rounds each weight once more (relative
    error up to 2**-24): the chain agrees with the whole model to rounding, not to the bit.
    """
    windowed = isinstance(window := facts.of_architecture("attention.sliding_window"), int) and window > 0
    rules = replace(
        base,
        token_scale=_root(facts),
        windowed=_pattern(facts, 6) if windowed else None,
        window_optional=True,
        forbidden_counts=frozenset({62}),
    )
    whole, head = facts.width // _heads(facts), _head_width(facts)
    if facts.layers == 62 and whole != head:
        return replace(rules, weight_factors=(("attn_q_norm.weight", math.sqrt(head / whole)),), exact=False)
    return rules


_TABLE: Final[Mapping[str, Callable[[ModelFacts, Rules], Rules]]] = MappingProxyType(
    {
        "llama": _plain,
        "mistral3": _plain,
        "qwen2": _plain,
        "qwen2moe": _qwen2moe,
        "qwen3": _plain,
        "qwen3moe": _plain,
        "phi3": _plain,
        "smollm3": _smollm3,
        "gemma": _gemma,
        "gemma2": _gemma2,
        "gemma3": _gemma3,
    }
)

# ---- what can't be cut, listed or not

# Names as in llama.cpp's src/llama-arch.cpp.
_RECURRENT: Final = frozenset({
    "arwkv7", "bailingmoe3", "deepseek4", "falcon-h1", "glm5-next", "granitehybrid", "jamba", "kimi-k3", "kimi-linear",
    "lfm2", "lfm2moe", "mamba", "mamba2", "minimax-01", "nemotron_h", "nemotron_h_moe", "plamo2", "qwen35", "qwen35moe",
    "qwen3next", "qwen4exp", "rwkv6", "rwkv6qwen2", "rwkv7",
})  # fmt: skip
_NOT_CAUSAL: Final = frozenset({
    "bert", "dream", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llada", "llada-moe", "llama-embed",
    "modern-bert", "neo-bert", "nomic-bert", "nomic-bert-moe", "rnd1", "t5", "t5encoder", "wavtokenizer-dec",
})  # fmt: skip
_ENTANGLED: Final = frozenset({"gemma3n", "gemma4", "gemma4-assistant", "eagle3", "dflash"})


def _impossible(facts: ModelFacts) -> str:
    """Why no rule could make slices of this model right, or an empty text."""
    if facts.architecture in _RECURRENT or any(
        key.startswith((f"{facts.architecture}.ssm.", f"{facts.architecture}.wkv.")) for key in facts.metadata
    ):
        return "its layers keep a recurrent state, which can't be trimmed as a KV cache can"
    if facts.architecture in _NOT_CAUSAL:
        return "it does not generate text token by token"
    if facts.architecture in _ENTANGLED or "per_layer_token_embd.weight" in facts.tensors:
        return "its layers read more than the output of the layer before them"
    if _positive(facts, "attention.shared_kv_layers"):
        return "its layers share KV caches with each other"
    if _positive(facts, "nextn_predict_layers"):
        return "its last blocks predict further tokens and belong to no layer"
    return ""


# ---- readings


def _positive(facts: ModelFacts, key: str) -> bool:
    value = facts.of_architecture(key)
    return isinstance(value, int | float) and value > 0


def _root(facts: ModelFacts) -> float:
    """sqrt(width) as llama.cpp computes it, in float32."""
    return float(np.sqrt(np.float32(facts.width)))


def _is_power_of_two(value: float) -> bool:
    return math.frexp(value)[0] == 0.5


def _heads(facts: ModelFacts) -> int:
    value = facts.of_architecture("attention.head_count")
    heads = value[0] if isinstance(value, tuple) and value else value
    if not isinstance(heads, int) or isinstance(heads, bool) or not 1 <= heads <= facts.width:
        raise ModelError(
            f"{facts.path} has no usable {facts.architecture}.attention.head_count.",
            hint="The file is damaged or made by a faulty converter: get another one.",
        )
    return heads


def _head_width(facts: ModelFacts) -> int:
    value = facts.of_architecture("attention.key_length")
    return value if isinstance(value, int) and value > 0 else facts.width // _heads(facts)


def _window_list(facts: ModelFacts) -> tuple[bool, ...] | None:
    """The per-layer list of the file, if it has one."""
    value = facts.of_architecture("attention.sliding_window_pattern")
    if not isinstance(value, tuple):
        return None
    if len(value) < facts.layers:
        raise ModelError(
            f"{facts.path} says for {len(value)} of {facts.layers} layers whether they see a window only.",
            hint="The file is damaged or made by a faulty converter: get another one.",
        )
    return tuple(bool(windowed) for windowed in value[: facts.layers])


def _pattern(facts: ModelFacts, default_period: int) -> tuple[bool, ...]:
    """For each layer whether it sees a window only: the file's list, or all but the last of each period."""
    listed = _window_list(facts)
    if listed is not None:
        return listed
    value = facts.of_architecture("attention.sliding_window_pattern")
    period = value if isinstance(value, int) and not isinstance(value, bool) else default_period
    return tuple(period == 0 or layer % period < period - 1 for layer in range(facts.layers))


__all__ = ["Rules", "rules_for", "supported"]
