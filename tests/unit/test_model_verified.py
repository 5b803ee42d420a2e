"""What `potluck verify` has passed on is remembered, for that very file only."""

from __future__ import annotations

from pathlib import Path

import pytest

from potluck.model import verified
from potluck.model.facts import read_facts
from potluck.model.verified import is_verified, mark_verified
from potluck.wire.errors import ModelError
from tiny_models import write_tiny


def test_model_is_verified_once_it_is_marked_and_no_other_is(tmp_path: Path) -> None:
    facts = read_facts(write_tiny(tmp_path / "a.gguf", layers=1))
    other = read_facts(write_tiny(tmp_path / "b.gguf", layers=1, seed=1))
    assert not is_verified(tmp_path, facts)
    mark_verified(tmp_path, facts, {"largest_difference": 0.0})
    assert is_verified(tmp_path, facts)
    assert not is_verified(tmp_path, other)


def test_other_llama_cpp_is_verified_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = read_facts(write_tiny(tmp_path / "a.gguf", layers=1))
    mark_verified(tmp_path, facts, {})
    monkeypatch.setattr(verified, "version", lambda _package: "9.9.9")
    assert not is_verified(tmp_path, facts)


@pytest.mark.parametrize("note", ["", "[]", "{", "{}", "[" * 100_000])
def test_damaged_note_counts_for_nothing(tmp_path: Path, note: str) -> None:
    facts = read_facts(write_tiny(tmp_path / "a.gguf", layers=1))
    mark_verified(tmp_path, facts, {}).write_text(note)
    assert not is_verified(tmp_path, facts)


def test_cache_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    facts = read_facts(write_tiny(tmp_path / "a.gguf", layers=1))
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ModelError, match="can't be written"):
        mark_verified(tmp_path / "cache", facts, {})
