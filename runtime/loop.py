"""The event loop of the commands: uvloop where it exists, otherwise one that ZeroMQ can watch sockets on."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's loop, or asyncio's selector loop (Windows' default loop can't watch a descriptor)."""
    if sys.platform != "win32":
        try:
            import uvloop
        except ImportError:
            pass
        else:
            return uvloop.new_event_loop
    return asyncio.SelectorEventLoop


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on that loop."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(work)
