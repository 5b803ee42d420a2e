"""Three hosts that find each other by multicast alone, one of them behind 10 Mbit/s: the plan does without it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import msgspec
import pytest

from namespaces import Host, Process, household
from potluck.stage.kept_profiles import Setting, keep_profile
from potluck.wire.measures import Profile

pytestmark = [pytest.mark.root, pytest.mark.real_model, pytest.mark.slow]

MBIT = 1e6 / 8
MEMORY_GB = "0.4"
"""Enough for two of three devices together, and for none alone."""


def as_fast_as(cache: Path, other: str) -> None:
    """Another device that computes like the one that was measured: only the links are to differ."""
    kept = json.loads(next((cache / "profiles").glob("*.json")).read_text())
    setting = msgspec.convert({**kept["setting"], "device": other}, Setting)
    keep_profile(cache, setting, msgspec.convert(kept["profile"], Profile))


def test_a_link_of_10_mbit_is_measured_avoided_and_named(smollm2_path: Path, tmp_path: Path) -> None:
    running: list[Process] = []
    cache = tmp_path / "cache"
    env = {"POTLUCK_CACHE_DIR": str(cache)}

    def start(host: Host, *command: str | Path) -> Process:
        running.append(host.start(*command, **env))
        return running[-1]

    with household(3) as (desktop, laptop, mini):
        mini.limit(10)
        broker = start(
            desktop, "potluck-broker", "--model", smollm2_path, "--name", "home", "--http", "off", "--stages", "3",
            "--misses", "20",
        )  # fmt: skip
        broker.wait_for("Can be found as")
        for host, name in ((desktop, "desktop"), (laptop, "laptop"), (mini, "mini")):
            stage = start(
                host, "potluck-stage", "--model", smollm2_path, "--name", name, "--threads", "1",
                "--max-memory-gb", MEMORY_GB,
            )  # fmt: skip
            if name == "desktop":
                broker.wait_for("desktop is measured")
                for other in ("laptop", "mini"):
                    as_fast_as(cache, other)
            else:
                assert "Found broker home" in stage.wait_for("Found")
        broker.wait_for("Chain 0 serves")
        asked = laptop.run("potluck", "plan", "--json")
        assert asked.code == 0, asked.err
        plan = json.loads(asked.out)["plan"]
        rates = {
            (link["sender"], link.get("receiver", "")): link["link"].get("bytes_per_s", 0.0)
            for link in plan["links"]
            if link["sender"]
        }
        for pair in (("mini", "laptop"), ("laptop", "mini"), ("mini", "desktop"), ("desktop", "mini")):
            assert 5 * MBIT < rates[pair] < 12 * MBIT, rates
        assert rates["desktop", "laptop"] == 0 or rates["desktop", "laptop"] > 100 * MBIT, rates
        (chain,) = plan["forecast"]["chains"]
        assert {stage["device"] for stage in chain["stages"]} == {"desktop", "laptop"}
        assert any("mini" in reason and "Mbit/s" in reason for reason in plan["reasons"]), plan["reasons"]
        answer = mini.run("potluck", "infer", "--prompt", "Hello", "--temperature", "0", "-n", "5", "--json")
        assert answer.code == 0, answer.err
        assert json.loads(answer.out)["tokens"] == 5
        for process in reversed(running):
            assert process.end(signal.SIGTERM) == 0, process.output
            assert "Traceback" not in process.output
