"""A cluster on this machine: one broker and some stages as real processes, for the demo, the benchmarks and tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from potluck.runtime.client import Client
from potluck.wire.errors import PotluckError, StageError
from potluck.wire.messages import StateView

START_S = 30.0
STOP_S = 5.0


@dataclass(slots=True)
class Child:
    """One process of the cluster and its log."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self.process.returncode is None

    def last_lines(self, count: int = 5) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to the process."""
        if self.alive:
            self.process.send_signal(number)


@dataclass(slots=True)
class LocalCluster:
    """A running broker and its stages. `address` is the broker's, `http` the REST API's base URL."""

    model: Path
    folder: Path
    address: str = ""
    http: str = ""
    broker: Child | None = None
    stages: list[Child] = field(default_factory=list)
    _again: list[str] = field(default_factory=list)
    """Options that start the broker once more on the same ports."""
    _brokers: int = 0

    async def start_stage(self, name: str, *more: str, cpu: int | None = None, threads: int = 1) -> Child:
        """One more stage."""
        pinned = [] if cpu is None else ["--cpu", str(cpu)]
        child = await self._spawn(
            name, "potluck.stage.cli", self.address, "--model", str(self.model), "--name", name,
            "--threads", str(threads), *pinned, *more,
        )  # fmt: skip
        self.stages.append(child)
        return child

    async def start_anew(self, child: Child, *more: str) -> Child:
        """The same stage again, as a new process, once the old one has ended. Raises TimeoutError if it does not."""
        await asyncio.wait_for(child.process.wait(), STOP_S)
        self.stages.remove(child)
        return await self.start_stage(child.name, *more)

    async def restart_broker(self) -> None:
        """A broker as the last one was, in its place, after that has ended."""
        await self.start_broker(*self._again)

    async def start_broker(self, *options: str) -> None:
        """The broker, on free ports of the loopback."""
        self._brokers += 1
        name = "broker" if self._brokers == 1 else f"broker-{self._brokers}"
        self.broker = await self._spawn(
            name, "potluck.broker.cli", "--model", str(self.model), "--listen-address", "127.0.0.1",
            "--announce", *_defaults(options), *options, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert self.broker.process.stdout is not None
        try:
            line = await asyncio.wait_for(self.broker.process.stdout.readline(), START_S)
            where = json.loads(line)
        except (TimeoutError, ValueError):
            raise StageError(f"The broker did not start: {self.broker.last_lines()}") from None
        self.address = where["control"].removeprefix("tcp://")
        self.http = f"http://127.0.0.1:{where['http_port']}" if where["http_port"] else ""
        ports = {
            "--port": where["control"].rpartition(":")[2],
            "--results-port": where["results"].rpartition(":")[2],
            "--http": f"127.0.0.1:{where['http_port']}" if where["http_port"] else "off",
        }
        self._again = [*options, *(part for flag, port in ports.items() for part in (flag, port))]

    async def wait_ready(self, client: Client, timeout_s: float = 120.0) -> AsyncIterator[StateView]:
        """The cluster's state again and again until all chains serve. Raises the error that keeps them from that."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            for child in (self.broker, *self.stages):
                if child is not None and not child.alive:
                    raise StageError(
                        f"{child.name} ended with status {child.process.returncode}:\n{child.last_lines()}"
                    )
            view = await client.state(timeout_s=10.0)
            yield view
            if view.ready and not any(stage.state == "loading" for stage in view.stages):
                return
            if asyncio.get_running_loop().time() > deadline:
                raise PotluckError(f"No chain within {timeout_s:g} s: {view.detail}")
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Ends every process, politely first."""
        children = [child for child in (*self.stages, self.broker) if child is not None]
        for child in children:
            child.kill(signal.SIGCONT)  # one that a test froze can't take the next signal
            child.kill(signal.SIGTERM)
        for child in children:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.process.wait(), STOP_S)
            child.kill()
            await child.process.wait()

    async def _spawn(
        self, name: str, module: str, *arguments: str, stdout: int = asyncio.subprocess.DEVNULL
    ) -> Child:
        log = self.folder / f"{name}.log"
        with log.open("ab") as sink:  # a process that is started anew goes on with the log of the one before
            process = await asyncio.create_subprocess_exec(
                # -P: from the repository's root, its folders would hide packages of the same name.
                sys.executable, "-P", "-m", module, *arguments, stdout=stdout, stderr=sink, env=self._environment(),
            )  # fmt: skip
        return Child(name, process, log)

    def _environment(self) -> dict[str, str]:
        """This process's environment without settings meant for one particular broker or stage.

        The state folder is the cluster's own: no journal is shared with another broker, or outlives this one.
        """
        kept = {"POTLUCK_CACHE_DIR"}
        mine = {k: v for k, v in os.environ.items() if not k.startswith("POTLUCK_") or k in kept}
        return {**mine, "POTLUCK_STATE_DIR": str(self.folder / "state")}


def _defaults(options: Sequence[str]) -> list[str]:
    """Free ports, and an even plan: stages of one machine that are measured at the same time disturb each other, and so
    do stages that load layers for a loss beside what they serve.

    The broker is stopped together with its stages, so it waits for no request.
    """
    wanted = {
        "--port": "0", "--results-port": "0", "--http": "127.0.0.1:0", "--plan": "even", "--drain-timeout": "0",
        "--standby": "off",
    }  # fmt: skip
    return [part for flag, value in wanted.items() if flag not in options for part in (flag, value)]


def stage_name(index: int) -> str:
    """The name of a stage that was given none, counted from 0."""
    return f"stage-{index + 1}"


@contextlib.asynccontextmanager
async def local_cluster(
    model: Path, stages: int, *broker_options: str, cpus: Sequence[int] = (), names: Sequence[str] = ()
) -> AsyncIterator[LocalCluster]:
    """A broker and `stages` stages of one thread each; stage i runs on core cpus[i] if given. Ended on leaving."""
    with tempfile.TemporaryDirectory(prefix="potluck-") as folder:
        cluster = LocalCluster(model, Path(folder))
        try:
            await cluster.start_broker(*(["--stages", str(stages)] if stages else []), *broker_options)
            for index in range(stages):
                name = names[index] if index < len(names) else stage_name(index)
                await cluster.start_stage(name, cpu=cpus[index] if index < len(cpus) else None)
            yield cluster
        finally:
            await cluster.stop()
