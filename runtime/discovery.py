"""Finding a broker on the local network, and letting a broker be found.

`find` looks until there is one (stages), `look` once (commands), `make_known` lets a broker be found while it runs.
What is used of this machine's interfaces is decided in `interfaces`, which broker is taken in `finding`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Protocol, TypeAlias

import psutil

from potluck.runtime.address import CONTROL_PORT, endpoint, split_address
from potluck.runtime.finding import (
    BROKERS,
    Advert,
    Broker,
    Search,
    Verdict,
    decide,
    nothing_found,
    places,
    several,
    shown,
)
from potluck.runtime.interfaces import (
    Interface,
    Interfaces,
    choose,
    choose_for_listener,
    explain_left_out,
    read_interfaces,
)
from potluck.runtime.mdns import Mdns, NoMulticastError
from potluck.wire.errors import SettingsError

log = logging.getLogger("potluck.discovery")

Host: TypeAlias = IPv4Address | IPv6Address
THIS_MACHINE = "127.0.0.1"
"""Tried like a peer: a broker that listens on the loopback only advertises nothing."""
SETTLE_S = 1.0
"""After the first broker was heard of, others get this long to answer, too."""
PEERS_AFTER_S = 3.0
"""A peer that takes connections is joined if multicast has found nothing by then."""
CONNECT_S = 1.5
"""How long a connection to an address is waited for."""
CLIENT_S = 4.0
"""How long a command looks for a broker: people wait for it."""
LOOK_AGAIN_S = 10.0
"""How often a broker looks whether this machine's addresses are still the same."""
SAY_EVERY = 30
"""Rounds in vain between two times that the same is said."""


class Multicast(Protocol):
    """What `mdns.Mdns` does, and a fake in tests."""

    async def advertise(self, advert: Advert, port: int, addresses: Sequence[Host]) -> str: ...
    def browse(self, heard: Callable[[str, Broker | None], None]) -> None: ...
    async def close(self) -> None: ...


class Network(Protocol):
    """This machine's way to its network: what is asked of it here, so that tests can take its place."""

    def interfaces(self) -> Sequence[Interface]:
        """What the machine has now."""

    async def multicast(self, addresses: Sequence[Host]) -> Multicast:
        """Opens multicast DNS on these addresses. Raises NoMulticastError."""

    async def answers(self, host: str, port: int) -> bool:
        """Whether somebody takes TCP connections there."""


class LocalNetwork:
    """The real one."""

    def interfaces(self) -> Sequence[Interface]:
        return read_interfaces(psutil.net_if_addrs(), psutil.net_if_stats())

    async def multicast(self, addresses: Sequence[Host]) -> Multicast:
        return await Mdns.open(addresses)

    async def answers(self, host: str, port: int) -> bool:
        try:
            async with asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to look for and where. `fingerprints` are those of the models at hand."""

    network_interface: str | None = None
    peers: tuple[str, ...] = ()
    fingerprints: frozenset[str] = frozenset()
    within_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Found:
    """Where to go, which broker that is in words, and a note for people, "" if there is nothing to say."""

    address: str
    text: str
    note: str = ""


async def find(wanted: Wanted, network: Network, *, example: str) -> Found:
    """Looks until a broker is found, and says after each round in vain what was tried, unless that was said lately.

    `example` is a command that names an address. Raises SettingsError for an interface or peer that is none.
    """
    said, rounds = "", 0
    while True:
        found = await look(wanted, network, hint=f"To name one: {example}")
        if isinstance(found, Found):
            return found
        text = nothing_found(found, example)
        if text != said or rounds % SAY_EVERY == 0:
            log.warning("%s\nStill looking.", text)
            said, rounds = text, 0
        rounds += 1


async def replacement(address: str, wanted: Wanted, network: Network) -> Found:
    """Waits until the broker at this address takes no connection any more and another one is found; returns that one.

    A broker that is only restarted is waited for: whoever has joined it keeps what it has loaded.
    """
    here = split_address(address, CONTROL_PORT)
    while True:
        await asyncio.sleep(wanted.within_s)
        if await network.answers(*here):
            continue
        with contextlib.suppress(SettingsError):  # the interface may be unplugged for a while
            found = await look(wanted, network, hint="")
            if isinstance(found, Found) and split_address(found.address, CONTROL_PORT) != here:
                return found


async def look(wanted: Wanted, network: Network, *, hint: str, patient: bool = True) -> Found | Search:
    """One round: multicast on the chosen interfaces, and the peers. Returns what was found, or what was tried in vain.

    It ends as soon as a broker is found, otherwise after `within_s`; without `patient` at once when there is nothing to
    wait for. `hint` says how to name one of several brokers. Raises SettingsError for a wrong interface or peer.
    """
    peers = tuple(dict.fromkeys((*wanted.peers, THIS_MACHINE)))
    where = [split_address(peer, CONTROL_PORT) for peer in peers]
    chosen = choose(network.interfaces(), wanted.network_interface)
    end_s = asyncio.get_running_loop().time() + wanted.within_s
    async with contextlib.AsyncExitStack() as stack:
        ears = await _Ears.open(network, chosen, stack)
        asked = asyncio.create_task(_first(network, where))
        stack.callback(asked.cancel)
        if not ears.trouble:
            await ears.hear(min(PEERS_AFTER_S, wanted.within_s))
        verdict = await _judge(wanted, network, chosen, ears.brokers)
        if verdict.taken is None and (index := await asked) is not None:
            host, port = where[index]
            address = endpoint(host, port).removeprefix("tcp://")
            which = "this machine" if peers[index] == THIS_MACHINE else "the peer that was named"
            return Found(address, f"a broker at {shown(host, port)}, {which}")
        while verdict.taken is None and (patient or not ears.trouble):
            if not await ears.hear(end_s - asyncio.get_running_loop().time()):
                break
            verdict = await _judge(wanted, network, chosen, ears.brokers)
        waited_s = wanted.within_s if patient or not ears.trouble else 0.0
        search = Search(waited_s, chosen, peers, verdict.refused, ears.trouble)
    if verdict.taken is None:
        return search
    return Found(verdict.taken.address, str(verdict.taken), several(verdict, hint))


class _Ears:
    """The brokers that were heard of so far. `trouble` says why nothing can be heard, "" if it can."""

    def __init__(self, trouble: str = "") -> None:
        self.trouble = trouble
        self._named: dict[str, Broker] = {}
        self._changed = asyncio.Event()

    @classmethod
    async def open(cls, network: Network, chosen: Interfaces, stack: contextlib.AsyncExitStack) -> _Ears:
        """Begins to listen; the stack closes it."""
        if not chosen.used:
            return cls("there is none to ask on")
        try:
            mdns = await network.multicast([address.ip for address in chosen.addresses])
        except NoMulticastError as error:
            return cls(str(error))
        stack.push_async_callback(mdns.close)
        ears = cls()
        mdns.browse(ears._heard)
        return ears

    @property
    def brokers(self) -> list[Broker]:
        return list(self._named.values())

    async def hear(self, within_s: float) -> bool:
        """Waits for news, and a moment more for others; False if there are none in time."""
        try:
            async with asyncio.timeout(max(0.0, within_s)):
                await self._changed.wait()
        except TimeoutError:
            return False
        await asyncio.sleep(SETTLE_S)
        self._changed.clear()
        return True

    def _heard(self, name: str, broker: Broker | None) -> None:
        if broker is None:
            self._named.pop(name, None)
        elif name in self._named or len(self._named) < BROKERS:
            self._named[name] = broker
            self._changed.set()


async def _judge(
    wanted: Wanted, network: Network, chosen: Interfaces, brokers: Collection[Broker]
) -> Verdict:
    """The verdict on these brokers, each asked at all its addresses at the same time."""
    spots = list({(way.host, broker.port) for broker in brokers for way in places(broker, chosen)})
    open_there = await asyncio.gather(*(network.answers(*spot) for spot in spots))
    answering = {spot for spot, is_open in zip(spots, open_there, strict=True) if is_open}
    return decide(brokers, chosen, wanted.fingerprints, answering)


async def _first(network: Network, where: Sequence[tuple[str, int]]) -> int | None:
    """The first of these places, in their order, that takes connections; all are asked at the same time."""
    open_there = await asyncio.gather(*(network.answers(host, port) for host, port in where))
    return next((index for index, is_open in enumerate(open_there) if is_open), None)


async def make_known(
    advert: Advert, port: int, listen_address: str, network_interface: str | None, network: Network
) -> None:
    """Lets a broker be found by the addresses it listens on, until it is cancelled; follows them when they change.

    A network without multicast costs one warning: the broker can still be given by its address.
    """
    said = ""
    while True:
        chosen = _listening(network, network_interface, listen_address)
        async with contextlib.AsyncExitStack() as stack:
            try:
                name = await _advertise(advert, port, chosen, network, stack)
            except NoMulticastError as error:
                if said != str(error):
                    log.warning("This broker can't be found by itself: %s. Give stages its address.", error)
                said = str(error)
                await asyncio.sleep(LOOK_AGAIN_S)
                continue
            said = ""
            log.info("Can be found as %s on %s.", name, ", ".join(map(str, chosen.used)))
            now = chosen
            while now.used == chosen.used:
                await asyncio.sleep(LOOK_AGAIN_S)
                now = _listening(network, network_interface, listen_address)


async def _advertise(
    advert: Advert, port: int, chosen: Interfaces, network: Network, stack: contextlib.AsyncExitStack
) -> str:
    addresses = [address.ip for address in chosen.addresses]
    if not addresses:
        left_out = f" (left out: {explain_left_out(chosen.left_out)})" if chosen.left_out else ""
        raise NoMulticastError(f"there is no network interface to be found on{left_out}")
    mdns = await network.multicast(addresses)
    stack.push_async_callback(mdns.close)
    return await mdns.advertise(advert, port, addresses)


def _listening(network: Network, network_interface: str | None, listen_address: str) -> Interfaces:
    try:
        return choose_for_listener(network.interfaces(), network_interface, listen_address)
    except SettingsError:  # it was there at the start: unplugged, or without an address for a while
        return Interfaces()


__all__ = [
    "Found",
    "LocalNetwork",
    "Multicast",
    "Network",
    "Wanted",
    "find",
    "look",
    "make_known",
    "replacement",
]
