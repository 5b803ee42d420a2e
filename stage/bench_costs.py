"""The profile of an engine that says what a micro-batch would cost: no clock is asked. Pure.

On virtual time nothing takes time by itself; a simulated device is as fast as its engine says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np

from potluck.stage.bench_plan import chunk_tokens, decode_rows
from potluck.stage.engine import Engine, Loaded, LoadSpec, Work
from potluck.stage.holder import NO_MODEL
from potluck.wire.measures import Profile, Speed, Timing
from potluck.wire.messages import Measure, Span

_LAYERS = 4
"""Of the model that the slices seem to be of: they are from the middle of it."""


@runtime_checkable
class SaysCosts(Protocol):
    """An engine that knows what a micro-batch takes."""

    def cost_s(self, work: Work) -> float:
        """Seconds for this micro-batch."""


def profile_of_costs(make_engine: Callable[[], Engine], message: Measure) -> Profile:
    """What the engine's own words come to. Raises TypeError for an engine that says nothing."""
    decode = [tuple(Span(slot, 0, 1, 0) for slot in range(rows)) for rows in decode_rows(message.slots)]
    chunks = [(Span(0, 0, tokens, 0),) for tokens in chunk_tokens(message.batch_tokens)]
    one, one_s = _costs(make_engine, message, 1, [*decode, *chunks])
    two, two_s = _costs(make_engine, message, 2, [*decode, *chunks])
    layer_s = [max(0.0, b - a) for a, b in zip(one_s, two_s, strict=True)]
    timings = [
        Timing(sum(span.tokens for span in spans), 0, seconds)
        for spans, seconds in zip([*decode, *chunks], layer_s, strict=True)
    ]
    kv_bytes = max(0, two.kv_bytes - one.kv_bytes)
    return Profile(
        fingerprint=message.model.fingerprint,
        cpu=Speed(
            decode=tuple(timings[: len(decode)]),
            prefill=tuple(timings[len(decode) :]),
            call_s=max(0.0, one_s[0] - layer_s[0]),
        ),
        slots=message.slots,
        context_tokens=message.context_tokens,
        kv_bytes=kv_bytes,
        compute_bytes=one.compute_bytes,
        head_compute_bytes=one.compute_bytes,
    )


def _costs(
    make_engine: Callable[[], Engine], message: Measure, layers: int, batches: list[tuple[Span, ...]]
) -> tuple[Loaded, list[float]]:
    engine = make_engine()
    if not isinstance(engine, SaysCosts):
        raise TypeError(f"The engine {engine.name} does not say what a micro-batch costs.")
    try:
        loaded = engine.load(
            LoadSpec(
                NO_MODEL,
                None,
                1,
                1 + layers,
                _LAYERS,
                message.slots,
                message.context_tokens,
                message.batch_tokens,
            )
        )
        works = [Work(spans, np.zeros(sum(span.tokens for span in spans), np.int32)) for spans in batches]
        return loaded, [engine.cost_s(work) for work in works]
    finally:
        engine.close()


__all__ = ["SaysCosts", "profile_of_costs"]
