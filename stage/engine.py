"""What a stage asks of an engine, whatever computes: load a slice, run tokens through it, forget tokens, close.

An engine is driven by one thread at a time, while others are driven by other threads, and knows no socket, epoch or
broker. It owns each slot's KV cache; all of its memory is reserved by `load`. Engines live in `stage/engines/`;
`fake` is deterministic and needs no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from potluck.wire.frames import Buffer
from potluck.wire.messages import Span
from potluck.wire.sampling import Sampling, TokenLogprobs

FloatRows: TypeAlias = NDArray[np.float32]
"""float32[rows, width]: one row of activations (or logits) per token."""

Tokens: TypeAlias = NDArray[np.int32]
"""int32[n]: token ids."""


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What to load and how much room to reserve.

    `slice_path` is a GGUF with the blocks [first, end) of a model of `layers` (the whole file when that is all of it).
    `embeddings_path` is a GGUF that holds token_embd, for the first stage, which looks tokens up itself.
    `context_tokens` is per slot.
    """

    slice_path: Path
    embeddings_path: Path | None
    first: int
    end: int
    layers: int
    slots: int
    context_tokens: int
    batch_tokens: int
    threads: int = 1
    exact: bool = False
    gpu_layers: int = 0
    mlock: bool = False
    """Keep the weights in memory for good."""
    tune: bool = False
    """Time a few calls after loading and compute decode rows in the runs that are fastest here. The results' last bits
    then depend on the device's speed, unless `exact` is on."""

    @property
    def is_first(self) -> bool:
        """Whether tokens come in and not activations."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Whether logits come out and not activations."""
        return self.end == self.layers


@dataclass(frozen=True, slots=True)
class Loaded:
    """What loading took. Bytes as llama.cpp reports them; 0 where it does not."""

    width: int
    vocab: int
    weights_bytes: int
    kv_bytes: int = 0
    compute_bytes: int = 0
    """Buffers that are in use while a micro-batch is computed, the engine's own arrays among them."""
    copied_bytes: int = 0
    """Weights laid out anew in memory, besides the file's own bytes."""


@dataclass(frozen=True, slots=True)
class Work:
    """One micro-batch for an engine: spans stand in the order of their rows.

    `hidden` is float32[n, width] from the stage before, or None at the first stage, which looks `tokens` up.
    """

    spans: Sequence[Span]
    tokens: Tokens
    hidden: FloatRows | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """What a micro-batch became: `hidden` float32[n, width] for the next stage, or `logits` float32[wants, vocab] at
    the last stage, one row per wanted result in the spans' order. Valid until the next call of `forward`.
    """

    hidden: FloatRows | None = None
    logits: FloatRows | None = None


class Sampler(Protocol):
    """Chooses tokens for the slots of the last stage."""

    def set(self, slot: int, sampling: Sampling) -> None:
        """From now on the slot's tokens are chosen like this; what it has seen stays."""

    def see(self, slot: int, position: int, tokens: Tokens) -> None:
        """These tokens went in at `position`: what the penalties count. Everything from `position` on is replaced."""

    def seen(self, slot: int) -> Tokens:
        """The tokens that went in, int32[n], all of them; `see` at 0 gives them to another sampler."""

    def sample(self, slot: int, position: int, logits: FloatRows) -> tuple[int, TokenLogprobs | None]:
        """The token that follows `position`, from logits float32[vocab], and its log-probabilities if asked for."""

    def close(self) -> None:
        """Frees what the sampler holds."""


class Engine(Protocol):
    """One slice of one model, loaded."""

    name: str

    def load(self, spec: LoadSpec) -> Loaded:
        """Loads the slice and reserves all memory. Raises ModelError, OutOfMemoryError, EngineError.

        The first micro-batch must be no slower than others: an engine that warms up does so before this returns.
        """

    def forward(self, work: Work) -> Output:
        """Runs the spans through the layers. Raises EngineError; a span that does not start where its slot's cache
        ends is one.
        """

    def trim(self, slot: int, keep: int) -> None:
        """Forgets everything of the slot but its first `keep` tokens. Raises EngineError if it has fewer."""

    def free(self, slot: int) -> None:
        """Empties the slot."""

    def held(self, slot: int) -> int:
        """How many tokens the slot holds. Raises EngineError for a slot that does not exist."""

    def export(self, slot: int) -> Buffer:
        """What the engine holds of the slot, for `restore`. Nobody else writes to it. Raises EngineError."""

    def restore(self, slot: int, tokens: int, state: Buffer) -> None:
        """Puts the `tokens` tokens that an engine of the same slice exported in place of what the slot holds.

        Raises EngineError if it does not hold exactly these then; the slot is empty in that case.
        """

    def sampler(self) -> Sampler:
        """The sampler of the last stage."""

    def close(self) -> None:
        """Frees everything. May be called twice."""
