"""How the spans of one micro-batch become calls of llama_decode whose row order is known. Pure.

With a KV stream per sequence, llama.cpp computes sequences together only if their ids are neighbours, ascend, and have
equally many tokens; anything else it splits and reorders. So spans are sorted by length and slot, and runs of
neighbours share a call. The calls depend on the spans and the limits alone: with the same limits every stage makes the
same calls, which keeps a chain equal to the whole model to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from potluck.wire.messages import Span


@dataclass(frozen=True, slots=True)
class Limits:
    """Rows of one call, of a call that holds several slots, of one slot in a call; and the results of one call."""

    batch_rows: int
    together_rows: int
    slot_rows: int
    wants: int
    decode_sizes: tuple[int, ...] = ()
    """For n rows of one token each that are left of a run, how many the next call takes; () keeps runs together."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one slot: the first is `row` in the micro-batch and `position` in the slot."""

    row: int
    slot: int
    position: int
    tokens: int
    wants: int


def plan_calls(spans: Sequence[Span], limits: Limits) -> list[list[Piece]]:
    """The calls to make, in order; the rows of a call are its pieces' rows one after the other."""
    pieces = list(_pieces(spans, limits))
    if len({span.slot for span in spans}) == len(spans):
        # Pieces of one slot keep their order: they all sort by the slot's whole span.
        whole = {span.slot: span.tokens for span in spans}
        pieces.sort(key=lambda piece: (whole[piece.slot], piece.slot, piece.position))
    calls: list[list[Piece]] = []
    for piece in pieces:
        if calls and _joins(calls[-1], piece, limits):
            calls[-1].append(piece)
        else:
            calls.append([piece])
    return (
        [part for call in calls for part in _cut(call, limits.decode_sizes)] if limits.decode_sizes else calls
    )


def _cut(call: list[Piece], sizes: tuple[int, ...]) -> Iterator[list[Piece]]:
    """A run of decode rows in the sizes that are fastest; anything else as it is."""
    if call[0].tokens > 1:
        yield call
        return
    left = call
    while left:
        size = sizes[min(len(left), len(sizes) - 1)]
        yield left[:size]
        left = left[size:]


def _pieces(spans: Sequence[Span], limits: Limits) -> Iterator[Piece]:
    """The spans, cut where one call could not hold them."""
    row = 0
    for span in spans:
        unwanted = span.tokens - span.wants
        done = 0
        while done < span.tokens:
            size = min(span.tokens - done, limits.slot_rows, limits.batch_rows)
            wants = max(0, done + size - max(done, unwanted))
            if wants > limits.wants:
                size -= wants - limits.wants
                wants = limits.wants
            yield Piece(row + done, span.slot, span.position + done, size, wants)
            done += size
        row += span.tokens


def _joins(call: list[Piece], piece: Piece, limits: Limits) -> bool:
    first, last = call[0], call[-1]
    return (
        piece.slot == last.slot + 1
        and piece.tokens == first.tokens
        and (len(call) + 1) * first.tokens <= min(limits.batch_rows, limits.together_rows)
        and sum(other.wants for other in call) + piece.wants <= limits.wants
    )


def in_order(calls: Sequence[Sequence[Piece]]) -> bool:
    """Whether the calls' rows, one after the other, are the micro-batch's rows."""
    row = 0
    for call in calls:
        for piece in call:
            if piece.row != row:
                return False
            row += piece.tokens
    return True
