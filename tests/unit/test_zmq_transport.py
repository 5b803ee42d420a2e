"""The sockets over ZeroMQ, on the loopback."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import pytest
import zmq

from potluck.runtime import zmq_transport
from potluck.runtime.loop import loop_factory
from potluck.runtime.transport import PeerClosed, Router
from potluck.runtime.zmq_transport import COPY_BELOW, DATA_QUEUE, HALF_OPEN_S, ZmqTransport
from potluck.wire.errors import PortInUseError, SettingsError

ANY = "tcp://127.0.0.1:0"
LOOPS = [asyncio.SelectorEventLoop, loop_factory()]


def run(
    loop: Callable[[], asyncio.AbstractEventLoop], story: Callable[[ZmqTransport], Coroutine[Any, Any, None]]
) -> None:
    async def whole() -> None:
        transport = ZmqTransport()
        try:
            async with asyncio.timeout(20):
                await story(transport)
        finally:
            transport.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(whole())


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what nobody announces; the story's deadline ends it."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("loop", LOOPS, ids=["asyncio", "uvloop"])
def test_frames_of_every_size_arrive_whole_and_in_order(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def story(transport: ZmqTransport) -> None:
        pull = transport.pull(ANY)
        push = transport.push(pull.endpoint)
        sizes = [0, 1, COPY_BELOW - 1, COPY_BELOW, 1 << 20] * 20

        async def send() -> None:
            for number, size in enumerate(sizes):
                await push.send([number.to_bytes(4, "little"), bytes(size)])

        sender = asyncio.create_task(send())
        for number, size in enumerate(sizes):
            head, body = await pull.recv()
            assert int.from_bytes(bytes(head), "little") == number
            assert memoryview(body).nbytes == size
        await sender

    run(loop, story)


@pytest.mark.parametrize("loop", LOOPS, ids=["asyncio", "uvloop"])
def test_a_pull_that_nobody_reads_holds_its_sender_back_and_loses_nothing(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def story(transport: ZmqTransport) -> None:
        pull = transport.pull(ANY)
        push = transport.push(pull.endpoint)
        await push.send([b"0"])
        sent = 1
        # The kernel's buffers take some more than ZeroMQ's queues do, so the frames are large.
        while push.try_send([str(sent).encode(), bytes(8 << 20)]):
            sent += 1
            await asyncio.sleep(0)
        assert sent < 10 * DATA_QUEUE
        for number in range(sent):
            assert bytes((await pull.recv())[0]) == str(number).encode()
        await push.send([b"again"])
        assert bytes((await pull.recv())[0]) == b"again"

    run(loop, story)


@pytest.mark.parametrize("loop", LOOPS, ids=["asyncio", "uvloop"])
def test_a_router_knows_its_dealers_and_refuses_frames_for_strangers(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def story(transport: ZmqTransport) -> None:
        router = transport.router(ANY)
        dealer = transport.dealer(router.endpoint, "mini-03/1")
        assert not router.send(b"nobody", [b"x"])
        assert dealer.send([b"hello"])
        peer, frames = await router.recv()
        assert (peer, bytes(frames[0])) == (b"mini-03/1", b"hello")
        assert router.send(peer, [b"welcome"])
        assert bytes((await dealer.recv())[0]) == b"welcome"
        dealer.close()
        for _ in range(5_000):
            if not router.send(peer, [b"still there?"]):
                break
            await asyncio.sleep(0.001)  # until ZeroMQ has heard of the closed connection
        else:
            pytest.fail("a router still takes frames for a dealer that is gone")

    run(loop, story)


def test_a_burst_of_small_messages_reaches_a_router_and_nothing_lies_unseen() -> None:
    async def story(transport: ZmqTransport) -> None:
        router = transport.router(ANY)
        dealers = [transport.dealer(router.endpoint, f"d{index}") for index in range(20)]
        for number in range(50):
            for dealer in dealers:
                assert dealer.send([number.to_bytes(2, "little")])
        heard: dict[bytes, list[int]] = {}
        for _ in range(1000):
            peer, frames = await router.recv()
            heard.setdefault(peer, []).append(int.from_bytes(bytes(frames[0]), "little"))
        assert all(numbers == list(range(50)) for numbers in heard.values())
        assert len(heard) == 20

    run(LOOPS[1], story)


def test_a_dead_peer_takes_nothing_and_the_wait_can_be_ended() -> None:
    async def story(transport: ZmqTransport) -> None:
        push = transport.push("tcp://127.0.0.1:1")  # a port that nobody listens on
        assert not push.try_send([b"x"])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await push.send([b"x"])

    run(LOOPS[1], story)


def test_a_push_finds_its_peer_when_that_comes_back() -> None:
    async def story(transport: ZmqTransport) -> None:
        first = transport.pull(ANY)
        push = transport.push(first.endpoint)
        await push.send([b"1"])
        assert bytes((await first.recv())[0]) == b"1"
        first.close()
        second = None
        while second is None:
            try:
                second = transport.pull(first.endpoint)
            except PortInUseError:
                await asyncio.sleep(0.01)  # the old socket's port is given back by ZeroMQ's own thread
        heard: Awaitable[list[Any]] = asyncio.ensure_future(second.recv())
        while not heard.done():  # type: ignore[attr-defined]
            await push.send([b"2"])
            await asyncio.sleep(0.001)
        assert bytes((await heard)[0]) == b"2"

    run(LOOPS[1], story)


def test_a_taken_port_is_named_and_a_wrong_address_explained() -> None:
    async def story(transport: ZmqTransport) -> None:
        pull = transport.pull(ANY)
        with pytest.raises(PortInUseError, match=pull.endpoint.removeprefix("tcp://")):
            transport.router(pull.endpoint)
        with pytest.raises(SettingsError, match="address of this machine"):
            transport.router("tcp://192.0.2.1:5555")
        with pytest.raises(SettingsError, match="not an address"):
            transport.push("tcp://nothing")

    run(LOOPS[1], story)


def test_a_socket_may_be_closed_twice_and_while_somebody_waits_for_it() -> None:
    async def story(transport: ZmqTransport) -> None:
        pull = transport.pull(ANY)
        waiting = asyncio.ensure_future(pull.recv())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        pull.close()
        pull.close()

    run(LOOPS[1], story)


@pytest.mark.parametrize("loop", LOOPS, ids=["asyncio", "uvloop"])
def test_a_dealer_hears_that_its_router_is_there_is_gone_and_is_there_again(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def story(transport: ZmqTransport) -> None:
        router = transport.router(ANY)
        dealer = transport.dealer(router.endpoint, "me")
        assert await dealer.connection()
        router.close()
        assert not await dealer.connection()
        transport.router(router.endpoint)
        assert await dealer.connection()
        dealer.close()
        dealer.close()

    run(loop, story)


# ---- connections that close


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
            for _ in range(zmq_transport.NEWS_QUEUE):
                with socket.create_connection(where, timeout=0.5) as connection:
                    connection.recv(1)  # it is accepted
        router.close()

    run(LOOPS[1], story)


# ---- dead peers


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no such option")
def test_a_connection_whose_other_machine_vanished_is_closed_by_this_one() -> None:
    async def story(transport: ZmqTransport) -> None:
        router = transport.router(ANY)
        transport.dealer(router.endpoint, "one").send([b"x"])
        frames = await router._recv()  # type: ignore[attr-defined]
        with socket.socket(fileno=os.dup(frames[-1].get(zmq.SRCFD))) as connection:
            tcp = {
                name: connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
                for name in ("TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
            }
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert tcp["TCP_USER_TIMEOUT"] == 1000 * HALF_OPEN_S
        assert tcp["TCP_KEEPIDLE"] + tcp["TCP_KEEPINTVL"] * tcp["TCP_KEEPCNT"] == HALF_OPEN_S

    run(LOOPS[1], story)


DEAF_STAGE = """
import zmq
pull = zmq.Context().socket(zmq.PULL)
pull.set_hwm(4)
pull.bind("tcp://127.0.0.1:*")
print(pull.getsockopt_string(zmq.LAST_ENDPOINT).rstrip(chr(0)), flush=True)
input()
"""


def test_what_was_queued_for_a_process_that_died_never_reaches_the_one_that_takes_its_port() -> None:
    async def story(transport: ZmqTransport) -> None:
        deaf = await asyncio.create_subprocess_exec(
            sys.executable, "-c", DEAF_STAGE, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert deaf.stdout is not None
        endpoint = (await deaf.stdout.readline()).decode().strip()
        push = transport.push(endpoint)
        await push.send([b"old", bytes(8 << 20)])
        sent = 1
        while push.try_send([b"old", bytes(8 << 20)]):
            sent += 1
            await asyncio.sleep(0)
        assert sent > 1
        deaf.kill()
        await deaf.wait()
        pull = transport.pull(endpoint)
        await push.send([b"new"])
        assert bytes((await pull.recv())[0]) == b"new"

    run(LOOPS[1], story)
