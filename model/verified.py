"""Remembers on which model files `potluck verify` has passed, so that an architecture outside the table can be served.

A pass counts for one file (its fingerprint), one version of llama.cpp and one format of slices: another of any of them
is verified anew. Decides nothing: whoever calls `rules_for` passes `allow_unlisted=is_verified(...)`.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from potluck.model.facts import ModelFacts
from potluck.model.slice_layout import FORMAT
from potluck.wire.errors import ModelError


def is_verified(cache_dir: Path, facts: ModelFacts) -> bool:
    """Whether `mark_verified` was called for this very model, with this version of llama.cpp."""
    try:
        kept = json.loads(_path(cache_dir, facts).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(kept, dict) and _key(facts).items() <= kept.items()


def mark_verified(cache_dir: Path, facts: ModelFacts, measured: Mapping[str, int | float | str]) -> Path:
    """Notes that verify has passed and what it `measured`; returns the file. Raises ModelError if it can't write."""
    path = _path(cache_dir, facts)
    note = json.dumps({**measured, **_key(facts), "model": facts.name}, indent=2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".verified-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(note)
        Path(name).replace(path)
    except OSError as error:
        raise ModelError(
            f"{path} can't be written: {error.strerror}.", hint="Set another cache folder or free some space."
        ) from error
    return path


def _key(facts: ModelFacts) -> dict[str, str | int]:
    try:
        llama = version("llama-cpp-python")
    except PackageNotFoundError:
        llama = "unknown"
    return {
        "architecture": facts.architecture,
        "fingerprint": facts.fingerprint,
        "llama_cpp_python": llama,
        "slice_format": FORMAT,
    }


def _path(cache_dir: Path, facts: ModelFacts) -> Path:
    # Hashed, because an architecture's name comes out of the file and could be a path.
    digest = hashlib.sha256(json.dumps(_key(facts), sort_keys=True).encode()).hexdigest()
    return cache_dir / "verified" / f"{digest}.json"


__all__ = ["is_verified", "mark_verified"]
