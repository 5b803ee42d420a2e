"""`potluck-stage`: joins a broker, and computes the layers it is given until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import platform
import signal
import socket
import sys
from pathlib import Path

import click
import psutil

from potluck.model.paths import cache_dir
from potluck.runtime.address import CONTROL_PORT, control_endpoint, split_address
from potluck.runtime.command import Command
from potluck.runtime.logs import LEVELS, set_up_logs
from potluck.runtime.loop import run
from potluck.runtime.settings import config_option
from potluck.runtime.signals import stop_signals
from potluck.runtime.zmq_transport import ZmqTransport
from potluck.stage.engines import NAMES
from potluck.stage.settings import StageSettings, offers
from potluck.stage.worker import StageWorker
from potluck.wire import limits
from potluck.wire.errors import NoBrokerError, SettingsError, UsageError
from potluck.wire.messages import Capabilities

ANY_ADDRESS = "0.0.0.0"
"""Listening: every address of this machine. Advertised: the host by which the broker is dialled."""


@click.command(
    "potluck-stage", cls=Command, context_settings={"auto_envvar_prefix": "POTLUCK", "show_default": True}
)
@click.argument("broker", default="127.0.0.1", envvar="POTLUCK_BROKER")
@config_option
@click.option(
    "--model", "-m", "models", multiple=True, type=click.Path(path_type=Path), envvar="POTLUCK_MODEL",
    help="A GGUF file at hand here; the broker's model has to be among them. May be repeated.",
)  # fmt: skip
@click.option("--name", help="This device's name in the cluster.  [default: the host's name]")
@click.option(
    "--listen-address",
    help="Where other stages reach this one.  [default: the address that faces the broker]",
)
@click.option(
    "--data-port", default=0, type=click.IntRange(0, 65535), help="Port for micro-batches; 0: any free one."
)
@click.option(
    "--threads", type=click.IntRange(1, 1024), help="Compute threads.  [default: physical cores minus one]"
)
@click.option(
    "--cpu", "cpus", multiple=True, type=click.IntRange(0), envvar="POTLUCK_CPU",
    help="Run on this core only. May be repeated.",
)  # fmt: skip
@click.option("--keep-trying/--give-up", default=False, help="What to do when the broker refuses this stage.")
@click.option("--engine", default="llama", type=click.Choice(NAMES), hidden=True)
@click.option("--fingerprint", "fingerprints", multiple=True, envvar="POTLUCK_FINGERPRINT", hidden=True)
@click.option("--log-level", default="info", type=click.Choice(LEVELS))
@click.option("--log-file", type=click.Path(), help="Log to this file instead of the terminal.")
@click.option("--log-max-size-mb", default=100, type=click.IntRange(1), hidden=True)
@click.option("--log-max-files", default=5, type=click.IntRange(1), hidden=True)
def main(
    broker: str,
    config: Path | None,
    models: tuple[Path, ...],
    name: str | None,
    listen_address: str | None,
    data_port: int,
    threads: int | None,
    cpus: tuple[int, ...],
    keep_trying: bool,
    engine: str,
    fingerprints: tuple[str, ...],
    log_level: str,
    log_file: str | None,
    log_max_size_mb: int,
    log_max_files: int,
) -> None:
    """Join the BROKER (host or host:port) and compute a part of its model.

    Start potluck-broker on one machine first; it prints its address.
    """
    set_up_logs(log_level, log_file, log_max_size_mb, log_max_files)
    pin(cpus)  # before any thread of llama.cpp starts: threads inherit it
    threads = threads or default_threads()
    bound, advertised = addresses(broker, listen_address)
    settings = StageSettings(
        device=_checked_name(name or platform.node() or "stage"),
        models={**offers(models), **dict.fromkeys(fingerprints)},
        engine=engine,
        cache_dir=cache_dir(),
        listen_address=bound,
        data_port=data_port,
        advertise_address=advertised,
        threads=threads,
        capabilities=capabilities(threads),
        keep_trying=keep_trying,
    )
    code = run(serve(control_endpoint(broker), settings))
    sys.exit(code)


async def serve(broker_endpoint: str, settings: StageSettings) -> int:
    """Runs one stage until SIGINT, SIGTERM or the broker's refusal. Returns the exit code."""
    with contextlib.closing(ZmqTransport()) as transport:
        worker = StageWorker(transport, broker_endpoint, settings)
        stopped: list[signal.Signals] = []
        stopping: set[asyncio.Task[None]] = set()

        def stop(number: signal.Signals) -> None:
            stopped.append(number)
            stopping.add(asyncio.ensure_future(worker.stop(f"{number.name} came")))

        with stop_signals(stop):
            code = await worker.run()
        if worker.error is not None:
            click.echo(f"potluck-stage: {worker.error}", err=True)
        return 130 if stopped and stopped[0] is signal.SIGINT else code


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
    """This machine's address on the way to the host. A connected UDP socket knows it without sending anything."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise NoBrokerError(
            f"There is no way to the broker at {host}: {error.strerror or error}.",
            hint="Check the address and this machine's network.",
        ) from error


def pin(cpus: tuple[int, ...]) -> None:
    """Keeps this process to these cores. Raises UsageError where that can't be done."""
    if not cpus:
        return
    try:
        os.sched_setaffinity(0, cpus)
    except (AttributeError, OSError) as error:
        raise UsageError(
            f"This process can't be kept to core {', '.join(map(str, cpus))}.",
            hint="Name cores that exist (Linux only), or leave --cpu out.",
        ) from error


def default_threads() -> int:
    """Physical cores minus one, at least one; not more than this process may use."""
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return max(1, min(cores - 1, usable))


def capabilities(threads: int) -> Capabilities:
    """What this machine has, as the broker is told."""
    memory = psutil.virtual_memory()
    return Capabilities(
        cores=psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        threads=threads,
        memory_bytes=memory.total,
        free_memory_bytes=memory.available,
        cpu=platform.processor() or platform.machine(),
        system=f"{platform.system()} {platform.release()}",
    )


def _checked_name(name: str) -> str:
    # The stage's id is the name, a slash and six digits: at most 128 characters on the wire.
    if not 0 < len(name.encode()) <= limits.NAME_CHARS - 7:
        raise SettingsError(
            f"A device's name has 1 to {limits.NAME_CHARS - 7} bytes.", hint="Give a shorter --name."
        )
    return name


if __name__ == "__main__":
    main()
