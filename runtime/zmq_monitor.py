"""What ZeroMQ says of a router's connections: its monitor's news of descriptors that were accepted and closed."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import cast

import zmq

from potluck.runtime.connections import Connections

_NOBLOCK = int(zmq.NOBLOCK)
_ACCEPTED, _DISCONNECTED = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_DISCONNECTED)
_NEWS = struct.Struct("=hi")
"""How a monitor's message begins: the event, and its value, which for these two events is a descriptor."""
NEWS_QUEUE = 10_000
"""News of connections that wait to be read. When they are more, ZeroMQ stops for it, and accepts nobody meanwhile."""


class Monitor:
    """News of the connections of one router, for its `Connections`. Made before the router binds, closed before it."""

    def __init__(self, router: zmq.Socket[bytes], number: int, news: Callable[[], None]) -> None:
        """`news` is called when some may have come. Raises ZMQError where ZeroMQ was built without monitors."""
        self.connections = Connections()
        self._router = router
        self._loop = asyncio.get_running_loop()
        where = f"inproc://connections-{number}"
        router.monitor(where, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._pair = router.context.socket(zmq.PAIR)
        self._pair.setsockopt(zmq.LINGER, 0)
        self._pair.setsockopt(zmq.RCVHWM, NEWS_QUEUE)
        self._pair.connect(where)
        self._fd = cast(int, self._pair.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, news)

    def read(self) -> bool:
        """Tells `connections` what has come; False if that is nothing."""
        news = False
        while True:
            try:
                head = self._pair.recv_multipart(_NOBLOCK)[0]
            except zmq.Again:
                return news
            event, descriptor = _NEWS.unpack_from(head)
            if event == _ACCEPTED:
                self.connections.opened(descriptor)
            elif event == _DISCONNECTED:
                self.connections.closed(descriptor)
            news = True

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        # In this order: ZeroMQ's thread holds a lock while it waits for room in this queue, and to stop the monitor
        # takes the lock. Once it has stopped nobody writes, and the reading end can go.
        self.read()
        self._router.disable_monitor()
        self._pair.close(0)
