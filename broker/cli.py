"""`potluck-broker`: reads the model's facts, opens the ports, serves until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import platform
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import click
import uvicorn
from click.core import ParameterSource

from potluck.broker.config import BrokerConfig
from potluck.broker.journal import Journal, default_path
from potluck.broker.machine import BrokerMachine
from potluck.broker.rest import make_app
from potluck.broker.server import BrokerServer
from potluck.model.architectures import rules_for
from potluck.model.exactness import rows_of_one_kernel
from potluck.model.facts import ModelFacts, read_facts
from potluck.model.paths import cache_dir
from potluck.model.prompt import ModelPrompts
from potluck.model.reference import reference
from potluck.model.verified import is_verified
from potluck.planner.even import plan_even
from potluck.planner.manual import ManualPlanner, parse_layers
from potluck.planner.measured import MeasuredPlanner
from potluck.planner.plan import Planner
from potluck.planner.shape import shape_of
from potluck.runtime.address import (
    CONTROL_PORT,
    REST_PORT,
    RESULTS_PORT,
    endpoint,
    lan_address,
    split_address,
)
from potluck.runtime.command import Command
from potluck.runtime.discovery import LocalNetwork, make_known
from potluck.runtime.finding import Advert
from potluck.runtime.interfaces import choose, choose_for_listener, is_loopback
from potluck.runtime.logs import LEVELS, set_up_logs
from potluck.runtime.loop import run
from potluck.runtime.settings import config_option
from potluck.runtime.signals import stop_signals
from potluck.runtime.zmq_transport import ZmqTransport
from potluck.wire import limits
from potluck.wire.errors import PortInUseError, SettingsError
from potluck.wire.ids import Epoch, StageId

log = logging.getLogger("potluck.broker")

WEB_STOP_S = 3.0
ANY = ("0.0.0.0", "*", "::")
"""Listening on every address."""


@click.command(
    "potluck-broker", cls=Command, context_settings={"auto_envvar_prefix": "POTLUCK", "show_default": True}
)
@config_option
@click.option("--model", "-m", required=True, type=click.Path(path_type=Path), help="The model, a GGUF file.")
@click.option("--alias", help="The name under which clients know the model.  [default: the file's name]")
@click.option("--name", help="This broker's name on the network.  [default: the host's name]")
@click.option(
    "--listen-address",
    help="Address for stages and clients.  [default: every one, or that of the network interface]",
)
@click.option("--network-interface", help="The network interface to use.  [default: all but virtual ones]")
@click.option(
    "--discovery/--no-discovery",
    default=True,
    help="Whether stages and clients on the network can find this broker.",
)
@click.option("--port", default=CONTROL_PORT, type=click.IntRange(0, 65535), help="Control port.")
@click.option("--results-port", default=RESULTS_PORT, type=click.IntRange(0, 65535), help="Port for results.")
@click.option("--http", default=f"127.0.0.1:{REST_PORT}", help="Address of the REST API; 'off' for none.")
@click.option(
    "--stages", default=1, type=click.IntRange(1, 256), help="Wait for this many stages before planning."
)
@click.option(
    "--layers",
    multiple=True,
    metavar="DEVICE=FIRST-LAST",
    help="Give a device these layers, both included. May be repeated; then all layers must be given.",
)
@click.option(
    "--plan",
    default="measured",
    type=click.Choice(["measured", "even"]),
    help="Measure devices and links for the best plan, or give every stage an even share.",
)
@click.option(
    "--users",
    default=1,
    type=click.IntRange(1, limits.USERS),
    help="People served at the same time: 1 plans for the least time per token, more for tokens per second.",
)
@click.option(
    "--standby",
    default="auto",
    type=click.Choice(["auto", "off"]),
    help="Keep further layers loaded where memory allows, so that a lost device is replaced at once.",
)
@click.option(
    "--reserve",
    multiple=True,
    metavar="DEVICE",
    help="This device serves only when others are lost. May be repeated.",
)
@click.option("--slots", default=8, type=click.IntRange(1, 256), help="Sequences served at the same time.")
@click.option(
    "--context",
    default=2048,
    type=click.IntRange(16, limits.PROMPT_TOKENS),
    help="Tokens of one sequence, answer included.",
)
@click.option("--chunk", default=64, type=click.IntRange(1, 4096), help="Prompt tokens in one micro-batch.")
@click.option("--queue", default=256, type=click.IntRange(0), help="Requests that may wait for a slot.")
@click.option(
    "--activation", default="auto", type=click.Choice(["auto", "f32", "f16"]), help="Numbers on the wire."
)
@click.option(
    "--exact/--no-exact", default=False, help="Same bits whatever shares a batch; prefill is slower."
)
@click.option("--heartbeat", default=1.0, type=click.FloatRange(0.01, 3600), help="Seconds between beats.")
@click.option(
    "--misses", default=3, type=click.IntRange(1, 1000), help="Beats missed before a stage is lost."
)
@click.option(
    "--request-timeout",
    default=0.0,
    type=click.FloatRange(0, limits.TIMEOUT_S),
    help="Seconds after which an unfinished request fails if its client named no time; 0: never.",
)
@click.option(
    "--drain-timeout",
    default=30.0,
    type=click.FloatRange(0, 86_400),
    help="Seconds that requests get to come to their end when the broker is stopped.",
)
@click.option(
    "--journal",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File in which accepted jobs survive.  [default: one per model in the user's state folder]",
)
@click.option("--no-journal", is_flag=True, help="Keep no journal and take no jobs.")
@click.option(
    "--jobs-keep-hours",
    default=168.0,
    type=click.FloatRange(0.0, 87_600.0),
    help="How long jobs that have ended are kept.",
)
@click.option("--announce", is_flag=True, hidden=True, help="Print the real addresses as one JSON line.")
@click.option("--log-level", default="info", type=click.Choice(LEVELS))
@click.option("--log-file", type=click.Path(), help="Log to this file instead of the terminal.")
@click.option("--log-max-size-mb", default=100, type=click.IntRange(1), hidden=True)
@click.option("--log-max-files", default=5, type=click.IntRange(1), hidden=True)
def main(
    config: Path | None,
    model: Path,
    alias: str | None,
    name: str | None,
    listen_address: str | None,
    network_interface: str | None,
    discovery: bool,
    port: int,
    results_port: int,
    http: str,
    stages: int,
    layers: tuple[str, ...],
    plan: str,
    users: int,
    standby: str,
    reserve: tuple[str, ...],
    slots: int,
    context: int,
    chunk: int,
    queue: int,
    activation: str,
    exact: bool,
    heartbeat: float,
    misses: int,
    request_timeout: float,
    drain_timeout: float,
    journal: Path | None,
    no_journal: bool,
    jobs_keep_hours: float,
    announce: bool,
    log_level: str,
    log_file: str | None,
    log_max_size_mb: int,
    log_max_files: int,
) -> None:
    """Serve MODEL with the stages that join.

    Start this on one machine, then potluck-stage on each device: it finds this broker, or is given its address.
    """
    set_up_logs(log_level, log_file, log_max_size_mb, log_max_files)
    facts = read_facts(model)
    settings = BrokerConfig(
        heartbeat_s=heartbeat,
        misses=misses,
        slots=slots,
        context_tokens=context,
        chunk_tokens=chunk,
        queue_limit=queue,
        request_timeout_s=request_timeout,
        drain_timeout_s=drain_timeout,
        min_stages=stages,
        activation="f32" if activation == "auto" else activation,
        exact=exact,
        users=users,
        measure=plan == "measured",
        standby=standby == "auto",
        reserve=reserve,
        by_hand=bool(layers),
        replay_tokens=rows_of_one_kernel(facts),
    )
    planner: Planner
    if layers:
        planner = ManualPlanner(parse_layers(layers), settings.demand)
    else:
        planner = MeasuredPlanner(settings.demand) if plan == "measured" else plan_even
    where = Where(
        listen_address or default_address(network_interface),
        port,
        results_port,
        http,
        announce,
        known_as=(name or platform.node() or "broker") if discovery else None,
        network_interface=network_interface,
    )
    said = [click.get_current_context().get_parameter_source(flag) for flag in ("journal", "no_journal")]
    if no_journal and journal is not None and said == [ParameterSource.COMMANDLINE] * 2:
        raise SettingsError("--journal and --no-journal exclude each other.", hint="Give one of them.")
    file = None if no_journal else journal or default_path(facts.fingerprint)
    keeping = Keeping(file, jobs_keep_hours * 3600.0)
    sys.exit(run(serve(facts, alias or model.stem, settings, planner, where, keeping)))


@dataclass(frozen=True, slots=True)
class Keeping:
    """Where jobs are written, None for nowhere, and for how many seconds they are kept once they have ended."""

    file: Path | None
    keep_s: float


@dataclass(frozen=True, slots=True)
class Where:
    """What to listen on, and whether others can find it.

    `announce` prints the real addresses as one JSON line. `known_as` is the name on the network, None to be hidden.
    """

    address: str
    port: int
    results_port: int
    http: str
    announce: bool
    known_as: str | None = None
    network_interface: str | None = None

    @property
    def is_known(self) -> bool:
        """Whether the broker makes itself known; nobody else could reach it on the loopback."""
        return self.known_as is not None and not is_loopback(self.address)


def default_address(network_interface: str | None) -> str:
    """Every address, or the first one of an interface that was named. Raises SettingsError if it has none."""
    if network_interface is None:
        return "0.0.0.0"
    return str(choose(LocalNetwork().interfaces(), network_interface).addresses[0].ip)


def make_machine(
    facts: ModelFacts,
    name: str,
    config: BrokerConfig,
    prompts: ModelPrompts,
    planner: Planner,
    results_endpoint: Callable[[StageId], str],
    first_epoch: Epoch,
) -> BrokerMachine:
    """The core for one model. Raises UnsupportedArchitectureError, SettingsError before anything is opened."""
    if not 0 < len(name) <= limits.NAME_CHARS:
        raise SettingsError(
            f"The model's name has {len(name)} characters; up to {limits.NAME_CHARS} can be.",
            hint="Give a short --alias.",
        )
    rules = rules_for(facts, allow_unlisted=is_verified(cache_dir(), facts))
    shape = shape_of(facts, rules, name)
    if isinstance(planner, ManualPlanner):
        planner.check(shape)
    return BrokerMachine(
        config,
        reference(facts, name),
        shape,
        prompts,
        planner,
        results_endpoint,
        version("potluck"),
        first_epoch=first_epoch,
    )


async def serve(
    facts: ModelFacts, name: str, config: BrokerConfig, planner: Planner, where: Where, keeping: Keeping
) -> int:
    """Runs one broker until SIGINT or SIGTERM, and then until its requests are done. Returns the exit code."""
    with contextlib.ExitStack() as stack:
        transport = ZmqTransport()
        stack.callback(transport.close)
        prompts = ModelPrompts(facts, datetime.now)
        stack.callback(prompts.close)
        rest = None if where.http == "off" else _bind_http(where.http)
        if rest is not None:
            stack.callback(rest.close)

        def results(_: StageId) -> str:
            return _on_any_host(
                server.results_endpoint
            )  # asked when stages are assigned: the port is known then

        journal, epoch = None, int(time.time())
        if keeping.file is not None:
            journal = Journal.open(keeping.file, facts.fingerprint)
            stack.callback(journal.close)
            epoch = journal.first_epoch(epoch)
        # Plans are rarer than seconds, so epochs grow over restarts, too; with a journal also if the clock is set back.
        machine = make_machine(facts, name, config, prompts, planner, results, Epoch(epoch))
        server = BrokerServer(
            transport,
            machine,
            prompts,
            control=endpoint(where.address, where.port),
            results=endpoint(where.address, where.results_port),
            random_seed=lambda: secrets.randbits(32),
            journal=journal,
            jobs_keep_s=keeping.keep_s,
        )
        server.start()
        log.info(
            "Model %s: %s, %d layers, %.1f GB.",
            name,
            facts.architecture,
            facts.layers,
            facts.file_bytes / 1e9,
        )
        if journal is not None:
            log.info("Jobs: %s, %d of them without an end yet.", journal.path, journal.unfinished)
        log.info("Stages and clients: %s", server.control_endpoint.removeprefix("tcp://"))
        given = f"potluck-stage {_dial(server, where.address)} --model FILE"
        if where.is_known:
            log.info("On each device: potluck-stage --model FILE, or with the address: %s", given)
        else:
            log.info("On each device: %s", given)

        def ask_to_close(number: signal.Signals) -> None:
            server.ask_to_close(number.name)

        with stop_signals(ask_to_close, ask_to_close):
            web = None
            if rest is not None:
                web = _web(server)
                serving = asyncio.create_task(web.serve(sockets=[rest]))
                log.info("REST: http://%s:%d/v1", *rest.getsockname()[:2])
            if where.announce:
                web_port = None if rest is None else rest.getsockname()[1]
                real = {
                    "control": server.control_endpoint,
                    "results": server.results_endpoint,
                    "http_port": web_port,
                }
                click.echo(json.dumps(real))
            known = asyncio.create_task(_make_known(facts, name, server, where)) if where.is_known else None
            await server.wait_closed()
            if known is not None:
                known.cancel()
                await asyncio.wait([known])
            if web is not None:
                web.should_exit = True
                await asyncio.wait([serving], timeout=WEB_STOP_S)
            await server.close()
    log.info("Closed.")
    return 0


async def _make_known(facts: ModelFacts, name: str, server: BrokerServer, where: Where) -> None:
    advert = Advert(where.known_as or "", name, facts.fingerprint, facts.layers, version("potluck"))
    port = int(server.control_endpoint.rpartition(":")[2])
    try:
        await make_known(advert, port, where.address, where.network_interface, LocalNetwork())
    except Exception:  # a fault of ours must not cost a broker that can be given by its address
        log.exception("This broker can't be found by itself any more. Give stages its address.")


def _on_any_host(bound: str) -> str:
    """0.0.0.0 stands for the host by which a stage dials this broker: stages on other networks see other addresses."""
    return endpoint("0.0.0.0", bound.rpartition(":")[2])


def _dial(server: BrokerServer, address: str) -> str:
    """How other machines reach this broker, the port left out where it is the usual one."""
    host = address
    if address in ANY:
        addresses = choose_for_listener(LocalNetwork().interfaces(), None, address).addresses
        host = str(addresses[0].ip) if addresses else lan_address()
    port = int(server.control_endpoint.rpartition(":")[2])
    return host if port == CONTROL_PORT else f"{host}:{port}"


def _bind_http(http: str) -> socket.socket:
    host, port = split_address(http, REST_PORT, lowest=0)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise PortInUseError(
            f"The REST API can't listen on {host}:{port}: {error.strerror}.",
            hint="Choose another address with --http HOST:PORT, or --http off.",
        ) from error
    listener.listen(128)
    return listener


class _Web(uvicorn.Server):
    """Leaves signals to the broker, which ends the web server itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _web(server: BrokerServer) -> _Web:
    app = make_app(server.gateway, new_id=lambda: secrets.token_hex(12), clock=time.time, jobs=server.jobs)
    config = uvicorn.Config(
        app, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1
    )
    return _Web(config)


if __name__ == "__main__":
    main()
