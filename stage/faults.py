"""A fault on purpose, to try what a cluster does about it: a testing aid, off unless asked for.

`potluck-stage --fault` (hidden, or POTLUCK_FAULT) takes one of

    hang-after:50         the 51st micro-batch of this process never ends
    hang-when:/tmp/now    the first micro-batch that begins once that file exists never ends

The stage goes on to beat and to receive; only the thread that computes is stuck, as in a driver that waits for ever.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from potluck.wire.errors import UsageError

log = logging.getLogger("potluck.stage")

BeforeBatch: TypeAlias = Callable[[], None]
"""Called on the compute lane before each micro-batch."""


def no_fault() -> None:
    """Nothing happens."""


def make_fault(text: str | None) -> BeforeBatch:
    """The fault by its description; none for None or an empty one. Raises UsageError."""
    if not text:
        return no_fault
    kind, _, rest = text.partition(":")
    if kind == "hang-after" and rest.isdecimal():
        return _HangAfter(int(rest))
    if kind == "hang-when" and rest:
        path = Path(rest)
        return lambda: hang(text) if path.exists() else None
    raise UsageError(
        f"There is no fault {text!r}.", hint="Give hang-after:NUMBER or hang-when:FILE, or leave --fault out."
    )


def hang(text: str) -> None:
    """Never returns. The thread ends with its process."""
    log.warning("This computation hangs from now on, as --fault %s asked for.", text)
    threading.Event().wait()


class _HangAfter:
    def __init__(self, batches: int) -> None:
        self._left = batches
        self._text = f"hang-after:{batches}"

    def __call__(self) -> None:
        if self._left == 0:
            hang(self._text)
        self._left -= 1


__all__ = ["BeforeBatch", "make_fault", "no_fault"]
