"""Chooses tokens with llama.cpp's own samplers, from logits that are already in numpy.

The order is llama.cpp's: bias, penalties, top_k, top_p, min_p, temperature, draw. A draw's seed is a function of the
request's seed and the token's position, so a replay on another chain draws the same. Log-probabilities come from the
raw logits, before any sampler.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.stage.engine import FloatRows, Tokens
from potluck.stage.engines.choice import draw_seed, likeliest, token_logprobs
from potluck.stage.engines.llama_lib import library
from potluck.wire.errors import EngineError
from potluck.wire.sampling import Sampling, TokenLogprobs

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""llama_token_data."""
_COLD = 1e-6
"""At and below this temperature logits would overflow: the likeliest token it is."""


class LlamaSampler:
    """See Sampler. `vocab` is the number of logits in a row."""

    def __init__(self, vocab: int) -> None:
        self._api: Any = library().api
        self._vocab = vocab
        self._choosers: dict[int, _Chooser] = {}
        self._seen: dict[int, array[int]] = {}
        self._ids = np.arange(vocab, dtype=np.int32)
        self._candidates: NDArray[np.void] = np.zeros(vocab, _CANDIDATE)
        self._data = ctypes.cast(self._candidates.ctypes.data, self._api.llama_token_data_p)

    def set(self, slot: int, sampling: Sampling) -> None:
        """See Sampler."""
        old = self._choosers.get(slot)
        if old is not None and old.sampling == sampling:
            return
        self._choosers[slot] = _Chooser(self._api, sampling, self._vocab)
        if old is not None:
            old.close()

    def see(self, slot: int, position: int, tokens: Tokens) -> None:
        """See Sampler. Raises EngineError when tokens before `position` were never seen."""
        seen = self._seen.setdefault(slot, array("i"))
        if position > len(seen):
            raise EngineError(
                f"Slot {slot}: tokens from {position} were seen, but only {len(seen)} before them."
            )
        if position < len(seen):
            del seen[position:]
            chooser = self._choosers.get(slot)
            if chooser is not None:
                chooser.forget(position)
        seen.frombytes(np.ascontiguousarray(tokens, np.intc).tobytes())

    def seen(self, slot: int) -> Tokens:
        """See Sampler."""
        return np.array(self._seen.get(slot, ()), np.int32)

    def sample(self, slot: int, position: int, logits: FloatRows) -> tuple[int, TokenLogprobs | None]:
        """See Sampler. Raises EngineError for NaN, infinite logits, or a row of another length."""
        if logits.shape != (self._vocab,):
            raise EngineError(f"Logits of shape {logits.shape} came in, {(self._vocab,)} were expected.")
        token = likeliest(logits)
        chooser = self._choosers.get(slot)
        if chooser is None:
            return token, None
        if not chooser.plain:
            chooser.catch_up(slot, position, self._seen.get(slot))
            token = self._choose(chooser, position, logits)
        wanted = chooser.sampling.top_logprobs
        return token, token_logprobs(logits, token, wanted) if wanted >= 0 else None

    def close(self) -> None:
        """See Sampler. May be called twice."""
        for chooser in self._choosers.values():
            chooser.close()
        self._choosers.clear()
        self._seen.clear()

    def _choose(self, chooser: _Chooser, position: int, logits: FloatRows) -> int:
        self._candidates["id"] = self._ids  # the samplers reorder the candidates in place
        self._candidates["logit"] = logits
        row = self._api.llama_token_data_array(data=self._data, size=self._vocab, selected=-1, sorted=False)
        chooser.apply(ctypes.byref(row), position)
        if not 0 <= row.selected < row.size:
            raise EngineError("llama.cpp's samplers chose no token.", slot_position=position)
        chosen = row.data[row.selected]
        if not chooser.cold and not math.isfinite(chosen.p):
            raise EngineError(
                "The sampling settings made the logits overflow.",
                hint="Use milder penalties, biases or temperature.",
            )
        return int(chosen.id)


class _Chooser:
    """One slot's settings as a chain of llama.cpp's samplers, and how many of the slot's tokens its penalties count."""

    def __init__(self, api: Any, sampling: Sampling, vocab: int) -> None:
        self.sampling = sampling
        self.cold = sampling.temperature <= _COLD
        self.plain = self.cold and not sampling.logit_bias and not sampling.penalized
        """Whether the likeliest token is the answer."""
        self._api = api
        self._counted = 0
        self._penalties: Any = None
        self._chain: Any = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        add = api.llama_sampler_chain_add
        if sampling.logit_bias:
            biases = (api.llama_logit_bias * len(sampling.logit_bias))()
            for entry, (token, bias) in zip(biases, sampling.logit_bias, strict=True):
                entry.token, entry.bias = min(token, vocab), bias  # past the vocabulary is ignored
            add(self._chain, api.llama_sampler_init_logit_bias(vocab, len(biases), biases))
        if sampling.penalized:
            self._penalties = api.llama_sampler_init_penalties(
                vocab,
                sampling.penalty_last_n,
                sampling.repeat_penalty,
                sampling.frequency_penalty,
                sampling.presence_penalty,
            )
            add(self._chain, self._penalties)
        if self.cold:
            add(self._chain, api.llama_sampler_init_greedy())
            return
        if sampling.top_k > 0:
            add(self._chain, api.llama_sampler_init_top_k(sampling.top_k))
        if sampling.top_p < 1.0:
            add(self._chain, api.llama_sampler_init_top_p(sampling.top_p, 1))
        if sampling.min_p > 0.0:
            add(self._chain, api.llama_sampler_init_min_p(sampling.min_p, 1))
        add(self._chain, api.llama_sampler_init_temp(sampling.temperature))

    def forget(self, position: int) -> None:
        """Tokens from `position` on are others now."""
        if self._counted > position:
            self._restart()

    def catch_up(self, slot: int, position: int, seen: array[int] | None) -> None:
        """Makes the penalties count exactly the slot's tokens up to `position`, it included.

        In the normal case that is one token more than last time.
        """
        if self._penalties is None:
            return
        end = position + 1
        if seen is None or len(seen) < end:
            raise EngineError(f"Slot {slot}: the penalties need {end} tokens, {len(seen or ())} were seen.")
        if self._counted > end:
            self._restart()
        first = max(self._counted, end - self.sampling.penalty_last_n)
        for token in seen[first:end]:
            self._api.llama_sampler_accept(self._penalties, token)
        self._counted = end

    def apply(self, row: Any, position: int) -> None:
        """Runs the chain over llama_token_data_array, and the draw."""
        self._api.llama_sampler_apply(self._chain, row)
        if not self.cold:
            draw = self._api.llama_sampler_init_dist(draw_seed(self.sampling.seed, position))
            self._api.llama_sampler_apply(draw, row)
            self._api.llama_sampler_free(draw)

    def close(self) -> None:
        """Frees the chain and the samplers in it."""
        if self._chain is not None:
            self._api.llama_sampler_free(self._chain)
            self._chain = None

    def _restart(self) -> None:
        if self._penalties is not None:
            self._api.llama_sampler_reset(self._penalties)
        self._counted = 0


__all__ = ["LlamaSampler"]
