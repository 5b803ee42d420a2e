"""Slices are kept in the cache folder by what is in the model: written once, never taken for another model's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from acceptance.cluster_world import FAST, World, world
from potluck.model.facts import read_facts
from potluck.runtime.client import Client
from potluck.wire.sampling import GREEDY
from tiny_models import write_tiny

pytestmark = pytest.mark.slow


def written(cache: Path) -> dict[str, tuple[int, int]]:
    """Every slice with its inode and the time of its last change."""
    found = {}
    for path in cache.rglob("*.gguf"):
        facts = path.stat()
        found[str(path.relative_to(cache))] = (facts.st_ino, facts.st_mtime_ns)
    return found


@contextmanager
def served(model: Path, folder: Path) -> Iterator[World]:
    folder.mkdir()
    with world(model, folder, 2, "--http", "off", *FAST) as made:
        yield made


def answer(made: World) -> tuple[int, ...]:
    async def ask() -> tuple[int, ...]:
        async with Client(made.address) as client:
            done = await client.complete("hello", max_tokens=16, sampling=GREEDY, ignore_eos=True)
        return done.tokens

    return made.run(ask())


def test_slices_are_written_once_for_each_model_whatever_its_file_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POTLUCK_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    cache = tmp_path / "xdg" / "potluck"
    model = write_tiny(tmp_path / "tiny.gguf", seed=1)
    first_print = read_facts(model).fingerprint

    with served(model, tmp_path / "first") as made:
        first = answer(made)
    before = written(cache)
    assert {Path(name).parent.name for name in before} == {first_print}
    assert len(before) == 2

    renamed = tmp_path / "renamed.gguf"
    shutil.copy(model, renamed)
    with served(renamed, tmp_path / "second") as made:
        assert answer(made) == first
    assert written(cache) == before

    write_tiny(model, seed=2)  # another model under the same file name
    second_print = read_facts(model).fingerprint
    with served(model, tmp_path / "third") as made:
        assert answer(made) != first
    after = written(cache)
    assert {name: after[name] for name in before} == before
    assert {Path(name).parent.name for name in after} == {first_print, second_print}
    assert len(after) == 4


def test_the_cache_folder_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("POTLUCK_CACHE_DIR", str(tmp_path / "chosen"))
    with served(write_tiny(tmp_path / "tiny.gguf"), tmp_path / "logs") as made:
        assert answer(made)
    assert len(written(tmp_path / "chosen")) == 2
    assert not written(tmp_path / "xdg")
