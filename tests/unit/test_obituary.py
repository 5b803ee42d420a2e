"""What a stage is said to have died of, by what is left of it."""

from __future__ import annotations

import pytest

from potluck.stage.obituary import Traces, cause_of_death
from potluck.stage.witness_child import stat_of
from potluck.wire.errors import OutOfMemoryError, StageLostError

SEGFAULT = "Fatal Python error: Segmentation fault\n\nThread 0x00007f (most recent call first):\n"


@pytest.mark.parametrize(
    ("traces", "said"),
    [
        (Traces(9), "laptop-02 was killed by SIGKILL."),
        (Traces(9, killed_in="group"), "laptop-02 was killed by the kernel for lack of memory."),
        (Traces(None, killed_in="machine"), "laptop-02 was killed by the kernel for lack of memory."),
        (Traces(), "laptop-02 ended without a word: killed by SIGKILL or crashed."),
        (Traces(11), "laptop-02 crashed: SIGSEGV."),
        (Traces(11 | 0x80), "laptop-02 crashed: SIGSEGV."),  # with a core dump
        (Traces(11, SEGFAULT), "laptop-02 crashed: SIGSEGV (Segmentation fault)."),
        (Traces(None, SEGFAULT), "laptop-02 crashed: (Segmentation fault)."),
        (Traces(6, killed_in="machine"), "laptop-02 crashed: SIGABRT."),
        (Traces(3 << 8, killed_in="machine"), "laptop-02 ended with status 3, without a word."),
        (Traces(130 << 8), "laptop-02 was stopped at once, by a second signal."),
        (Traces(143 << 8), "laptop-02 was stopped at once, by a second signal."),
        (Traces(0), "laptop-02 ended with status 0, without a word."),
        (Traces(40), "laptop-02 was killed by signal 40."),
    ],
)
def test_the_cause_is_the_likeliest_one_and_says_what_to_do(traces: Traces, said: str) -> None:
    error = cause_of_death("laptop-02", "laptop-02/1", traces)
    assert error.what == said
    assert "Start potluck-stage there again" in error.hint
    assert (error.device, error.stage) == ("laptop-02", "laptop-02/1")
    lack = "lack of memory" in said
    assert isinstance(error, OutOfMemoryError if lack else StageLostError)
    assert ("--max-memory-gb" in error.hint) == lack


def test_a_process_that_is_not_there_has_no_state() -> None:
    assert stat_of(1 << 30) == ("", "", 0)
