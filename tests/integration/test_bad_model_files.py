"""A model file that can't be served is refused in a line or two, by every command that takes one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tiny_models
from acceptance.cluster_world import command
from tiny_models import ARCHITECTURES, write_tiny

UNLISTED = "internlm2"


def missing(folder: Path) -> Path:
    return folder / "missing.gguf"


def a_directory(folder: Path) -> Path:
    return folder


def empty(folder: Path) -> Path:
    path = folder / "empty.gguf"
    path.touch()
    return path


def not_gguf(folder: Path) -> Path:
    path = folder / "notes.gguf"
    path.write_text("This is no model. " * 1000)
    return path


def only_the_magic(folder: Path) -> Path:
    path = folder / "magic.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 4096)
    return path


def cut_off_in_its_header(folder: Path) -> Path:
    return _cut(folder, 300)


def cut_off_in_its_tensors(folder: Path) -> Path:
    return _cut(folder, -1000)


def unlisted(folder: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_models, "ARCHITECTURES", (*ARCHITECTURES, UNLISTED))
        return write_tiny(folder / "unlisted.gguf", UNLISTED)


def _cut(folder: Path, length: int) -> Path:
    path = folder / "cut.gguf"
    path.write_bytes(write_tiny(folder / "whole.gguf").read_bytes()[:length])
    return path


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (missing, "no file"),
        (a_directory, "directory"),
        (empty, "GGUF"),
        (not_gguf, "GGUF"),
        (only_the_magic, "magic.gguf"),
        (cut_off_in_its_header, "cut.gguf"),
        (cut_off_in_its_tensors, "is cut off"),
        (unlisted, UNLISTED),
    ],
)
def test_the_broker_refuses_it_before_it_opens_a_port(
    bad: Callable[[Path], Path], words: str, tmp_path: Path
) -> None:
    path = bad(tmp_path)
    ended = command("potluck-broker", "--model", path, "--port", "0", "--results-port", "0", "--http", "off")
    assert ended.code == 1
    assert words.lower() in ended.err.lower()
    assert path.name in ended.err
    assert ended.lines[-1].startswith("potluck-broker: ")
    assert len(ended.lines) <= 2


@pytest.mark.parametrize("bad", [missing, a_directory, not_gguf, cut_off_in_its_tensors])
@pytest.mark.parametrize(
    "line",
    [
        ["potluck", "demo", "--model"],
        ["potluck", "verify"],
        ["potluck", "bench", "throughput", "--model"],
        ["potluck-stage", "127.0.0.1", "--model"],
    ],
    ids=lambda line: " ".join(line[:2]),
)
def test_every_command_that_takes_a_model_says_what_is_wrong_with_it(
    line: list[str], bad: Callable[[Path], Path], tmp_path: Path
) -> None:
    path = bad(tmp_path)
    ended = command(*line, path)
    assert ended.code == 1
    assert path.name in ended.err
    assert ended.lines[-1].startswith(f"{line[0]}: ")
    assert len(ended.lines) <= 2


def test_an_architecture_that_is_not_listed_is_served_once_it_was_verified(tmp_path: Path) -> None:
    path = unlisted(tmp_path)
    cache = str(tmp_path / "cache")
    ended = command("potluck", "demo", "--model", path, POTLUCK_CACHE_DIR=cache)
    assert ended.code == 1
    assert UNLISTED in ended.err
    assert "potluck verify" in ended.err
    assert command("potluck", "verify", path, POTLUCK_CACHE_DIR=cache).code == 0
    served = command("potluck", "demo", "--model", path, "--max-tokens", "2", POTLUCK_CACHE_DIR=cache)
    assert served.code == 0, served.err
