"""Looking for a broker and being found: on virtual time over a fake network, and by real multicast on the loopback."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from ipaddress import ip_address, ip_interface

import pytest

from potluck.runtime import discovery
from potluck.runtime.discovery import (
    Found,
    Host,
    LocalNetwork,
    Multicast,
    Wanted,
    find,
    look,
    make_known,
    replacement,
)
from potluck.runtime.finding import Advert, Broker, Search
from potluck.runtime.interfaces import Interface
from potluck.runtime.loop import run
from potluck.runtime.mdns import Mdns, NoMulticastError
from potluck.tools.broker_address import broker_address
from potluck.wire.errors import NoBrokerError, SettingsError
from sim.virtual_time import run_virtual

ETH0 = Interface("eth0", (ip_interface("192.168.1.20/24"),))
DOCKER0 = Interface("docker0", (ip_interface("172.17.0.1/16"),))
LLAMA = "a" * 64
DEADLINE_S = 20.0


def broker(name: str, host: str, fingerprint: str = LLAMA) -> Broker:
    return Broker(Advert(name, "llama", fingerprint[:12], 30, "0.1.0"), 7946, (host,))


class FakeNetwork:
    """A network that tests script: who is on it from when on, and who takes connections."""

    def __init__(
        self, *brokers: tuple[float, Broker], open_at: Sequence[str] = (), multicast: bool = True
    ) -> None:
        self.brokers = brokers
        self.open_at = {(host, 7946) for host in open_at} | {
            (host, one.port) for _, one in brokers for host in one.addresses
        }
        self.has_multicast = multicast
        self.machine: list[Interface] = [ETH0, DOCKER0]
        self.opened: list[tuple[str, ...]] = []
        self.sockets = 0
        self.advertised: list[tuple[str, ...]] = []
        self.hosts_asked: list[str] = []
        self.changed = asyncio.Event()

    def interfaces(self) -> Sequence[Interface]:
        return self.machine

    async def multicast(self, addresses: Sequence[Host]) -> Multicast:
        if not self.has_multicast:
            raise NoMulticastError("multicast does not work here: it is a test")
        self.opened.append(tuple(map(str, addresses)))
        self.sockets += 1
        return FakeMulticast(self)

    async def answers(self, host: str, port: int) -> bool:
        self.hosts_asked.append(host)
        return (host, port) in self.open_at


class FakeMulticast:
    def __init__(self, network: FakeNetwork) -> None:
        self.network = network
        self.timers: list[asyncio.TimerHandle] = []

    async def advertise(self, advert: Advert, port: int, addresses: Sequence[Host]) -> str:
        self.network.advertised.append(tuple(map(str, addresses)))
        self.network.changed.set()
        return advert.label

    def browse(self, heard: Callable[[str, Broker | None], None]) -> None:
        loop = asyncio.get_running_loop()
        for at_s, one in self.network.brokers:
            self.timers.append(loop.call_at(at_s, heard, one.advert.name, one))

    async def close(self) -> None:
        for timer in self.timers:
            timer.cancel()
        self.network.sockets -= 1


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_a_broker_that_answers_is_found_at_once_on_the_chosen_interfaces_only() -> None:
    async def scenario() -> None:
        network = FakeNetwork((0.1, broker("desktop", "192.168.1.10")))
        found = await look(Wanted(), network, hint="")
        assert found == Found("192.168.1.10:7946", "broker desktop with llama at 192.168.1.10 through eth0")
        assert now_s() < 2
        assert network.opened == [("192.168.1.20",)]
        assert network.sockets == 0

    run_virtual(scenario())


def test_others_get_a_moment_to_answer_too_and_the_one_with_our_model_is_taken() -> None:
    async def scenario() -> None:
        network = FakeNetwork(
            (0.1, broker("attic", "192.168.1.9", "b" * 64)), (0.5, broker("desktop", "192.168.1.10"))
        )
        found = await look(Wanted(fingerprints=frozenset({LLAMA})), network, hint="")
        assert isinstance(found, Found)
        assert found.address == "192.168.1.10:7946"
        assert found.note == ""

    run_virtual(scenario())


def test_several_that_fit_are_listed_in_a_note() -> None:
    async def scenario() -> None:
        network = FakeNetwork((0.1, broker("attic", "192.168.1.9")), (0.5, broker("desktop", "192.168.1.10")))
        found = await look(Wanted(), network, hint="To name one: x")
        assert isinstance(found, Found)
        assert found.note.startswith("2 brokers are on this network: attic, llama, 192.168.1.9; desktop")
        assert found.note.endswith("Taking attic. To name one: x")

    run_virtual(scenario())


def test_a_peer_is_joined_where_multicast_finds_nothing() -> None:
    async def scenario() -> None:
        network = FakeNetwork(open_at=["10.0.0.2", "10.0.0.3"])
        found = await look(Wanted(peers=("10.0.0.1", "10.0.0.2", "10.0.0.3")), network, hint="")
        assert found == Found("10.0.0.2:7946", "a broker at 10.0.0.2, the peer that was named")
        assert now_s() < 5

    run_virtual(scenario())


def test_what_multicast_finds_comes_before_a_peer() -> None:
    async def scenario() -> None:
        network = FakeNetwork((2.0, broker("desktop", "192.168.1.10")), open_at=["10.0.0.2"])
        found = await look(Wanted(peers=("10.0.0.2",)), network, hint="")
        assert isinstance(found, Found)
        assert found.address == "192.168.1.10:7946"

    run_virtual(scenario())


def test_a_broker_on_this_machine_is_found_without_any_network() -> None:
    async def scenario() -> None:
        network = FakeNetwork(open_at=["127.0.0.1"])
        network.machine = []
        found = await look(Wanted(), network, hint="")
        assert found == Found("127.0.0.1:7946", "a broker at 127.0.0.1, this machine")
        assert now_s() == 0
        assert network.opened == []

    run_virtual(scenario())


def test_a_round_in_vain_takes_its_time_and_tells_what_it_tried() -> None:
    async def scenario() -> None:
        network = FakeNetwork((1.0, broker("desktop", "192.168.1.10")))
        network.open_at.clear()
        search = await look(Wanted(peers=("10.0.0.2",), within_s=7), network, hint="")
        assert isinstance(search, Search)
        assert now_s() == 7
        assert [one.name for one in search.interfaces.used] == ["eth0"]
        assert search.peers == ("10.0.0.2", "127.0.0.1")
        assert [one.advert.name for one, _ in search.refused] == ["desktop"]
        assert network.sockets == 0

    run_virtual(scenario())


def test_a_stage_keeps_looking_and_says_the_same_only_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        network = FakeNetwork((95.0, broker("desktop", "192.168.1.10")))
        found = await find(Wanted(), network, example="potluck-stage 192.168.1.10")
        assert found.address == "192.168.1.10:7946"
        assert 95 < now_s() < 97

    with caplog.at_level(logging.WARNING, "potluck.discovery"):
        run_virtual(scenario())
    assert len(caplog.records) == 1
    assert "potluck-stage 192.168.1.10\nStill looking." in caplog.text


def test_an_interface_that_comes_later_is_used_in_the_next_round(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        network = FakeNetwork((5.0, broker("desktop", "192.168.1.10")))
        network.machine = [DOCKER0]
        asyncio.get_running_loop().call_at(12.0, network.machine.append, ETH0)
        found = await find(Wanted(), network, example="")
        assert found.address == "192.168.1.10:7946"
        assert 20 < now_s() < 22

    run_virtual(scenario())
    assert "docker0 (for containers)" in caplog.text


def test_without_multicast_a_command_does_not_wait() -> None:
    async def scenario() -> None:
        search = await look(Wanted(), FakeNetwork(multicast=False), hint="", patient=False)
        assert isinstance(search, Search)
        assert search.trouble == "multicast does not work here: it is a test"
        assert now_s() == 0

    run_virtual(scenario())


def test_an_interface_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(SettingsError, match="There is no network interface eth7"):
        run_virtual(look(Wanted(network_interface="eth7"), FakeNetwork(), hint=""))


def test_a_broker_that_is_gone_is_left_for_another_one_and_not_before() -> None:
    async def scenario() -> None:
        network = FakeNetwork((0.0, broker("attic", "192.168.1.9")), (0.0, broker("desktop", "192.168.1.10")))
        loop = asyncio.get_running_loop()
        loop.call_at(50.0, network.open_at.discard, ("192.168.1.9", 7946))
        found = await replacement("192.168.1.9:7946", Wanted(), network)
        assert found.address == "192.168.1.10:7946"
        assert 50 < now_s() < 62

    run_virtual(scenario())


def test_a_broker_that_comes_back_at_its_address_is_no_other_one() -> None:
    async def scenario() -> None:
        network = FakeNetwork((0.0, broker("attic", "192.168.1.9")))
        loop = asyncio.get_running_loop()
        loop.call_at(50.0, network.open_at.clear)
        loop.call_at(75.0, network.open_at.add, ("192.168.1.9", 7946))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(300):
                await replacement("192.168.1.9:7946", Wanted(), network)

    run_virtual(scenario())


# ---- commands


def test_a_command_asks_this_machine_first(capsys: pytest.CaptureFixture[str]) -> None:
    network = FakeNetwork((0.1, broker("desktop", "192.168.1.10")), open_at=["127.0.0.1"])
    assert run_virtual(broker_address(None, network)) == "127.0.0.1"
    assert network.opened == []
    assert run_virtual(broker_address("10.0.0.9", network)) == "10.0.0.9"
    assert capsys.readouterr() == ("", "")


def test_a_command_says_on_standard_error_what_it_found_on_the_network(
    capsys: pytest.CaptureFixture[str],
) -> None:
    network = FakeNetwork((0.1, broker("desktop", "192.168.1.10")))
    assert run_virtual(broker_address(None, network)) == "192.168.1.10:7946"
    out, err = capsys.readouterr()
    assert (out, err) == ("", "Found broker desktop with llama at 192.168.1.10 through eth0.\n")


def test_a_command_that_finds_nothing_ends_with_what_was_tried() -> None:
    with pytest.raises(NoBrokerError, match="No broker found in 4 s") as caught:
        run_virtual(broker_address(None, FakeNetwork()))
    assert "--broker 192.168.1.10" in str(caught.value)
    assert caught.value.exit_code == 3


# ---- being found


def test_a_broker_is_made_known_on_its_addresses_and_follows_them_when_they_change() -> None:
    async def scenario() -> None:
        network = FakeNetwork()
        known = asyncio.create_task(make_known(Advert("desktop"), 7946, "0.0.0.0", None, network))
        await network.changed.wait()
        assert network.advertised == [("192.168.1.20",)]
        network.changed.clear()
        network.machine = [Interface("eth0", (ip_interface("192.168.1.33/24"),)), DOCKER0]
        await network.changed.wait()
        assert network.advertised[1:] == [("192.168.1.33",)]
        assert network.sockets == 1
        known.cancel()
        await asyncio.wait([known])
        assert network.sockets == 0

    run_virtual(scenario())


def test_without_multicast_a_broker_says_so_once_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        network = FakeNetwork(multicast=False)
        known = asyncio.create_task(make_known(Advert("desktop"), 7946, "0.0.0.0", None, network))
        await asyncio.sleep(10 * discovery.LOOK_AGAIN_S)
        assert not known.done()
        assert network.advertised == []
        network.has_multicast = True
        await network.changed.wait()
        known.cancel()
        await asyncio.wait([known])

    with caplog.at_level(logging.WARNING, "potluck.discovery"):
        run_virtual(scenario())
    assert len(caplog.records) == 1
    assert "can't be found by itself: multicast does not work here: it is a test" in caplog.text


# ---- the real thing, on the loopback


LOOPBACK = [ip_address("127.0.0.1")]


async def heard_of(mdns: Multicast, wanted: Callable[[dict[str, Broker]], bool]) -> dict[str, Broker]:
    """What is known once it is as wanted."""
    known: dict[str, Broker] = {}
    done = asyncio.Event()

    def heard(name: str, one: Broker | None) -> None:
        if one is None:
            known.pop(name, None)
        else:
            known[name] = one
        if wanted(known):
            done.set()

    mdns.browse(heard)
    async with asyncio.timeout(DEADLINE_S):
        await done.wait()
    return known


def test_two_brokers_of_one_name_are_both_found_by_multicast_and_each_keeps_its_address() -> None:
    async def scenario() -> None:
        opened = [await Mdns.open(LOOPBACK) for _ in range(3)]
        try:
            name = f"test-{secrets.token_hex(4)}"  # other runs of this test are heard here, too
            advert = Advert(name, "llama", LLAMA, 30, "0.1.0")
            named = [
                await opened[0].advertise(advert, 7001, LOOPBACK),
                await opened[1].advertise(advert, 7002, [ip_address("127.0.0.2")]),
            ]
            assert named == [name, f"{name}-2"]

            def both(known: dict[str, Broker]) -> bool:
                return {one.advert.name for one in known.values()} >= set(named)

            known = {one.advert.name: one for one in (await heard_of(opened[2], both)).values()}
            first, second = (known[one] for one in named)
            assert first == Broker(Advert(name, "llama", LLAMA[:12], 30, "0.1.0"), 7001, ("127.0.0.1",))
            assert (second.port, second.addresses) == (7002, ("127.0.0.2",))
        finally:
            for one in opened:
                await one.close()

    run(scenario())


def test_a_broker_that_stops_is_forgotten_at_once() -> None:
    async def scenario() -> None:
        speaker, listener = await Mdns.open(LOOPBACK), await Mdns.open(LOOPBACK)
        gone, came = asyncio.Event(), asyncio.Event()
        brief = f"test-{secrets.token_hex(4)}"

        def heard(name: str, one: Broker | None) -> None:
            if name.startswith(brief):
                (gone if one is None else came).set()

        try:
            listener.browse(heard)
            await speaker.advertise(Advert(brief), 7001, LOOPBACK)
            async with asyncio.timeout(DEADLINE_S):
                await came.wait()
                await speaker.close()
                await gone.wait()
        finally:
            await listener.close()

    run(scenario())


# zeroconf leaves the sockets of a failed start to the garbage collector, which says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_multicast_on_an_address_that_this_machine_has_not_is_a_clear_error() -> None:
    async def scenario() -> None:
        for addresses in ([ip_address("203.0.113.7")], [], [ip_address("2001:db8::7")]):
            with pytest.raises(NoMulticastError):
                await Mdns.open(addresses)

    run(scenario())


def test_the_real_network_knows_who_takes_connections() -> None:
    async def scenario() -> None:
        network = LocalNetwork()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            assert await network.answers("127.0.0.1", port)
        assert not await network.answers("127.0.0.1", port)
        assert not await network.answers("no such host.invalid", port)
        assert any(address.ip.is_loopback for one in network.interfaces() for address in one.addresses)

    run(scenario())
