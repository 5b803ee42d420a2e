"""Logging for the commands: short lines on a terminal, the same in a file that is rotated by size."""

from __future__ import annotations

import logging
import logging.handlers
import sys
from pathlib import Path

LEVELS = ("debug", "info", "warning", "error")


def set_up_logs(level: str, file: str | None = None, max_size_mb: int = 100, max_files: int = 5) -> None:
    """Sends Potluck's log to standard error, or to `file`."""
    handler: logging.Handler
    if file:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(
            file, maxBytes=max_size_mb << 20, backupCount=max(0, max_files - 1), encoding="utf-8"
        )
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    root = logging.getLogger("potluck")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
