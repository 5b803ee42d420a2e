"""What a plan is predicted to do, as it travels to people: per stage, per chain and in all. Pure."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from potluck.wire import limits
from potluck.wire.parts import Body, Count, Layer, Name, Rate, Seconds, Text


class StageForecast(Body, frozen=True):
    """One stage of a chain, with every micro-batch of a full round in mind."""

    stage: Name
    device: Name
    first: Layer
    end: Layer
    gpu_layers: Layer = 0
    decode_s: Seconds = 0.0
    """Computing one decode micro-batch of the chain's `rows`."""
    prefill_s: Seconds = 0.0
    """Computing one chunk of a prompt."""
    send_s: Seconds = 0.0
    """Until the decode micro-batch's output is at the next stage (or the broker)."""
    busy: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Share of the time in which it computes."""
    weights_bytes: Count = 0
    kv_bytes: Count = 0
    compute_bytes: Count = 0
    memory_bytes: Count = 0
    """What it may take in all; 0 where it is not known."""


class ChainForecast(Body, frozen=True):
    """One chain with `users` sequences that decode at the same time."""

    users: Count
    rows: Count
    """Sequences in one decode micro-batch."""
    token_s: Seconds
    """Between two tokens of one sequence."""
    tokens_per_s: Rate
    """Of all its sequences."""
    ttft_s: Seconds
    """From a prompt's arrival at an idle chain to its first token."""
    bubble: Annotated[float, Meta(ge=0.0, le=1.0)]
    """Share of the time in which its slowest stage does not compute."""
    limit: Text
    """What a faster chain would need first: a device, or a link as `a to b`."""
    stages: Annotated[tuple[StageForecast, ...], Meta(max_length=limits.STAGES)]


class Forecast(Body, frozen=True):
    """A plan with all its users."""

    users: Count
    token_s: Seconds
    """Between two tokens of one sequence, averaged over users."""
    tokens_per_s: Rate
    ttft_s: Seconds
    """The slowest chain's."""
    prompt_tokens: Count
    """Of the prompt that `ttft_s` speaks of."""
    chains: Annotated[tuple[ChainForecast, ...], Meta(max_length=limits.STAGES)]
