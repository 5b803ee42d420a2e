"""Where the broker is, for a command that was not told: on this machine, or somewhere on the local network."""

from __future__ import annotations

import click

from potluck.runtime.address import CONTROL_PORT
from potluck.runtime.discovery import CLIENT_S, THIS_MACHINE, Found, LocalNetwork, Network, Wanted, look
from potluck.runtime.finding import nothing_found
from potluck.wire.errors import NoBrokerError

EXAMPLE = "--broker 192.168.1.10"


async def broker_address(given: str | None, network: Network | None = None) -> str:
    """The address that was given; else this machine's if a broker answers there; else one found on the network.

    Says on standard error which one was found. Raises NoBrokerError with what was tried and what to check.
    """
    if given is not None:
        return given
    network = network or LocalNetwork()
    if await network.answers(THIS_MACHINE, CONTROL_PORT):
        return THIS_MACHINE
    found = await look(Wanted(within_s=CLIENT_S), network, hint=f"To name one: {EXAMPLE}", patient=False)
    if not isinstance(found, Found):
        raise NoBrokerError(nothing_found(found, EXAMPLE))
    click.echo(f"Found {found.text}.", err=True)
    if found.note:
        click.echo(found.note, err=True)
    return found.address


__all__ = ["broker_address"]
