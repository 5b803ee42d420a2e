"""Who is gone, from news of connections and messages that are read in any order that ZeroMQ allows."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from potluck.runtime.connections import MOST_UNTOLD, Connections


def test_whoever_spoke_is_gone_once_its_connection_closes_and_nobody_else() -> None:
    connections = Connections()
    for descriptor, name in ((7, b"a"), (8, b"b")):
        connections.opened(descriptor)
        connections.spoke(descriptor, name)
    assert connections.settle() == []
    connections.closed(7)
    assert connections.settle() == [b"a"]
    assert connections.settle() == []


def test_the_next_owner_of_a_descriptor_is_not_taken_for_the_last() -> None:
    connections = Connections()
    connections.opened(7)
    connections.spoke(7, b"a")
    connections.closed(7)
    connections.opened(7)
    connections.spoke(7, b"b")
    assert connections.settle() == [b"a"]
    connections.spoke(7, b"b")
    connections.closed(7)
    assert connections.settle() == [b"b"]


def test_one_that_speaks_again_on_another_connection_is_not_gone() -> None:
    connections = Connections()
    for descriptor in (7, 8):
        connections.opened(descriptor)
        connections.spoke(descriptor, b"a")
    connections.closed(7)
    assert connections.settle() == []
    connections.closed(8)
    assert connections.settle() == [b"a"]


def test_one_that_comes_back_on_the_same_descriptor_is_not_gone() -> None:
    connections = Connections()
    connections.opened(7)
    connections.spoke(7, b"a")
    connections.closed(7)
    connections.opened(7)
    connections.spoke(7, b"a")
    assert connections.settle() == []
    connections.closed(7)
    assert connections.settle() == [b"a"]


def test_whose_message_was_the_last_of_a_closed_connection_comes_out_when_the_next_one_speaks() -> None:
    connections = Connections()
    connections.opened(7)
    connections.closed(7)  # of a, whose message waits
    connections.opened(7)
    connections.spoke(7, b"b")
    connections.spoke(7, b"a")
    assert connections.settle() == []  # either may be the one that is still there
    connections.spoke(7, b"b")
    assert connections.settle() == [b"a"]


def test_a_connection_that_never_spoke_is_nobodys() -> None:
    connections = Connections()
    connections.opened(7)
    connections.closed(7)
    assert connections.settle() == []


def test_a_message_of_one_that_was_already_told_to_be_gone_tells_nothing() -> None:
    connections = Connections()
    connections.spoke(7, b"a")
    assert connections.settle() == []


def test_closings_in_a_flood_are_overdue_before_they_are_many() -> None:
    connections = Connections()
    for number in range(MOST_UNTOLD):
        assert not connections.overdue
        connections.opened(7)
        connections.spoke(7, b"%d" % number)
        connections.closed(7)
    assert connections.overdue
    assert len(connections.settle()) == MOST_UNTOLD
    assert not connections.overdue


class _Pipe:
    """What one connection has sent; it is read to its end although the connection is closed."""

    def __init__(self, descriptor: int, identity: bytes, waiting: int) -> None:
        self.descriptor = descriptor
        self.identity = identity
        self.waiting = waiting
        self.open = True


class Interleavings(RuleBasedStateMachine):
    """A router with its pipes and its monitor, whose reader is now ahead on the one channel and now on the other.

    Each connection has an identity of its own; a few descriptors are given away again and again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.connections = Connections()
        self.news: deque[tuple[bool, int]] = deque()
        self.pipes: list[_Pipe] = []
        self.heard: set[bytes] = set()
        self.gone: set[bytes] = set()

    def _read_news(self) -> None:
        while self.news:
            opened, descriptor = self.news.popleft()
            (self.connections.opened if opened else self.connections.closed)(descriptor)

    # ---- what ZeroMQ's thread does

    @rule(says=st.integers(0, 2))
    def connect(self, says: int) -> None:
        taken = {pipe.descriptor for pipe in self.pipes if pipe.open}
        free = next((number for number in range(3) if number not in taken), None)
        if free is not None:
            self.pipes.append(_Pipe(free, b"%d" % len(self.pipes), says))
            self.news.append((True, free))

    def _living(self) -> list[_Pipe]:
        return [pipe for pipe in self.pipes if pipe.open]

    @precondition(lambda self: self._living())
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self._living())).waiting += 1

    @precondition(lambda self: self._living())
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        pipe = data.draw(st.sampled_from(self._living()))
        pipe.open = False
        self.news.append((False, pipe.descriptor))

    # ---- what the reader does

    @rule()
    def read_news(self) -> None:
        self._read_news()

    @precondition(lambda self: any(pipe.waiting for pipe in self.pipes))
    @rule(data=st.data())
    def read_message(self, data: st.DataObject) -> None:
        pipe = data.draw(st.sampled_from([pipe for pipe in self.pipes if pipe.waiting]))
        pipe.waiting -= 1
        self._hear(pipe)

    def _hear(self, pipe: _Pipe) -> None:
        self._read_news()
        self.connections.spoke(pipe.descriptor, pipe.identity)
        self.heard.add(pipe.identity)

    @rule()
    def settle(self) -> None:
        """As a reader does who has read the news and then finds no message."""
        self._read_news()
        for pipe in self.pipes:
            while pipe.waiting:
                pipe.waiting -= 1
                self._hear(pipe)
        told = self.connections.settle()
        assert not set(told) & {pipe.identity for pipe in self._living()}, "a living peer is said to be gone"
        assert not set(told) & self.gone, "told twice"
        self.gone |= set(told)

    def teardown(self) -> None:
        """All who ever spoke are gone in the end. Where it was doubtful who is, the living have to speak once more."""
        self.settle()
        for pipe in self._living():
            pipe.waiting += 1
        self.settle()
        assert self.gone == self.heard - {pipe.identity for pipe in self._living()}
        for pipe in self._living():
            pipe.open = False
            self.news.append((False, pipe.descriptor))
        self.settle()
        assert self.gone == self.heard


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(stateful_step_count=40)
