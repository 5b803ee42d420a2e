"""What the answers to pings say of a link."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from potluck.stage.link_timing import LARGE_FRAMES, LargePing, link_timing, next_bytes

MBIT = 1e6 / 8


def measure(rtt_s: float, bytes_per_s: float, most: int) -> list[LargePing]:
    """The large frames of a perfect link."""
    large: list[LargePing] = []
    at_size = 0
    while at_size < LARGE_FRAMES:
        size = next_bytes(large[-1] if large else None, most)
        at_size = at_size + 1 if large and size == large[-1].frame_bytes else 1
        large.append(LargePing(size, rtt_s + size / bytes_per_s))
        assert len(large) < 50, "the size never settles"
    return large


@given(st.floats(1e-4, 0.05), st.floats(1 * MBIT, 10_000 * MBIT), st.integers(1, 16 << 20))
def test_a_perfect_link_gives_its_own_figures(rtt_s: float, bytes_per_s: float, most: int):
    link = link_timing([rtt_s] * 5, measure(rtt_s, bytes_per_s, most))
    assert abs(link.rtt_s - rtt_s) < 1e-9
    assert link.bytes_per_s == 0.0 or abs(link.bytes_per_s / bytes_per_s - 1.0) < 0.01
    assert link.bytes_per_s > 0.0 or most / bytes_per_s <= 0.06 * rtt_s


def test_a_slow_link_is_not_asked_for_frames_that_take_long():
    large = measure(0.001, 10 * MBIT, 2 << 20)
    assert max(ping.seconds for ping in large) < 0.3


def test_a_fast_link_gets_frames_of_the_full_size():
    assert measure(0.0005, 1000 * MBIT, 1 << 20)[-1].frame_bytes == 1 << 20


def test_the_median_and_the_slow_tail_are_told_apart():
    pings = [LargePing(1_000_000, 0.001 + seconds) for seconds in (0.1, 0.1, 0.1, 0.1, 0.4)]
    link = link_timing([0.001, 0.001, 0.001, 0.001, 0.009], pings)
    assert (round(link.bytes_per_s), round(link.bytes_per_s_p5)) == (10_000_000, 2_500_000)
    assert (link.rtt_s, link.rtt_p95_s) == (0.001, 0.009)


def test_where_bytes_cost_nothing_noticeable_there_is_no_limit():
    link = link_timing([0.001], [LargePing(16_384, 0.00101)] * 5)
    assert link.bytes_per_s == 0.0
