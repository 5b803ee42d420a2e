"""`make soak`: an hour at home in some minutes, with real processes, and what they hold before, during and after it.

A broker and some stages serve short requests of several people at once while devices join, leave, sleep and are killed.
Four times everything stands still for a moment and is read: at the start, after one and two thirds, and at the end
(`soak_census`). At last everything is stopped, and nothing may be left: no process, no port, no file that is not meant
to stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import click
import psutil
from rich.console import Console
from rich.table import Table

from potluck.runtime.client import Client
from potluck.runtime.command import Command, run
from potluck.tools.console import make_console
from potluck.tools.demo import demo_model
from potluck.tools.local import LocalCluster
from potluck.tools.soak_census import MB, Census, Reading, grown, read
from potluck.tools.soak_churn import AT_READINGS, STAYS, Churn
from potluck.tools.soak_load import Person, Tally
from potluck.wire.errors import PotluckError
from potluck.wire.messages import Holds, StateView

OPTIONS = (
    "--exact", "--slots", "8", "--context", "128", "--heartbeat", "0.2", "--misses", "8", "--log-level", "warning",
    "--standby", "auto",
)  # fmt: skip
"""Five beats in the time of one: what takes minutes at home takes seconds here."""
QUIET_S = 60.0
LOOK_S = 0.25
SAME_LOOKS = 4
"""Nothing is about to change any more when so many looks saw the same."""


@dataclass(frozen=True, slots=True)
class Soak:
    """What is to be done."""

    model: Path
    requests: int = 2000
    people: int = 8
    acts: int = 75
    """Comings and goings of devices, evenly among the requests."""
    pause_s: float = 1.0
    """Between two of them."""
    seed: int = 1


@dataclass(slots=True)
class SoakReport:
    """What came of it. `faults` is empty if all is well."""

    soak: Soak
    seconds: float = 0.0
    tally: Tally = field(default_factory=Tally)
    churn: dict[str, int] = field(default_factory=dict)
    censuses: list[Census] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(
            {
                "bench": "soak",
                "model": self.soak.model.name,
                "seed": self.soak.seed,
                "seconds": round(self.seconds, 1),
                "requests": dict(self.tally.ends),
                "refused": self.tally.refused,
                "devices": self.churn,
                "readings": [
                    {
                        "at": census.name,
                        "seconds": round(census.seconds, 1),
                        "requests": census.requests,
                        "processes": {name: reading.to_dict() for name, reading in census.readings.items()},
                    }
                    for census in self.censuses
                ],
                "faults": self.faults,
            }
        )

    def print(self, console: Console) -> None:
        """For people."""
        console.print(
            f"{self.soak.model.name}: {self.tally.ended} requests in {self.seconds:.0f} s "
            f"({_counted(self.tally.ends)}; {self.tally.refused} sent again).",
            highlight=False,
        )
        console.print(f"Devices: {_counted(self.churn)}.", highlight=False)
        table = Table(box=None, header_style="bold", pad_edge=False)
        for title in ("reading", "requests", "process", "MB", "of that own", "slices", "files", "threads"):
            table.add_column(title, justify="left" if title in ("reading", "process") else "right")
        for census in self.censuses:
            for index, (name, reading) in enumerate(census.readings.items()):
                first = (census.name, str(census.requests)) if index == 0 else ("", "")
                table.add_row(*first, name, *_cells(reading))
        console.print(table)
        for fault in self.faults:
            console.print(f"FAULT: {fault}", highlight=False, markup=False)
        if not self.faults:
            console.print("Every request ended once; nothing grew, nothing is left.", highlight=False)


def _cells(reading: Reading) -> tuple[str, ...]:
    return (
        f"{reading.rss_bytes / MB:.1f}",
        f"{reading.own_bytes / MB:.1f}",
        f"{reading.held_bytes / MB:.1f}",
        str(reading.files),
        str(reading.threads),
    )


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "nothing"


class _Run:
    """One soak under way."""

    def __init__(self, soak: Soak, cluster: LocalCluster, tell: Callable[[str], None]) -> None:
        self.report = SoakReport(soak)
        self._soak = soak
        self._cluster = cluster
        self._tell = tell
        self._chance = random.Random(soak.seed)
        self._churn = Churn(cluster, self._chance)
        self._left = self._asked = 0
        self._begun_s = 0.0

    async def run(self) -> None:
        soak, report, tally = self._soak, self.report, self.report.tally
        await self._cluster.start_broker("--stages", str(1 + len(AT_READINGS)), *OPTIONS)
        await self._churn.begin()
        self._begun_s = time.monotonic()
        await self._read("start")
        for part, name in enumerate(("a third", "two thirds", "end"), start=1):
            self._left = soak.requests * part // 3 - tally.ended
            acts = soak.acts * part // 3 - self._churn.acts
            async with asyncio.TaskGroup() as group:
                group.create_task(self._churn.run(acts, soak.pause_s))
                for number in range(soak.people):
                    group.create_task(self._person(number))
            await self._read(name)
        report.churn = dict(self._churn.done)
        report.seconds = time.monotonic() - self._begun_s
        report.faults += [*tally.faults, *self._churn.faults, *grown(report.censuses)]
        if tally.ended != soak.requests:
            report.faults.append(f"{tally.ended} of {soak.requests} requests ended")

    async def _person(self, number: int) -> None:
        where = self._cluster
        person = Person(number, where.address, where.http, self.report.tally, self._chance)
        try:
            while self._left > 0:
                self._left -= 1
                self._asked += 1
                await self._churn.reached((self._asked - 1) * self._soak.acts // self._soak.requests)
                await person.ask()
        finally:
            await person.close()

    async def _read(self, name: str) -> None:
        """Takes a reading when everything stands still."""
        await self._churn.as_at_readings()
        async with Client(self._cluster.address) as client:
            view = await self._quiet(client)
        readings = await self._settled({stage.device: stage.holds.memory_bytes for stage in view.stages})
        tally = self.report.tally
        census = Census(name, time.monotonic() - self._begun_s, tally.ended, readings)
        self.report.censuses.append(census)
        broker = readings["broker"]
        self._tell(f"{name}: {tally.ended} requests, broker {' '.join(_cells(broker))}")

    async def _quiet(self, client: Client) -> StateView:
        """Waits until nobody is served, all devices are there, and what they hold stays the same for some looks.

        Raises PotluckError.
        """
        names = {STAYS, *AT_READINGS}
        deadline = time.monotonic() + QUIET_S
        same = 0
        held: Mapping[str, Holds] = {}
        while True:
            view = await client.state(timeout_s=QUIET_S)
            holds = {stage.device: stage.holds for stage in view.stages}
            same = same + 1 if _stands_still(view, names) and holds == held else 0
            if same >= SAME_LOOKS:
                return view
            held = holds
            if time.monotonic() > deadline:
                raise PotluckError(f"The cluster does not come to rest: {view}")
            await asyncio.sleep(LOOK_S)

    async def _settled(self, held: Mapping[str, int]) -> dict[str, Reading]:
        """Readings once the numbers of files and threads have stopped changing; by device, what its slices take."""
        assert self._cluster.broker is not None
        pids = {"broker": self._cluster.broker.process.pid}
        pids |= {child.name: child.process.pid for child in self._cluster.stages}
        deadline = time.monotonic() + QUIET_S
        same, last = 0, {name: read(pid, held.get(name, 0)) for name, pid in pids.items()}
        while same < SAME_LOOKS and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_S)
            now = {name: read(pid, held.get(name, 0)) for name, pid in pids.items()}
            same = same + 1 if all(now[name].counts == last[name].counts for name in now) else 0
            last = now
        return last

    def check_left(self, ports: list[int], before: set[int]) -> None:
        """Whether anything is left after everybody has ended."""
        faults, cluster = self.report.faults, self._cluster
        for child in (*cluster.stages, *([cluster.broker] if cluster.broker else [])):
            if child.process.returncode != 0:
                faults.append(f"{child.name} ended with {child.process.returncode}")
        for process in psutil.Process().children(recursive=True):
            if process.pid not in before:
                faults.append(f"a process is left: {process}")
        for port in ports:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
                faults.append(f"somebody listens on port {port}")
        for path in sorted(cluster.folder.rglob("*")):
            if path.is_file() and not _may_stay(path):
                faults.append(f"a file is left: {path.relative_to(cluster.folder)}")
        for log in sorted(cluster.folder.glob("*.log")):
            if "Traceback" in log.read_text(errors="replace"):
                faults.append(f"a traceback is in {log.name}")


def _stands_still(view: StateView, names: set[str]) -> bool:
    there = {stage.device for stage in view.stages}
    loading = any(stage.state == "loading" or "loads" in stage.detail for stage in view.stages)
    return view.ready and not loading and there == names and (view.running, view.queued) == (0, 0)


def _may_stay(path: Path) -> bool:
    """Logs, slices, and the journal without the files that SQLite keeps beside an open one."""
    return path.suffix in (".log", ".gguf", ".sqlite3", ".json", ".lock")


@contextlib.contextmanager
def _cache(folder: Path) -> Iterator[None]:
    """Slices are written there, and nowhere else."""
    before = os.environ.get("POTLUCK_CACHE_DIR")
    os.environ["POTLUCK_CACHE_DIR"] = str(folder / "cache")
    try:
        yield
    finally:
        if before is None:
            del os.environ["POTLUCK_CACHE_DIR"]
        else:
            os.environ["POTLUCK_CACHE_DIR"] = before


@contextlib.asynccontextmanager
async def _folder(logs: Path | None) -> AsyncIterator[Path]:
    if logs is not None:
        yield logs
        return
    with tempfile.TemporaryDirectory(prefix="potluck-soak-") as folder:
        yield Path(folder)


async def run_soak(soak: Soak, tell: Callable[[str], None], logs: Path | None = None) -> SoakReport:
    """The whole soak. Raises PotluckError if the cluster does not come up, or does not come to rest."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    async with _folder(logs) as folder:
        with _cache(folder):
            cluster = LocalCluster(soak.model, folder)
            work = _Run(soak, cluster, tell)
            ports: list[int] = []
            try:
                await work.run()
            finally:
                ports = _listening(cluster)
                await cluster.stop()
        work.check_left(ports, before)
        return work.report


def _listening(cluster: LocalCluster) -> list[int]:
    """The broker's ports."""
    if cluster.broker is None or not cluster.broker.alive:
        return []
    made = psutil.Process(cluster.broker.process.pid).net_connections("tcp")
    return [one.laddr.port for one in made if one.status == psutil.CONN_LISTEN]


@click.command(cls=Command, context_settings={"show_default": True})
@click.option("--model", "-m", type=click.Path(path_type=Path), help="Another GGUF file than the demo's.")
@click.option("--requests", default=2000, type=click.IntRange(3))
@click.option("--people", default=8, type=click.IntRange(1), help="Who ask at the same time.")
@click.option("--acts", default=75, type=click.IntRange(0), help="Comings and goings of devices meanwhile.")
@click.option("--seed", default=1, type=int)
@click.option("--logs", type=click.Path(path_type=Path), help="Keep the processes' logs in this folder.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end.")
@click.pass_context
def main(
    context: click.Context,
    model: Path | None,
    requests: int,
    people: int,
    acts: int,
    seed: int,
    logs: Path | None,
    as_json: bool,
) -> None:
    """Serve many short requests while devices come and go, and see what the processes hold."""
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
    soak = Soak(model or demo_model(), requests, people, acts, seed=seed)
    report = run(run_soak(soak, lambda line: click.echo(line, err=True), logs))
    if as_json:
        click.echo(report.to_json())
    else:
        report.print(make_console())
    if report.faults:
        context.exit(1)


if __name__ == "__main__":
    main()
