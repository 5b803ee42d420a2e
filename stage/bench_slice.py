"""One loaded slice that is timed: micro-batches go through it as a stage computes them, and leave no trace. Pure.

Each goes the way of a micro-batch in service (`compute_batch`), so decoding of activations, sampling and copies count.
What the activations are does not matter to time, but to experts: every row is another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from potluck.stage.batch import compute_batch
from potluck.stage.bench_plan import Point
from potluck.stage.engine import Engine, Loaded, LoadSpec, Sampler
from potluck.stage.events import Job
from potluck.wire.ids import Epoch
from potluck.wire.messages import Assign, MicroBatch, ModelRef, Span
from potluck.wire.sampling import Sampling

NOWHERE = "nowhere"
"""Where the results would go."""
_SPARE_ROWS = 256


class Rows:
    """Random tokens and activations, another part of them for every micro-batch of up to `most` rows."""

    def __init__(self, most: int, vocab: int, width: int) -> None:
        chance = np.random.default_rng(0)
        self._tokens: NDArray[np.int32] = chance.integers(0, vocab, _SPARE_ROWS + most, np.int32)
        self._hidden: NDArray[np.float32] = chance.standard_normal((_SPARE_ROWS + most, width), np.float32)
        self._at = 0

    def take(self, count: int, hidden: bool) -> tuple[bytes, ...]:
        """The arrays of a micro-batch of `count` tokens, with or without activations."""
        self._at = (self._at + count) % _SPARE_ROWS
        rows = slice(self._at, self._at + count)
        tokens = self._tokens[rows].tobytes()
        return (tokens, self._hidden[rows].tobytes()) if hidden else (tokens,)


class TimedSlice:
    """Loads the slice at once; raises as `Engine.load`. The first `full_slots` slots are the ones that get filled."""

    def __init__(
        self, engine: Engine, spec: LoadSpec, model: ModelRef, rows: Rows, full_slots: int = 0
    ) -> None:
        self._engine = engine
        self._spec = spec
        self._full_slots = full_slots
        self._full_tokens = 0
        self._sampler: Sampler | None = None
        try:
            self.loaded: Loaded = engine.load(spec)
            if spec.is_last:
                self._sampler = engine.sampler()
                for slot in range(spec.slots):
                    self._sampler.set(slot, Sampling())
        except BaseException:
            self.close()
            raise
        index = 0 if spec.is_first else 1
        self._assign = Assign(
            chain=0,
            index=index,
            stages=index + 1 if spec.is_last else index + 2,
            model=model,
            first=spec.first,
            end=spec.end,
            next_endpoint=NOWHERE,
            results_endpoint=NOWHERE,
            slots=spec.slots,
            context_tokens=spec.context_tokens,
            batch_tokens=spec.batch_tokens,
            exact=spec.exact,
        )
        self._rows = rows

    def fill(self, tokens: int, wanted: Callable[[], bool]) -> None:
        """Puts so many tokens into each of the slots that are to be full, while `wanted`."""
        for slot in range(self._full_slots):
            at = 0
            while at < tokens and wanted():
                step = min(self._spec.batch_tokens, tokens - at)
                self._compute([Span(slot, at, step, 0)])
                at += step
        self._full_tokens = tokens

    def time(self, point: Point, clocks: Sequence[Callable[[], float]]) -> tuple[float, ...]:
        """Seconds that the micro-batch takes, by each clock. Raises PotluckError."""
        start = self._full_tokens if point.full else 0
        first = 0 if point.full else self._full_slots
        if point.chunk:
            # At the end of a chain one result of a chunk is wanted, if it is the prompt's last.
            spans = [Span(first, start, point.rows, int(self._spec.is_last))]
        else:
            wants = int(self._spec.is_last)
            spans = [Span(first + index, start, 1, wants) for index in range(point.rows)]
        job = self._job(spans)
        begun = [clock() for clock in clocks]
        compute_batch(self._engine, self._sampler, job)
        took = tuple(clock() - begin for clock, begin in zip(clocks, begun, strict=True))
        for span in spans:
            if start:
                self._engine.trim(span.slot, start)
            else:
                self._engine.free(span.slot)
        return took

    def _compute(self, spans: list[Span]) -> None:
        compute_batch(self._engine, self._sampler, self._job(spans))

    def _job(self, spans: list[Span]) -> Job:
        arrays = self._rows.take(sum(span.tokens for span in spans), hidden=not self._spec.is_first)
        message = MicroBatch(batch=0, spans=tuple(spans))
        return Job(Epoch(0), self._assign, message, arrays, sum(map(len, arrays)))

    def close(self) -> None:
        """Frees everything."""
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None
        self._engine.close()


__all__ = ["Rows", "TimedSlice"]
