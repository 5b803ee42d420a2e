"""The ways from a stage to its mirrors: one copy at a time goes out on each, beside the micro-batches. Decides nothing.

A copy is followed by a Ping over the same connection. Its answer says that the copy has arrived and not only left: what
a copy costs the link is known, and no second one is queued behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from potluck.runtime.address import seen_from
from potluck.runtime.transport import Push, Transport
from potluck.stage.effects import SendCopy
from potluck.stage.events import CopySent, MirrorLost, StageEvent
from potluck.stage.probe import Prober
from potluck.wire.errors import PotluckError
from potluck.wire.frames import Buffer
from potluck.wire.messages import encode

SLOWEST_BYTES_PER_S = 1_000_000
"""A mirror gets the deadline of all sends, and the time that a copy takes at this speed."""
FIRST_PING = 1 << 61
"""Pings after copies are numbered from here on, those of probes from 0."""


class Mirrors:
    """The mirrors of one stage in one epoch."""

    def __init__(
        self,
        transport: Transport,
        home: str,
        prober: Prober,
        feed: Callable[[StageEvent], None],
        send_timeout_s: float,
    ) -> None:
        """`home` is the host that an address given as 0.0.0.0 stands for."""
        self._transport = transport
        self._home = home
        self._prober = prober
        self._feed = feed
        self._send_timeout_s = send_timeout_s
        self._loop = asyncio.get_running_loop()
        self._pushes: dict[str, Push] = {}
        self._sending: asyncio.Task[None] | None = None

    def set(self, endpoints: tuple[str, ...]) -> None:
        """Copies go here from now on. One that is under way is given up."""
        self.close()
        for each in endpoints:
            try:
                self._pushes[each] = self._transport.push(seen_from(self._home, each))
            except PotluckError:
                self._loop.call_soon(self._feed, MirrorLost(cause="mirrors", endpoint=each, after_s=0.0))

    def send(self, copy: SendCopy) -> None:
        """Begins to send a copy to all of them."""
        self._sending = self._loop.create_task(self._send(copy))

    def close(self) -> None:
        """Drops what is on its way, and closes the ways."""
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        while self._pushes:
            self._pushes.popitem()[1].close()

    async def _send(self, copy: SendCopy) -> None:
        begun_s = self._loop.time()
        frames = encode(copy.message, copy.epoch, copy.arrays)
        ways = enumerate(list(self._pushes.items()))
        await asyncio.gather(
            *(self._send_to(each, push, copy.number, index, frames) for index, (each, push) in ways)
        )
        took_s = self._loop.time() - begun_s
        self._feed(CopySent(cause=f"copy {copy.number}", number=copy.number, took_s=took_s))

    async def _send_to(
        self, endpoint: str, push: Push, number: int, index: int, frames: list[Buffer]
    ) -> None:
        size = sum(memoryview(frame).nbytes for frame in frames)
        patience_s = self._send_timeout_s + size / SLOWEST_BYTES_PER_S
        try:
            async with asyncio.timeout(patience_s):
                if not push.try_send(frames):
                    await push.send(frames)
                await self._prober.ping(push, FIRST_PING + number, index, b"", patience_s)
        except TimeoutError:
            push.close()
            self._pushes.pop(endpoint, None)
            self._feed(MirrorLost(cause=f"copy {number}", endpoint=endpoint, after_s=patience_s))


__all__ = ["FIRST_PING", "SLOWEST_BYTES_PER_S", "Mirrors"]
