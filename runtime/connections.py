"""Whose connection closed: what one socket says of connections, and who speaks on them, put together.

ZeroMQ says on one channel that the connection of a descriptor opened or closed, and on another one which identity
spoke on which descriptor. Each channel keeps its order, but one may be ahead of the other, and the system gives the
number of a closed descriptor to the next connection at once. Three facts make up for that:

- A connection has one identity for all its life, and closes before its number is given away.
- Whoever has a message in hand and then reads the news of connections has read that the message's connection opened.
- Whoever has read that a connection closed and then finds no message waiting has all that came on it.

So a closing is told once nothing waits that came before it (`settle`), and only of an identity that has not spoken on
another connection since. Where a message may be of more than one connection, nobody is said to be gone until that is
known: a peer that is lost late is found by its missing beats, one that is wrongly lost would have to start anew.
"""

from __future__ import annotations

MOST_UNTOLD = 1000
"""Closings that may wait for a moment without messages: a flood must neither hide them nor fill the memory."""


class _Connection:
    """One connection, from when it opened until its closing is told."""

    def __init__(self) -> None:
        self.owner: bytes | None = None
        """Who speaks on it, once that is certain."""
        self.perhaps: set[bytes] = set()
        """Who may be its owner. All of them are gone with it: those who are not had an older one, which is closed."""

    def names(self) -> set[bytes]:
        return self.perhaps if self.owner is None else self.perhaps | {self.owner}


class Connections:
    """The connections of one bound socket. `settle` says who is gone; the rest tells it what happened, in order."""

    def __init__(self) -> None:
        self._open: dict[int, _Connection] = {}
        self._closed: dict[int, _Connection] = {}
        """The last one of each descriptor that closed: messages that came on it, or before it, may still wait."""
        self._latest: dict[bytes, _Connection] = {}
        """Where each identity spoke last, for certain or perhaps."""
        self._untold: list[_Connection] = []

    @property
    def overdue(self) -> bool:
        """Whether so many closings wait that `settle` is to be asked although messages wait, too."""
        return len(self._untold) >= MOST_UNTOLD

    def opened(self, descriptor: int) -> None:
        """A connection was accepted."""
        self.closed(descriptor)  # nothing to do unless that was never told
        self._open[descriptor] = _Connection()

    def closed(self, descriptor: int) -> None:
        """The connection that has this descriptor is closed."""
        connection = self._open.pop(descriptor, None)
        if connection is not None:
            self._closed[descriptor] = connection
            if connection.names():
                self._untold.append(connection)

    def spoke(self, descriptor: int, identity: bytes) -> None:
        """A message of `identity` came on this descriptor. All news of connections until now were told before."""
        now, before = self._open.get(descriptor), self._closed.get(descriptor)
        if now is not None and now.owner == identity:
            return  # as nearly always
        if before is None:
            if now is not None:
                self._belongs(now, identity)
        elif now is not None and now.owner is None:
            self._may_belong(now, identity)
        else:  # it came on one of those that are closed, and all of them are over
            if not before.names():
                self._untold.append(before)
            self._may_belong(before, identity)

    def _belongs(self, connection: _Connection, identity: bytes) -> None:
        """Whoever else was thought to speak here had an older connection of the same descriptor."""
        others = connection.names() - {identity}
        connection.owner, connection.perhaps = identity, set()
        self._latest[identity] = connection
        for other in others:
            if self._latest.get(other) is connection:
                older = _Connection()
                self._may_belong(older, other)
                self._untold.append(older)

    def _may_belong(self, connection: _Connection, identity: bytes) -> None:
        connection.perhaps.add(identity)
        self._latest[identity] = connection

    def settle(self) -> list[bytes]:
        """Who is gone. To be asked when no message waits that came before the last news, or when it is `overdue`."""
        gone = []
        for connection in self._untold:
            for identity in sorted(connection.names()):
                if self._latest.get(identity) is connection:
                    del self._latest[identity]
                    gone.append(identity)
        self._untold.clear()
        self._closed.clear()
        return gone
