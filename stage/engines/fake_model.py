"""The arithmetic of the fake model: what a layer does to one token, and the text that follows a prompt.

Values are integers below 2048, which f16 and f32 carry exactly. A layer adds its token, weighted by position, to a
running sum modulo a prime (its "cache") and mixes the sum into what it passes on. So a token that is lost, doubled,
moved or left over from another request changes every later sum, and with it the text. `fake_continuation` computes
that text token by token without caches: the engine has to agree with it whatever the split, batches or replays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from potluck.stage.engine import FloatRows
from potluck.stage.engines.choice import draw_seed, likeliest
from potluck.wire.sampling import GREEDY, Sampling

PRIME = 2039
"""The largest prime below 2048: every hidden value is in [0, PRIME)."""
WIDTH = 8
VOCAB = 512
START_TOKEN = 256
END_TOKEN = 257
_NEVER = -1000.0
"""Logit of the special tokens: no text ends by itself; a bias on END_TOKEN ends it."""

Ints: TypeAlias = NDArray[np.int64]


def hashed(*parts: NDArray[np.int64] | NDArray[np.int32] | int) -> Ints:
    """Integers in [0, PRIME) that depend on all parts, elementwise; the same on every machine."""
    value = np.asarray(0x9E37, np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            value = (value ^ np.asarray(part, np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
            value = value ^ (value >> np.uint64(29))
    return np.asarray(value % np.uint64(PRIME), np.int64)


def embed(tokens: NDArray[np.int32], width: int = WIDTH) -> Ints:
    """int64[n, width] for token ids int32[n]."""
    return hashed(1, tokens[:, None], np.arange(width))


def position_weights(layer: int, positions: Ints) -> Ints:
    """int64[n, 1] in [1, PRIME): what a token counts in the layer's sum, by its position."""
    return 1 + hashed(2, layer, positions)[:, None] % (PRIME - 1)


def mix(layer: int, hidden: Ints, sums: Ints) -> Ints:
    """What the layer passes on, int64[n, width], from what came in and the layer's sums up to each token."""
    return (hidden * hidden + 3 * np.roll(hidden, 1, axis=-1) + sums + layer + 1) % PRIME


def logits_of(hidden: Ints, vocab: int = VOCAB) -> FloatRows:
    """float32[n, vocab] from the last layer's hidden int64[n, width]; the special tokens are never the likeliest."""
    table = hashed(3, np.arange(vocab)[:, None], np.arange(hidden.shape[-1]))
    logits = ((hidden @ table.T) % 8191).astype(np.float32) / np.float32(512)
    logits[:, START_TOKEN : END_TOKEN + 1] = _NEVER
    return logits


def fake_choice(logits: FloatRows, position: int, sampling: Sampling = GREEDY) -> int:
    """The token after `position` from logits float32[vocab]: greedy, or drawn by (seed, position). No penalties.

    Raises EngineError for NaN and infinite logits.
    """
    scores = logits.astype(np.float64)
    for token, bias in sampling.logit_bias:
        if token < len(scores):
            scores[token] += bias
    best = likeliest(scores.astype(np.float32))
    if sampling.temperature == 0.0:
        return best
    weights: NDArray[np.float64] = np.exp((scores - scores.max()) / max(sampling.temperature, 1e-6))
    if 0 < sampling.top_k < len(weights):
        weights[np.argsort(-weights, kind="stable")[sampling.top_k :]] = 0.0
    drawn = draw_seed(sampling.seed, position) / 2.0**32 * weights.sum()
    return int(np.searchsorted(np.cumsum(weights), drawn, side="right"))


def fake_continuation(
    prompt_tokens: Sequence[int],
    n: int,
    layers: int,
    vocab: int = VOCAB,
    width: int = WIDTH,
    sampling: Sampling = GREEDY,
) -> list[int]:
    """The `n` tokens that follow the prompt, computed one token after the other, without slots, batches or stages."""
    sums: list[Ints] = [np.zeros((1, width), np.int64) for _ in range(layers)]
    fed = list(prompt_tokens)
    for position in range(len(fed) + n - 1):
        hidden = embed(np.asarray([fed[position]], np.int32), width)
        for layer in range(layers):
            weight = position_weights(layer, np.asarray([position]))
            sums[layer] = (sums[layer] + weight * hidden) % PRIME
            hidden = mix(layer, hidden, sums[layer])
        if position >= len(prompt_tokens) - 1:
            fed.append(fake_choice(logits_of(hidden, vocab)[0], position, sampling))
    return fed[len(prompt_tokens) :]
