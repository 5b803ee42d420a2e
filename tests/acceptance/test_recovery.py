"""Stages are killed, frozen, hung, and killed two at once, in the middle of answers: no token is lost or doubled,
no request fails, and with --exact every answer is the one that it would have been.

Real processes, real signals, the real model. `potluck bench recovery` does the same a hundred times.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from acceptance.cluster_world import command
from potluck.tools.bench_recovery import RecoveryBench, RecoveryReport, run_recovery
from potluck.tools.recovery_faults import Fault

pytestmark = [pytest.mark.real_model, pytest.mark.slow, pytest.mark.timeout(300)]
"""Twenty to thirty seconds each on two idle cores; every wait inside has a deadline of its own."""

STREAMS = 4
WITHIN_S = 290.0


def ran(bench: RecoveryBench) -> RecoveryReport:
    told: list[str] = []
    report = asyncio.run(run_recovery(bench, told.append))
    assert bench.logs is not None
    for log in bench.logs.glob("*/*.log"):
        said = log.read_text(errors="replace")
        assert "Traceback" not in said, f"{log.name}:\n{said}"
    assert len(told) == bench.kills
    return report


def check_whole(report: RecoveryReport) -> None:
    tally, bench = report.tally, report.bench
    assert not report.faulty, report.to_text()
    assert (tally.lost, tally.duplicated, tally.failed) == (0, 0, 0)
    assert tally.kills == bench.kills
    assert tally.disturbed >= STREAMS - 1, "nothing ran when the fault came"
    assert tally.equal == tally.disturbed, "with --exact a replay gives the same tokens"
    assert len(tally.warm_s) + len(tally.cold_s) >= tally.disturbed


def test_the_command_kills_stages_warm_and_cold_and_finds_every_token_once(smollm2_path: Path) -> None:
    ended = command(
        "potluck", "bench", "recovery", "--model", smollm2_path, "--kills", "2", "--streams", str(STREAMS), "--exact",
        "--seed", "5", "--json", within_s=WITHIN_S,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    times = found.pop("time_to_next_token_s")
    assert found == {
        "kills": 2,
        "lost_tokens": 0,
        "duplicated_tokens": 0,
        "failed_requests": 0,
        "equal_to_undisturbed": 1.0,
    }
    assert set(times) == {"warm", "cold"}
    for kind in times.values():
        assert kind["n"] >= STREAMS - 1, "nothing ran when the fault came"
        assert 0 < kind["p50"] <= kind["p95"]


def test_a_frozen_stage_is_replaced_and_changes_nothing_when_it_wakes_up(
    smollm2_path: Path, tmp_path: Path
) -> None:
    bench = RecoveryBench(
        smollm2_path,
        kills=2,
        streams=STREAMS,
        seed=6,
        exact=True,
        fault=Fault.FREEZE,
        standby="auto",
        logs=tmp_path,
    )
    check_whole(ran(bench))


def test_a_stage_that_computes_for_ever_is_found_and_replaced(smollm2_path: Path, tmp_path: Path) -> None:
    bench = RecoveryBench(
        smollm2_path,
        kills=2,
        streams=STREAMS,
        seed=7,
        exact=True,
        fault=Fault.HANG,
        standby="auto",
        logs=tmp_path,
    )
    check_whole(ran(bench))
    hung = [log for log in tmp_path.glob("*/stage-*.log") if "hangs from now on" in log.read_text()]
    assert hung, "no stage has hung"


def test_two_stages_of_a_chain_killed_at_once_are_replaced_by_two_spares(
    smollm2_path: Path, tmp_path: Path
) -> None:
    bench = RecoveryBench(
        smollm2_path,
        kills=2,
        streams=STREAMS,
        seed=8,
        exact=True,
        fault=Fault.TWO,
        standby="auto",
        logs=tmp_path,
    )
    check_whole(ran(bench))
