"""Addresses as people write them: `host`, `host:port` or `tcp://host:port`."""

from __future__ import annotations

import socket

from potluck.wire.errors import SettingsError

CONTROL_PORT = 7946
RESULTS_PORT = 7947
REST_PORT = 8080
DISCARD_PORT = 9
NOBODY = "192.0.2.1"
"""An address of RFC 5737 that nobody has."""


def split_address(address: str, default_port: int, *, lowest: int = 1) -> tuple[str, int]:
    """Host and port. IPv6 hosts stand in brackets; `lowest` 0 lets in "any free port". Raises SettingsError."""
    text = address.strip().removeprefix("tcp://")
    host, port = text, str(default_port)
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        if rest.startswith(":"):
            port = rest[1:]
    elif text.count(":") == 1:
        host, port = text.split(":")
    elif text.count(":") > 1:
        host = text
    if not host or not port.isdigit() or not lowest <= int(port) < 65_536:
        raise SettingsError(
            f"{address!r} is not an address.", hint="Write host or host:port, e.g. 192.168.1.10:7946."
        )
    return host, int(port)


def endpoint(host: str, port: int | str) -> str:
    """`tcp://host:port`, IPv6 in brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def control_endpoint(broker: str) -> str:
    """Where the broker of this address takes stages and clients."""
    return endpoint(*split_address(broker, CONTROL_PORT))


def seen_from(dialled: str, bound: str) -> str:
    """An endpoint that its owner gave as `0.0.0.0`, `*` or `[::]`, on the host by which the owner was dialled."""
    host, _, port = bound.removeprefix("tcp://").rpartition(":")
    if host not in ("0.0.0.0", "*", "[::]", ""):
        return bound
    return f"tcp://{dialled.removeprefix('tcp://').rpartition(':')[0]}:{port}"


def address_towards(host: str, port: int = DISCARD_PORT) -> str:
    """This machine's address on the way to the host. Raises OSError where there is no way.

    A connected UDP socket knows it, and sends nothing.
    """
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def lan_address() -> str:
    """What others on the same network dial: this machine's address on the default route; loopback if there is none."""
    try:
        return address_towards(NOBODY)
    except OSError:
        return "127.0.0.1"
