"""Text goes out as early as it may, and nothing of a stop string ever does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from potluck.model.text import TextStream

LETTERS = st.text(alphabet="abcé😀\n", max_size=40)
STOPS = st.lists(st.text(alphabet="abcé😀\n", min_size=1, max_size=5), max_size=4)


def streamed(pieces: Sequence[bytes], stops: Sequence[str]) -> tuple[list[str], str | None]:
    stream = TextStream(stops)
    out = [stream.push(piece) for piece in pieces]
    return [*out, stream.finish()], stream.stopped


def split(raw: bytes, cuts: Sequence[int]) -> list[bytes]:
    at = [0, *sorted(cut % (len(raw) + 1) for cut in cuts), len(raw)]
    return [raw[first:end] for first, end in pairwise(at)]


def expected(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """By brute force: the first end of any stop; of two with the same end the longer."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 200), max_size=30))
@example(text="aab", stops=["ab"], cuts=[1, 2])
@example(text="abcab", stops=["abcd", "bc"], cuts=[1, 2, 3])
@example(text="aaaa", stops=["aaab"], cuts=[])
def test_text_up_to_the_first_complete_stop_whatever_the_pieces(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    out, stopped = streamed(split(text.encode(), cuts), stops)
    assert ("".join(out), stopped) == expected(text, stops)


@given(
    raw=st.binary(max_size=60),
    stops=st.lists(st.text(min_size=1, max_size=3), max_size=2),
    cuts=st.lists(st.integers(0, 99)),
)
@example(raw="é".encode()[:1], stops=[], cuts=[])
@example(raw=b"\xf0\x9f\x98 \xf0\x9f", stops=["\ufffd"], cuts=[1, 2, 3])
def test_any_bytes_become_what_decoding_all_of_them_gives(
    raw: bytes, stops: list[str], cuts: list[int]
) -> None:
    out, stopped = streamed(split(raw, cuts), stops)
    assert ("".join(out), stopped) == expected(raw.decode("utf-8", errors="replace"), stops)


@given(text=LETTERS, stops=STOPS)
def test_only_what_may_begin_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    stream = TextStream(stops)
    sent = ""
    for end, character in enumerate(text, start=1):
        sent += stream.push(character.encode())
        if stream.stopped is not None:
            return
        held = text[len(sent) : end]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_character_split_over_tokens_waits_for_its_last_byte() -> None:
    stream = TextStream()
    face = "😀".encode()
    assert [stream.push(face[at : at + 1]) for at in range(4)] == ["", "", "", "😀"]


def test_incomplete_character_at_the_end_is_replaced() -> None:
    stream = TextStream(["never"])
    assert stream.push(b"a" + "é".encode()[:1]) == "a"
    assert stream.finish() == "\ufffd"


def test_stop_over_three_tokens_is_never_sent() -> None:
    out, stopped = streamed([b"one ", b"<|im", b"_end", b"|> two"], ["<|im_end|>"])
    assert out == ["one ", "", "", "", ""]
    assert stopped == "<|im_end|>"


def test_what_only_looked_like_a_stop_goes_out() -> None:
    out, stopped = streamed([b"<|im", b"age|>"], ["<|im_end|>"])
    assert out == ["", "<|image|>", ""]
    assert stopped is None


def test_beginning_of_a_stop_at_the_end_goes_out_when_the_text_is_over() -> None:
    stream = TextStream(["STOP"])
    assert stream.push(b"do not ST") == "do not "
    assert stream.finish() == "ST"


def test_nothing_follows_a_stop() -> None:
    stream = TextStream(["x"])
    assert stream.push(b"axb") == "a"
    assert (stream.push(b"c"), stream.finish(), stream.stopped) == ("", "", "x")


@pytest.mark.parametrize("stops", [["ab", "b"], ["b", "ab"]])
def test_of_two_stops_complete_at_once_the_earlier_begun_counts(stops: list[str]) -> None:
    out, stopped = streamed([b"xab"], stops)
    assert ("".join(out), stopped) == ("x", "ab")


def test_empty_stop_is_none() -> None:
    assert streamed([b"abc"], [""]) == (["abc", ""], None)


def test_stop_that_repeats_itself_is_found_with_a_thousand_false_starts() -> None:
    stop = "a" * 500 + "b"
    out, stopped = streamed([b"a" * 700] * 20 + [b"b"], [stop])
    assert ("".join(out), stopped) == ("a" * 13_500, stop)
