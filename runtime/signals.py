"""Ctrl-C for programs that serve: the first one asks, the second one insists."""

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
def stop_signals(stop: Callable[[signal.Signals], None]) -> Iterator[None]:
    """The first SIGINT or SIGTERM calls `stop` on the event loop, a later one ends the process whatever it computes."""
    loop = asyncio.get_running_loop()
    first_s: float | None = None

    def on_signal(number: signal.Signals) -> None:
        nonlocal first_s
        if first_s is None:
            first_s = loop.time()
            stop(number)
        elif loop.time() - first_s > ONE_SIGNAL_S:
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
