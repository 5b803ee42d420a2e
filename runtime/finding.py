"""Which of the brokers found on the network to join, and what to say when there is none. Pure.

Decides what of an advertisement is believed (it comes from strangers), which broker is taken, and the words for people.
Leaves listening, asking and waiting to `discovery`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from potluck.runtime.address import CONTROL_PORT, endpoint
from potluck.runtime.interfaces import Interfaces, explain_left_out
from potluck.wire import limits

SERVICE = "_potluck._tcp.local."
FINGERPRINT_CHARS = 12
"""As much of a model's fingerprint is advertised: enough to tell a household's models apart."""
TEXT_BYTES = 64
"""The longest value that is read from an advertisement."""
ADDRESSES = 8
"""Addresses of one broker that are looked at."""
BROKERS = 32
"""Brokers of one network that are looked at."""
LABEL_BYTES = 63
"""The longest name that DNS takes."""


@dataclass(frozen=True, slots=True)
class Advert:
    """What a broker tells about itself. `layers` and `protocol` are 0 where a stranger's could not be read."""

    name: str
    model: str = ""
    fingerprint: str = ""
    layers: int = 0
    version: str = ""
    protocol: int = limits.PROTOCOL_VERSION

    def texts(self) -> dict[str, str]:
        """The TXT record, each value short enough for one."""
        texts = {
            "protocol": str(self.protocol),
            "version": self.version,
            "model": self.model,
            "fingerprint": self.fingerprint[:FINGERPRINT_CHARS],
            "layers": str(self.layers),
        }
        return {key: _shortened(value, TEXT_BYTES) for key, value in texts.items()}

    @property
    def label(self) -> str:
        """The name as one label of a DNS name: no dots, nothing unprintable, at most 63 bytes."""
        clean = "".join(char if char.isprintable() and char != "." else "-" for char in self.name)
        return _shortened(clean, LABEL_BYTES).strip() or "potluck"


@dataclass(frozen=True, slots=True)
class Broker:
    """One broker that was found: what it says of itself, and where it may be reached."""

    advert: Advert
    port: int
    addresses: tuple[str, ...]

    def __str__(self) -> str:
        model = f", {self.advert.model}" if self.advert.model else ""
        return f"{self.advert.name}{model}, {shown(self.addresses[0], self.port)}"


@dataclass(frozen=True, slots=True)
class Way:
    """A broker and the address to dial. `interface` is ours whose network the address is on, "" if none is known."""

    broker: Broker
    host: str
    interface: str = ""

    @property
    def address(self) -> str:
        """host:port, IPv6 in brackets."""
        return endpoint(self.host, self.broker.port).removeprefix("tcp://")

    def __str__(self) -> str:
        advert = self.broker.advert
        model = f" with {advert.model}" if advert.model else ""
        through = f" through {self.interface}" if self.interface else ""
        return f"broker {advert.name}{model} at {shown(self.host, self.broker.port)}{through}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The way that is taken if there is one; others that would have done as well; those that don't do, and why."""

    taken: Way | None = None
    as_good: tuple[Way, ...] = ()
    refused: tuple[tuple[Broker, str], ...] = ()


def read_answer(
    instance: str, port: int | None, addresses: Iterable[str], texts: Mapping[bytes, bytes | None]
) -> Broker | None:
    """A broker out of an answer from the network; None if it has no port or no address that could be dialled.

    Whoever is on the network can write anything into it: texts are cut and only printable ones are kept, numbers and
    addresses must be such, and there is an end to how many.
    """
    if port is None or not 0 < port < 65_536:
        return None
    dialled = tuple(dict.fromkeys(filter(_is_dialled, addresses)))[:ADDRESSES]
    if not dialled:
        return None
    advert = Advert(
        name=_text(instance.removesuffix(f".{SERVICE}").encode()) or "?",
        model=_text(texts.get(b"model")),
        fingerprint=_text(texts.get(b"fingerprint"))[:FINGERPRINT_CHARS],
        layers=_number(texts.get(b"layers"), limits.LAYERS),
        version=_text(texts.get(b"version")),
        protocol=_number(texts.get(b"protocol"), 65_535),
    )
    return Broker(advert, port, dialled)


def places(broker: Broker, interfaces: Interfaces) -> list[Way]:
    """Every address of the broker worth a try, the best first: on a network of ours, in the order of our interfaces.

    A loopback address counts only where the loopback is what we were told to use: it would be our own machine.
    """
    order = {interface.name: index for index, interface in enumerate(interfaces.used)}
    ways = []
    for host in broker.addresses:
        held = interfaces.holding(host)
        if held is not None or not ip_address(host).is_loopback:
            ways.append(Way(broker, host, "" if held is None else held.name))
    return sorted(ways, key=lambda way: (order.get(way.interface, len(order)), ":" in way.host))


def decide(
    brokers: Iterable[Broker],
    interfaces: Interfaces,
    fingerprints: Collection[str] = (),
    answering: Collection[tuple[str, int]] = (),
) -> Verdict:
    """Which broker to join.

    `fingerprints` are those of the models at hand, `answering` the addresses that took a connection. In this order:
    the broker speaks our protocol and takes connections; it has a model that is at hand; it is on a network of ours;
    its name comes first.
    """
    held = {fingerprint[:FINGERPRINT_CHARS] for fingerprint in fingerprints}
    ranked: list[tuple[bool, bool, str, Way]] = []
    refused: list[tuple[Broker, str]] = []
    for broker in brokers:
        if broker.advert.protocol != limits.PROTOCOL_VERSION:
            refused.append((broker, _other_protocol(broker.advert)))
            continue
        ways = places(broker, interfaces)
        way = next((way for way in ways if (way.host, broker.port) in answering), None)
        if way is None:
            refused.append(
                (broker, f"takes no connection; does a firewall stop TCP port {broker.port} there?")
            )
            continue
        ranked.append((broker.advert.fingerprint not in held, not way.interface, broker.advert.name, way))
    ranked.sort(key=lambda entry: (*entry[:3], entry[3].host))
    if not ranked:
        return Verdict(None, (), tuple(refused))
    best = ranked[0]
    as_good = tuple(way for *rank, _, way in ranked[1:] if rank == list(best[:2]))
    return Verdict(best[3], as_good, tuple(refused))


def several(verdict: Verdict, hint: str) -> str:
    """One line for people where more than one broker would have done; "" otherwise. `hint` says how to name one."""
    if verdict.taken is None or not verdict.as_good:
        return ""
    all_of_them = [verdict.taken.broker, *(way.broker for way in verdict.as_good)]
    return (
        f"{len(all_of_them)} brokers are on this network: {'; '.join(map(str, all_of_them))}. "
        f"Taking {verdict.taken.broker.advert.name}. {hint}"
    )


@dataclass(frozen=True, slots=True)
class Search:
    """What was tried in vain. `trouble` is why the network could not be asked by multicast, "" if it could."""

    seconds: float
    interfaces: Interfaces
    peers: tuple[str, ...] = ()
    refused: tuple[tuple[Broker, str], ...] = ()
    trouble: str = ""


def nothing_found(search: Search, example: str) -> str:
    """What was tried and what to check. `example` is a command with an address in it."""
    used = ", ".join(map(str, search.interfaces.used)) or "no network interface"
    lines = [f"No broker found in {search.seconds:g} s." if search.seconds else "No broker found."]
    if search.trouble:
        lines.append(f"  not asked   {used}: {search.trouble}")
    else:
        lines.append(f"  asked       {used}")
    if search.interfaces.left_out:
        lines.append(f"  left out    {explain_left_out(search.interfaces.left_out)}")
    if search.peers:
        lines.append(f"  tried       {', '.join(search.peers)}: nobody there takes a connection")
    lines += [f"  not taken   {broker}: {reason}" for broker, reason in search.refused]
    lines += [
        "What to check:",
        "  - Does potluck-broker run, and did it say that it can be found?",
        "  - Are both machines on the same network? A guest network or a VPN is another one.",
        f"  - Does a firewall stop UDP port 5353 (finding) or TCP port {CONTROL_PORT} (joining)?",
        "  - Does the Wi-Fi keep its devices apart (client isolation)?",
        f"Or give the broker's address: {example}",
    ]
    return "\n".join(lines)


def shown(host: str, port: int) -> str:
    """An address for people; the usual port is left out."""
    if port == CONTROL_PORT:
        return host
    return endpoint(host, port).removeprefix("tcp://")


def _other_protocol(advert: Advert) -> str:
    theirs, ours = advert.protocol, limits.PROTOCOL_VERSION
    side = "there" if theirs < ours else "here"
    return f"speaks protocol {theirs or '?'}, this is {ours}; upgrade Potluck {side}"


def _is_dialled(address: str) -> bool:
    try:
        ip = ip_address(address)
    except ValueError:
        return False
    return not (ip.is_unspecified or ip.is_multicast or (ip.version == 6 and ip.is_link_local))


def _text(raw: bytes | None) -> str:
    """A value as text for people: cut, what is no UTF-8 left out, and nothing that could move a cursor."""
    text = (raw or b"")[:TEXT_BYTES].decode("utf-8", "ignore")
    return "".join(char for char in text if char.isprintable()).strip()


def _number(raw: bytes | None, most: int) -> int:
    text = _text(raw)
    return min(int(text), most) if text.isascii() and text.isdecimal() and len(text) <= 9 else 0


def _shortened(text: str, most_bytes: int) -> str:
    return text.encode("utf-8", "replace")[:most_bytes].decode("utf-8", "ignore")


__all__ = [
    "Advert",
    "Broker",
    "Search",
    "Verdict",
    "Way",
    "decide",
    "nothing_found",
    "places",
    "read_answer",
    "several",
    "shown",
]
