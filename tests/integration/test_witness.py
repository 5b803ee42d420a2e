"""A stage process that dies: its witness tells the broker what of, and is gone soon after."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from acceptance.cluster_world import FAST, World, command_line, environment, eventually, serving
from cgroups import MemoryGroup, memory_limit
from potluck.runtime.client import Client
from potluck.tools.local import Child
from potluck.wire.errors import UnavailableError
from potluck.wire.sampling import GREEDY
from tiny_models import write_tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="there are witnesses on Linux only"),
]


class Mourned(World):
    """A cluster whose stages die of what the test wants."""

    def check_ended(self) -> None:
        for child in self.children:
            assert "Traceback" not in child.log.read_text(errors="replace")
            assert not psutil.pid_exists(child.process.pid)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Mourned]:
    """A broker and a stage of a tiny model."""
    world = Mourned(write_tiny(tmp_path / "tiny.gguf", layers=4), tmp_path)
    with world.runner:
        try:
            world.run(world.start(1, "--http", "off", *FAST))
            yield world
        finally:
            world.run(world.close())
    world.check_ended()


def witness_of(child: Child) -> psutil.Process:
    """The process that a stage has left to tell of its death."""
    found = [
        process
        for process in psutil.Process(child.process.pid).children()
        if any(part.endswith("witness_child.py") for part in process.cmdline())
    ]
    assert len(found) == 1
    return found[0]


async def gone(witness: psutil.Process) -> bool:
    """Whether it has ended; whoever it was left to may not have fetched its status."""
    try:
        return not witness.is_running() or witness.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def expect_told(world: World, text: str) -> None:
    """The broker's log and whoever asks for an answer are told so."""

    await world.until(lambda view: text in view.detail)
    async with Client(world.address) as client:
        with pytest.raises(UnavailableError) as caught:
            await client.complete("hello", max_tokens=2, sampling=GREEDY)
    assert text in str(caught.value)
    assert "[device stage-1, stage stage-1/" in str(caught.value)
    assert text in world.broker.log.read_text()
    assert text in world.stage("stage-1").log.read_text()


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (signal.SIGKILL, "SIGKILL"),
        (signal.SIGSEGV, "stage-1 crashed: "),
        (signal.SIGABRT, "stage-1 crashed: "),
    ],
)
def test_a_stage_that_is_killed_or_crashes_is_named_so(
    made: Mourned, number: signal.Signals, text: str
) -> None:
    async def scenario() -> None:
        witness = witness_of(made.stage("stage-1"))
        made.stage("stage-1").kill(number)
        await expect_told(made, text)
        assert await eventually(lambda: gone(witness), bool)

    made.run(scenario())


LIMIT = 260_000_000
HOG = 170_000_000
"""With what the stage takes, 115 MB, that is more than the limit; with what its witness needs for the report, less."""
CACHES = ("--context", "16384", "--slots", "8")
"""67 MB of them."""
EATS = f"""
import sys
held = b"x" * {HOG}
print("full", flush=True)
sys.stdin.read()
"""


def choose(pid: int) -> None:
    """Of all in its group the kernel kills this one; whom it would choose by itself is not the question here."""
    Path(f"/proc/{pid}/oom_score_adj").write_text("1000")


async def stage_within(world: World, group: MemoryGroup) -> Child:
    """A stage in the group from its first instruction on, as in a container."""
    log = world.cluster.folder / "stage-1.log"
    arguments = (world.address, "--model", str(world.cluster.model), "--name", "stage-1", "--threads", "1")
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            *group.within, *command_line("potluck-stage", *arguments), stderr=sink, env=environment()
        )
    child = Child("stage-1", process, log)
    world.cluster.stages.append(child)
    world.children.append(child)
    return child


@pytest.mark.root
def test_a_stage_that_the_kernel_kills_for_memory_is_named_so_and_the_hint_says_what_helps(
    tmp_path: Path,
) -> None:
    world = Mourned(write_tiny(tmp_path / "tiny.gguf", layers=4), tmp_path)

    async def scenario() -> None:
        with memory_limit(LIMIT) as group:
            hog = None
            try:
                await world.start_broker("--stages", "1", "--http", "off", *CACHES, *FAST)
                stage = await stage_within(world, group)
                await world.ready()
                choose(stage.process.pid)
                hog = await asyncio.create_subprocess_exec(
                    *group.within,
                    *(sys.executable, "-I", "-S", "-c", EATS),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                )
                assert await stage.process.wait() == -signal.SIGKILL
                assert group.kills > 0
                await expect_told(world, "stage-1 was killed by the kernel for lack of memory")
                await expect_told(world, "--max-memory-gb")
            finally:
                if hog is not None:
                    await hog.communicate(b"enough")  # the kernel may not have waited for the stage's memory
                await world.close()

    with world.runner:
        world.run(scenario())
    world.check_ended()


def test_a_stage_that_ends_in_order_takes_its_witness_along(made: Mourned) -> None:
    async def scenario() -> None:
        stage = made.stage("stage-1")
        witness = witness_of(stage)
        stage.kill(signal.SIGTERM)
        assert await stage.process.wait() == 0
        assert not witness.is_running()
        assert "died" not in made.broker.log.read_text()

    made.run(scenario())


def test_signals_for_the_group_do_not_end_the_witness_before_its_stage(made: Mourned) -> None:
    async def scenario() -> None:
        witness = witness_of(made.stage("stage-1"))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            witness.send_signal(number)
        assert os.getsid(witness.pid) != os.getsid(made.stage("stage-1").process.pid)
        made.stage("stage-1").kill()
        await expect_told(made, "SIGKILL")

    made.run(scenario())


def test_a_witness_that_is_killed_itself_costs_nothing_but_the_reason(made: Mourned) -> None:
    async def scenario() -> None:
        witness_of(made.stage("stage-1")).kill()
        async with Client(made.address) as client:
            assert len((await client.complete("hello", max_tokens=3, ignore_eos=True)).tokens) == 3
        made.stage("stage-1").kill()
        await expect_told_of_close(made)

    made.run(scenario())


async def expect_told_of_close(world: World) -> None:
    view = await world.until(lambda view: not view.ready)
    assert "stage-1 is gone" in view.detail


def test_without_a_broker_that_hears_it_the_witness_ends_all_the_same(made: Mourned) -> None:
    async def scenario() -> None:
        witness = witness_of(made.stage("stage-1"))
        made.broker.kill()
        await made.broker.process.wait()
        made.stage("stage-1").kill()
        assert await eventually(lambda: gone(witness), bool)
        assert "SIGKILL" in made.stage("stage-1").log.read_text()

    made.run(scenario())


def test_a_witness_takes_a_few_mb(made: Mourned) -> None:
    async def scenario() -> None:
        await made.until(serving(1))
        assert witness_of(made.stage("stage-1")).memory_full_info().uss < 8_000_000

    made.run(scenario())
