"""What the tests of the sockets over ZeroMQ share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from potluck.runtime.loop import loop_factory
from potluck.runtime.zmq_transport import ZmqTransport

ANY = "tcp://127.0.0.1:0"
LOOPS = [asyncio.SelectorEventLoop, loop_factory()]


def run(
    loop: Callable[[], asyncio.AbstractEventLoop], story: Callable[[ZmqTransport], Coroutine[Any, Any, None]]
) -> None:
    async def whole() -> None:
        transport = ZmqTransport()
        try:
            async with asyncio.timeout(20):
                await story(transport)
        finally:
            transport.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(whole())


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what nobody announces; the story's deadline ends it."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
