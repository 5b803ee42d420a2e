"""The micro-batches by which a chain of slices is compared with its whole model, and the chain they go through."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from potluck.model.codecs import Codec, decode, encode
from potluck.stage.engine import FloatRows, LoadSpec, Work
from potluck.stage.engines.llama import LlamaEngine
from potluck.wire.errors import ModelError, UsageError
from potluck.wire.messages import Span

CHUNK: Final = 24
"""Tokens of one prompt in one micro-batch; the prompts' chunks travel together."""
_EDGE: Final = 240
TakesLogits = Callable[[Sequence[Span], list[list[int]], int, FloatRows], None]
"""Spans of a micro-batch, all texts before it, the number of results before it, and its logits."""


class Batches:
    """The micro-batches of a run: chunks of all prompts side by side, then one token of each. Slot i is prompt i."""

    def __init__(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        self.prompts = prompts
        self.tokens = tokens
        self.longest = max(map(len, prompts))
        self.positions = 0
        """Results of a run, all told."""
        for slot, prompt in enumerate(prompts):
            for at in range(0, len(prompt), CHUNK):
                self.positions += self._wants(slot, at, min(CHUNK, len(prompt) - at))
            self.positions += tokens - 1

    def _wants(self, slot: int, at: int, size: int) -> int:
        """Results of a chunk: all, but one of each chunk in the middle of a very long prompt (logits are large)."""
        return size if at < _EDGE or len(self.prompts[slot]) - at <= _EDGE else 1

    def spec(self, path: Path, first: int, end: int, layers: int, threads: int, exact: bool) -> LoadSpec:
        """How each engine of a run is loaded: with the same limits, so that all make the same calls."""
        return LoadSpec(
            slice_path=path,
            embeddings_path=path if first == 0 else None,
            first=first,
            end=end,
            layers=layers,
            slots=len(self.prompts),
            context_tokens=self.longest + self.tokens,
            batch_tokens=CHUNK * len(self.prompts),
            threads=threads,
            exact=exact,
        )

    def run(self, chain: Sequence[LlamaEngine], activation: Codec, take: TakesLogits) -> list[list[int]]:
        """Runs everything through a chain. The logits go to `take` in order; the greedy tokens come back."""
        texts = [list(prompt) for prompt in self.prompts]
        done = [0] * len(texts)
        row = 0
        while any(at < len(self.prompts[i]) + self.tokens - 1 for i, at in enumerate(done)):
            spans = []
            fed: list[int] = []
            for slot, (text, at) in enumerate(zip(texts, done, strict=True)):
                last = len(self.prompts[slot]) + self.tokens - 1
                size = min(CHUNK, len(text) - at, last - at)
                if size > 0:
                    spans.append(Span(slot, at, size, self._wants(slot, at, size)))
                    fed.extend(text[at : at + size])
            logits = _through(chain, spans, np.array(fed, np.int32), activation)
            take(spans, texts, row, logits)
            row += len(logits)
            end = 0
            for span in spans:
                end += span.wants
                done[span.slot] += span.tokens
                if done[span.slot] == len(texts[span.slot]):
                    texts[span.slot].append(int(np.argmax(logits[end - 1])))
        return [text[len(prompt) :] for text, prompt in zip(texts, self.prompts, strict=True)]


def _through(
    chain: Sequence[LlamaEngine], spans: Sequence[Span], tokens: NDArray[np.int32], activation: Codec
) -> FloatRows:
    hidden: FloatRows | None = None
    for engine in chain:
        output = engine.forward(Work(spans, tokens, hidden))
        if output.logits is not None:
            return output.logits
        assert output.hidden is not None
        rows, width = output.hidden.shape
        hidden = decode(bytes(encode(output.hidden, activation)), rows, width, activation)
    raise UsageError("The chain has no last stage.")


@contextmanager
def chain_of(specs: Sequence[LoadSpec]) -> Iterator[list[LlamaEngine]]:
    """Engines that hold these slices, in order."""
    engines = [LlamaEngine() for _ in specs]
    try:
        for engine, spec in zip(engines, specs, strict=True):
            engine.load(spec)
        yield engines
    finally:
        for engine in engines:
            engine.close()


class Kept:
    """The whole model's logits, row by row."""

    def __init__(self, rows: NDArray[np.float32]) -> None:
        self._rows = rows

    def take(self, spans: Sequence[Span], texts: list[list[int]], row: int, logits: FloatRows) -> None:
        """See TakesLogits."""
        self._rows[row : row + len(logits)] = logits


@contextmanager
def room_for(rows: int, vocab: int) -> Iterator[NDArray[np.float32]]:
    """float32[rows, vocab] in a temporary file: the whole model's logits, while the slices need the memory."""
    with tempfile.TemporaryFile() as file:
        try:
            file.truncate(rows * vocab * 4)
            yield np.memmap(file, np.float32, "r+", shape=(rows, vocab))
        except OSError as error:
            raise ModelError(
                f"{rows * vocab * 4 >> 20} MiB are needed in {tempfile.gettempdir()}: {error.strerror}.",
                hint="Free some space, or set TMPDIR.",
            ) from error


__all__ = ["CHUNK", "Batches", "Kept", "TakesLogits", "chain_of", "room_for"]
