"""An event loop whose clock stands still while there is work and jumps to the next timer when there is none."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NothingWillHappen(AssertionError):
    """Everything waits and no timer is set: in real life this would hang for ever."""


class _Selector(selectors.DefaultSelector):
    """Never waits: moves the loop's clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise NothingWillHappen("every task waits, and no timer is set")
            self.now += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual seconds since the loop was made."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._virtual.now


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on virtual time to its end."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
