"""Clusters and commands as real processes, for the tests here and in integration/.

A `World` is a broker and its stages with an event loop of its own, so that the tests of a module share one. Whoever
makes one also checks that it ends: no process left, no traceback in any log. Everything waits for an event until a
deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import psutil

from potluck.runtime.client import Client
from potluck.tools.local import Child, LocalCluster
from potluck.wire.messages import Delta, StateView

T = TypeVar("T")

DEADLINE_S = 60.0
"""For whatever takes a second or two on an idle machine."""
ENDED_BY_US = {0, -signal.SIGKILL}
FAST = ("--heartbeat", "0.2", "--misses", "10")
"""A lost stage is noticed after 2 s; a machine under load still beats in time."""


class World:
    """One cluster. `run` takes a coroutine through the loop that the cluster's processes live on."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.cluster = LocalCluster(model, folder)
        self.runner = asyncio.Runner()
        self.children: list[Child] = []
        """Every process there ever was, also those that were replaced."""

    def run(self, work: Coroutine[Any, Any, T], within_s: float = DEADLINE_S) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(within_s):
                return await work

        return self.runner.run(bounded())

    async def start(self, stages: int, *broker_options: str) -> None:
        """A broker that waits for `stages` stages, those stages, and a chain that serves."""
        await self.start_broker("--stages", str(stages), *broker_options)
        for index in range(stages):
            await self.start_stage(f"stage-{index + 1}")
        await self.ready()

    async def start_broker(self, *options: str) -> None:
        try:
            await self.cluster.start_broker(*options)
        finally:
            if self.cluster.broker is not None:
                self.children.append(self.cluster.broker)

    async def start_stage(self, name: str, *more: str) -> Child:
        child = await self.cluster.start_stage(name, *more)
        self.children.append(child)
        return child

    async def ready(self) -> StateView:
        async with Client(self.address) as client:
            views = [view async for view in self.cluster.wait_ready(client, DEADLINE_S)]
        return views[-1]

    async def until(self, wanted: Callable[[StateView], bool]) -> StateView:
        """The first state of the cluster that is as wanted."""
        async with Client(self.address) as client:
            return await eventually(client.state, wanted)

    @property
    def address(self) -> str:
        return self.cluster.address

    @property
    def http(self) -> str:
        return self.cluster.http

    @property
    def broker(self) -> Child:
        assert self.cluster.broker is not None
        return self.cluster.broker

    @property
    def listening(self) -> set[int]:
        """The broker's ports: control, results and REST."""
        connections = psutil.Process(self.broker.process.pid).net_connections("tcp")
        return {made.laddr.port for made in connections if made.status == psutil.CONN_LISTEN}

    def stage(self, name: str) -> Child:
        return next(child for child in reversed(self.cluster.stages) if child.name == name)

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.http}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
        )

    def rest(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.http, timeout=DEADLINE_S)

    async def close(self) -> None:
        await self.cluster.stop()

    def check_ended(self) -> None:
        """Nothing runs any more, nothing ended by itself in a bad way, nobody saw a traceback."""
        for child in self.children:
            log = child.log.read_text(errors="replace")
            assert "Traceback" not in log, f"{child.name}:\n{log}"
            assert not psutil.pid_exists(child.process.pid), f"{child.name} is left over"
            assert child.process.returncode in ENDED_BY_US, f"{child.name}: {child.process.returncode}\n{log}"


@contextlib.contextmanager
def world(model: Path, folder: Path, stages: int, *broker_options: str) -> Iterator[World]:
    """A cluster that serves; afterwards everything has ended well."""
    made = World(model, folder)
    with made.runner:
        try:
            made.run(made.start(stages, *broker_options))
            yield made
        finally:
            made.run(made.close())
    made.check_ended()


async def eventually(look: Callable[[], Awaitable[T]], wanted: Callable[[T], bool]) -> T:
    """What `look` gives, as soon as it is as wanted; AssertionError with the last look after the deadline."""
    end = time.monotonic() + DEADLINE_S / 2
    while True:
        found = await look()
        if wanted(found):
            return found
        assert time.monotonic() < end, f"still {found}"
        await asyncio.sleep(0.02)


def idle(view: StateView) -> bool:
    """Whether nobody is served and nobody waits."""
    return (view.running, view.queued) == (0, 0)


def serving(stages: int) -> Callable[[StateView], bool]:
    """Whether a chain of this many stages serves."""
    return lambda view: view.ready and sum(stage.chain is not None for stage in view.stages) == stages


async def text_of(stream: Any) -> tuple[list[str], list[int]]:
    """The pieces and the tokens of one of the Client's streams."""
    pieces: list[str] = []
    tokens: list[int] = []
    async for event in stream:
        if isinstance(event, Delta):
            pieces.append(event.text)
            tokens += event.tokens
    return pieces, tokens


# ---- commands


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        return self.err.strip().splitlines()


COMMANDS = {
    "potluck": "potluck.tools.cli",
    "potluck-broker": "potluck.broker.cli",
    "potluck-stage": "potluck.stage.cli",
}


def command_line(name: str, *arguments: str | Path) -> list[str]:
    return [sys.executable, "-P", "-m", COMMANDS[name], *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    """This process's, without settings that would change what a command does."""
    ours = {"POTLUCK_CACHE_DIR", "POTLUCK_STATE_DIR"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("POTLUCK_") or k in ours}
    return {**kept, "COLUMNS": "200", "NO_COLOR": "1", **more}


def command(
    name: str, *arguments: str | Path, stdin: str = "", within_s: float = DEADLINE_S, **env: str
) -> Ended:
    """Runs a command to its end; it may leave no traceback and no process behind."""
    begin = time.monotonic()
    process = subprocess.Popen(
        command_line(name, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(**env),
        start_new_session=True,
        text=True,
        encoding="utf-8",
        errors="surrogateescape",  # a test can write and read bytes that are no text
    )
    with process:
        try:
            out, err = process.communicate(stdin, timeout=within_s)
        finally:
            left = of_session(process.pid)
            if left:
                os.killpg(process.pid, signal.SIGKILL)
    assert "Traceback" not in err, err
    assert not left, f"left over: {left}"
    return Ended(process.returncode, out, err, time.monotonic() - begin)


def of_session(session: int) -> list[str]:
    """The processes of a session that still run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    """A port of the loopback that another program listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def free_port() -> int:
    """A port that nobody has now. For peers that are not there; everything else binds port 0."""
    with taken_port() as port:
        return port
