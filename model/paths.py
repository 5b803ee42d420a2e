"""Where Potluck keeps what it can make again: the user's cache folder, or $POTLUCK_CACHE_DIR."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """`$POTLUCK_CACHE_DIR`, else `potluck` in the XDG cache folder (or the system's own kind of it)."""
    chosen = os.environ.get("POTLUCK_CACHE_DIR")
    return Path(chosen) if chosen else Path(platformdirs.user_cache_path("potluck", appauthor=False))
