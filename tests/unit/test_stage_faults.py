"""Faults on purpose: off by default, and a computation hangs exactly where it was told to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from potluck.stage.faults import make_fault, no_fault
from potluck.wire.errors import UsageError

DEADLINE_S = 5.0


class Lane:
    """A thread that begins one micro-batch after the other."""

    def __init__(self, before_batch: Callable[[], None], batches: int) -> None:
        self.begun = 0
        self._before = before_batch
        self._batches = batches
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        for _ in range(self._batches):
            self._before()
            self.begun += 1


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set as soon as something hangs."""
    hung = threading.Event()

    def hang(text: str) -> None:
        hung.set()
        threading.Event().wait()

    monkeypatch.setattr("potluck.stage.faults.hang", hang)
    return hung


@pytest.mark.parametrize("text", [None, ""])
def test_without_being_asked_there_is_no_fault(text: str | None) -> None:
    assert make_fault(text) is no_fault


def test_a_lane_hangs_after_so_many_micro_batches(hangs: threading.Event) -> None:
    lane = Lane(make_fault("hang-after:3"), 5)
    assert hangs.wait(DEADLINE_S)
    assert lane.begun == 3


def test_a_lane_hangs_once_the_file_is_there(hangs: threading.Event, tmp_path: Path) -> None:
    switch = tmp_path / "now"
    fault = make_fault(f"hang-when:{switch}")
    lane = Lane(fault, 5)
    lane.thread.join(DEADLINE_S)
    assert lane.begun == 5
    assert not hangs.is_set()
    switch.touch()
    lane = Lane(fault, 1)
    assert hangs.wait(DEADLINE_S)
    assert lane.begun == 0


@pytest.mark.parametrize(
    "text", ["hang", "hang-after:", "hang-after:-1", "hang-after:x", "hang-when:", "explode:1"]
)
def test_an_unknown_fault_is_refused_with_those_that_there_are(text: str) -> None:
    with pytest.raises(UsageError, match="There is no fault") as caught:
        make_fault(text)
    assert "hang-after:NUMBER" in caught.value.hint
