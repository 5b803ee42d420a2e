"""The sockets over ZeroMQ, on the loopback."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable

import pytest
import zmq

from potluck.runtime.zmq_transport import COPY_BELOW, DATA_QUEUE, HALF_OPEN_S, ZmqTransport
from potluck.wire.errors import PortInUseError, SettingsError
from zmq_world import ANY, LOOPS, run


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
        heard = asyncio.ensure_future(second.recv())
        while not heard.done():
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
        dealer = transport.dealer(router.endpoint, "me", watched=True)
        assert await dealer.connection()
        router.close()
        assert not await dealer.connection()
        transport.router(router.endpoint)
        assert await dealer.connection()
        dealer.close()
        dealer.close()

    run(loop, story)


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
