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
def stop_signals(
    stop: Callable[[signal.Signals], None], insist: Callable[[signal.Signals], bool] = lambda _: False
) -> Iterator[None]:
    """The first SIGINT or SIGTERM calls `stop` on the event loop, every later one `insist`.

    If that has nothing more to do and returns False, the process ends, whatever it computes.
    """
    loop = asyncio.get_running_loop()
    last_s: float | None = None

    def on_signal(number: signal.Signals) -> None:
        nonlocal last_s
        if last_s is not None and loop.time() - last_s <= ONE_SIGNAL_S:
            return
        first, last_s = last_s is None, loop.time()
        if first:
            stop(number)
        elif not insist(number):
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
