"""To which broker a stage goes, by which address it is reached there, and when it goes to another one.

A broker that was named is kept for good. One that was found on the network is left when it is gone and another one is
there. What a stage does once it has joined is the worker's.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
from dataclasses import replace

import click

from potluck.runtime.address import CONTROL_PORT, address_towards, control_endpoint, split_address
from potluck.runtime.discovery import Network, Wanted, find, replacement
from potluck.runtime.interfaces import choose
from potluck.runtime.signals import stop_signals
from potluck.runtime.transport import Transport
from potluck.runtime.zmq_transport import ZmqTransport
from potluck.stage.settings import StageSettings
from potluck.stage.witness import Witness
from potluck.stage.worker import StageWorker
from potluck.wire.errors import NoBrokerError, PotluckError

log = logging.getLogger("potluck.stage")

ANY_ADDRESS = "0.0.0.0"
"""Listening: every address of this machine. Advertised: the host by which the broker is dialled."""
EXAMPLE = "potluck-stage 192.168.1.10"


async def serve(
    broker: str | None,
    settings: StageSettings,
    listen_address: str | None,
    wanted: Wanted,
    network: Network,
    witness: Witness,
) -> int:
    """Runs one stage until SIGINT, SIGTERM or the broker's refusal. Returns the exit code.

    Looks for a broker if none is named. Raises NoBrokerError, PortInUseError, SettingsError, EngineHangsError.
    """
    with contextlib.closing(ZmqTransport()) as transport:
        joining = _Joining(transport, settings, listen_address, wanted, network, witness)
        life = asyncio.create_task(joining.run(broker))
        stopped: list[signal.Signals] = []

        def stop(number: signal.Signals) -> None:
            stopped.append(number)
            if not joining.leave(f"{number.name} came"):
                life.cancel()

        def insist(number: signal.Signals) -> bool:
            return joining.stays and joining.stop(f"{number.name} came again")

        code = 0
        with stop_signals(stop, insist):
            try:
                code = await life
            except asyncio.CancelledError:
                if not stopped:
                    raise
        if joining.error is not None:
            click.echo(f"potluck-stage: {joining.error}", err=True)
        return 130 if stopped and stopped[0] is signal.SIGINT else code


class _Joining:
    """One stage process: a worker for each broker that it goes to, one after the other."""

    def __init__(
        self,
        transport: Transport,
        settings: StageSettings,
        listen_address: str | None,
        wanted: Wanted,
        network: Network,
        witness: Witness,
    ) -> None:
        self.error: PotluckError | None = None
        """What the last worker ended by."""
        self._transport = transport
        self._settings = settings
        self._listen_address = listen_address
        self._wanted = wanted
        self._network = network
        self._witness = witness
        self._worker: StageWorker | None = None
        self._stopping: set[asyncio.Task[None]] = set()

    async def run(self, broker: str | None) -> int:
        """Until it is stopped or refused. Returns the exit code."""
        if broker is not None:
            return await self._work(broker)
        found = await find(self._wanted, self._network, example=EXAMPLE)
        while True:
            log.info("Found %s.", found.text)
            if found.note:
                log.warning("%s", found.note)
            other = asyncio.create_task(replacement(found.address, self._wanted, self._network))
            working = asyncio.create_task(self._work(found.address))
            try:
                await asyncio.wait({other, working}, return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    return await working
                log.warning("The broker at %s is gone, and another one is there.", found.address)
                self.stop("it goes to another broker")
                await working
                found = await other
            finally:
                other.cancel()
                working.cancel()

    def leave(self, reason: str) -> bool:
        """Has the worker ask to leave; False if there is none."""
        if self._worker is None:
            return False
        self._worker.leave(reason)
        return True

    @property
    def stays(self) -> bool:
        """Whether there is a worker that was asked to leave and is still needed."""
        return self._worker is not None and self._worker.stays

    def stop(self, reason: str) -> bool:
        """Ends the worker with a goodbye, so that what has begun comes to its end; False if there is none."""
        if self._worker is None:
            return False
        stopping = asyncio.ensure_future(self._worker.stop(reason))
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)
        return True

    async def _work(self, broker: str) -> int:
        bound, advertised = addresses(broker, self._listen_address)
        if advertised != ANY_ADDRESS:
            log.info("This device's address for others: %s.", advertised or bound)
        settings = replace(self._settings, listen_address=bound, advertise_address=advertised)
        self._worker = StageWorker(self._transport, control_endpoint(broker), settings)
        self._witness.watch(control_endpoint(broker), self._worker.stage_id)
        try:
            return await self._worker.run()
        finally:
            self.error, self._worker = self._worker.error, None


def interface_address(network: Network, name: str) -> str:
    """The address to listen on for an interface that was named. Raises SettingsError if there is none."""
    return str(choose(network.interfaces(), name).addresses[0].ip)


def addresses(broker: str, listen_address: str | None) -> tuple[str, str | None]:
    """Where the data socket is bound, and the address to advertise if that is another one.

    By default the address of this machine that faces the broker. On the broker's own machine, dialled as 127.0.0.1,
    that would be out of reach for stages elsewhere: then every address is bound, and the one advertised stands for
    the broker's host. Raises NoBrokerError when there is no way to the broker, SettingsError.
    """
    if listen_address not in (None, ANY_ADDRESS):
        return str(listen_address), None
    facing = _facing_address(*split_address(broker, CONTROL_PORT))
    if ipaddress.ip_address(facing).is_loopback:
        return ANY_ADDRESS, ANY_ADDRESS
    return listen_address or facing, facing


def _facing_address(host: str, port: int) -> str:
    try:
        return address_towards(host, port)
    except OSError as error:
        raise NoBrokerError(
            f"There is no way to the broker at {host}: {error.strerror or error}.",
            hint="Check the address and this machine's network.",
        ) from error


__all__ = ["addresses", "interface_address", "serve"]
