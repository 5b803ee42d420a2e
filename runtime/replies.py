"""Answers to pings: a Pong to the sender's data socket, over a few connections that are kept open for a while."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict

from potluck.runtime.address import seen_from
from potluck.runtime.transport import Push, Transport
from potluck.wire.errors import PotluckError
from potluck.wire.frames import Buffer
from potluck.wire.messages import Ping, Pong, encode

KEPT = 8
"""Connections at the same time: one per stage that is probing now, and a few that have just ended."""
CONNECT_S = 5.0
"""A first answer may wait this long for its connection."""


class Replies:
    """Where pings are answered. `home` is the host that an address given as 0.0.0.0 stands for."""

    def __init__(self, transport: Transport, home: str) -> None:
        self._transport = transport
        self._home = home
        self._pushes: OrderedDict[str, Push] = OrderedDict()
        self._waiting: set[asyncio.Task[None]] = set()

    def answer(self, ping: Ping) -> None:
        """Sends the Pong, at once where there is a connection. Too many that wait for one are dropped."""
        endpoint = seen_from(self._home, ping.reply_endpoint)
        push = self._pushes.pop(endpoint, None)
        if push is None:
            try:
                push = self._transport.push(endpoint)
            except PotluckError:
                return  # not an address: the sender's own loss
            while len(self._pushes) >= KEPT:
                self._pushes.popitem(last=False)[1].close()
        self._pushes[endpoint] = push
        frames = encode(Pong(ping.number, ping.index))
        if not push.try_send(frames) and len(self._waiting) < KEPT:
            task = asyncio.get_running_loop().create_task(_send(push, frames))
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)

    def close(self) -> None:
        """Closes every connection."""
        for task in self._waiting:
            task.cancel()
        while self._pushes:
            self._pushes.popitem()[1].close()


async def _send(push: Push, frames: list[Buffer]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CONNECT_S):
            await push.send(frames)
