"""The event loop of the commands: uvloop where it exists, otherwise one that ZeroMQ can watch sockets on."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
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


async def in_thread(work: Callable[[], T]) -> T:
    """The result of `work`, done beside the event loop. The thread never keeps the process from ending."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.cancelled():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def run_it() -> None:
        value, error = None, None
        try:
            value = work()
        except BaseException as raised:  # noqa: BLE001 - whatever it is, it belongs to whoever waits for the result
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is gone, and with it whoever waited
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run_it, name="potluck-beside", daemon=True).start()
    return await result
