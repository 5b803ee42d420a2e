"""The benchmark's own judgement: it sees a lost or doubled token wherever it is, and in no text that merely differs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.tools.recovery_checks import LEAST_ALIGNED, Heard, Tally, Verdict, judge, spread

TRUE = list(range(100, 140))


def text_of(tokens: Sequence[int]) -> str:
    return "".join(f" {token}" for token in tokens)


def heard(
    tokens: Sequence[int], said: int | None = None, cuts: Sequence[int] = (), text: str | None = None
) -> Heard:
    return Heard(
        tokens,
        text_of(tokens) if text is None else text,
        len(TRUE) if said is None else said,
        len(TRUE),
        cuts,
    )


def verdict(found: Heard) -> Verdict:
    return judge(found, TRUE, text_of(found.tokens))


def test_a_whole_answer_is_whole_and_equal() -> None:
    assert verdict(heard(TRUE, cuts=(7, 20))) == Verdict(0, 0, equal=True)


@given(st.integers(0, len(TRUE) - 1))
def test_a_token_that_the_client_never_got_is_lost(at: int) -> None:
    found = verdict(heard(TRUE[:at] + TRUE[at + 1 :]))
    assert (found.lost, found.duplicated, found.equal) == (1, 0, False)
    assert "39 tokens came" in found.why


@given(st.integers(0, len(TRUE) - 1))
def test_a_token_that_the_client_got_twice_is_doubled(at: int) -> None:
    found = verdict(heard(TRUE[: at + 1] + TRUE[at:]))
    assert (found.lost, found.duplicated) == (0, 1)


def test_a_token_that_the_broker_does_not_count_itself_is_doubled() -> None:
    found = verdict(heard(TRUE, said=len(TRUE) - 1))
    assert (found.lost, found.duplicated) == (0, 1)


@given(st.integers(1, len(TRUE) - LEAST_ALIGNED - 2), st.integers(1, 2))
def test_a_place_that_the_broker_skipped_at_a_fault_is_a_loss_although_the_number_is_right(
    at: int, places: int
) -> None:
    skipped = [*TRUE[:at], *TRUE[at + places :], *range(places)]
    assert len(skipped) == len(TRUE)
    found = verdict(heard(skipped, cuts=(at,)))
    # The tokens after the end of the true ones are new; all that can be compared agrees.
    assert (found.lost, found.duplicated) == (places, 0)


@given(st.integers(2, len(TRUE) - LEAST_ALIGNED - 2), st.integers(1, 2))
def test_a_place_that_the_broker_computed_twice_is_doubled_although_the_number_is_right(
    at: int, places: int
) -> None:
    again = [*TRUE[:at], *TRUE[at - places :]][: len(TRUE)]
    found = verdict(heard(again, cuts=(at,)))
    assert (found.lost, found.duplicated) == (0, places)


def test_another_choice_of_two_close_tokens_is_no_loss() -> None:
    other = [*TRUE[:10], *range(500, 500 + len(TRUE) - 10)]
    for cuts in ((), (10,), (11,), (30,)):
        assert verdict(heard(other, cuts=cuts)) == Verdict(0, 0, equal=False)


def test_a_shift_away_from_any_fault_is_another_choice() -> None:
    shifted = [*TRUE[:10], *TRUE[11:], 7]
    assert verdict(heard(shifted, cuts=(25,))) == Verdict(0, 0, equal=False)


@pytest.mark.parametrize(
    ("text", "lost", "doubled"), [(text_of(TRUE[1:]), 1, 0), (text_of([*TRUE, 1]), 0, 1)]
)
def test_text_that_is_not_that_of_the_tokens_is_wrong(text: str, lost: int, doubled: int) -> None:
    found = verdict(heard(TRUE, text=text))
    assert (found.lost, found.duplicated, found.equal) == (lost, doubled, True)


def test_the_tally_has_exactly_what_programs_read() -> None:
    tally = Tally(kills=2, failed=1)
    tally.add(Verdict(0, 0, equal=True), disturbed=True)
    tally.add(Verdict(1, 2, equal=False), disturbed=True)
    tally.add(Verdict(0, 0, equal=False), disturbed=False)
    tally.warm_s += [0.3, 0.1, 0.2, 9.0]
    assert not tally.whole
    assert tally.to_dict() == {
        "kills": 2,
        "lost_tokens": 1,
        "duplicated_tokens": 2,
        "failed_requests": 1,
        "equal_to_undisturbed": 0.5,
        "time_to_next_token_s": {
            "warm": {"p50": 0.2, "p95": 9.0, "n": 4},
            "cold": {"p50": None, "p95": None, "n": 0},
        },
    }


@given(st.lists(st.floats(0.0, 100.0), min_size=1))
def test_percentiles_are_measured_values_in_order(seconds: list[float]) -> None:
    found = spread(seconds)
    p50, p95 = found["p50"], found["p95"]
    assert p50 is not None
    assert p95 is not None
    assert min(seconds) - 1e-3 <= p50 <= p95 <= max(seconds) + 1e-3
