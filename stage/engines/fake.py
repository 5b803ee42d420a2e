"""An engine that needs no model file: deterministic integers instead of a network, and faults on request.

It keeps a cache per layer and slot as a real engine does, refuses what a real one refuses, and says what a call would
cost; it never sleeps, whoever drives it does. `fake_model` has the arithmetic and the text that must come out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from potluck.stage.engine import FloatRows, Loaded, LoadSpec, Output, Tokens, Work
from potluck.stage.engines.choice import token_logprobs
from potluck.stage.engines.fake_model import (
    END_TOKEN,
    PRIME,
    VOCAB,
    WIDTH,
    Ints,
    embed,
    fake_choice,
    fake_continuation,
    logits_of,
    mix,
    position_weights,
)
from potluck.stage.engines.fake_vocabulary import FakeVocabulary
from potluck.stage.engines.slots import SlotTable
from potluck.wire.errors import EngineError, PotluckError
from potluck.wire.frames import Buffer
from potluck.wire.messages import Span
from potluck.wire.sampling import GREEDY, Sampling, TokenLogprobs


class FakeSampler:
    """Greedy, or a draw that is a function of (seed, position, logits). It checks what it sees, and counts nothing."""

    def __init__(self) -> None:
        self._seen: dict[int, list[int]] = {}
        """Per slot, the tokens that went in so far."""
        self._samplings: dict[int, Sampling] = {}

    def set(self, slot: int, sampling: Sampling) -> None:
        """See Sampler."""
        self._samplings[slot] = sampling

    def see(self, slot: int, position: int, tokens: Tokens) -> None:
        """See Sampler. Raises EngineError when tokens before `position` were never seen."""
        seen = self._seen.setdefault(slot, [])
        if position > len(seen):
            raise EngineError(
                f"Slot {slot}: tokens from {position} were seen, but only {len(seen)} before them."
            )
        seen[position:] = tokens.tolist()

    def seen(self, slot: int) -> Tokens:
        """See Sampler."""
        return np.array(self._seen.get(slot, ()), np.int32)

    def sample(self, slot: int, position: int, logits: FloatRows) -> tuple[int, TokenLogprobs | None]:
        """See Sampler. Raises EngineError for NaN."""
        sampling = self._samplings.get(slot, GREEDY)
        token = fake_choice(logits, position, sampling)
        wanted = sampling.top_logprobs
        return token, token_logprobs(logits, token, wanted) if wanted >= 0 else None

    def close(self) -> None:
        """See Sampler."""
        self._seen.clear()


class FakeEngine:
    """Layers [first, end) of the fake model.

    `seconds_per_batch` is the fixed cost of a micro-batch, `seconds_per_token` that of one token in one layer.
    `fail_load` is raised by every load, `fail_forward[n]` by the n-th forward (from 1) before it changes anything.
    """

    name = "fake"

    def __init__(
        self,
        seconds_per_token: float = 0.0,
        seconds_per_batch: float = 0.0,
        *,
        width: int = WIDTH,
        vocab: int = VOCAB,
        fail_load: PotluckError | None = None,
        fail_forward: Mapping[int, PotluckError] | None = None,
    ) -> None:
        if vocab <= END_TOKEN:
            raise ValueError(f"The fake model has more than {END_TOKEN} tokens, not {vocab}.")
        self.seconds_per_token = seconds_per_token
        self.seconds_per_batch = seconds_per_batch
        self.width = width
        self.vocab = vocab
        self.fail_load = fail_load
        self.fail_forward = dict(fail_forward or {})
        self.forwards = 0
        """Calls of `forward` since the engine was made."""
        self._spec: LoadSpec | None = None
        self._table = SlotTable(0, 0, 0)
        self._sums: NDArray[np.int16] = np.zeros((0, 0, 0, 0), np.int16)
        """[layers, slots, context + 1, width]: at [l, s, n], layer l's sum over the first n tokens of slot s."""

    def load(self, spec: LoadSpec) -> Loaded:
        """See Engine. The paths of the spec need not exist."""
        self.close()
        if self.fail_load is not None:
            raise self.fail_load
        held = spec.end - spec.first
        if held < 1 or spec.first < 0 or spec.end > spec.layers:
            raise EngineError(f"Layers {spec.first} to {spec.end} of {spec.layers} are no slice.")
        self._spec = spec
        self._table = SlotTable(spec.slots, spec.context_tokens, spec.batch_tokens)
        self._sums = np.zeros((held, spec.slots, spec.context_tokens + 1, self.width), np.int16)
        return Loaded(self.width, self.vocab, weights_bytes=held * self.width, kv_bytes=self._sums.nbytes)

    def cost_s(self, work: Work) -> float:
        """Seconds that this engine would take for the micro-batch."""
        tokens = sum(span.tokens for span in work.spans)
        return self.seconds_per_batch + self.seconds_per_token * tokens * len(self._sums)

    def forward(self, work: Work) -> Output:
        """See Engine."""
        spec = self._loaded()
        self.forwards += 1
        fault = self.fail_forward.get(self.forwards)
        if fault is not None:
            raise fault
        self._table.check(spec, work, self.width)
        if work.hidden is None:
            if len(work.tokens) and not 0 <= work.tokens.min() <= work.tokens.max() < self.vocab:
                raise EngineError(f"A token is outside the vocabulary of {self.vocab}.")
            hidden = embed(work.tokens, self.width)
        else:
            hidden = work.hidden.astype(np.int64)
        hidden = self._through_layers(spec, work.spans, hidden)
        self._table.advance(work.spans)
        if spec.is_last:
            return Output(logits=logits_of(hidden[_wanted_rows(work.spans)], self.vocab))
        return Output(hidden=hidden.astype(np.float32))

    def _through_layers(self, spec: LoadSpec, spans: Sequence[Span], hidden: Ints) -> Ints:
        """int64[n, width] after the layers; one step for all slots when each has one token, else span by span."""
        slots = np.asarray([span.slot for span in spans])
        positions = np.asarray([span.position for span in spans])
        if len(spans) == len(hidden) and len(set(slots.tolist())) == len(slots):
            for index, layer in enumerate(range(spec.first, spec.end)):
                before = self._sums[index, slots, positions].astype(np.int64)
                sums = (before + position_weights(layer, positions) * hidden) % PRIME
                self._sums[index, slots, positions + 1] = sums
                hidden = mix(layer, hidden, sums)
            return hidden
        out = np.empty_like(hidden)
        row = 0
        for span in spans:
            rows = slice(row, row + span.tokens)
            out[rows] = self._span_through_layers(spec, span, hidden[rows])
            row += span.tokens
        return out

    def _span_through_layers(self, spec: LoadSpec, span: Span, hidden: Ints) -> Ints:
        at = span.position
        positions = np.arange(at, at + span.tokens)
        for index, layer in enumerate(range(spec.first, spec.end)):
            cache = self._sums[index, span.slot]
            steps = np.cumsum(position_weights(layer, positions) * hidden, axis=0)
            sums = (cache[at].astype(np.int64) + steps) % PRIME
            cache[at + 1 : at + 1 + span.tokens] = sums
            hidden = mix(layer, hidden, sums)
        return hidden

    def trim(self, slot: int, keep: int) -> None:
        """See Engine."""
        self._loaded()
        self._table.trim(slot, keep)

    def free(self, slot: int) -> None:
        """See Engine."""
        self.trim(slot, 0)

    def held(self, slot: int) -> int:
        """See Engine."""
        self._loaded()
        return self._table.held(slot)

    def export(self, slot: int) -> Buffer:
        """See Engine: the first layer, then its sums up to each token, and those of the layers after it."""
        spec = self._loaded()
        sums = self._sums[:, slot, : self._table.held(slot) + 1]
        return np.int32(spec.first).tobytes() + sums.tobytes()

    def restore(self, slot: int, tokens: int, state: Buffer) -> None:
        """See Engine."""
        spec = self._loaded()
        self._table.put(slot, 0)
        self._table.check_copy(slot, tokens)
        raw = bytes(state)
        shape = (len(self._sums), tokens + 1, self.width)
        if raw[:4] != np.int32(spec.first).tobytes() or len(raw) != 4 + 2 * math.prod(shape):
            raise EngineError(f"The copy of slot {slot} does not fit this slice.", slot=slot, tokens=tokens)
        self._sums[:, slot, : tokens + 1] = np.frombuffer(raw[4:], np.int16).reshape(shape)
        self._table.put(slot, tokens)

    def sampler(self) -> FakeSampler:
        """See Engine."""
        return FakeSampler()

    def close(self) -> None:
        """See Engine."""
        self._spec = None
        self._sums = np.zeros((0, 0, 0, 0), np.int16)

    def _loaded(self) -> LoadSpec:
        if self._spec is None:
            raise EngineError("Nothing is loaded.")
        return self._spec


def _wanted_rows(spans: Sequence[Span]) -> list[int]:
    """Rows whose results are wanted, in order."""
    rows: list[int] = []
    end = 0
    for span in spans:
        end += span.tokens
        rows.extend(range(end - span.wants, end))
    return rows


__all__ = ["FakeEngine", "FakeSampler", "FakeVocabulary", "fake_choice", "fake_continuation"]
