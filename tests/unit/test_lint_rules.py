"""The import rules hold only while ruff really refuses a planted import in every kind of file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PURE_PLACES = ["wire/x.py", "model/x.py", "planner/x.py", "broker/x.py", "stage/x.py"]
SHELL_PLACES = [
    *(f"broker/{name}.py" for name in ("server", "rest", "rest_chat", "gateway", "metrics", "cli")),
    *(f"stage/{name}.py" for name in ("pipeline", "bench", "worker", "compute", "cli", "engines/llama")),
    *("runtime/sockets.py", "tools/demo.py", "tests/unit/test_x.py"),
]
PACKAGES = ["broker", "model", "planner", "runtime", "stage", "tools", "wire"]
IMPURE = ["asyncio", "multiprocessing", "random", "secrets", "selectors", "socket", "subprocess", "threading"]
IMPURE += ["time", "uuid", "zmq"]


def ruff_bans(path: str, source: str, *options: str) -> set[str]:
    """The modules whose import ruff refuses in `source`, if it stood at `path`."""
    command = [sys.executable, "-m", "ruff", "check", "--output-format=concise", *options]
    command += [f"--stdin-filename={path}", "-"]
    ran = subprocess.run(command, cwd=ROOT, input=source, capture_output=True, text=True, check=False)
    assert ran.returncode in (0, 1), ran.stderr
    return set(re.findall(r"TID251 `([^`]+)` is banned", ran.stdout))


def imports(modules: list[str]) -> str:
    return "".join(f"import {module}\n" for module in modules)


@pytest.mark.parametrize("path", PURE_PLACES)
def test_pure_files_may_import_no_clock_socket_or_chance(path: str) -> None:
    assert ruff_bans(path, imports(IMPURE)) == set(IMPURE)


def test_only_model_among_the_pure_packages_may_import_os() -> None:
    allowed = [path for path in PURE_PLACES if not ruff_bans(path, "from os import path\n")]
    assert allowed == ["model/x.py"]


@pytest.mark.parametrize("path", SHELL_PLACES)
def test_shell_files_may_import_what_they_like(path: str) -> None:
    assert ruff_bans(path, imports([*IMPURE, "os"])) == set()


@pytest.mark.parametrize("path", ["broker/machine.py", "stage/machine.py"])
def test_pure_files_may_not_import_shells(path: str) -> None:
    shells = [
        "potluck.runtime",
        "potluck.broker.server",
        "potluck.stage.pipeline",
        "potluck.stage.engines.llama",
    ]
    source = "".join(f"from {shell} import Name\n" for shell in shells)
    assert len(ruff_bans(path, source)) == len(shells)


@pytest.mark.parametrize("path", [*PURE_PLACES, *SHELL_PLACES])
def test_bare_package_names_are_refused_everywhere(path: str) -> None:
    source = f"def late():\n    {'; '.join(f'from {name}.x import y' for name in PACKAGES)}\n"
    # As `make lint` runs it: once with each folder's own rules, once with the root's.
    refused = ruff_bans(path, source) | ruff_bans(path, source, "--config=pyproject.toml", "--select=TID251")
    assert refused == set(PACKAGES)


def test_make_lint_runs_both_passes() -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "check --quiet ." in recipe
    assert "check --quiet --config pyproject.toml --select TID251 broker stage" in recipe
