"""How one request wants its tokens chosen. Travels from the client to the last stage. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from potluck.wire import limits

Bias = Annotated[float, Meta(ge=-1e6, le=1e6)]


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of llama.cpp's samplers, which apply in this order: bias, penalties, top_k, top_p, min_p, temperature.

    `temperature` 0 takes the likeliest token (greedy). `seed` and a token's position alone decide the draw, so that
    a request replayed elsewhere goes on with the same text.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.8
    top_k: Annotated[int, Meta(ge=0, le=1_000_000)] = 40
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.95
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.05
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] = 1.0
    frequency_penalty: Annotated[float, Meta(ge=-100.0, le=100.0)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-100.0, le=100.0)] = 0.0
    penalty_last_n: Annotated[int, Meta(ge=0, le=65_536)] = 64
    seed: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    logit_bias: Annotated[tuple[tuple[int, Bias], ...], Meta(max_length=limits.LOGIT_BIASES)] = ()
    top_logprobs: Annotated[int, Meta(ge=-1, le=limits.TOP_LOGPROBS)] = -1
    """-1: no log-probabilities; 0: the chosen token's; n: also the n likeliest."""

    @property
    def penalized(self) -> bool:
        """Whether earlier tokens change the choice."""
        return self.penalty_last_n > 0 and (
            self.repeat_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0
        )


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Natural-log probabilities of one result: the chosen token's and the likeliest ones', before any sampler."""

    chosen: float
    top: Annotated[tuple[tuple[int, float], ...], Meta(max_length=limits.TOP_LOGPROBS)] = ()


GREEDY = Sampling(temperature=0.0)
