"""What counts as grown in a soak."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from potluck.tools.soak_census import (
    BASE_BYTES,
    REQUEST_BYTES,
    SPARE_FILES,
    SPARE_THREADS,
    Census,
    Reading,
    grown,
    read,
)

MB = 1_000_000


def reading(
    own_bytes: int = 50 * MB, files: int = 40, threads: int = 5, pid: int = 1, held_bytes: int = 0
) -> Reading:
    return Reading(pid, 2 * own_bytes, own_bytes, files, threads, held_bytes)


def soak(*readings: Reading) -> Sequence[Census]:
    return [Census(str(at), float(at), 100 * at, {"broker": one}) for at, one in enumerate(readings)]


def test_what_warms_up_in_the_first_third_has_not_grown() -> None:
    assert grown(soak(reading(10 * MB, 10, 2), reading(), reading(), reading())) == []


def test_what_comes_and_goes_has_not_grown() -> None:
    assert grown(soak(reading(), reading(70 * MB, 60, 9), reading(), reading(70 * MB, 60, 9))) == []


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (reading(50 * MB + BASE_BYTES + 101 * REQUEST_BYTES), "memory"),
        (reading(files=41 + SPARE_FILES), "open files"),
        (reading(threads=6 + SPARE_THREADS), "threads"),
    ],
)
def test_more_than_at_both_readings_before_has_grown(more: Reading, word: str) -> None:
    found = grown(soak(reading(), reading(), reading(), more))
    assert len(found) == 1
    assert word in found[0]


def test_a_device_that_holds_other_slices_than_before_has_not_grown() -> None:
    more = reading(90 * MB, held_bytes=40 * MB)
    assert grown(soak(reading(), reading(), reading(), more)) == []


def test_what_is_kept_of_slices_that_are_gone_has_grown() -> None:
    full = reading(90 * MB, held_bytes=40 * MB)
    kept = reading(90 * MB)
    assert len(grown(soak(full, full, full, kept))) == 1


def test_a_process_that_was_started_anew_is_not_compared_with_the_one_before() -> None:
    assert grown(soak(reading(), reading(), reading(), reading(500 * MB, 500, 50, pid=2))) == []


def test_a_reading_counts_the_files_that_a_process_opens() -> None:
    before = read(os.getpid())
    with open(os.devnull) as _, open(os.devnull) as _:
        assert read(os.getpid()).files == before.files + 2
    assert 0 < before.own_bytes <= before.rss_bytes
