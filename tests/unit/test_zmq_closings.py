"""A router over ZeroMQ that tells whose connection closed, on the loopback."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable
from functools import partial

import pytest

from potluck.runtime import zmq_transport
from potluck.runtime.transport import PeerClosed, Router
from potluck.runtime.zmq_monitor import NEWS_QUEUE
from potluck.runtime.zmq_transport import ZmqTransport
from potluck.wire.errors import PortInUseError
from zmq_world import ANY, LOOPS, run, until


async def heard(router: Router) -> tuple[bytes, bytes] | PeerClosed:
    """What comes next: the last frame of a message and who sent it, or a closing."""
    news = await router.hear()
    return news if isinstance(news, PeerClosed) else (news[0], bytes(news[1][-1]))


@pytest.mark.parametrize("loop", LOOPS, ids=["asyncio", "uvloop"])
def test_a_router_tells_of_a_dealer_that_closed_after_all_that_it_had_said(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def story(transport: ZmqTransport) -> None:
        router = transport.router(ANY, closings=True)
        one, other = (transport.dealer(router.endpoint, name) for name in ("one", "other"))
        for number in range(200):
            assert one.send([b"%d" % number])
        other.send([b"here"])
        came = [await heard(router) for _ in range(201)]
        assert [news for news in came if news[0] == b"one"] == [(b"one", b"%d" % n) for n in range(200)]  # type: ignore[index]
        one.close()
        assert await heard(router) == PeerClosed(b"one")
        other.send([b"still here"])
        assert await heard(router) == (b"other", b"still here")

    run(loop, story)


def test_a_dealer_that_speaks_over_a_new_connection_is_not_told_to_be_closed() -> None:
    async def story(transport: ZmqTransport) -> None:
        router = transport.router(ANY, closings=True)
        old = transport.dealer(router.endpoint, "one")
        old.send([b"1"])
        assert await heard(router) == (b"one", b"1")
        new = transport.dealer(router.endpoint, "one")
        new.send([b"2"])
        assert await heard(router) == (b"one", b"2")
        old.close()
        new.send([b"3"])
        assert await heard(router) == (b"one", b"3")
        new.close()
        assert await heard(router) == PeerClosed(b"one")

    run(LOOPS[1], story)


def test_thousands_of_dealers_that_come_and_go_on_few_descriptors_are_each_told_of_once() -> None:
    async def story(transport: ZmqTransport) -> None:
        router = transport.router(ANY, closings=True)
        steady = transport.dealer(router.endpoint, "steady")
        steady.send([b"x"])
        closed: list[bytes] = []
        said: set[bytes] = set()

        async def come_and_go(lane: int) -> None:
            for number in range(100):
                dealer = transport.dealer(router.endpoint, f"{lane}/{number}")
                dealer.send([b"x"])
                if number % 3 == 0:
                    await asyncio.sleep(0)
                else:
                    await until(partial(said.__contains__, f"{lane}/{number}".encode()))
                dealer.close()

        async def listen() -> None:
            while True:
                news = await heard(router)
                if isinstance(news, PeerClosed):
                    closed.append(news.peer)
                else:
                    said.add(news[0])

        listener = asyncio.create_task(listen())
        await asyncio.gather(*(come_and_go(lane) for lane in range(10)))
        await until(lambda: len(closed) >= len(said) - 1)
        listener.cancel()
        assert len(closed) == len(set(closed))
        assert set(closed) == said - {b"steady"}

    run(LOOPS[1], story)


def test_connections_that_say_nothing_or_no_zeromq_are_nobodys() -> None:
    async def story(transport: ZmqTransport) -> None:
        router = transport.router(ANY, closings=True)
        where = ("127.0.0.1", int(router.endpoint.rpartition(":")[2]))
        steady = transport.dealer(router.endpoint, "steady")
        steady.send([b"x"])
        assert await heard(router) == (b"steady", b"x")
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n"):
            for _ in range(20):
                _, writer = await asyncio.open_connection(*where)
                writer.write(said)
                writer.close()
        last = transport.dealer(router.endpoint, "last")
        last.send([b"x"])
        assert await heard(router) == (b"last", b"x")
        last.close()
        assert await heard(router) == PeerClosed(b"last")

    run(LOOPS[1], story)


def test_without_descriptors_messages_come_as_ever_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(zmq_transport, "_SRCFD", 9999)  # as a build that has no such option
    caplog.set_level(logging.INFO)

    async def story(transport: ZmqTransport) -> None:
        router = transport.router(ANY, closings=True)
        dealers = [transport.dealer(router.endpoint, f"{number}") for number in range(5)]
        for dealer in dealers:
            dealer.send([b"x"])
        assert len({(await router.recv())[0] for _ in dealers}) == 5
        for dealer in dealers[1:]:
            dealer.close()
        dealers[0].send([b"y"])
        assert await heard(router) == (b"0", b"y")
        assert caplog.text.count("does not tell of closed connections") == 1

    run(LOOPS[1], story)


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_a_router_takes_its_monitor_along_when_it_closes() -> None:
    def open_now() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def story(transport: ZmqTransport) -> None:
        async def once() -> None:
            router = transport.router(ANY, closings=True)
            dealer = transport.dealer(router.endpoint, "one")
            dealer.send([b"x"])
            await router.recv()
            dealer.close()
            router.close()
            with pytest.raises(PortInUseError):
                transport.router(taken.endpoint, closings=True)

        taken = transport.router(ANY)
        await once()
        before = open_now()
        for _ in range(50):
            await once()
        await until(lambda: open_now() <= before)  # ZeroMQ's own thread closes them

    before = open_now()
    run(asyncio.SelectorEventLoop, story)
    assert open_now() == before


def test_a_router_closes_in_the_middle_of_a_storm_of_connections() -> None:
    async def story(transport: ZmqTransport) -> None:
        router = transport.router(ANY, closings=True)
        where = ("127.0.0.1", int(router.endpoint.rpartition(":")[2]))
        with contextlib.suppress(
            TimeoutError
        ):  # this loop reads no news meanwhile: in the end nobody is let in
            for _ in range(NEWS_QUEUE):
                with socket.create_connection(where, timeout=0.5) as connection:
                    connection.recv(1)  # it is accepted
        router.close()

    run(LOOPS[1], story)
