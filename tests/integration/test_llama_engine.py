"""The llama.cpp engine on tiny random models: rows in order, caches that follow, errors with a reason."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from potluck.model.cache_size import cache_token_bytes
from potluck.model.facts import read_facts
from potluck.model.slices import ensure_slice
from potluck.stage.engine import LoadSpec, Work
from potluck.stage.engines import llama_loading, make_engine
from potluck.stage.engines.llama import LlamaEngine, prepare_process
from potluck.wire.errors import EngineError, ModelError, NotGgufError, OutOfMemoryError
from potluck.wire.messages import Span
from potluck.wire.sampling import GREEDY
from tiny_models import write_tiny

# ggml reads its environment once in a process. This runs when tests are collected, before any of them computes.
prepare_process(exact=True)

SLOTS = 5
LAYERS = 4
CONTEXT = 300

Loader = Callable[..., LlamaEngine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "llama.gguf", "llama", layers=LAYERS, context=1024)


@pytest.fixture(scope="module")
def vocab(model: Path) -> int:
    return read_facts(model).vocab


def spec_of(path: Path, first: int = 0, end: int = LAYERS, layers: int = LAYERS, **settings: Any) -> LoadSpec:
    usual = {"slots": SLOTS, "context_tokens": CONTEXT, "batch_tokens": 256}
    return LoadSpec(path, path if first == 0 else None, first, end, layers, **{**usual, **settings})


@pytest.fixture
def load() -> Iterator[Loader]:
    """Loads engines and closes them at the end."""
    engines: list[LlamaEngine] = []

    def loader(spec: LoadSpec) -> LlamaEngine:
        engine = LlamaEngine()
        engines.append(engine)
        engine.load(spec)
        return engine

    yield loader
    for engine in engines:
        engine.close()


@pytest.fixture
def chain(model: Path, load: Loader, tmp_path: Path) -> list[LlamaEngine]:
    """Three stages: [0, 1), [1, 3), [3, 4)."""
    facts = read_facts(model)
    engines = []
    for first, end in ((0, 1), (1, 3), (3, 4)):
        files = ensure_slice(model, facts, first, end, tmp_path)
        spec = spec_of(files.slice_path, first, end)
        assert (files.embeddings_path is not None) == spec.is_first
        engines.append(load(spec_with(spec, files.embeddings_path)))
    return engines


def spec_with(spec: LoadSpec, embeddings: Path | None) -> LoadSpec:
    return LoadSpec(
        spec.slice_path,
        embeddings,
        spec.first,
        spec.end,
        spec.layers,
        spec.slots,
        spec.context_tokens,
        spec.batch_tokens,
    )


def tokens_of(seed: int, count: int, vocab: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, vocab, count).astype(np.int32)


def run(engines: list[LlamaEngine], spans: list[Span], tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """The logits at the end of a chain, copied."""
    hidden = None
    for engine in engines:
        output = engine.forward(Work(spans, tokens, hidden))
        hidden = output.hidden
    assert output.logits is not None
    return output.logits.copy()


MIXED = [
    [Span(1, 0, 100, 100)],
    [Span(3, 0, 7, 7), Span(0, 0, 30, 2), Span(2, 0, 30, 30)],
    [Span(2, 30, 1, 1), Span(4, 0, 5, 0), Span(0, 30, 1, 1), Span(1, 100, 1, 1), Span(3, 7, 1, 1)],
    [Span(1, 101, 3, 3), Span(1, 104, 2, 1), Span(0, 31, 1, 1)],
    [Span(4, 5, 150, 5), Span(0, 32, 1, 0)],
]


def test_a_chain_gives_the_whole_models_logits_for_every_shape_of_micro_batch(
    model: Path, load: Loader, chain: list[LlamaEngine], vocab: int
) -> None:
    whole = load(spec_of(model))
    for index, spans in enumerate(MIXED):
        tokens = tokens_of(index, sum(span.tokens for span in spans), vocab)
        expected = run([whole], spans, tokens)
        assert expected.shape == (sum(span.wants for span in spans), vocab)
        assert np.array_equal(run(chain, spans, tokens), expected)


@pytest.mark.parametrize("exact", [False, True])
def test_results_come_back_in_the_spans_order_whatever_the_slots_order(
    model: Path, load: Loader, vocab: int, exact: bool
) -> None:
    engine = load(spec_of(model, exact=exact))
    texts = {slot: tokens_of(slot, 6 + slot % 2, vocab) for slot in range(SLOTS)}
    alone = {}
    for slot, text in texts.items():
        alone[slot] = run([engine], [Span(slot, 0, len(text), 2)], text)
        engine.free(slot)
    order = [3, 0, 4, 2, 1]
    spans = [Span(slot, 0, len(texts[slot]), 2) for slot in order]
    together = run([engine], spans, np.concatenate([texts[slot] for slot in order]))
    for index, slot in enumerate(order):
        others = np.abs(together[2 * index : 2 * index + 2] - alone[slot]).max()
        assert others == 0.0 if exact else others < 1e-3
    assert np.abs(alone[0] - alone[1]).max() > 0.1


def test_a_trimmed_slot_goes_on_as_if_the_rest_had_never_been(model: Path, load: Loader, vocab: int) -> None:
    engine = load(spec_of(model, exact=True))
    text = tokens_of(1, 40, vocab)
    expected = run([engine], [Span(2, 0, 40, 40)], text)
    engine.trim(2, 25)
    engine.forward(Work([Span(2, 25, 9, 1)], tokens_of(2, 9, vocab)))
    engine.trim(2, 25)
    assert np.array_equal(run([engine], [Span(2, 25, 15, 15)], text[25:]), expected[25:])
    engine.free(2)
    assert np.array_equal(run([engine], [Span(2, 0, 40, 40)], text), expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_every_slot_holds_its_whole_context_and_not_a_token_more(
    model: Path, load: Loader, vocab: int, threads: int
) -> None:
    engine = load(spec_of(model, slots=3, context_tokens=256, threads=threads, exact=True))
    for slot in range(3):
        engine.forward(Work([Span(slot, 0, 255, 0)], tokens_of(slot, 255, vocab)))
    run([engine], [Span(slot, 255, 1, 1) for slot in range(3)], tokens_of(9, 3, vocab))
    for slot in range(3):
        engine.trim(slot, 255)
        run([engine], [Span(slot, 255, 1, 1)], tokens_of(9, 1, vocab))  # alone, so that exact mode pads it
        with pytest.raises(EngineError, match="room for 256"):
            engine.forward(Work([Span(slot, 256, 1, 1)], tokens_of(9, 1, vocab)))


def test_a_span_in_the_wrong_place_is_refused_before_anything_is_computed(
    model: Path, load: Loader, vocab: int
) -> None:
    engine = load(spec_of(model))
    text = tokens_of(0, 12, vocab)
    expected = run([engine], [Span(0, 0, 10, 1)], text[:10])
    for spans in ([Span(0, 9, 1, 1)], [Span(0, 11, 1, 1)], [Span(1, 0, 1, 1), Span(0, 3, 1, 1)]):
        with pytest.raises(EngineError, match="holds"):
            engine.forward(Work(spans, text[: len(spans)]))
    with pytest.raises(EngineError, match="vocabulary"):
        engine.forward(Work([Span(1, 0, 1, 1)], np.array([vocab], np.int32)))
    with pytest.raises(EngineError):
        engine.trim(0, 11)
    engine.free(0)
    assert np.array_equal(run([engine], [Span(0, 0, 10, 1)], text[:10]), expected)


def test_an_exception_inside_llama_cpps_callback_is_raised_and_the_slots_stay_as_they_were(
    chain: list[LlamaEngine], vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tokens_of(3, 20, vocab)
    expected = run(chain, [Span(0, 0, 20, 20)], text)
    for engine in chain:
        engine.trim(0, 12)
    first = chain[0]
    assert first._slice is not None
    tap = first._slice._tap
    assert tap is not None

    def broken(_tensor: int) -> None:
        raise ZeroDivisionError("inside the callback")

    with monkeypatch.context() as patch:
        patch.setattr(tap, "_take", broken)
        with pytest.raises(ZeroDivisionError, match="inside the callback"):
            first.forward(Work([Span(0, 12, 8, 8)], text[12:]))
    again = run(chain, [Span(0, 12, 8, 8)], text[12:])
    assert np.abs(again - expected[12:]).max() < 1e-3


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (1, EngineError, "no room"),
        (2, EngineError, "aborted"),
        (-2, OutOfMemoryError, "memory"),
        (-3, EngineError, "-3"),
    ],
)
def test_a_refusal_by_llama_decode_is_an_error_and_undoes_the_micro_batch(
    model: Path,
    load: Loader,
    vocab: int,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    kind: type[EngineError],
    words: str,
) -> None:
    engine = load(spec_of(model, exact=True))
    text = tokens_of(5, 200, vocab)
    expected = run([engine], [Span(1, 0, 200, 200)], text)
    engine.trim(1, 20)
    assert engine._slice is not None
    api = engine._slice._api
    real, calls = api.llama_decode, []

    def refuses_the_second(context: object, batch: object) -> int:
        calls.append(batch)
        return int(real(context, batch)) if len(calls) == 1 else code

    with monkeypatch.context() as patch:
        patch.setattr(api, "llama_decode", refuses_the_second)
        with pytest.raises(kind, match=words):
            engine.forward(Work([Span(1, 20, 180, 1)], text[20:]))
    assert len(calls) == 2
    assert np.array_equal(run([engine], [Span(1, 20, 180, 180)], text[20:]), expected[20:])


def test_hidden_rows_of_the_wrong_shape_are_refused(chain: list[LlamaEngine]) -> None:
    work = Work([Span(0, 0, 2, 1)], np.zeros(2, np.int32), np.zeros((2, 63), np.float32))
    with pytest.raises(EngineError, match="shape"):
        chain[1].forward(work)


def test_loading_says_what_it_took(model: Path) -> None:
    engine = make_engine("llama")
    loaded = engine.load(spec_of(model))
    facts = read_facts(model)
    assert (loaded.width, loaded.vocab) == (facts.width, facts.vocab)
    assert loaded.weights_bytes == sum(tensor.bytes for tensor in facts.tensors.values())
    # Keys and values of 2 heads of 16 numbers of 2 bytes, in 512 cells (300 rounded up to a multiple of 256).
    assert loaded.kv_bytes == pytest.approx(SLOTS * 512 * LAYERS * 2 * 2 * 16 * 2, abs=1 << 14)
    assert loaded.kv_bytes == pytest.approx(SLOTS * 512 * cache_token_bytes(facts), abs=1 << 14)
    assert loaded.compute_bytes > 0
    engine.close()


def test_closing_twice_is_fine_and_a_closed_engine_says_so(model: Path) -> None:
    engine = make_engine("llama")
    engine.load(spec_of(model))
    engine.close()
    engine.close()
    for call in (lambda: engine.trim(0, 0), lambda: engine.free(0), engine.sampler):
        with pytest.raises(EngineError, match="Nothing is loaded"):
            call()
    engine.load(spec_of(model))
    engine.close()


def test_loading_again_replaces_what_was_loaded(model: Path, load: Loader, vocab: int) -> None:
    engine = load(spec_of(model))
    text = tokens_of(1, 5, vocab)
    expected = run([engine], [Span(0, 0, 5, 1)], text)
    engine.load(spec_of(model))
    assert np.array_equal(run([engine], [Span(0, 0, 5, 1)], text), expected)


def test_a_file_that_is_missing_or_no_model_is_refused_with_its_name(tmp_path: Path) -> None:
    engine = make_engine("llama")
    with pytest.raises(ModelError, match=r"nothing\.gguf"):
        engine.load(spec_of(tmp_path / "nothing.gguf"))
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"not a model" * 1000)
    with pytest.raises(NotGgufError):
        engine.load(spec_of(garbage))
    with pytest.raises(EngineError):
        engine.free(0)


def test_a_file_that_llama_cpp_refuses_is_an_error_with_llama_cpps_words(tmp_path: Path, model: Path) -> None:
    raw = model.read_bytes()
    assert raw.count(b"blk.2.attn_q.weight") == 1
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(raw.replace(b"blk.2.attn_q.weight", b"blk.2.attn_X.weight"))
    with pytest.raises(ModelError, match=r"blk\.2\.attn_q"):
        make_engine("llama").load(spec_of(broken))


def test_a_slice_of_another_length_is_refused(model: Path) -> None:
    with pytest.raises(EngineError, match="4 layers, not the 2"):
        make_engine("llama").load(spec_of(model, 0, 2))


@pytest.mark.parametrize("context", [200_000_000, 4_000_000_000])
def test_a_cache_that_can_not_fit_is_refused_before_it_is_reserved(model: Path, context: int) -> None:
    with pytest.raises(OutOfMemoryError, match="MiB"):
        make_engine("llama").load(spec_of(model, context_tokens=context))


def test_a_cache_is_refused_if_the_container_has_no_room_for_it_though_the_machine_has(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_loading, "free_memory_bytes", lambda: 1 << 10)
    with pytest.raises(OutOfMemoryError, match="0 MiB are free"):
        make_engine("llama").load(spec_of(model, context_tokens=4096))


@pytest.mark.parametrize("slots", [0, 257])
def test_more_slots_than_llama_cpp_has_are_refused(model: Path, slots: int) -> None:
    with pytest.raises(EngineError, match="256"):
        make_engine("llama").load(spec_of(model, slots=slots))


def test_more_slots_than_tokens_in_a_micro_batch_work(model: Path, load: Loader, vocab: int) -> None:
    engine = load(spec_of(model, slots=40, context_tokens=32, batch_tokens=4))
    logits = run([engine], [Span(slot, 0, 1, 1) for slot in (39, 0, 1, 17)], tokens_of(0, 4, vocab))
    assert np.isfinite(logits).all()


def test_only_the_last_stage_samples(chain: list[LlamaEngine], vocab: int) -> None:
    with pytest.raises(EngineError):
        chain[0].sampler()
    sampler = chain[-1].sampler()
    sampler.set(0, GREEDY)
    row = run(chain, [Span(0, 0, 1, 1)], tokens_of(0, 1, vocab))[0]
    assert sampler.sample(0, 0, row)[0] == int(row.argmax())
    sampler.close()
    sampler.close()


# ---- exactness: the same bits whatever shares a micro-batch, and in whatever chunks

LONG = 600


def walk(
    engine: LlamaEngine, text: NDArray[np.int32], slot: int, sizes: list[int], strangers: int
) -> NDArray[np.float32]:
    """The logits of every position of `text` in chunks of `sizes`, with strangers in the slots behind."""
    for other in range(SLOTS):
        engine.free(other)
    at = step = stranger_at = 0
    found = []
    while at < len(text):
        size = min(sizes[step % len(sizes)], len(text) - at)
        spans, tokens = [Span(slot, at, size, size)], [text[at : at + size]]
        for other in range(slot + 1, slot + 1 + strangers):
            if stranger_at + size <= LONG:
                spans.append(Span(other, stranger_at, size, 1))
                tokens.append(np.full(size, 5 + other, np.int32))
        stranger_at += size if len(spans) > 1 else 0
        found.append(run([engine], spans, np.concatenate(tokens))[:size])
        at += size
        step += 1
    return np.concatenate(found)


def spread(engine: LlamaEngine, text: NDArray[np.int32]) -> float:
    """The largest difference between decoding one by one and every other way."""
    alone = walk(engine, text, 0, [1], 0)
    ways = [(1, [24], 0), (0, [100, 1, 7], 0), (2, [256], 0), (1, [1], 2), (0, [8, 3, 1], 3)]
    return max(float(np.abs(walk(engine, text, *way) - alone).max()) for way in ways)


KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", [*KINDS, "experts"])
def test_exact_mode_gives_the_same_bits_alone_and_among_strangers_and_in_any_chunks(
    load: Loader, tmp_path: Path, kind: str, threads: int
) -> None:
    arch = "qwen3moe" if kind == "experts" else "llama"
    weights = "Q8_0" if kind == "experts" else kind
    path = write_tiny(
        tmp_path / "model.gguf",
        arch,
        layers=2,
        width=256,
        feed_forward=256,
        types=(weights,),
        head_type=weights,
        context=2048,
    )
    engine = load(spec_of(path, 0, 2, 2, context_tokens=LONG, exact=True, threads=threads))
    assert spread(engine, tokens_of(7, LONG, read_facts(path).vocab)) == 0.0


@pytest.mark.skipif(platform.machine() != "x86_64", reason="which kernels differ depends on the processor")
def test_without_exact_mode_chunks_do_change_the_last_bits(load: Loader, model: Path, vocab: int) -> None:
    engine = load(spec_of(model, context_tokens=LONG))
    assert 0.0 < spread(engine, tokens_of(7, 200, vocab)) < 1.0


@pytest.mark.real_model
def test_exact_mode_holds_on_a_real_model(load: Loader, smollm2_path: Path) -> None:
    engine = load(spec_of(smollm2_path, 0, 30, 30, exact=True))
    assert spread(engine, tokens_of(7, 150, 49_152)) == 0.0
