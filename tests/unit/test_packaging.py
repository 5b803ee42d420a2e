"""What pyproject.toml and the Makefile promise about installing Potluck."""

from __future__ import annotations

import importlib
import os
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES: list[str] = SETTINGS["tool"]["setuptools"]["packages"]
FOLDERS: dict[str, str] = SETTINGS["tool"]["setuptools"]["package-dir"]


def test_every_folder_with_python_code_is_a_listed_package() -> None:
    ignored = {"tests", "build", "dist", "docs", "configs"}
    inits = [path.parent.relative_to(ROOT) for path in ROOT.glob("[a-z]*/**/__init__.py")]
    found = {"potluck." + ".".join(folder.parts) for folder in inits if folder.parts[0] not in ignored}
    assert found == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_imported_from_its_folder_under_its_full_name(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__file__ is not None
    assert Path(module.__file__).parent == ROOT / FOLDERS[package]


@pytest.mark.parametrize("package", [package for package in PACKAGES if package.count(".") == 1])
def test_a_package_says_that_it_is_typed(package: str) -> None:
    assert (ROOT / FOLDERS[package] / "py.typed").is_file()


def test_make_says_what_to_install_when_no_python_will_do() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "-C", str(ROOT), "bootstrap", "PYTHON=/nowhere/python3"]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert "Potluck needs Python 3.11 or newer" in ran.stderr
