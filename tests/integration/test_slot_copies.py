"""Slots that go from one llama.cpp engine to another: whatever is computed on then is the same to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from potluck.model.facts import read_facts
from potluck.model.slices import ensure_slice
from potluck.stage.engine import LoadSpec, Work
from potluck.stage.engines.llama import LlamaEngine, prepare_process
from potluck.wire.errors import EngineError
from potluck.wire.messages import Span
from tiny_models import write_tiny

# ggml reads its environment once in a process. This runs when tests are collected, before any of them computes.
prepare_process(exact=True)

LAYERS, SLOTS, CONTEXT, VOCAB = 4, 5, 600, 250

Rows = NDArray[np.float32]
Loader = Callable[..., LlamaEngine]


@pytest.fixture
def load() -> Iterator[Loader]:
    """Loads layers [first, end) of a model and closes them at the end."""
    engines: list[LlamaEngine] = []

    def loader(path: Path, first: int, end: int, **settings: Any) -> LlamaEngine:
        facts = read_facts(path)
        files = ensure_slice(path, facts, first, end, path.parent, allow_unlisted=True)
        usual = {"slots": SLOTS, "context_tokens": CONTEXT, "batch_tokens": 256}
        spec = LoadSpec(
            files.slice_path, files.embeddings_path, first, end, facts.layers, **{**usual, **settings}
        )
        engine = LlamaEngine()
        engines.append(engine)
        engine.load(spec)
        return engine

    yield loader
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In Q4_1, as the real one."""
    path = tmp_path_factory.mktemp("tiny") / "llama.gguf"
    return write_tiny(path, "llama", layers=LAYERS, context=1024, types=("Q4_1",))


class Feeder:
    """Gives engines of the same slice the same rows."""

    def __init__(self, engine: LlamaEngine, width: int, seed: int = 1) -> None:
        self._width = None if engine._loaded().spec.is_first else width
        self._rng = np.random.default_rng(seed)

    def __call__(self, spans: list[Span], *engines: LlamaEngine) -> list[Rows]:
        """The same micro-batch through each; what came out, copied."""
        count = sum(span.tokens for span in spans)
        tokens = self._rng.integers(0, VOCAB, count).astype(np.int32)
        hidden = None
        if self._width is not None:
            hidden = self._rng.standard_normal((count, self._width), np.float32)
        results = []
        for engine in engines:
            output = engine.forward(Work(spans, tokens, hidden))
            rows = output.hidden if output.logits is None else output.logits
            assert rows is not None
            results.append(rows.copy())
        return results


def decode_alike(feed: Feeder, spans: list[Span], one: LlamaEngine, other: LlamaEngine, steps: int) -> None:
    """Decodes with both, and with each slot alone as well as together."""
    lengths = {span.slot: one.held(span.slot) for span in spans}
    for step in range(steps):
        chosen = [span.slot for span in spans] if step % 3 else [spans[step % len(spans)].slot]
        batch = [Span(slot, lengths[slot], 1, 1) for slot in chosen]
        first, second = feed(batch, one, other)
        assert np.array_equal(first, second)
        for slot in chosen:
            lengths[slot] += 1
    assert {slot: other.held(slot) for slot in lengths} == lengths


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("first", "end"), [(0, 2), (1, 3), (2, 4), (0, 4)])
def test_a_restored_slot_decodes_on_to_the_last_bit(
    model: Path, load: Loader, first: int, end: int, exact: bool
) -> None:
    one = load(model, first, end, exact=exact, threads=2)
    other = load(model, first, end, exact=exact, threads=2)
    feed = Feeder(one, read_facts(model).width)
    feed([Span(1, 0, 37, 1), Span(3, 0, 90, 2)], one)
    feed([Span(1, 37, 1, 1)], one)
    for slot in (3, 1):
        other.restore(slot, one.held(slot), one.export(slot))
    decode_alike(feed, [Span(1, 0, 1, 1), Span(3, 0, 1, 1)], one, other, 12)


@pytest.mark.parametrize("exact", [False, True])
def test_a_slot_that_was_trimmed_goes_into_one_that_held_something_else(
    model: Path, load: Loader, exact: bool
) -> None:
    one, other = (load(model, 2, 4, exact=exact, threads=2) for _ in range(2))
    feed = Feeder(one, read_facts(model).width)
    feed([Span(0, 0, 256, 1)], one)
    feed([Span(0, 256, 44, 1)], one)
    one.trim(0, 270)
    feed([Span(0, 270, 9, 1)], one)
    feed([Span(0, 0, 200, 1), Span(2, 0, 20, 1)], other)
    feed([Span(0, 200, 1, 1)], other)
    other.restore(0, 279, one.export(0))
    assert (other.held(0), other.held(2)) == (279, 20)
    decode_alike(feed, [Span(0, 0, 1, 1)], one, other, 8)
    for engine in (one, other):
        engine.trim(0, 100)
    decode_alike(feed, [Span(0, 0, 1, 1)], one, other, 3)
    feed([Span(0, one.held(0), 150, 3)], one, other)
    decode_alike(feed, [Span(0, 0, 1, 1)], one, other, 3)


def test_a_copy_that_is_older_than_the_slot_goes_on_from_where_it_was_taken(
    model: Path, load: Loader
) -> None:
    """The takeover: what came after the copy is computed again."""
    one, other = (load(model, 0, 4) for _ in range(2))
    feed, again = (Feeder(one, 0, seed=7) for _ in range(2))
    feed([Span(0, 0, 40, 1)], one)
    again([Span(0, 0, 40, 1)])
    copy = one.export(0)
    (expected,) = feed([Span(0, 40, 5, 5)], one)
    other.restore(0, 40, copy)
    (got,) = again([Span(0, 40, 5, 5)], other)
    assert np.array_equal(got, expected)


def damaged(copy: bytes, how: str) -> bytes:
    match how:
        case "cut":
            return copy[:-1]
        case "longer":
            return copy + b"\0"
        case "empty":
            return b""
        case "noise":
            return np.random.default_rng(3).bytes(len(copy))
        case "count":
            return copy.replace((30).to_bytes(4, "little"), (1 << 31).to_bytes(4, "little"), 1)
        case _:
            return copy


@pytest.mark.parametrize("how", ["cut", "longer", "empty", "noise", "count", "fewer tokens", "another slice"])
def test_a_copy_that_does_not_fit_is_refused_and_leaves_the_slot_empty_and_usable(
    model: Path, load: Loader, how: str
) -> None:
    one, other = load(model, 2, 4), load(model, 2, 3) if how == "another slice" else load(model, 2, 4)
    feed = Feeder(one, read_facts(model).width)
    feed([Span(0, 0, 30, 1)], one)
    feed([Span(0, 0, 10, 1), Span(1, 0, 6, 1)], other)
    with pytest.raises(EngineError, match="slot 0"):
        other.restore(0, 29 if how == "fewer tokens" else 30, damaged(bytes(one.export(0)), how))
    assert (other.held(0), other.held(1)) == (0, 6)
    if how != "another slice":
        fresh = load(model, 2, 4)
        first, second = feed([Span(0, 0, 12, 2)], other, fresh)
        assert np.array_equal(first, second)


def test_copies_of_no_tokens_of_too_many_or_of_no_slot_are_refused(model: Path, load: Loader) -> None:
    engine = load(model, 2, 4)
    for slot, tokens in ((0, 0), (0, CONTEXT + 1), (SLOTS, 3)):
        with pytest.raises(EngineError):
            engine.restore(slot, tokens, b"")
    with pytest.raises(EngineError):
        engine.export(SLOTS)


@pytest.mark.real_model
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("first", "end"), [(0, 15), (15, 30)])
def test_a_real_models_slot_decodes_on_to_the_last_bit(
    smollm2_path: Path, tmp_path: Path, load: Loader, first: int, end: int, exact: bool
) -> None:
    path = tmp_path / smollm2_path.name
    path.symlink_to(smollm2_path)
    one, other = (load(path, first, end, exact=exact, threads=2) for _ in range(2))
    feed = Feeder(one, read_facts(path).width)
    feed([Span(0, 0, 200, 1)], one)
    feed([Span(4, 0, 33, 1)], one)
    feed([Span(4, 0, 50, 1)], other)
    one.trim(0, 180)
    for slot in (0, 4):
        other.restore(slot, one.held(slot), one.export(slot))
    decode_alike(feed, [Span(0, 0, 1, 1), Span(4, 0, 1, 1)], one, other, 9)
