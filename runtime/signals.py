"""Ctrl-C for programs that serve: the first one asks, the next one insists, and one after that ends the process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator

ONE_SIGNAL_S = 0.5
"""A terminal and a wrapper may both send the same Ctrl-C: within this time it is one."""


@contextlib.contextmanager
def stop_signals(*steps: Callable[[signal.Signals], bool | None]) -> Iterator[None]:
    """Each SIGINT or SIGTERM calls the next of `steps` on the event loop. The one after them ends the process whatever
    it computes; so does a step that returns False, because it has nothing more to do.
    """
    loop = asyncio.get_running_loop()
    last_s = float("-inf")
    left = iter(steps)

    def on_signal(number: signal.Signals) -> None:
        nonlocal last_s
        if loop.time() - last_s <= ONE_SIGNAL_S:
            return
        last_s = loop.time()
        step = next(left, None)
        if step is None or step(number) is False:
            sys.stderr.write("Stopped at once.\n")
            sys.stderr.flush()
            os._exit(128 + number)

    handled = (signal.SIGINT, signal.SIGTERM)
    for number in handled:
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in handled:
            with contextlib.suppress(NotImplementedError):
                loop.remove_signal_handler(number)
