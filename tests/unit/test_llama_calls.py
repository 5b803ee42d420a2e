"""How spans become calls of llama_decode: nothing lost, nothing that llama.cpp would reorder."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from potluck.stage.engines.llama_calls import Limits, in_order, plan_calls
from potluck.wire.messages import Span

WIDE = Limits(batch_rows=512, together_rows=512, slot_rows=512, wants=512)


def spans_of(*rows: tuple[int, int, int]) -> list[Span]:
    """Spans (slot, tokens, wants), each at position 10."""
    return [Span(slot, 10, tokens, wants) for slot, tokens, wants in rows]


def slots_of(spans: list[Span], limits: Limits = WIDE) -> list[list[int]]:
    return [[piece.slot for piece in call] for call in plan_calls(spans, limits)]


def test_neighbouring_decodes_share_a_call_and_gaps_part_them() -> None:
    assert slots_of(spans_of(*((slot, 1, 1) for slot in (0, 1, 2, 5, 6)))) == [[0, 1, 2], [5, 6]]


def test_decodes_are_sorted_by_slot_before_they_are_grouped() -> None:
    assert slots_of(spans_of((2, 1, 1), (0, 1, 1), (3, 1, 1), (1, 1, 1))) == [[0, 1, 2, 3]]


def test_spans_of_unequal_lengths_go_separately() -> None:
    assert slots_of(spans_of((0, 30, 1), (1, 1, 1), (2, 1, 1), (3, 7, 0))) == [[1, 2], [3], [0]]


def test_two_spans_of_one_slot_keep_their_order() -> None:
    spans = [Span(1, 5, 3, 1), Span(1, 8, 1, 1), Span(0, 0, 1, 1)]
    calls = plan_calls(spans, WIDE)
    assert [(piece.slot, piece.position) for call in calls for piece in call] == [(1, 5), (1, 8), (0, 0)]


def test_a_span_with_more_results_than_a_call_may_have_is_cut_before_its_last_ones() -> None:
    limits = Limits(batch_rows=512, together_rows=512, slot_rows=512, wants=4)
    calls = plan_calls([Span(0, 0, 10, 6)], limits)
    assert [(piece.tokens, piece.wants) for call in calls for piece in call] == [(8, 4), (2, 2)]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Span], Limits]:
    rows = draw(st.integers(1, 40))
    limits = Limits(
        batch_rows=rows,
        together_rows=draw(st.integers(1, rows)),
        slot_rows=draw(st.integers(1, rows)),
        wants=draw(st.integers(1, rows)),
    )
    spans = []
    ends: dict[int, int] = {}
    for slot in draw(st.lists(st.integers(0, 9), min_size=1, max_size=12)):
        tokens = draw(st.one_of(st.just(1), st.integers(1, 30)))
        at = ends.setdefault(slot, slot * 3)
        spans.append(Span(slot, at, tokens, draw(st.integers(0, tokens))))
        ends[slot] += tokens
    return spans, limits


@given(batches())
def test_calls_hold_every_row_once_within_the_limits_and_in_an_order_that_llama_keeps(
    batch: tuple[list[Span], Limits],
) -> None:
    spans, limits = batch
    calls = plan_calls(spans, limits)
    rows = [(piece.row + step) for call in calls for piece in call for step in range(piece.tokens)]
    assert sorted(rows) == list(range(sum(span.tokens for span in spans)))
    assert in_order(calls) == (rows == sorted(rows))
    assert sum(piece.wants for call in calls for piece in call) == sum(span.wants for span in spans)
    wanted = {
        sum(s.tokens for s in spans[: i + 1]) - 1 - back
        for i, span in enumerate(spans)
        for back in range(span.wants)
    }
    assert {
        piece.row + piece.tokens - 1 - back for call in calls for piece in call for back in range(piece.wants)
    } == wanted
    ends: dict[int, int] = {slot: slot * 3 for slot in range(10)}
    for call in calls:
        for before, after in pairwise(call):
            assert after.slot == before.slot + 1
            assert after.tokens == before.tokens
        together = sum(piece.tokens for piece in call)
        assert together <= (
            limits.together_rows if len(call) > 1 else min(limits.batch_rows, limits.slot_rows)
        )
        assert sum(piece.wants for piece in call) <= limits.wants
        for piece in call:
            assert piece.position == ends[piece.slot]
            ends[piece.slot] += piece.tokens
