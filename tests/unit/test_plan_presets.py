"""The plans of configs/clusters, as they are printed, against the files in snapshots/.

After a change that is meant to change them, write them anew and read what changed as the owner of those machines would:

    POTLUCK_WRITE_SNAPSHOTS=1 .venv/bin/pytest tests/unit/test_plan_presets.py
    git diff tests/unit/snapshots docs/planning.md
"""

from __future__ import annotations

import json
import os
from io import StringIO
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from rich.console import Console

from potluck.planner.described import parse_cluster
from potluck.tools.cli import main
from potluck.tools.plan import Fitting, Unfitting, Wish, plan_described, show

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOTS = Path(__file__).parent / "snapshots"
PRESETS = sorted((ROOT / "configs/clusters").glob("*.yaml"))
CASES = [(path, users) for path in PRESETS for users in (1, 8)]
IDS = [f"{path.stem}-{users}" for path, users in CASES]
WIDTH = 80


def printed(found: Fitting | Unfitting, *, colour: bool = False) -> str:
    out = StringIO()
    show(Console(file=out, width=WIDTH, highlight=False, force_terminal=colour), found)
    return out.getvalue()


def test_there_are_five_presets() -> None:
    assert len(PRESETS) == 5


def test_the_plan_on_the_page_about_planning_is_the_one_that_is_printed() -> None:
    page = ROOT / "docs/planning.md"
    text = page.read_text(encoding="utf-8")
    path = ROOT / "configs/clusters/desktop-mac-and-phone.yaml"
    before, command, rest = text.partition(
        f"```\n$ potluck plan --cluster {path.relative_to(ROOT).as_posix()}\n"
    )
    assert command
    shown, fence, after = rest.partition("```\n")
    expected = printed(plan_described(path, None, Wish()))
    if os.environ.get("POTLUCK_WRITE_SNAPSHOTS"):
        page.write_text(f"{before}{command}{expected}{fence}{after}", encoding="utf-8")
        shown = expected
    assert shown == expected


@pytest.mark.parametrize(("path", "users"), CASES, ids=IDS)
def test_a_preset_is_planned_as_in_its_snapshot(path: Path, users: int) -> None:
    text = printed(plan_described(path, None, Wish(users=users)))
    snapshot = SNAPSHOTS / f"{path.stem}-{users}.txt"
    if os.environ.get("POTLUCK_WRITE_SNAPSHOTS"):
        snapshot.parent.mkdir(exist_ok=True)
        snapshot.write_text(text, encoding="utf-8")
    assert text == snapshot.read_text(encoding="utf-8")


@pytest.mark.parametrize(("path", "users"), CASES, ids=IDS)
def test_a_printed_plan_fits_80_columns_and_says_nothing_by_colour_alone(path: Path, users: int) -> None:
    found = plan_described(path, None, Wish(users=users))
    plain, coloured = printed(found), printed(found, colour=True)
    assert all(len(line) <= WIDTH for line in plain.splitlines())
    assert "\x1b[" not in plain
    assert "\x1b[3" not in coloured, "bold is all there is"


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_device_of_a_preset_stands_in_its_plan_with_its_whole_name(path: Path) -> None:
    text = printed(plan_described(path, None, Wish()))
    cluster = parse_cluster(yaml.safe_load(path.read_text(encoding="utf-8")), path.name)
    for device in cluster.devices:
        assert device.name in text


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_no_stage_of_a_preset_takes_more_than_its_device_offers(path: Path) -> None:
    found = plan_described(path, None, Wish(users=8))
    fitting = found if isinstance(found, Fitting) else found.instead
    assert fitting is not None
    assert fitting.view.forecast is not None
    for chain in fitting.view.forecast.chains:
        for stage in chain.stages:
            assert stage.weights_bytes + stage.kv_bytes + stage.compute_bytes <= stage.memory_bytes


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["plan", *words])
    return result.exit_code, result.output


def test_the_command_prints_a_plan_as_json_in_seconds_and_bytes() -> None:
    code, text = run("--cluster", str(ROOT / "configs/clusters/two-laptops.yaml"), "--users", "4", "--json")
    assert code == 0
    plan = json.loads(text)
    assert (plan["source"], plan["users"], plan["slots"], plan["context_tokens"]) == ("described", 4, 8, 2048)
    assert plan["plan"]["forecast"]["chains"][0]["stages"][0]["end"] > 0
    assert plan["plan"]["reasons"]


def test_the_command_ends_with_1_and_says_how_much_is_missing_where_the_model_does_not_fit() -> None:
    path = str(ROOT / "configs/clusters/four-old-laptops.yaml")
    code, text = run("--cluster", path)
    assert code == 1
    assert "does not fit" in text
    assert "GB are missing" in text
    code, text = run("--cluster", path, "--json")
    assert code == 1
    found = json.loads(text)
    assert found["plan"] is None
    assert found["need"]["weights_bytes"] > found["need"]["offered_bytes"]
    assert found["remedies"][0]["quantization"]


def test_the_command_names_the_file_and_key_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("devices:\n  - {name: a, memory_gb: 8, memory_gb_s: 20, gflop: 100}\n")
    code, text = run("--cluster", str(path))
    assert code == 2
    assert "mine.yaml: there is no setting devices[0].gflop. Did you mean devices[0].gflops?" in text


def test_the_command_asks_for_a_model_where_none_is_described(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("devices:\n  - {name: a, memory_gb: 8, memory_gb_s: 20, gflops: 100}\n")
    code, text = run("--cluster", str(path))
    assert code == 2
    assert "describes no model. Give --model" in text


def test_a_prompt_that_does_not_fit_the_context_is_refused() -> None:
    path = str(ROOT / "configs/clusters/two-laptops.yaml")
    code, text = run("--cluster", path, "--context", "512", "--prompt", "513")
    assert code == 2
    assert "A prompt of 513 tokens does not fit a context of 512." in text
