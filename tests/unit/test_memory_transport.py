"""The network in memory: what it keeps of ZeroMQ's ways, and the faults it can be told to have."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import pytest

from potluck.runtime.memory import Fate, MemoryNetwork, Weather
from potluck.runtime.transport import PeerClosed
from potluck.wire.errors import PortInUseError
from potluck.wire.frames import Buffer
from sim.virtual_time import run_virtual

CONTROL = "tcp://broker:7946"


class Scripted(Weather):
    """The fates of the messages in their order, fair weather after them."""

    def __init__(self, *fates: Fate) -> None:
        self.fates = list(fates)
        self.cut = False

    def fate(self, source: str, target: str, frames: Sequence[Buffer]) -> Fate:
        return self.fates.pop(0) if self.fates else Fate()

    def connected(self, source: str, target: str) -> bool:
        return not self.cut


def now() -> float:
    return asyncio.get_running_loop().time()


async def soon(work: Awaitable[object], within_s: float = 1.0) -> object:
    """The result, or None if it does not come in time."""
    with suppress(TimeoutError):
        return await asyncio.wait_for(work, within_s)
    return None


def story(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Runs a coroutine function as a test on virtual time; no task may be left at its end."""

    def wrapper() -> None:
        async def run() -> None:
            await test()
            assert asyncio.all_tasks() == {asyncio.current_task()}

        run_virtual(run())

    wrapper.__name__ = test.__name__
    return wrapper


@story
async def test_a_router_answers_the_dealer_that_wrote() -> None:
    network = MemoryNetwork()
    router = network.host("broker").router(CONTROL)
    one, other = (network.host(name).dealer(CONTROL, name) for name in ("a", "b"))
    assert one.send([b"hello", b"there"])
    assert other.send([b"hi"])
    assert await router.recv() == (b"a", [b"hello", b"there"])
    assert await router.recv() == (b"b", [b"hi"])
    assert router.send(b"b", [b"you"])
    assert await other.recv() == [b"you"]
    assert await soon(one.recv()) is None


@story
async def test_a_router_cannot_reach_a_stranger_or_one_that_closed() -> None:
    network = MemoryNetwork()
    router = network.host("broker").router(CONTROL)
    assert not router.send(b"a", [b"x"])
    dealer = network.host("a").dealer(CONTROL, "a")
    dealer.send([b"1"])
    await router.recv()
    dealer.close()
    assert not dealer.send([b"2"])
    assert not router.send(b"a", [b"x"])


@story
async def test_a_newer_dealer_of_the_same_identity_takes_the_older_ones_place() -> None:
    network = MemoryNetwork(Scripted(Fate((0.5,))))
    router = network.host("broker").router(CONTROL)
    host = network.host("a")
    old = host.dealer(CONTROL, "a")
    old.send([b"late"])
    old.close()
    new = host.dealer(CONTROL, "a")
    new.send([b"new"])
    assert [(await router.recv())[1] for _ in range(2)] == [[b"late"], [b"new"]]
    assert router.send(b"a", [b"answer"])
    assert await new.recv() == [b"answer"]


@story
async def test_what_a_dealer_sends_before_the_router_is_there_waits_for_it_up_to_a_bound() -> None:
    network = MemoryNetwork()
    dealer = network.host("a").dealer(CONTROL, "a")
    sent = 0
    while dealer.send([b"%d" % sent]):
        sent += 1
    assert sent == 1000
    router = network.host("broker").router(CONTROL)
    assert [(await router.recv())[1] for _ in range(sent)] == [[b"%d" % number] for number in range(sent)]
    assert dealer.send([b"again"])


@story
async def test_a_port_is_bound_once_and_free_again_when_its_host_has_died() -> None:
    network = MemoryNetwork()
    first = network.host("broker")
    first.router(CONTROL)
    with pytest.raises(PortInUseError):
        network.host("broker").router(CONTROL)
    first.close()
    second = network.host("broker").router(CONTROL)
    first.router(CONTROL).close()  # of a dead host: it neither takes the port nor frees it
    network.host("a").dealer(CONTROL, "a").send([b"x"])
    assert await second.recv() == (b"a", [b"x"])


@story
async def test_free_ports_differ_and_are_on_their_own_host() -> None:
    host = MemoryNetwork().host("a")
    one, other = host.pull("tcp://*:0"), host.pull("tcp://0.0.0.0:*")
    assert one.endpoint != other.endpoint
    assert one.endpoint.startswith("tcp://a:")


@story
async def test_late_frames_hold_up_those_that_follow_and_nothing_overtakes() -> None:
    network = MemoryNetwork(Scripted(Fate((0.3,)), Fate((0.1,)), Fate(())))
    pull = network.host("b").pull("tcp://b:1")
    push = network.host("a").push("tcp://b:1")
    for number in range(4):
        await push.send([b"%d" % number])
    arrived = [(bytes((await pull.recv())[0]), now()) for _ in range(3)]
    assert arrived == [(b"0", 0.3), (b"1", 0.3), (b"3", 0.3)]


@story
async def test_a_doubled_frame_comes_twice_as_bytes_of_the_receivers_own() -> None:
    network = MemoryNetwork(Scripted(Fate((0.0, 0.2))))
    pull = network.host("b").pull("tcp://b:1")
    frame = bytearray(b"abc")
    await network.host("a").push("tcp://b:1").send([frame])
    frame[:] = b"xyz"
    assert await pull.recv() == [b"abc"]
    assert await pull.recv() == [b"abc"]
    assert now() == 0.2


@story
async def test_a_push_waits_while_the_puller_is_full_and_goes_on_when_it_reads() -> None:
    network = MemoryNetwork()
    pull = network.host("b").pull("tcp://b:1")
    push = network.host("a").push("tcp://b:1")
    sent = 0
    while push.try_send([b"%d" % sent]):
        sent += 1
    assert 0 < sent < 20
    waiting = asyncio.create_task(push.send([b"last"]))
    await asyncio.sleep(10.0)
    assert not waiting.done()
    assert await pull.recv() == [b"0"]
    await waiting
    assert [(await pull.recv())[0] for _ in range(sent)][-1] == b"last"


@story
async def test_a_push_waits_for_its_puller_and_through_a_cut() -> None:
    weather = Scripted()
    network = MemoryNetwork(weather)
    push = network.host("a").push("tcp://b:1")
    assert await soon(push.send([b"early"])) is None
    pull = network.host("b").pull("tcp://b:1")
    weather.cut = True
    assert not push.try_send([b"x"])
    waiting = asyncio.create_task(push.send([b"x"]))
    await asyncio.sleep(1.0)
    assert not waiting.done()
    weather.cut = False
    await waiting
    assert await pull.recv() == [b"x"]


@story
async def test_a_send_that_is_given_up_leaves_nothing_behind() -> None:
    network = MemoryNetwork()
    network.host("b").pull("tcp://b:1")
    push = network.host("a").push("tcp://b:1")
    while push.try_send([b"x"]):
        pass
    assert await soon(push.send([b"y"]), 0.12) is None


@story
async def test_a_dead_host_sends_nothing_more_and_what_was_on_its_way_arrives() -> None:
    network = MemoryNetwork(Scripted(Fate((0.5,)), Fate((0.5,))))
    router = network.host("broker").router(CONTROL)
    pull = network.host("b").pull("tcp://b:1")
    host = network.host("a")
    dealer, push = host.dealer(CONTROL, "a"), host.push("tcp://b:1")
    dealer.send([b"goodbye"])
    await push.send([b"data"])
    host.close()
    host.close()
    assert not dealer.send([b"more"])
    assert not push.try_send([b"more"])
    assert not host.dealer(CONTROL, "a").send([b"more"])
    assert await soon(push.send([b"more"])) is None
    assert await router.recv() == (b"a", [b"goodbye"])
    assert await pull.recv() == [b"data"]
    assert await soon(router.recv()) is None
    assert not router.send(b"a", [b"answer"])


@story
async def test_a_dealer_hears_that_its_router_is_there_is_gone_and_is_there_again() -> None:
    network = MemoryNetwork()
    broker = network.host("broker")
    router = broker.router(CONTROL)
    dealer = network.host("a").dealer(CONTROL, "a")
    assert await dealer.connection()
    router.close()
    assert not await dealer.connection()
    broker.router(CONTROL)
    assert await dealer.connection()


# ---- connections that close


@story
async def test_a_router_hears_that_a_dealer_closed_after_all_that_it_had_sent() -> None:
    network = MemoryNetwork(Scripted(Fate((0.5,))))
    router = network.host("broker").router(CONTROL, closings=True)
    host = network.host("a")
    host.dealer(CONTROL, "a").send([b"last words"])
    host.close()
    assert await router.hear() == (b"a", [b"last words"])
    assert (await router.hear(), now()) == (PeerClosed(b"a"), 0.5)


@story
async def test_a_router_hears_nothing_of_a_dealer_that_is_cut_off_or_never_spoke() -> None:
    weather = Scripted()
    network = MemoryNetwork(weather)
    router = network.host("broker").router(CONTROL, closings=True)
    spoke, silent = (network.host(name).dealer(CONTROL, name) for name in ("a", "b"))
    spoke.send([b"x"])
    await router.hear()
    weather.cut = True
    spoke.close()
    weather.cut = False
    silent.close()
    assert await soon(router.hear()) is None


@story
async def test_a_router_does_not_miss_a_dealer_that_speaks_over_a_new_connection() -> None:
    network = MemoryNetwork()
    router = network.host("broker").router(CONTROL, closings=True)
    host = network.host("a")
    old, new = host.dealer(CONTROL, "a"), host.dealer(CONTROL, "a")
    for dealer in (old, new):
        dealer.send([b"x"])
        await router.hear()
    old.close()
    assert await soon(router.hear()) is None
    assert router.send(b"a", [b"answer"])
    new.close()
    assert await router.hear() == PeerClosed(b"a")


@story
async def test_only_routers_that_were_told_to_hear_of_closings() -> None:
    network = MemoryNetwork()
    router = network.host("broker").router(CONTROL)
    dealer = network.host("a").dealer(CONTROL, "a")
    dealer.send([b"x"])
    await router.hear()
    dealer.close()
    assert await soon(router.hear()) is None


@story
async def test_a_connection_that_breaks_loses_what_is_on_its_way_and_comes_back() -> None:
    network = MemoryNetwork(Scripted(Fate(), Fate((0.5,)), Fate((0.5,))))
    router = network.host("broker").router(CONTROL, closings=True)
    dealer = network.host("sofa").dealer(CONTROL, "sofa", watched=True)
    assert await dealer.connection()
    dealer.send([b"first"])
    assert await soon(router.hear()) == (b"sofa", [b"first"])
    dealer.send([b"lost"])
    router.send(b"sofa", [b"lost, too"])
    network.sever("broker", "sofa")
    assert await soon(router.hear()) == PeerClosed(b"sofa")
    assert [await dealer.connection(), await dealer.connection()] == [False, True]
    assert not router.send(b"sofa", [b"before it spoke again"])
    dealer.send([b"again"])
    assert await soon(router.hear()) == (b"sofa", [b"again"])
    router.send(b"sofa", [b"heard"])
    assert await soon(dealer.recv()) == [b"heard"]
