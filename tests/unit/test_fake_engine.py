"""The fake engine: whatever the split, the batches and the replays, the text is that of a pure function."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.stage.engine import LoadSpec, Work
from potluck.stage.engines import make_engine
from potluck.stage.engines.fake import FakeEngine, FakeSampler, FakeVocabulary, fake_continuation
from potluck.stage.engines.fake_model import END_TOKEN, PRIME, VOCAB
from potluck.wire.errors import EngineError, OutOfMemoryError, UsageError
from potluck.wire.messages import Span
from potluck.wire.sampling import GREEDY, Sampling

LAYERS = 6
SLOTS = 4
NOWHERE = Path("/no/such/slice.gguf")


def spec(first: int = 0, end: int = LAYERS, layers: int = LAYERS) -> LoadSpec:
    return LoadSpec(NOWHERE, None, first, end, layers, slots=SLOTS, context_tokens=64, batch_tokens=128)


class Chain:
    """A chain of fake stages with a sampler, driven by hand. `fed` is what each slot holds."""

    def __init__(self, cuts: Sequence[int] = (), half: bool = False) -> None:
        self.engines = [FakeEngine() for _ in range(len(cuts) + 1)]
        for engine, (first, end) in zip(self.engines, pairwise((0, *cuts, LAYERS)), strict=True):
            engine.load(spec(first, end))
        self.sampler = self.engines[-1].sampler()
        self.half = half

    def run(self, spans: list[Span], tokens: list[list[int]]) -> list[int]:
        """One micro-batch; a token for each wanted result."""
        flat = np.array([token for part in tokens for token in part], np.int32)
        hidden = None
        for engine in self.engines:
            output = engine.forward(Work(spans, flat, hidden))
            if output.hidden is not None:
                hidden = output.hidden.astype(np.float16).astype(np.float32) if self.half else output.hidden
        assert output.logits is not None
        chosen = []
        for span, part in zip(spans, tokens, strict=True):
            self.sampler.see(span.slot, span.position, np.array(part, np.int32))
            for index in range(span.tokens - span.wants, span.tokens):
                row = output.logits[len(chosen)]
                chosen.append(self.sampler.sample(span.slot, span.position + index, row)[0])
        return chosen

    def trim(self, slot: int, keep: int) -> None:
        for engine in self.engines:
            engine.trim(slot, keep)


def generate(
    chain: Chain, prompt: list[int], n: int, slot: int = 0, chunk: int = 64, keep: int = 0
) -> list[int]:
    """`n` tokens after `prompt`, of which the slot holds the first `keep` tokens already."""
    text = list(prompt)
    at = keep
    while len(text) < len(prompt) + n:
        part = text[at : at + chunk]
        last = at + len(part) == len(text)
        chosen = chain.run([Span(slot, at, len(part), int(last))], [part])
        at += len(part)
        text += chosen
    return text[len(prompt) :]


prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)


@given(
    prompt=prompts,
    cuts=st.sets(st.integers(1, LAYERS - 1)).map(sorted),
    chunk=st.integers(1, 8),
    half=st.booleans(),
)
def test_every_split_and_every_chunk_size_gives_the_text_of_the_pure_function(
    prompt: list[int], cuts: list[int], chunk: int, half: bool
) -> None:
    assert generate(Chain(cuts, half), prompt, 5, chunk=chunk) == fake_continuation(prompt, 5, LAYERS)


@given(texts=st.lists(prompts, min_size=2, max_size=SLOTS), order=st.randoms(use_true_random=False))
def test_slots_that_share_micro_batches_do_not_disturb_each_other(
    texts: list[list[int]], order: Random
) -> None:
    chain = Chain([2, 3])
    done = [list(text) for text in texts]
    at = [0] * len(texts)
    for _ in range(6):
        slots = list(range(len(texts)))
        order.shuffle(slots)
        spans = [Span(slot, at[slot], len(done[slot]) - at[slot], 1) for slot in slots]
        chosen = chain.run(spans, [done[slot][at[slot] :] for slot in slots])
        for slot, token in zip(slots, chosen, strict=True):
            at[slot] = len(done[slot])
            done[slot].append(token)
    for text, all_of_it in zip(texts, done, strict=True):
        assert all_of_it[len(text) :] == fake_continuation(text, 6, LAYERS)


def test_a_slot_used_again_shows_nothing_of_the_request_before() -> None:
    chain = Chain([3])
    generate(chain, [9, 8, 7, 6, 5], 10)
    chain.trim(0, 0)
    assert generate(chain, [1, 2, 3], 6) == fake_continuation([1, 2, 3], 6, LAYERS)


def test_a_kept_prefix_gives_the_same_text_as_the_whole_prompt() -> None:
    chain = Chain([1])
    generate(chain, [5, 6, 7, 8], 4)
    chain.trim(0, 3)
    assert generate(chain, [5, 6, 7, 300, 301], 4, keep=3) == fake_continuation(
        [5, 6, 7, 300, 301], 4, LAYERS
    )


def test_a_replay_on_another_chain_goes_on_with_the_same_sampled_text() -> None:
    sampling = Sampling(temperature=1.0, top_k=0, seed=7)
    expected = fake_continuation([1, 2, 3], 12, LAYERS, sampling=sampling)
    first, second = Chain([2]), Chain([1, 4])
    first.sampler.set(0, sampling)
    second.sampler.set(3, sampling)
    begun = generate(first, [1, 2, 3], 5)
    assert begun + generate(second, [1, 2, 3, *begun], 7, slot=3) == expected


@pytest.mark.parametrize(
    "other",
    [[1, 2, 4], [1, 2, 3, 3, 4], [1, 3, 2, 4], [2, 1, 3, 4], [1, 2, 3, 4, 4]],
    ids=["lost", "doubled", "swapped", "swapped first", "doubled last"],
)
def test_a_lost_doubled_or_moved_token_changes_the_text(other: list[int]) -> None:
    assert fake_continuation([1, 2, 3, 4], 8, LAYERS) != fake_continuation(other, 8, LAYERS)


def test_hidden_values_are_integers_that_float16_carries() -> None:
    engine = FakeEngine()
    engine.load(spec(0, 3))
    hidden = engine.forward(Work([Span(0, 0, 50, 0)], np.arange(50, dtype=np.int32))).hidden
    assert hidden is not None
    assert np.array_equal(hidden, hidden.astype(np.float16).astype(np.float32))
    assert 0 <= hidden.min() <= hidden.max() < PRIME


@pytest.mark.parametrize(
    ("span", "tokens"),
    [
        (Span(0, 1, 1, 1), 1),
        (Span(0, 0, 2, 1), 1),
        (Span(SLOTS, 0, 1, 1), 1),
        (Span(0, 0, 65, 1), 65),
        (Span(0, 0, 1, 2), 1),
        (Span(0, 0, 129, 1), 129),
    ],
    ids=[
        "a gap",
        "a token short",
        "no such slot",
        "over the context",
        "more results than tokens",
        "over the batch",
    ],
)
def test_a_micro_batch_that_does_not_fit_is_refused_and_changes_nothing(span: Span, tokens: int) -> None:
    chain = Chain()
    with pytest.raises(EngineError):
        chain.engines[0].forward(Work([span], np.zeros(tokens, np.int32)))
    assert generate(chain, [1, 2], 3) == fake_continuation([1, 2], 3, LAYERS)


def test_faults_come_when_they_are_told_to() -> None:
    fault = EngineError("scripted")
    engine = FakeEngine(fail_forward={2: fault})
    engine.load(spec())
    work = Work([Span(0, 0, 1, 1)], np.array([1], np.int32))
    engine.forward(work)
    engine.free(0)
    with pytest.raises(EngineError, match="scripted"):
        engine.forward(work)
    engine.forward(work)
    with pytest.raises(OutOfMemoryError):
        FakeEngine(fail_load=OutOfMemoryError("none left")).load(spec())


def test_the_cost_grows_with_tokens_and_layers_and_nothing_sleeps() -> None:
    engine = FakeEngine(seconds_per_token=2.0, seconds_per_batch=100.0)
    engine.load(spec(0, 3))
    work = Work([Span(0, 0, 4, 1)], np.zeros(4, np.int32))
    assert engine.cost_s(work) == 100.0 + 2.0 * 4 * 3
    engine.forward(work)


def test_an_engine_refuses_to_compute_before_load_and_after_close() -> None:
    engine = FakeEngine()
    work = Work([Span(0, 0, 1, 1)], np.zeros(1, np.int32))
    with pytest.raises(EngineError):
        engine.forward(work)
    engine.load(spec())
    engine.close()
    engine.close()
    with pytest.raises(EngineError):
        engine.forward(work)


def test_a_bias_on_the_end_token_ends_a_text_that_would_not_end_by_itself() -> None:
    vocabulary = FakeVocabulary()
    assert not any(vocabulary.is_end(token) for token in fake_continuation([1], 200, 2))
    sampler = FakeSampler()
    sampler.set(0, Sampling(temperature=0.0, logit_bias=((END_TOKEN, 1e5),)))
    assert vocabulary.is_end(sampler.sample(0, 0, np.zeros(VOCAB, np.float32))[0])


def test_the_sampler_notices_tokens_it_never_saw() -> None:
    sampler = FakeSampler()
    sampler.see(0, 0, np.array([1, 2, 3], np.int32))
    sampler.see(0, 1, np.array([9], np.int32))
    assert sampler.seen(0).tolist() == [1, 9]
    with pytest.raises(EngineError):
        sampler.see(0, 3, np.array([4], np.int32))


def test_the_sampler_refuses_nan_and_gives_log_probabilities_when_asked() -> None:
    sampler = FakeSampler()
    logits = np.zeros(VOCAB, np.float32)
    logits[7] = 3.0
    sampler.set(0, Sampling(temperature=0.0, top_logprobs=2))
    token, logprobs = sampler.sample(0, 0, logits)
    assert logprobs is not None
    assert token == 7
    assert logprobs.top[0] == (7, logprobs.chosen)
    sampler.set(0, GREEDY)
    assert sampler.sample(0, 0, logits)[1] is None
    logits[3] = np.nan
    with pytest.raises(EngineError):
        sampler.sample(0, 0, logits)


@given(st.text())
def test_the_vocabulary_gives_back_the_text_it_encoded(text: str) -> None:
    vocabulary = FakeVocabulary()
    tokens = vocabulary.encode(text.encode(errors="replace").decode())
    assert vocabulary.decode(tokens) == text.encode(errors="replace").decode()


def test_every_token_but_the_specials_has_a_piece_of_its_own() -> None:
    vocabulary = FakeVocabulary()
    pieces = [vocabulary.piece(token) for token in range(vocabulary.size)]
    assert len(set(pieces)) == VOCAB - 1
    assert pieces[vocabulary.start_token] == pieces[vocabulary.end_token] == b""


def test_engines_are_made_by_name() -> None:
    assert make_engine("fake").name == "fake"
    with pytest.raises(UsageError, match="onnx"):
        make_engine("onnx")
