"""A short soak over real processes. `make soak` is the long one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from potluck.tools.soak import Soak, run_soak
from tiny_models import write_tiny

pytestmark = pytest.mark.slow


@pytest.mark.timeout(600)
def test_short_requests_while_devices_come_and_go_end_once_and_leave_nothing_behind(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", layers=6)
    folder = tmp_path / "cluster"
    folder.mkdir()
    soak = Soak(model, requests=90, people=6, acts=6, pause_s=0.5)
    report = asyncio.run(run_soak(soak, print, folder))
    assert report.faults == []
    assert report.tally.ended == soak.requests
    assert sum(report.churn.values()) >= soak.acts
    assert [census.name for census in report.censuses] == ["start", "a third", "two thirds", "end"]
    assert len({census.readings["broker"].pid for census in report.censuses}) == 1
