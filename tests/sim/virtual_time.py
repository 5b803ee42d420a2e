"""An event loop whose clock stands still while there is work and jumps to the next timer when there is none."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NothingWillHappen(AssertionError):
    """Everything waits and no timer is set: in real life this would hang for ever."""


class _Selector(selectors.DefaultSelector):
    """Never waits: moves the loop's clock instead."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise NothingWillHappen("every task waits, and no timer is set")
            if timeout > 0:
                self._loop.jump()
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual seconds since the loop was made.

    The clock jumps to exactly the time of the next timer, and no timer comes even a little early: a core that is asked
    a moment too soon asks again, and with others at work at that moment the clock would never move on.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Selector(self))
        self._clock_resolution = math.ulp(0.0)

    def jump(self) -> None:
        """To the next timer."""
        self._now_s = max(self._now_s, self._scheduled[0].when())
        self._clock_resolution = math.ulp(self._now_s)

    def time(self) -> float:
        return self._now_s


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on virtual time to its end."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
