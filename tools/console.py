"""Where the commands print: as wide as the terminal, or wide enough for every table when nobody's terminal is there."""

from __future__ import annotations

import sys

from rich.console import Console

PIPED_COLUMNS = 160


def make_console(*, stderr: bool = False) -> Console:
    """A console that colours no numbers and wraps nothing that is read by programs."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else PIPED_COLUMNS)
