"""llama.cpp's samplers driven from numpy: the same draw for the same seed and position, and penalties that keep up."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from potluck.stage.engines.choice import draw_seed, likeliest, token_logprobs
from potluck.stage.engines.llama_sampler import LlamaSampler
from potluck.wire.errors import EngineError
from potluck.wire.sampling import GREEDY, Sampling

VOCAB = 64


@pytest.fixture
def sampler() -> Iterator[LlamaSampler]:
    made = LlamaSampler(VOCAB)
    yield made
    made.close()


def logits(seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)


def ints(*tokens: int) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


def test_greedy_takes_the_largest_logit_and_the_first_of_equal_ones(sampler: LlamaSampler) -> None:
    row = logits()
    sampler.set(0, GREEDY)
    assert sampler.sample(0, 5, row) == (int(row.argmax()), None)
    row[:] = 1.0
    assert sampler.sample(0, 6, row)[0] == 0


def test_a_slot_without_settings_is_greedy(sampler: LlamaSampler) -> None:
    row = logits(4)
    assert sampler.sample(9, 0, row)[0] == int(row.argmax())


@given(seed=st.integers(0, 2**32 - 1), position=st.integers(0, 1 << 20))
def test_the_same_seed_and_position_draw_the_same_token_in_any_sampler(seed: int, position: int) -> None:
    sampling = Sampling(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
    row = logits(1)
    tokens = set()
    for slot in (0, 3):
        sampler = LlamaSampler(VOCAB)
        sampler.set(slot, sampling)
        sampler.sample(slot, position + slot + 1, row)  # what was drawn before does not matter
        tokens.add(sampler.sample(slot, position, row)[0])
        sampler.close()
    assert len(tokens) == 1


def test_draws_follow_the_softmax_of_the_logits(sampler: LlamaSampler) -> None:
    row = np.full(VOCAB, -np.inf, np.float32)
    row[:4] = np.log([0.5, 0.3, 0.15, 0.05])
    sampler.set(0, Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=11))
    count = 4000
    drawn = np.bincount([sampler.sample(0, position, row)[0] for position in range(count)], minlength=VOCAB)
    for token, share in enumerate((0.5, 0.3, 0.15, 0.05)):
        assert abs(drawn[token] - count * share) < 5 * math.sqrt(count * share * (1 - share))
    assert drawn[4:].sum() == 0


def test_seeds_of_neighbouring_positions_and_seeds_are_all_different() -> None:
    seeds = {draw_seed(seed, position) for seed in range(100) for position in range(100)}
    assert len(seeds) > 9_990
    assert all(0 <= seed < 0xFFFFFFFF for seed in seeds)


@pytest.mark.parametrize(
    "narrow",
    [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 1e-9}],
    ids=lambda d: next(iter(d)),
)
def test_each_narrowing_setting_alone_leaves_the_likeliest(
    sampler: LlamaSampler, narrow: dict[str, float]
) -> None:
    wide = {"temperature": 5.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    row = logits(2)
    sampler.set(0, Sampling(**{**wide, **narrow}))  # type: ignore[arg-type]
    assert {sampler.sample(0, position, row)[0] for position in range(40)} == {int(row.argmax())}


def test_a_bias_moves_the_choice_even_when_greedy_and_ignores_tokens_past_the_vocabulary(
    sampler: LlamaSampler,
) -> None:
    row = logits(3)
    worst = int(row.argmin())
    sampler.set(0, Sampling(temperature=0.0, logit_bias=((worst, 100.0), (VOCAB + 5, 100.0))))
    assert sampler.sample(0, 0, row)[0] == worst


def penalized(seen: list[int], row: NDArray[np.float32], sampling: Sampling) -> int:
    """What greedy with penalties must choose, computed from their definition."""
    scores = row.astype(np.float64)
    tail = seen[-sampling.penalty_last_n :]
    for token in set(tail):
        scores[token] *= sampling.repeat_penalty if scores[token] <= 0 else 1 / sampling.repeat_penalty
        scores[token] -= tail.count(token) * sampling.frequency_penalty + sampling.presence_penalty
    return int(scores.argmax())


@given(
    prompt=st.lists(st.integers(0, 7), min_size=1, max_size=12),
    steps=st.lists(
        st.tuples(st.integers(0, 12), st.lists(st.integers(0, 7), min_size=1, max_size=4)), max_size=12
    ),
    last_n=st.integers(1, 6),
)
def test_penalties_count_what_was_seen_also_after_earlier_tokens_were_replaced(
    prompt: list[int], steps: list[tuple[int, list[int]]], last_n: int
) -> None:
    sampling = Sampling(
        temperature=0.0,
        repeat_penalty=1.3,
        frequency_penalty=0.7,
        presence_penalty=0.4,
        penalty_last_n=last_n,
    )
    sampler = LlamaSampler(VOCAB)
    sampler.set(2, sampling)
    seen = list(prompt)
    sampler.see(2, 0, ints(*prompt))
    row = np.full(VOCAB, -5.0, np.float32)
    row[:8] = [2.0, 1.9, 1.7, 1.4, 1.0, 0.5, -0.2, -1.0]
    for position, tokens in steps:
        at = min(position, len(seen))
        seen[at:] = tokens
        sampler.see(2, at, ints(*tokens))
        assert sampler.sample(2, len(seen) - 1, row)[0] == penalized(seen, row, sampling)
        # A result in the middle of a span must not count the tokens behind it.
        middle = len(seen) // 2
        assert sampler.sample(2, middle, row)[0] == penalized(seen[: middle + 1], row, sampling)
    sampler.close()


def test_settings_that_come_late_still_count_the_prompt(sampler: LlamaSampler) -> None:
    row = logits(5)
    best = int(row.argmax())
    sampler.see(0, 0, ints(best, best))
    sampler.set(0, Sampling(temperature=0.0, frequency_penalty=50.0))
    assert sampler.sample(0, 1, row)[0] != best


def test_penalties_without_the_tokens_they_need_are_an_error(sampler: LlamaSampler) -> None:
    sampler.set(0, Sampling(temperature=0.0, presence_penalty=1.0))
    sampler.see(0, 0, ints(1, 2))
    with pytest.raises(EngineError):
        sampler.sample(0, 2, logits())
    with pytest.raises(EngineError):
        sampler.see(0, 5, ints(1))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(repeat_penalty=1.1)])
def test_logits_that_are_no_numbers_are_an_error_and_not_a_token(
    sampler: LlamaSampler, bad: float, sampling: Sampling
) -> None:
    sampler.set(0, sampling)
    sampler.see(0, 0, ints(1, 2, 3))
    row = np.full(VOCAB, bad, np.float32) if bad == -np.inf else logits()
    row[17] = bad
    with pytest.raises(EngineError):
        sampler.sample(0, 2, row)


def test_settings_that_overflow_are_an_error_and_not_a_token(sampler: LlamaSampler) -> None:
    row = np.full(VOCAB, 3e38, np.float32)
    sampler.set(0, Sampling(temperature=1e-3, top_k=0, top_p=1.0, min_p=0.0))
    with pytest.raises(EngineError, match="overflow"):
        sampler.sample(0, 0, row)


def test_a_row_of_another_length_is_an_error(sampler: LlamaSampler) -> None:
    with pytest.raises(EngineError):
        sampler.sample(0, 0, np.zeros(VOCAB + 1, np.float32))


def test_log_probabilities_are_those_of_the_raw_logits(sampler: LlamaSampler) -> None:
    row = logits(6)
    expected = np.log(np.exp(row.astype(np.float64)) / np.exp(row.astype(np.float64)).sum())
    sampler.set(0, Sampling(temperature=0.5, top_k=3, logit_bias=((9, 50.0),), top_logprobs=5))
    token, logprobs = sampler.sample(0, 0, row)
    assert logprobs is not None
    assert token == 9
    assert logprobs.chosen == pytest.approx(expected[9])
    assert [chosen for chosen, _ in logprobs.top] == np.argsort(-expected)[:5].tolist()
    assert [value for _, value in logprobs.top] == pytest.approx(np.sort(expected)[::-1][:5].tolist())


def test_equal_log_probabilities_are_listed_by_token() -> None:
    assert [token for token, _ in token_logprobs(np.zeros(VOCAB, np.float32), 0, 3).top] == [0, 1, 2]


def test_no_top_means_the_chosen_one_only() -> None:
    found = token_logprobs(np.zeros(VOCAB, np.float32), 5, 0)
    assert found.top == ()
    assert found.chosen == pytest.approx(-math.log(VOCAB))


def test_the_likeliest_of_damaged_logits_is_an_error() -> None:
    row = logits()
    row[-1] = np.nan
    with pytest.raises(EngineError, match="nan"):
        likeliest(row)
