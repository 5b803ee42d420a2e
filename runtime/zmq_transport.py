"""The sockets over TCP, by ZeroMQ. All of Potluck's ZeroMQ is in this file and `zmq_monitor`.

A socket's file descriptor is edge-triggered: after every read and write its events are looked at again, or a message
would lie unseen. Frames arrive and leave as ZeroMQ's own buffers from `COPY_BELOW` bytes on; smaller ones are copied,
which is cheaper than tracking them. LINGER is 0, but for a broker's last words: what a dead peer has not taken is
dropped at close.

A router that tells of closings reads two more things: the descriptor that each message came from, and its monitor's
news of descriptors. `connections` puts them together.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from potluck.runtime.connections import Connections
from potluck.runtime.transport import Dealer, Heard, PeerClosed, Pull, Push, Router, Transport
from potluck.runtime.zmq_monitor import Monitor
from potluck.wire import limits
from potluck.wire.errors import PortInUseError, SettingsError
from potluck.wire.frames import Buffer

log = logging.getLogger("potluck.transport")

COPY_BELOW = 1 << 15
# As plain numbers: these run for every message, and arithmetic on enumerations is slow.
_IN, _OUT, _NOBLOCK, _EVENTS = int(zmq.POLLIN), int(zmq.POLLOUT), int(zmq.NOBLOCK), int(zmq.EVENTS)
_SRCFD = int(zmq.SRCFD)
DATA_QUEUE = 4
"""Micro-batches that one data connection queues on each side."""
CONTROL_QUEUE = 10_000
HALF_OPEN_S = 30
"""A connection whose other machine acknowledges nothing for this many seconds is closed, see `_end_half_open`."""
PROBES = 3
CONNECT_S = 5
"""An attempt to connect that nobody answers is given up after this many seconds, and made again."""
IN_A_ROW = 64
"""Messages read without a turn of the event loop: a peer that sends faster than they are handled must not stop it."""


class _Socket:
    """One ZeroMQ socket on the running event loop."""

    BURST = 1
    """Messages taken from ZeroMQ at a time. On data sockets one, so that ZeroMQ's short queue holds the sender back."""

    def __init__(self, owner: ZmqTransport, kind: int, queue: int, frame_bytes: int) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self.endpoint = ""
        socket = owner.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, queue)
        socket.setsockopt(zmq.RCVHWM, queue)
        socket.setsockopt(zmq.MAXMSGSIZE, frame_bytes)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        _end_half_open(socket)
        self.socket = socket
        self._arrived: deque[list[zmq.Frame]] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._fd = cast(int, socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._look)
        self._again = False
        self._in_a_row = 0
        owner._sockets.add(self)

    # -- what ZeroMQ has to say

    def _look(self) -> None:
        """The descriptor fired, or may have: wake whoever waits for what is there now."""
        self._again = False
        if self.socket.closed:
            return
        events = cast(int, self.socket.get(_EVENTS))
        if events & _IN:
            self._wake()
        if events & _OUT and self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    def _look_soon(self) -> None:
        if not self._again:
            self._again = True
            self._loop.call_soon(self._look)

    async def _recv(self) -> list[zmq.Frame]:
        """The next multipart message as ZeroMQ's frames."""
        if not self._arrived:
            await self._fill()
        self._in_a_row += 1
        if self._in_a_row >= IN_A_ROW:
            self._in_a_row = 0
            await asyncio.sleep(0)
        return self._arrived.popleft()

    async def _fill(self) -> None:
        while not self._take():
            await self._wait()

    def _take(self) -> bool:
        """Takes what has arrived; False if that is nothing."""
        for _ in range(self.BURST):
            try:
                self._arrived.append(self.socket.recv_multipart(_NOBLOCK, copy=False))
            except zmq.Again:
                break
        if self._writer is not None:
            self._look_soon()
        return bool(self._arrived)

    async def _wait(self) -> None:
        """Until there may be something to take."""
        self._in_a_row = 0
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _send(self, frames: Sequence[Buffer]) -> bool:
        try:
            self.socket.send_multipart(frames, _NOBLOCK, copy=False, copy_threshold=COPY_BELOW)
        except (zmq.Again, zmq.ZMQError) as error:
            if not isinstance(error, zmq.Again) and error.errno not in (zmq.EHOSTUNREACH, zmq.ENOTSOCK):
                raise
            return False
        finally:
            if self._reader is not None:
                self._look_soon()
        return True

    def _bind(self, endpoint: str) -> None:
        self._allow_ipv6(endpoint)
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            if error.errno == zmq.EADDRINUSE:
                raise PortInUseError(
                    f"{endpoint.removeprefix('tcp://')} is taken by another program.",
                    hint="Stop that program (is another broker or stage running here?) or choose another port.",
                ) from error
            raise SettingsError(
                f"Can't listen on {endpoint.removeprefix('tcp://')}: {zmq.strerror(error.errno or 0)}.",
                hint="Give an address of this machine, for example 0.0.0.0 for all of them.",
            ) from error
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def _connect(self, endpoint: str) -> None:
        self._allow_ipv6(endpoint)
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise SettingsError(
                f"{endpoint} is not an address that can be connected to.", hint="Give host:port."
            ) from error
        self.endpoint = endpoint

    def _allow_ipv6(self, endpoint: str) -> None:
        """Only for endpoints that need it: a socket for both kinds shows other addresses, and needs IPv6 to exist."""
        if endpoint.startswith("tcp://["):
            self.socket.setsockopt(zmq.IPV6, 1)

    def close(self, last_words_s: float = 0.0) -> None:
        if not self.socket.closed:
            self._loop.remove_reader(self._fd)
            self.socket.close(int(1000 * last_words_s))
        self._owner._sockets.discard(self)


def _end_half_open(socket: zmq.Socket[bytes]) -> None:
    """Closes connections to machines that vanished without a word: the cable was pulled, the power failed.

    A process that dies closes its connections, its machine sees to that. Of a machine that vanishes nobody is told, and
    TCP by itself waits for two hours if it has nothing to send, and a quarter of an hour if it has. Our own beats find
    a lost stage within seconds, and deadlines a lost micro-batch. They don't find the rest: a client that vanished (it
    does not beat) would keep its slot to the end of its answer, a stage whose broker vanished would send into the void
    when the broker is long back, and every such connection would hold a descriptor and a queue. Hence keepalive for
    connections that are idle, and TCP_MAXRT (TCP_USER_TIMEOUT) for those with something unacknowledged, where TCP does
    not probe. 30 s is as long as the shortest deadline of a micro-batch: a link that comes back earlier has lost
    nothing, as TCP sends again by itself. Systems without TCP_USER_TIMEOUT have keepalive alone.

    Not ZMQ_HEARTBEAT: that asks the process, and these options ask the machine. A frozen process answers no ZeroMQ
    heartbeat, but its machine still acknowledges. How long a stage may be silent is said by its own beats, which people
    can set; a client that is stopped by Ctrl-Z and goes on a minute later has lost nothing.

    CONNECT_TIMEOUT: a machine that is off answers no SYN, and the pauses between attempts of one connect() grow up to a
    minute. Given up early and made anew, the attempt finds a machine soon after it is back.
    """
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, HALF_OPEN_S // 2)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, HALF_OPEN_S // 2 // PROBES)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, PROBES)
    socket.setsockopt(zmq.TCP_MAXRT, HALF_OPEN_S * 1000)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_S * 1000)


def _buffers(frames: Sequence[zmq.Frame]) -> list[Buffer]:
    return [frame.buffer for frame in frames]


class _ZmqRouter(_Socket):
    BURST = 64

    def __init__(self, owner: ZmqTransport, kind: int, queue: int, frame_bytes: int) -> None:
        super().__init__(owner, kind, queue, frame_bytes)
        self._monitor: Monitor | None = None
        self._gone: deque[bytes] = deque()

    def watch(self, number: int) -> None:
        """From now on `hear` tells of closings. To be called before binding, with another number for each router."""
        try:
            self._monitor = Monitor(self.socket, number, self._news)
        except zmq.ZMQError as error:
            self._go_without(error)

    async def recv(self) -> tuple[bytes, list[Buffer]]:
        while True:
            heard = await self.hear()
            if not isinstance(heard, PeerClosed):
                return heard

    async def hear(self) -> Heard:
        while not self._gone and not self._arrived and not self._take():
            await self._wait()
        if self._gone:
            return PeerClosed(self._gone.popleft())
        frames = await self._recv()
        return frames[0].bytes, _buffers(frames[1:])

    def _take(self) -> bool:
        monitor = self._monitor
        if monitor is None:
            return super()._take()
        monitor.read()
        some = super()._take()
        if some:
            monitor.read()  # again: what came with these messages happened before them
            self._note(monitor.connections)
        if not some or monitor.connections.overdue:
            self._gone.extend(monitor.connections.settle())
        return some or bool(self._gone)

    def _note(self, connections: Connections) -> None:
        try:
            for frames in self._arrived:
                connections.spoke(frames[-1].get(_SRCFD), frames[0].bytes)
        except zmq.ZMQError as error:
            self._go_without(error)

    def _news(self) -> None:
        if self._monitor is not None and self._monitor.read():
            self._wake()

    def _go_without(self, error: zmq.ZMQError) -> None:
        log.info("This build of ZeroMQ does not tell of closed connections (%s); missed beats do.", error)
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        return self._send([peer, *frames])

    def close(self, last_words_s: float = 0.0) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        super().close(last_words_s)


class _ZmqDealer(_Socket):
    BURST = 64
    _monitor: _OwnConnection | None = None
    """Made for whoever asks: events that nobody reads would pile up."""

    async def recv(self) -> list[Buffer]:
        return _buffers(await self._recv())

    def send(self, frames: Sequence[Buffer]) -> bool:
        return self._send(frames)

    async def connection(self) -> bool:
        if self._monitor is None:
            raise RuntimeError("this dealer is not watched")
        return await self._monitor.recv()

    def watch(self) -> None:
        """To be called before connecting, or the first news is missed."""
        self._monitor = _OwnConnection(self._owner, self.socket)

    def close(self, last_words_s: float = 0.0) -> None:
        if self._monitor is not None:
            if not self.socket.closed:
                self.socket.disable_monitor()
            self._monitor.close()
        super().close(last_words_s)


class _OwnConnection(_Socket):
    """What becomes of another socket's connection."""

    BURST = 16

    def __init__(self, owner: ZmqTransport, watched: zmq.Socket[bytes]) -> None:
        super().__init__(owner, zmq.PAIR, CONTROL_QUEUE, limits.TEXT_CHARS)
        where = f"inproc://connection-{next(owner._numbers)}"
        watched.monitor(where, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self.socket.connect(where)

    async def recv(self) -> bool:
        frames = await self._recv()
        event = parse_monitor_message([frame.bytes for frame in frames])["event"]
        return bool(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)


class _ZmqPull(_Socket):
    async def recv(self) -> list[Buffer]:
        return _buffers(await self._recv())


class _ZmqPush(_Socket):
    def try_send(self, frames: Sequence[Buffer]) -> bool:
        return not self.socket.closed and self._send(frames)

    async def send(self, frames: Sequence[Buffer]) -> None:
        while not self._send(frames):
            if self.socket.closed:
                await self._loop.create_future()
            self._writer = self._loop.create_future()
            self._look_soon()
            try:
                await self._writer
            finally:
                self._writer = None


class ZmqTransport(Transport):
    """Sockets of one process. Make it on the event loop that uses it."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self._sockets: set[_Socket] = set()
        self._numbers = count(1)

    def router(self, endpoint: str, *, closings: bool = False) -> Router:
        router = _ZmqRouter(self, zmq.ROUTER, CONTROL_QUEUE, limits.CONTROL_BODY_BYTES)
        router.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if closings:
            router.watch(next(self._numbers))
        router._bind(endpoint)
        return router

    def dealer(self, endpoint: str, identity: str, *, watched: bool = False) -> Dealer:
        dealer = _ZmqDealer(self, zmq.DEALER, CONTROL_QUEUE, limits.CONTROL_BODY_BYTES)
        dealer.socket.setsockopt(zmq.IDENTITY, identity.encode())
        if watched:
            dealer.watch()
        dealer._connect(endpoint)
        return dealer

    def pull(self, endpoint: str) -> Pull:
        pull = _ZmqPull(self, zmq.PULL, DATA_QUEUE, limits.ARRAY_BYTES)
        pull._bind(endpoint)
        return pull

    def push(self, endpoint: str) -> Push:
        push = _ZmqPush(self, zmq.PUSH, DATA_QUEUE, limits.ARRAY_BYTES)
        # Without this ZeroMQ would keep what a dead peer did not take, and give it to whoever has its port next.
        push.socket.setsockopt(zmq.IMMEDIATE, 1)
        push._connect(endpoint)
        return push

    def close(self) -> None:
        for socket in list(self._sockets):
            socket.close()
        self.context.term()
