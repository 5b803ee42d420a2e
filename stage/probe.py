"""Measures a link over the real sockets: pings to another stage's data socket, answers at this one's. Decides nothing.

How large the frames are and what their times mean is decided in `link_timing`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from potluck.runtime.address import seen_from
from potluck.runtime.transport import Push, Transport
from potluck.stage.link_timing import (
    BUDGET_S,
    LARGE_FRAMES,
    SMALL_BYTES,
    SMALL_FRAMES,
    WARM_UPS,
    LargePing,
    link_timing,
    next_bytes,
)
from potluck.wire.errors import PotluckError
from potluck.wire.frames import Buffer
from potluck.wire.ids import Epoch
from potluck.wire.measures import LinkTiming
from potluck.wire.messages import Ping, Pong, Probe, encode

FIRST_S = 5.0
"""How long the first answer may take: both connections are made meanwhile."""
ANSWER_S = 3.0


class Prober:
    """The probes of one stage, and the pongs they wait for."""

    def __init__(
        self, transport: Transport, broker_endpoint: str, reply_endpoint: str, clock: Callable[[], float]
    ) -> None:
        """`clock` counts seconds finely: the time of uvloop goes on by whole milliseconds."""
        self._transport = transport
        self._broker_endpoint = broker_endpoint
        self._reply_endpoint = reply_endpoint
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._waits: dict[tuple[int, int], asyncio.Future[float]] = {}

    def heard(self, pong: Pong) -> None:
        """An answer has come."""
        wait = self._waits.get((pong.number, pong.index))
        if wait is not None and not wait.done():
            wait.set_result(self._clock())

    async def run(self, probe: Probe) -> LinkTiming | None:
        """The link's figures; None if nobody answers at the other end."""
        try:
            push = self._transport.push(seen_from(self._broker_endpoint, probe.endpoint))
        except PotluckError:
            return None
        try:
            return await self._measure(push, probe)
        except TimeoutError:
            return None
        finally:
            push.close()

    async def _measure(self, push: Push, probe: Probe) -> LinkTiming:
        index = 0

        async def ping(array: Buffer, patience_s: float) -> float:
            nonlocal index
            index += 1
            return await self.ping(push, probe.number, index, array, patience_s)

        small = bytes(SMALL_BYTES)
        await ping(small, FIRST_S)
        begun_s = self._clock()
        for _ in range(WARM_UPS):
            await ping(small, ANSWER_S)
        small_s = [await ping(small, ANSWER_S)]
        while len(small_s) < SMALL_FRAMES and self._clock() < begun_s + BUDGET_S / 3:
            small_s.append(await ping(small, ANSWER_S))
        large: list[LargePing] = []
        noise = secrets.token_bytes(probe.frame_bytes)  # nothing on the way can make it shorter
        at_size = 0
        while at_size < LARGE_FRAMES and (not large or self._clock() < begun_s + BUDGET_S):
            size = next_bytes(large[-1] if large else None, probe.frame_bytes)
            at_size = at_size + 1 if large and size == large[-1].frame_bytes else 1
            large.append(LargePing(size, await ping(memoryview(noise)[:size], ANSWER_S)))
        return link_timing(small_s, large)

    async def ping(self, push: Push, number: int, index: int, array: Buffer, patience_s: float) -> float:
        """Seconds until the answer was there; number and index are nobody else's meanwhile. Raises TimeoutError."""
        wait: asyncio.Future[float] = self._loop.create_future()
        self._waits[number, index] = wait
        begun_s = self._clock()
        frames = encode(Ping(number, index, self._reply_endpoint), Epoch(0), [array])
        try:
            async with asyncio.timeout(patience_s):
                if not push.try_send(frames):
                    await push.send(frames)
                answered_s = await wait
        finally:
            del self._waits[number, index]
        return answered_s - begun_s
