"""What all samplers share: the seed of one draw, the log-probabilities of a result, the check of the logits."""

from __future__ import annotations

import numpy as np

from potluck.stage.engine import FloatRows
from potluck.wire.errors import EngineError
from potluck.wire.sampling import TokenLogprobs

_MASK = 0xFFFFFFFF
_LLAMA_RANDOM_SEED = 0xFFFFFFFF
"""LLAMA_DEFAULT_SEED: llama.cpp takes it as "draw a seed at random"."""


def draw_seed(seed: int, position: int) -> int:
    """The 32-bit seed of the draw that follows `position`: a function of the two alone, so that a replay goes on alike.

    Two rounds of the `lowbias32` mixer (Chris Wellons, https://nullprogram.com/blog/2018/07/31/).
    """
    mixed = _mix(_mix(seed & _MASK) ^ (position & _MASK))
    return mixed - 1 if mixed == _LLAMA_RANDOM_SEED else mixed


def _mix(value: int) -> int:
    value = ((value ^ (value >> 16)) * 0x7FEB352D) & _MASK
    value = ((value ^ (value >> 15)) * 0x846CA68B) & _MASK
    return value ^ (value >> 16)


def likeliest(logits: FloatRows) -> int:
    """The index of the largest of logits float32[vocab], the first of equal ones.

    Raises EngineError if any is NaN (argmax stops at the first one) or if the largest is not finite.
    """
    best = int(np.argmax(logits))
    if not np.isfinite(logits[best]):
        raise EngineError(
            f"The model gave {float(logits[best])} as the logit of token {best}.",
            hint="The model file or a stage's memory is damaged: check the file's hash, then load it again.",
            token=best,
        )
    return best


def token_logprobs(logits: FloatRows, chosen: int, top: int) -> TokenLogprobs:
    """Natural-log probabilities from raw logits float32[vocab]: the chosen token's and the `top` likeliest."""
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    best: list[tuple[int, float]] = []
    if top > 0:
        count = min(top, len(values))
        near = np.argpartition(-values, count - 1)[:count]
        ordered = near[np.lexsort((near, -values[near]))]
        best = [(int(token), float(values[token])) for token in ordered]
    return TokenLogprobs(float(values[chosen]), tuple(best))


__all__ = ["draw_seed", "likeliest", "token_logprobs"]
