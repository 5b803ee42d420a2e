"""Sockets as the shells see them: four kinds, multipart frames, no waiting where a wait could hang the whole side.

`zmq_transport` carries frames over TCP, `memory` within one process with scripted faults. Both keep the order of
frames from one sender to one receiver. Frames that can't go out are refused to the caller (False), never kept for a
dead peer. Sockets belong to the event loop that made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from potluck.wire.frames import Buffer


@dataclass(frozen=True, slots=True)
class PeerClosed:
    """A dealer's connection is closed, and all that came on it has been received."""

    peer: bytes


Heard: TypeAlias = tuple[bytes, list[Buffer]] | PeerClosed
"""What comes to a router: a message and who sent it, or the end of a connection."""


class Socket(Protocol):
    """What all sockets have."""

    endpoint: str
    """Where it is bound (with the real port), or where it connects to."""

    def close(self) -> None:
        """Drops what is still queued. May be called twice."""


class Router(Socket, Protocol):
    """Bound; talks with many dealers, each known by its identity."""

    def close(self, last_words_s: float = 0.0) -> None:
        """Drops what has not left within `last_words_s`, during which closing the transport waits for it."""

    async def recv(self) -> tuple[bytes, list[Buffer]]:
        """The next message and who sent it."""

    async def hear(self) -> Heard:
        """The next message, or the end of the connection of somebody who had sent one.

        A dealer that speaks again over a new connection is not said to be closed, if that is known in time. Whether
        every closing is heard of depends on the library and the network: a peer that is silent may be gone, too.
        """

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        """Queues frames for a peer; False if it is not connected or its queue is full."""


class Dealer(Socket, Protocol):
    """Connected to one router, again and again until closed."""

    async def recv(self) -> list[Buffer]:
        """The next message."""

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Queues frames; False if the queue is full."""

    async def connection(self) -> bool:
        """Waits for the connection to stand (True) or to break (False). It comes back by itself if the router does."""


class Pull(Socket, Protocol):
    """Bound; takes frames from any number of pushers."""

    async def recv(self) -> list[Buffer]:
        """The next message."""


class Push(Socket, Protocol):
    """Connected to one puller; queues at most a few messages, and only while the connection stands."""

    def try_send(self, frames: Sequence[Buffer]) -> bool:
        """Queues frames if that needs no waiting; False otherwise."""

    async def send(self, frames: Sequence[Buffer]) -> None:
        """Waits until the frames are queued. Put a deadline around it: a dead peer never takes them."""


class Transport(Protocol):
    """Makes sockets. Endpoints are `tcp://host:port`; port 0 or `*` when binding takes a free one."""

    def router(self, endpoint: str, *, closings: bool = False) -> Router:
        """Binds. With `closings`, `hear` tells of closed connections, too. Raises PortInUseError."""

    def dealer(self, endpoint: str, identity: str, *, watched: bool = False) -> Dealer:
        """Connects under an identity of 1 to 255 bytes. What `connection` tells of has to be `watched`."""

    def pull(self, endpoint: str) -> Pull:
        """Binds. Raises PortInUseError."""

    def push(self, endpoint: str) -> Push:
        """Connects."""

    def close(self) -> None:
        """Closes every socket this transport made."""
