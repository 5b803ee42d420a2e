"""`potluck-stage`: joins a broker, and computes the layers it is given until it is told to stop."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import click

from potluck.model.paths import cache_dir
from potluck.runtime.address import control_endpoint
from potluck.runtime.command import Command
from potluck.runtime.discovery import LocalNetwork, Wanted
from potluck.runtime.logs import LEVELS, set_up_logs
from potluck.runtime.loop import run
from potluck.runtime.settings import config_option
from potluck.stage.capabilities import capabilities, default_threads
from potluck.stage.engines import NAMES
from potluck.stage.faults import make_fault
from potluck.stage.joining import interface_address, serve
from potluck.stage.machine_facts import Owner
from potluck.stage.restart import restart
from potluck.stage.settings import DRAIN_TIMEOUT_S, HANG_S, StageSettings, offers
from potluck.stage.witness import witness
from potluck.wire import limits
from potluck.wire.errors import EngineHangsError, SettingsError, UsageError


@click.command(
    "potluck-stage", cls=Command, context_settings={"auto_envvar_prefix": "POTLUCK", "show_default": True}
)
@click.argument("broker", required=False, envvar="POTLUCK_BROKER")
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
@click.option("--network-interface", help="The network interface to use.  [default: all but virtual ones]")
@click.option(
    "--discovery/--no-discovery", default=True, help="Whether to look for the broker if none is named."
)
@click.option(
    "--discovery-interval", default=10.0, type=click.FloatRange(1, 3600),
    help="Seconds of looking until it says what was tried; then it looks again.",
)  # fmt: skip
@click.option(
    "--peer", "peers", multiple=True, envvar="POTLUCK_PEER",
    help="Try this address, too, where looking does not work. May be repeated.",
)  # fmt: skip
@click.option(
    "--data-port", default=0, type=click.IntRange(0, 65535), help="Port for micro-batches; 0: any free one."
)
@click.option(
    "--threads", type=click.IntRange(1, 1024), help="Compute threads.  [default: physical cores minus one]"
)
@click.option(
    "--max-memory-gb",
    type=click.FloatRange(0, min_open=True),
    help="Memory that Potluck may take.  [default: what is free]",
)
@click.option(
    "--max-vram-gb", type=click.FloatRange(0), help="GPU memory that it may take.  [default: what is free]"
)
@click.option("--vram-pool-gb", type=click.FloatRange(0), help="GPU memory set aside for weights and caches.")
@click.option(
    "--cpu-fallback/--no-cpu-fallback", default=True,
    help="Whether the CPU computes layers that the GPU has no room for.",
)  # fmt: skip
@click.option("--mlock/--no-mlock", default=False, help="Whether to keep the weights in memory for good.")
@click.option(
    "--cpu", "cpus", multiple=True, type=click.IntRange(0), envvar="POTLUCK_CPU",
    help="Run on this core only. May be repeated.",
)  # fmt: skip
@click.option("--keep-trying/--give-up", default=False, help="What to do when the broker refuses this stage.")
@click.option(
    "--drain-timeout", default=DRAIN_TIMEOUT_S, type=click.FloatRange(0, 86_400),
    help="Seconds that it serves on after Ctrl-C or SIGTERM, until others have taken over; 0: not at all.",
)  # fmt: skip
@click.option(
    "--hang-timeout",
    default=HANG_S,
    type=click.FloatRange(0, 86_400, min_open=True),
    hidden=True,
)
@click.option("--engine", default="llama", type=click.Choice(NAMES), hidden=True)
@click.option("--fingerprint", "fingerprints", multiple=True, envvar="POTLUCK_FINGERPRINT", hidden=True)
@click.option(
    "--fault", hidden=True, help="A fault on purpose, for tests: hang-after:NUMBER, hang-when:FILE."
)
@click.option("--log-level", default="info", type=click.Choice(LEVELS))
@click.option("--log-file", type=click.Path(), help="Log to this file instead of the terminal.")
@click.option("--log-max-size-mb", default=100, type=click.IntRange(1), hidden=True)
@click.option("--log-max-files", default=5, type=click.IntRange(1), hidden=True)
def main(
    broker: str | None,
    config: Path | None,
    models: tuple[Path, ...],
    name: str | None,
    listen_address: str | None,
    network_interface: str | None,
    discovery: bool,
    discovery_interval: float,
    peers: tuple[str, ...],
    data_port: int,
    threads: int | None,
    max_memory_gb: float | None,
    max_vram_gb: float | None,
    vram_pool_gb: float | None,
    cpu_fallback: bool,
    mlock: bool,
    cpus: tuple[int, ...],
    keep_trying: bool,
    drain_timeout: float,
    hang_timeout: float,
    engine: str,
    fingerprints: tuple[str, ...],
    fault: str | None,
    log_level: str,
    log_file: str | None,
    log_max_size_mb: int,
    log_max_files: int,
) -> None:
    """Join a broker and compute a part of its model.

    Start potluck-broker on one machine first. It is looked for on the local network, unless its address is given as
    BROKER (host or host:port).
    """
    set_up_logs(log_level, log_file, log_max_size_mb, log_max_files)
    pin(cpus)  # before any thread of llama.cpp starts: threads inherit it
    threads = threads or default_threads()
    if broker is not None:
        control_endpoint(broker)  # a mistake in it is said before files are read
    elif not discovery:
        raise SettingsError(
            "No broker is named, and looking for one is off.",
            hint="Give its address, such as potluck-stage 192.168.1.10, or leave --no-discovery out.",
        )
    network = LocalNetwork()
    if network_interface is not None:
        listen_address = listen_address or interface_address(network, network_interface)
    owner = Owner(max_memory_gb, max_vram_gb, vram_pool_gb, cpu_fallback)
    offered = {**offers(models), **dict.fromkeys(fingerprints)}
    settings = StageSettings(
        device=_checked_name(name or platform.node() or "stage"),
        models=offered,
        engine=engine,
        cache_dir=cache_dir(),
        data_port=data_port,
        threads=threads,
        capabilities=capabilities(threads, owner, models, llama=engine == "llama"),
        mlock=mlock,
        keep_trying=keep_trying,
        drain_timeout_s=drain_timeout,
        hang_s=hang_timeout,
        before_batch=make_fault(fault),
    )
    wanted = Wanted(network_interface, peers, frozenset(offered), discovery_interval)
    try:
        with witness(settings.device) as watching:
            code = run(serve(broker, settings, listen_address, wanted, network, watching))
    except EngineHangsError as error:
        restart(error)
    sys.exit(code)


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


def _checked_name(name: str) -> str:
    # The stage's id is the name, a slash and six digits: at most 128 characters on the wire.
    if not 0 < len(name.encode()) <= limits.NAME_CHARS - 7:
        raise SettingsError(
            f"A device's name has 1 to {limits.NAME_CHARS - 7} bytes.", hint="Give a shorter --name."
        )
    return name


if __name__ == "__main__":
    main()
