"""The engine that computes: a slice of a model in llama.cpp, driven through its C interface.

Activations go in as embeddings and come out of the graph by a callback on the last block's output; the last stage
returns logits. A stage that holds the whole model takes token ids, as llama.cpp does by itself: `verify` compares with
that. Which rows share a call is decided in `llama_calls`, how things are loaded in `llama_loading`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from potluck.model.architectures import Rules, rules_for
from potluck.model.embeddings import Embeddings
from potluck.model.facts import read_facts
from potluck.stage.engine import FloatRows, Loaded, LoadSpec, Output, Tokens, Work
from potluck.stage.engines import llama_loading as loading
from potluck.stage.engines.llama_batch import CallArrays, Filled
from potluck.stage.engines.llama_callback import HiddenTap
from potluck.stage.engines.llama_calls import Limits, Piece, in_order, plan_calls
from potluck.stage.engines.llama_lib import (
    Library,
    buffer_bytes,
    copied_bytes,
    library,
    prepare_process,
)
from potluck.stage.engines.llama_rows import best_sizes, time_rows
from potluck.stage.engines.llama_sampler import LlamaSampler
from potluck.stage.engines.llama_state import SlotStates
from potluck.stage.engines.slots import SlotTable
from potluck.stage.memory import trim
from potluck.wire.errors import EngineError, OutOfMemoryError, Phase, PotluckError
from potluck.wire.frames import Buffer
from potluck.wire.messages import Span


class LlamaEngine:
    """See Engine. All memory is reserved by `load`; one thread at a time calls it."""

    name = "llama"

    def __init__(self) -> None:
        self._slice: _Slice | None = None

    def load(self, spec: LoadSpec) -> Loaded:
        """See Engine. `Loaded.vocab` is 0 on a stage in the middle, which knows no vocabulary."""
        self.close()
        if not 1 <= spec.slots <= loading.MAX_SLOTS:
            raise EngineError(
                f"llama.cpp serves 1 to {loading.MAX_SLOTS} slots, not {spec.slots}.", phase=Phase.LOAD
            )
        self._slice = _Slice(spec)
        return self._slice.loaded

    def forward(self, work: Work) -> Output:
        """See Engine. Whatever fails, every slot is left as it was before."""
        return self._loaded().forward(work)

    def trim(self, slot: int, keep: int) -> None:
        """See Engine."""
        self._loaded().trim(slot, keep)

    def free(self, slot: int) -> None:
        """See Engine."""
        self._loaded().trim(slot, 0)

    def held(self, slot: int) -> int:
        """See Engine."""
        return self._loaded().held(slot)

    def export(self, slot: int) -> Buffer:
        """See Engine."""
        return self._loaded().export(slot)

    def restore(self, slot: int, tokens: int, state: Buffer) -> None:
        """See Engine."""
        self._loaded().restore(slot, tokens, state)

    def sampler(self) -> LlamaSampler:
        """See Engine. Raises EngineError on a stage that is not the last."""
        loaded = self._loaded()
        if not loaded.spec.is_last:
            raise EngineError("Only the last stage chooses tokens.")
        return LlamaSampler(loaded.loaded.vocab)

    def close(self) -> None:
        """See Engine."""
        if self._slice is not None:
            self._slice.close()
            self._slice = None
            trim()  # a device that is rid of a slice has its memory again

    def _loaded(self) -> _Slice:
        if self._slice is None:
            raise EngineError("Nothing is loaded.")
        return self._slice


class _Slice:
    """A slice that is loaded, with the arrays its calls use."""

    def __init__(self, spec: LoadSpec) -> None:
        self.spec = spec
        self._closing = contextlib.ExitStack()
        try:
            self._open(spec)
        except BaseException:
            self.close()
            raise

    def _open(self, spec: LoadSpec) -> None:
        facts = read_facts(spec.slice_path)
        if facts.layers != spec.end - spec.first:
            raise EngineError(
                f"{spec.slice_path} has {facts.layers} layers, not the {spec.end - spec.first} of this stage.",
                phase=Phase.LOAD,
            )
        self.rules: Rules = rules_for(facts, allow_unlisted=True)
        self.library: Library = library()
        if spec.exact and self.library.computed_tiled is None:
            prepare_process(exact=True)
        self.width = facts.width
        self.exactness = loading.Exactness.of(spec, facts, self.library)
        loading.check_room(spec, facts, self.exactness)
        self.limits: Limits = loading.limits_of(spec, self.exactness.on)
        self._table = SlotTable(spec.slots, spec.context_tokens, spec.batch_tokens)
        self._takes_tokens = spec.is_first and spec.is_last
        self._embeddings = self._open_embeddings(spec)
        # One row more than a call may hold, for padding.
        rows = self.limits.batch_rows + 1
        name = f"{self.rules.hidden_tensor}-{facts.layers - 1}"
        self._tap = None if spec.is_last else HiddenTap(self.library, name, self.width, rows)
        api = self._api = self.library.api
        with self.library.capture() as lines:
            model = loading.load_model(self.library, spec, self.exactness.on)
            self._closing.callback(api.llama_model_free, model)
            context = loading.make_context(self.library, model, spec, self.exactness, self.limits, self._tap)
            self._closing.callback(api.llama_free, context)
            self._context = context
            self._memory = api.llama_get_memory(context)
            self._states = SlotStates(self.library, context, self._memory)
            sections = loading.position_sections(self.library, model)
            self._arrays = CallArrays(api, rows, None if self._takes_tokens else self.width, sections)
            self.vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model)) if spec.is_last else 0
            self._logits: FloatRows = np.empty((spec.slots if spec.is_last else 0, self.vocab), np.float32)
            self._warm_up()
            if spec.tune:
                self._tune()
            sizes = buffer_bytes(lines)
            copied = copied_bytes(lines)
        self.loaded = Loaded(
            width=self.width,
            vocab=self.vocab or (self._embeddings.vocab if self._embeddings else 0),
            weights_bytes=api.llama_model_size(model),
            kv_bytes=sizes.get("KV", 0) + sizes.get("RS", 0),
            compute_bytes=sizes.get("compute", 0) + sizes.get("output", 0) + self._own_bytes(),
            copied_bytes=copied,
        )

    def _own_bytes(self) -> int:
        """Of the arrays that rows go in and come out by."""
        tapped = self._tap.buffer.nbytes if self._tap is not None else 0
        return self._arrays.staged_bytes + tapped + self._logits.nbytes

    def _open_embeddings(self, spec: LoadSpec) -> Embeddings | None:
        if not spec.is_first or spec.is_last:
            return None
        path: Path = spec.embeddings_path or spec.slice_path
        embeddings = Embeddings(path, self.rules.token_scale)
        self._closing.callback(embeddings.close)
        if embeddings.width != self.width:
            raise EngineError(
                f"{path} has embeddings of width {embeddings.width}, the slice one of {self.width}.",
                phase=Phase.LOAD,
            )
        return embeddings

    def _warm_up(self) -> None:
        """One row through everything, so that the first token does not wait for the weights to be read in.

        Not with llama_set_warmup: the graph that lets all experts of a MoE model compute would be used again for the
        next call of this size.
        """
        values: FloatRows | Tokens = (
            np.zeros(1, np.int32) if self._takes_tokens else np.zeros((1, self.width), np.float32)
        )
        self._run([[Piece(0, 0, 0, 1, int(self.spec.is_last))]], values, np.zeros(1, np.intp))
        self._api.llama_memory_clear(self._memory, True)

    def _tune(self) -> None:
        """Finds the runs in which decode rows are fastest here, and empties the cache again."""

        def call(rows: int) -> None:
            pieces = [Piece(slot, slot, 0, 1, int(self.spec.is_last)) for slot in range(rows)]
            values: FloatRows | Tokens = (
                np.zeros(rows, np.int32) if self._takes_tokens else np.zeros((rows, self.width), np.float32)
            )
            self._run([pieces], values, np.arange(rows))
            self._api.llama_memory_clear(self._memory, False)

        times = time_rows(call, min(self.spec.slots, self.limits.together_rows), time.perf_counter)
        sizes = best_sizes(times, min(self.spec.slots, self.limits.together_rows))
        self.limits = replace(self.limits, decode_sizes=sizes)
        self._api.llama_memory_clear(self._memory, True)

    # ---- computing

    def forward(self, work: Work) -> Output:
        """See Engine."""
        self._table.check(self.spec, work, self.width)
        values = self._values(work)
        calls = plan_calls(work.spans, self.limits)
        try:
            output = self._run(calls, values, _wanted_rows(work.spans))
        except BaseException:
            self._repair(work.spans)
            raise
        self._table.advance(work.spans)
        return output

    def _values(self, work: Work) -> FloatRows | Tokens:
        """What goes into the graph for each row."""
        if work.hidden is not None:
            rows = np.ascontiguousarray(work.hidden, np.float32)
            return self.rules.scale_handover(rows)
        if self._embeddings is None:
            tokens = np.ascontiguousarray(work.tokens, np.int32)
            if not 0 <= tokens.min() <= tokens.max() < self.vocab:
                raise EngineError(f"A token is outside the vocabulary of {self.vocab}.")
            return tokens
        try:
            return np.ascontiguousarray(self._embeddings.look_up(work.tokens))
        except EngineError:
            raise
        except PotluckError as error:
            raise EngineError(error.what, hint=error.hint) from error

    def _run(self, calls: list[list[Piece]], values: FloatRows | Tokens, wanted: NDArray[np.intp]) -> Output:
        """All calls, and their outputs in the order of the micro-batch's rows."""
        if self._tap is None:
            return self._run_last(calls, values, wanted)
        tap = self._tap
        tap.begin()
        done: list[NDArray[np.intp]] = []
        for call in calls:
            before = tap.rows
            rows = self._call(call, values).rows
            tap.settle(before + len(rows), extra=self._pads(call))
            done.append(rows)
        hidden = tap.buffer[: tap.rows]
        if not in_order(calls):
            ordered = np.empty_like(hidden)
            ordered[np.concatenate(done)] = hidden
            hidden = ordered
        return Output(hidden=hidden)

    def _run_last(
        self, calls: list[list[Piece]], values: FloatRows | Tokens, wanted: NDArray[np.intp]
    ) -> Output:
        if len(wanted) > len(self._logits):
            self._logits = np.empty((len(wanted), self.vocab), np.float32)
        logits = self._logits[: len(wanted)]
        for call in calls:
            filled = self._call(call, values)
            if not len(filled.wanted):
                continue
            pointer = self._api.llama_get_logits(self._context)
            if not pointer:
                raise EngineError(f"llama.cpp gave no logits: {self.library.last_error() or 'no reason'}.")
            here = np.searchsorted(wanted, filled.wanted)
            first, count = int(here[0]), len(here)
            if filled.outputs is None and int(here[-1]) - first == count - 1:
                logits[first : first + count] = np.ctypeslib.as_array(pointer, (count, self.vocab))
            else:
                outputs = np.arange(count) if filled.outputs is None else filled.outputs
                logits[here] = np.ctypeslib.as_array(pointer, (int(outputs[-1]) + 1, self.vocab))[outputs]
        return Output(logits=logits)

    def _call(self, call: Sequence[Piece], values: FloatRows | Tokens) -> Filled:
        """One llama_decode."""
        pad = self._pads(call)
        filled = self._arrays.fill(call, values, not self.spec.is_last, pad, self.exactness.pair)
        loading.note_computing(self.library)
        code = self._api.llama_decode(self._context, self._arrays.struct)
        if self._tap is not None:
            self._tap.raise_error()
        if code:
            raise self._refusal(code, call)
        if pad:
            self._remove(call[0].slot, call[0].position + 1)
        return filled

    def _pads(self, call: Sequence[Piece]) -> bool:
        return self.exactness.pad and len(call) == 1 and call[0].tokens == 1

    def _refusal(self, code: int, call: Sequence[Piece]) -> EngineError:
        rows = sum(piece.tokens for piece in call)
        said = self.library.last_error()
        what = f"llama.cpp returned {code} for {rows} tokens of slots {call[0].slot} to {call[-1].slot}"
        match code:
            case 1:
                kind, why = EngineError, "its KV cache has no room for them"
            case 2:
                kind, why = EngineError, "the computation was aborted"
            case -2:
                kind, why = OutOfMemoryError, f"there is no memory for them ({said})"
            case _:
                kind, why = EngineError, said or "it gave no reason"
        return kind(f"{what}: {why}.", code=code, rows=rows, said=said)

    # ---- the cache

    def trim(self, slot: int, keep: int) -> None:
        """See Engine."""
        if self._table.trim(slot, keep):
            self._remove(slot, keep)

    def held(self, slot: int) -> int:
        """See Engine."""
        return self._table.held(slot)

    def export(self, slot: int) -> Buffer:
        """See Engine."""
        self._table.held(slot)
        return self._states.read(slot)

    def restore(self, slot: int, tokens: int, state: Buffer) -> None:
        """See Engine."""
        self._table.put(slot, 0)
        try:
            self._table.check_copy(slot, tokens)
        except EngineError:
            self._states.empty(slot)
            raise
        self._states.write(slot, tokens, state)
        self._table.put(slot, tokens)

    def _remove(self, slot: int, first: int) -> None:
        """Forgets the slot's positions from `first` on; if llama.cpp can't, the whole slot, and says so."""
        if self._api.llama_memory_seq_rm(self._memory, slot, first, -1):
            return
        self._api.llama_memory_seq_rm(self._memory, slot, -1, -1)
        self._table.trim(slot, 0)
        raise EngineError(f"llama.cpp can't forget a part of slot {slot}: the slot is empty now.", slot=slot)

    def _repair(self, spans: Sequence[Span]) -> None:
        """Back to what the slots held before a micro-batch that failed."""
        for span in spans:
            self._remove(span.slot, self._table.held(span.slot))

    def close(self) -> None:
        """Frees everything. May be called twice."""
        self._closing.close()


def _wanted_rows(spans: Sequence[Span]) -> NDArray[np.intp]:
    """intp[wants]: the rows whose results are wanted, ascending."""
    rows: list[int] = []
    end = 0
    for span in spans:
        end += span.tokens
        rows.extend(range(end - span.wants, end))
    return np.array(rows, np.intp)


__all__ = ["LlamaEngine", "prepare_process"]
