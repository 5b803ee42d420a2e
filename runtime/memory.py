"""A network inside one process: the same sockets as over TCP, with faults by script. For tests, and for trying things.

Every host has its own transport. A `Weather` says for each message what becomes of it: how long it takes, whether it is
lost or doubled. Order between one sender and one receiver is kept, as TCP keeps it: what is late holds up what follows.
Closing a host's transport is its death: what it had queued is gone, what was on its way already still arrives, and no
socket made afterwards works. As over TCP, a router hears that a dealer closed, after all that the dealer had sent; it
hears nothing of one that is frozen or cut off.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Generic, TypeVar

from potluck.runtime.transport import Dealer, Heard, PeerClosed, Pull, Push, Router, Transport
from potluck.wire.errors import PortInUseError
from potluck.wire.frames import Buffer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one message: one delay in seconds per copy that arrives; no delay, no arrival."""

    delays_s: tuple[float, ...] = (0.0,)


class Weather:
    """Decides every message's fate. This one is fair weather; tests script others."""

    def fate(self, source: str, target: str, frames: Sequence[Buffer]) -> Fate:
        """Source and target are host names."""
        return Fate()

    def closing(self, source: str, target: str) -> Fate:
        """What becomes of the news that a connection from source to target was closed there."""
        return Fate() if self.connected(source, target) else Fate(())

    def connected(self, source: str, target: str) -> bool:
        """Whether the two hosts reach each other at all: a push waits while they don't."""
        return True


class _Inbox(Generic[T]):
    """Messages that have arrived at a socket."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._wake = asyncio.Event()

    def put(self, item: T) -> None:
        self._items.append(item)
        self._wake.set()

    async def get(self) -> T:
        while not self._items:
            self._wake.clear()
            await self._wake.wait()
        return self._items.popleft()

    def __len__(self) -> int:
        return len(self._items)


def _freeze(frames: Sequence[Buffer]) -> list[Buffer]:
    """As over a real network, the receiver's bytes are its own."""
    return [bytes(frame) for frame in frames]


@dataclass
class MemoryNetwork:
    """Hosts, bound endpoints and the weather between them."""

    weather: Weather = field(default_factory=Weather)
    delivered: int = 0
    lost: int = 0

    def __post_init__(self) -> None:
        self._bound: dict[str, _Bound] = {}
        self._dealers: dict[_MemoryDealer, None] = {}
        self._ports = count(20_000)
        self._lanes: dict[tuple[str, str, str], _Lane] = {}
        self._context = copy_context()
        """What is on its way belongs to the network, not to who sent it."""

    def host(self, name: str) -> MemoryTransport:
        """A transport for one host."""
        return MemoryTransport(self, name)

    def carry(
        self,
        source: str,
        target: str,
        lane: str,
        frames: Sequence[Buffer],
        arrive: Callable[[list[Buffer]], None],
    ) -> int:
        """Delivers frames by the weather's will, in order within one lane. Returns how many copies arrive."""
        copies = self.weather.fate(source, target, frames).delays_s
        if not copies:
            self.lost += 1
        frozen = _freeze(frames)
        for delay in copies:
            self.delivered += 1
            self._lane(source, target, lane).send(delay, partial(arrive, list(frozen)))
        return len(copies)

    def sever(self, one: str, other: str) -> None:
        """Control connections between two hosts break and come back at once: what was on its way is gone."""
        for dealer in self._dealers:
            router = self._bound.get(dealer.endpoint)
            if not isinstance(router, _MemoryRouter):
                continue
            client, server = dealer.transport.name, router.transport.name
            if {client, server} == {one, other}:
                for way in ((client, server, dealer.lane), (server, client, router.lane(dealer.identity))):
                    if way in self._lanes:
                        self._lanes[way].drop()
                router.ended(dealer)
                dealer.links.put(False)
                dealer.links.put(True)

    def close(self, source: str, target: str, lane: str, arrive: Callable[[], None]) -> None:
        """Tells that a connection closed, after all that is on its way there."""
        for delay in self.weather.closing(source, target).delays_s[:1]:
            self._lane(source, target, lane).send(delay, arrive)

    def _lane(self, *way: str) -> _Lane:
        source, target, lane = way
        found = self._lanes.get((source, target, lane))
        if found is None:
            found = _Lane(self._context, partial(self._lanes.pop, (source, target, lane)))
            self._lanes[source, target, lane] = found
        return found


class _Lane:
    """What is on its way from one sender to one receiver: nothing overtakes, whatever the delays."""

    def __init__(self, context: Context, empty: Callable[[], object]) -> None:
        """`empty` is called when nothing is on its way any more; the lane is then of no more use."""
        self._context = context
        self._empty = empty
        self._coming: deque[Callable[[], None]] = deque()
        self._last_s = 0.0

    def send(self, delay_s: float, arrive: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._last_s = max(loop.time() + delay_s, self._last_s)
        self._coming.append(arrive)
        # Timers of equal times come in any order: each one delivers whatever is first.
        loop.call_at(self._last_s, self._deliver, context=self._context)

    def drop(self) -> None:
        """What is on its way never arrives."""
        self._coming = deque([_nothing] * len(self._coming))

    def _deliver(self) -> None:
        arrive = self._coming.popleft()
        if not self._coming:
            self._empty()
        arrive()


def _nothing() -> None:
    """Arrives in place of what was lost."""


class MemoryTransport(Transport):
    """One host's sockets."""

    def __init__(self, network: MemoryNetwork, name: str) -> None:
        self.network = network
        self.name = name
        self._sockets: list[_Socket] = []
        self._closed = False

    def _bind(self, endpoint: str, socket: _Bound) -> str:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        if port in ("0", "*"):
            port = str(next(self.network._ports))
        host = self.name if host in ("*", "0.0.0.0", "") else host
        where = f"tcp://{host}:{port}"
        if socket.closed:
            return where
        if where in self.network._bound:
            raise PortInUseError(f"{where} is taken.", hint="Choose another port.")
        self.network._bound[where] = socket
        return where

    def _keep(self, socket: _Socket) -> None:
        if self._closed:
            socket.closed = True
        else:
            self._sockets.append(socket)

    def router(self, endpoint: str, *, closings: bool = False) -> Router:
        router = _MemoryRouter(self, closings)
        router.endpoint = self._bind(endpoint, router)
        for dealer in list(self.network._dealers):
            if dealer.endpoint == router.endpoint:
                dealer.links.put(True)
            dealer.flush()
        return router

    def pull(self, endpoint: str) -> Pull:
        pull = _MemoryPull(self)
        pull.endpoint = self._bind(endpoint, pull)
        return pull

    def dealer(self, endpoint: str, identity: str, *, watched: bool = False) -> Dealer:
        return _MemoryDealer(self, endpoint, identity.encode())

    def push(self, endpoint: str) -> Push:
        return _MemoryPush(self, endpoint)

    def close(self) -> None:
        for socket in list(self._sockets):
            socket.close()
        self._closed = True


class _Socket:
    def __init__(self, transport: MemoryTransport) -> None:
        self.transport = transport
        self.endpoint = ""
        self.closed = False
        transport._keep(self)

    @property
    def network(self) -> MemoryNetwork:
        return self.transport.network

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.transport._sockets.remove(self)


class _Bound(_Socket):
    """Something that can be connected to."""

    def close(self) -> None:
        if not self.closed:
            self.network._bound.pop(self.endpoint, None)
        super().close()


class _MemoryRouter(_Bound):
    def __init__(self, transport: MemoryTransport, closings: bool) -> None:
        super().__init__(transport)
        self.closings = closings
        self.inbox: _Inbox[Heard] = _Inbox()
        self.peers: dict[bytes, _MemoryDealer] = {}
        """Where each identity spoke last."""

    def close(self, last_words_s: float = 0.0) -> None:
        """What was sent is on its way already."""
        if not self.closed:
            for dealer in self.network._dealers:
                if dealer.endpoint == self.endpoint:
                    dealer.links.put(False)
        super().close()

    async def recv(self) -> tuple[bytes, list[Buffer]]:
        while True:
            heard = await self.hear()
            if not isinstance(heard, PeerClosed):
                return heard

    async def hear(self) -> Heard:
        return await self.inbox.get()

    def arrive(self, dealer: _MemoryDealer, frames: list[Buffer]) -> None:
        if self.closed:
            return
        self.peers[dealer.identity] = dealer  # a newer dealer of the same identity takes its place
        self.inbox.put((dealer.identity, frames))

    def ended(self, dealer: _MemoryDealer) -> None:
        """A connection closed: the end of its peer, unless that speaks on another one."""
        if not self.closed and self.peers.get(dealer.identity) is dealer:
            del self.peers[dealer.identity]
            if self.closings:
                self.inbox.put(PeerClosed(dealer.identity))

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        dealer = self.peers.get(peer)
        if dealer is None or dealer.closed or self.closed:
            return False
        self.network.carry(self.transport.name, dealer.transport.name, self.lane(peer), frames, dealer.arrive)
        return True

    def lane(self, peer: bytes) -> str:
        """What is sent to one peer keeps its order."""
        return f"{self.endpoint}>{peer!r}"


class _MemoryDealer(_Socket):
    """Keeps what it sends while nothing is bound at its endpoint, as a ZeroMQ dealer that reconnects does."""

    QUEUE = 1000

    def __init__(self, transport: MemoryTransport, endpoint: str, identity: bytes) -> None:
        super().__init__(transport)
        self.endpoint = endpoint
        self.identity = identity
        self.inbox: _Inbox[list[Buffer]] = _Inbox()
        self.links: _Inbox[bool] = _Inbox()
        self._queue: deque[list[Buffer]] = deque()
        if not self.closed:
            self.network._dealers[self] = None
            if endpoint in self.network._bound:
                self.links.put(True)

    async def recv(self) -> list[Buffer]:
        return await self.inbox.get()

    async def connection(self) -> bool:
        return await self.links.get()

    def arrive(self, frames: list[Buffer]) -> None:
        if not self.closed:
            self.inbox.put(frames)

    def send(self, frames: Sequence[Buffer]) -> bool:
        if self.closed or len(self._queue) >= self.QUEUE:
            return False
        self._queue.append(_freeze(frames))
        self.flush()
        return True

    def flush(self) -> None:
        """What is queued goes out, if there is a router."""
        router = self.network._bound.get(self.endpoint)
        if not isinstance(router, _MemoryRouter):
            return
        while self._queue:
            self.network.carry(
                self.transport.name,
                router.transport.name,
                self.lane,
                self._queue.popleft(),
                lambda arrived: router.arrive(self, arrived),
            )

    @property
    def lane(self) -> str:
        """What is sent keeps its order."""
        return f"{self.identity!r}>{self.endpoint}"

    def close(self) -> None:
        router = self.network._bound.get(self.endpoint)
        if not self.closed and isinstance(router, _MemoryRouter):
            ended = partial(router.ended, self)
            self.network.close(self.transport.name, router.transport.name, self.lane, ended)
        self._queue.clear()
        self.network._dealers.pop(self, None)
        super().close()


class _MemoryPull(_Bound):
    QUEUE = 8

    def __init__(self, transport: MemoryTransport) -> None:
        super().__init__(transport)
        self.inbox: _Inbox[list[Buffer]] = _Inbox()
        self.room = asyncio.Event()
        self.room.set()
        self.coming = 0

    @property
    def full(self) -> bool:
        return len(self.inbox) + self.coming >= self.QUEUE

    async def recv(self) -> list[Buffer]:
        frames = await self.inbox.get()
        self.room.set()
        return frames

    def arrive(self, frames: list[Buffer]) -> None:
        self.coming -= 1
        if not self.closed:
            self.inbox.put(frames)


class _MemoryPush(_Socket):
    RETRY_S = 0.05

    def __init__(self, transport: MemoryTransport, endpoint: str) -> None:
        super().__init__(transport)
        self.endpoint = endpoint

    def try_send(self, frames: Sequence[Buffer]) -> bool:
        pull = self.network._bound.get(self.endpoint)
        if (
            self.closed
            or not isinstance(pull, _MemoryPull)
            or pull.full
            or not self.network.weather.connected(self.transport.name, pull.transport.name)
        ):
            return False
        lane = f"{id(self)}>{self.endpoint}"
        pull.coming += self.network.carry(self.transport.name, pull.transport.name, lane, frames, pull.arrive)
        return True

    async def send(self, frames: Sequence[Buffer]) -> None:
        while not self.try_send(frames):
            if self.closed:
                break
            pull = self.network._bound.get(self.endpoint)
            if isinstance(pull, _MemoryPull) and pull.full:
                pull.room.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(pull.room.wait(), self.RETRY_S)
            else:
                await asyncio.sleep(self.RETRY_S)
        else:
            return
        # Closed: the frames go nowhere, as over a dead connection.
        await asyncio.get_running_loop().create_future()
