"""Which of this machine's network interfaces and addresses to use. Pure: facts in, choices out.

Decides what is left out and why, and in which order the rest is used. Leaves to `discovery` where the facts come from
(psutil) and what is done with the choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv6Address, IPv6Interface, ip_address, ip_interface
from typing import Any, TypeAlias

from potluck.wire.errors import SettingsError

Address: TypeAlias = IPv4Interface | IPv6Interface
"""An address with its network, e.g. 192.168.1.10/24."""

VIRTUAL = (
    ("containers", r"docker|br-[0-9a-f]|veth|cni|flannel|kube|cali|cilium|podman|lxcbr|lxdbr|nerdctl"),
    ("virtual machines", r"virbr|vnet\d|vmnet|vmenet|vboxnet|vEthernet|bridge1\d\d"),
    ("a VPN", r"tun\d|tun-|tap\d|tap-|tunl|wg|tailscale|zt|utun|ppp|ipsec|nordlynx|proton"),
    ("Apple's direct links", r"awdl|llw|anpi"),
)
"""What an interface is for, by how its name begins. A bridge such as br0 is the LAN itself on some machines, and stays
in: only Docker's are named br- and a hexadecimal id.
"""
WIRED = re.compile(r"en|eth|Ethernet")
WIRELESS = re.compile(r"wl|ath\d|Wi-Fi|wifi", re.IGNORECASE)
NAMES_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Interface:
    """One network interface as the system reports it; `addresses` in the system's order."""

    name: str
    addresses: tuple[Address, ...] = ()
    up: bool = True

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(str(address.ip) for address in self.addresses)})"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An interface that is not used, and why not."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Interfaces:
    """The interfaces to use, the preferred one first, each with the addresses to use; and the others."""

    used: tuple[Interface, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Every address to use, the preferred one first."""
        return tuple(address for interface in self.used for address in interface.addresses)

    def holding(self, host: str) -> Interface | None:
        """The used interface on whose network this address lies."""
        try:
            wanted = ip_address(host)
        except ValueError:
            return None
        for interface in self.used:
            if any(wanted in address.network for address in interface.addresses):
                return interface
        return None


def read_interfaces(
    addresses: Mapping[str, Iterable[Any]], stats: Mapping[str, Any]
) -> tuple[Interface, ...]:
    """Facts from what psutil.net_if_addrs() and psutil.net_if_stats() return."""
    return tuple(
        Interface(
            name,
            tuple(read for one in entries if (read := _read(one.address, one.netmask)) is not None),
            bool(getattr(stats.get(name), "isup", True)),
        )
        for name, entries in addresses.items()
    )


def choose(found: Sequence[Interface], wanted: str | None = None) -> Interfaces:
    """What to use of the interfaces of a machine. `wanted` (node.network_interface) overrules everything else.

    Left out: the loopback, interfaces of containers, virtual machines and VPNs, those that are down or have no address.
    An address of 169.254.0.0/16, which a machine gives itself where nobody else does, is used only where no interface
    has another one. Wired comes before Wi-Fi as far as the names tell, IPv4 before IPv6.
    Raises SettingsError when the wanted interface does not exist or has no address.
    """
    if wanted is not None:
        return _choose_named(found, wanted)
    used: list[Interface] = []
    last_resort: list[Interface] = []
    left_out: list[LeftOut] = []
    for interface in found:
        reason = _reason_against(interface)
        if reason:
            left_out.append(LeftOut(interface.name, reason))
            continue
        given = _usable(interface.addresses)
        own = tuple(address for address in interface.addresses if _is_self_assigned(address))
        if given:
            used.append(Interface(interface.name, given, interface.up))
        else:
            last_resort.append(Interface(interface.name, own, interface.up))
    if not used:
        used, last_resort = last_resort, []
    left_out += [LeftOut(one.name, "only an address it gave itself") for one in last_resort]
    return Interfaces(tuple(sorted(used, key=_preference)), tuple(left_out))


def choose_for_listener(found: Sequence[Interface], wanted: str | None, listen_address: str) -> Interfaces:
    """The interfaces and addresses by which somebody who listens on this address is reached.

    Any address (0.0.0.0, *) means those of `choose` that are IPv4, `::` all of them; a particular one means that one,
    on whatever interface it is. None for host names.
    """
    if listen_address in ("0.0.0.0", "*", "::"):
        chosen = choose(found, wanted)
        return chosen if listen_address == "::" else _keep(chosen, lambda address: address.version == 4)
    try:
        listened = ip_address(listen_address)
    except ValueError:
        return Interfaces()
    chosen = _keep(Interfaces(tuple(found)), lambda address: address.ip == listened)
    return Interfaces(tuple(one for one in chosen.used if wanted in (None, one.name)))


def is_loopback(listen_address: str) -> bool:
    """Whether who listens on this address is reached from the same machine only."""
    try:
        return ip_address(listen_address).is_loopback
    except ValueError:
        return listen_address == "localhost"


def explain_left_out(left_out: Sequence[LeftOut]) -> str:
    """The interfaces that are not used, grouped by the reason: `docker0 (for containers), wg0 (for a VPN)`."""
    reasons: dict[str, list[str]] = {}
    for one in left_out:
        reasons.setdefault(one.reason, []).append(one.name)
    return ", ".join(f"{_names(names)} ({reason})" for reason, names in reasons.items())


def _choose_named(found: Sequence[Interface], wanted: str) -> Interfaces:
    others = tuple(LeftOut(one.name, "another one was named") for one in found if one.name != wanted)
    named = next((one for one in found if one.name == wanted), None)
    if named is None:
        raise SettingsError(f"There is no network interface {wanted}.", hint=_what_exists(found))
    given = _usable(named.addresses) or tuple(
        address for address in named.addresses if address.version == 4 or address.ip.is_loopback
    )
    if not given:
        raise SettingsError(
            f"The network interface {wanted} has no address that can be used.", hint=_what_exists(found)
        )
    return Interfaces((Interface(named.name, given, named.up),), others)


def _what_exists(found: Sequence[Interface]) -> str:
    chosen = choose(found)
    parts = []
    if chosen.used:
        parts.append(f"These can be used: {', '.join(map(str, chosen.used))}.")
    if chosen.left_out:
        parts.append(f"Left out unless one is named: {explain_left_out(chosen.left_out)}.")
    return " ".join(parts) or "This machine has no network interface."


def _reason_against(interface: Interface) -> str:
    if interface.addresses and all(address.ip.is_loopback for address in interface.addresses):
        return "this machine only"
    for purpose, pattern in VIRTUAL:
        if re.match(pattern, interface.name, re.IGNORECASE):
            return f"for {purpose}"
    if not interface.up:
        return "down"
    if not _usable(interface.addresses) and not any(map(_is_self_assigned, interface.addresses)):
        return "no address"
    return ""


def _usable(addresses: Iterable[Address]) -> tuple[Address, ...]:
    """Addresses that others can dial as they stand, IPv4 first. IPv6's link-local ones need a zone besides."""
    good = [
        address
        for address in addresses
        if not (address.ip.is_link_local or address.ip.is_loopback or address.ip.is_unspecified)
    ]
    return tuple(sorted(good, key=lambda address: address.version))


def _is_self_assigned(address: Address) -> bool:
    return address.version == 4 and address.ip.is_link_local


def _keep(chosen: Interfaces, wanted: Any) -> Interfaces:
    kept = [
        Interface(one.name, tuple(address for address in one.addresses if wanted(address)), one.up)
        for one in chosen.used
    ]
    return Interfaces(tuple(one for one in kept if one.addresses), chosen.left_out)


def _preference(interface: Interface) -> tuple[object, ...]:
    name = interface.name
    medium = 2 if WIRELESS.match(name) else 0 if WIRED.match(name) else 1
    return (interface.addresses[0].version, medium, _natural(name))


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """eth2 before eth10."""
    return [
        (part.isdecimal(), int(part) if part.isdecimal() else 0, part)
        for part in re.split(r"(\d+)", name)
        if part
    ]


def _read(address: str, netmask: str | None) -> Address | None:
    """An entry of psutil's; None for what is no IP address, such as a card's own one."""
    text = address.partition("%")[0]
    try:
        ip: IPv4Address | IPv6Address = ip_address(text)
        bits = None if netmask is None else int(ip_address(netmask.partition("%")[0])).bit_count()
    except ValueError:
        return None
    return ip_interface(f"{ip}/{ip.max_prefixlen if bits is None else bits}")


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN} more"


__all__ = [
    "Address",
    "Interface",
    "Interfaces",
    "LeftOut",
    "choose",
    "choose_for_listener",
    "explain_left_out",
    "is_loopback",
    "read_interfaces",
]
