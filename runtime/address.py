"""Addresses as people write them: `host`, `host:port` or `tcp://host:port`."""

from __future__ import annotations

import socket

from potluck.wire.errors import SettingsError

CONTROL_PORT = 7946
RESULTS_PORT = 7947
REST_PORT = 8080


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


def lan_address(towards: str = "192.0.2.1") -> str:
    """The address by which this machine would reach `towards`: what others on the same network dial. Sends nothing.

    The default is an address of RFC 5737 that nobody has, so the answer is that of the default route; loopback if none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
