"""The broker is killed at random moments under load: no acknowledged job is lost, and none has two results.

`KILLS` in the environment says how often (`make kill-broker` has 20). The number in the test's name is the seed of the
load and of the moments; KILLS_SEED takes it again.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from acceptance.cluster_world import FAST, World, eventually, serving, world
from potluck.runtime.client import Client
from potluck.wire.errors import JobConflictError, PotluckError
from potluck.wire.messages import Delta, JobView, StateView
from potluck.wire.sampling import GREEDY, Sampling

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

KILLS = int(os.environ.get("KILLS", "3"))
SEED = int(os.environ.get("KILLS_SEED", "0")) or secrets.randbits(32)
JOBS_PATH = "/potluck/v1/jobs"
WORDS = ["sky", "river", "stone", "winter", "copper", "garden", "letter", "engine", "music", "harbour"]


@pytest.fixture(scope="module")
def killed(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two stages that find their slices in a cache of their own, so that a test may take it away."""
    folder = tmp_path_factory.mktemp("killed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POTLUCK_CACHE_DIR", str(folder / "cache"))
        with world(smollm2_path, folder, 2, "--exact", "--slots", "4", "--context", "256", *FAST) as made:
            yield made


@dataclass(frozen=True)
class Wanted:
    """One job as its client wants it. `key` is the client's, so it may be handed in again."""

    key: str
    prompt: str
    max_tokens: int
    greedy: bool
    by_rest: bool

    @property
    def body(self) -> dict[str, Any]:
        """As REST takes it; the same settings as `sampling`."""
        return {
            "prompt": self.prompt, "max_tokens": self.max_tokens, "temperature": self.sampling.temperature,
            "top_k": self.sampling.top_k, "top_p": self.sampling.top_p, "min_p": self.sampling.min_p,
            "ignore_eos": True,
        }  # fmt: skip

    @property
    def sampling(self) -> Sampling:
        return GREEDY if self.greedy else Sampling(temperature=1.0)


@dataclass
class Load:
    """Clients that hand in jobs and fetch their results, over both ways, while brokers come and go.

    `promised` are acknowledged jobs, `results` what was fetched. `tick` counts what a client could notice.
    """

    world: World
    chance: random.Random
    promised: dict[str, Wanted] = field(default_factory=dict)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    ticks: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    up: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False

    async def client(self, number: int) -> None:
        """One job after the other, each handed in until it is acknowledged, sometimes twice, and fetched."""
        nth = 0
        while not self.over:
            nth += 1
            wanted = Wanted(
                f"client-{number}-{nth}",
                "Tell me about the " + " ".join(self.chance.choices(WORDS, k=self.chance.randint(1, 12))),
                self.chance.randint(1, 48),
                greedy=nth % 2 == 0,
                by_rest=number % 2 == 0,
            )
            await self.persist(self.hand_in, wanted)
            if self.chance.random() < 0.3:
                await self.persist(self.hand_in, wanted)
            if self.chance.random() < 0.7:
                await self.persist(self.fetch, wanted)

    async def person(self) -> None:
        """Somebody who talks to the model meanwhile: what makes moments between two tokens."""
        while not self.over:
            await self.up.wait()
            try:
                async with Client(self.world.address, timeout_s=1.0) as client:
                    stream = client.stream("Once upon a time", max_tokens=64, ignore_eos=True)
                    async with aclosing(stream) as events:
                        async for event in events:
                            if isinstance(event, Delta):
                                self.ticks.put_nowait("token")
            except PotluckError:
                await asyncio.sleep(0)

    async def persist(self, work: Any, wanted: Wanted) -> None:
        """Again and again, as a client that means it would."""
        while True:
            await self.up.wait()
            try:
                await work(wanted)
                return
            except JobConflictError:
                raise
            except (httpx.TransportError, PotluckError):
                await asyncio.sleep(0)

    async def hand_in(self, wanted: Wanted) -> None:
        if wanted.by_rest:
            async with self.world.rest() as client:
                response = await client.post(
                    JOBS_PATH, json=wanted.body, headers={"Idempotency-Key": wanted.key}
                )
            assert response.status_code in (202, 503), response.text
            if response.status_code == 503:
                raise PotluckError("shutting down")
            assert response.json()["key"] == wanted.key
        else:
            async with Client(self.world.address, timeout_s=5.0) as client:
                view = await client.submit_job(
                    wanted.prompt, key=wanted.key, timeout_s=5.0, max_tokens=wanted.max_tokens,
                    sampling=wanted.sampling, ignore_eos=True,
                )  # fmt: skip
            assert view.key == wanted.key
        self.promised[wanted.key] = wanted
        self.ticks.put_nowait("acknowledged")

    async def fetch(self, wanted: Wanted) -> None:
        """The result, once it is there; it has to be what it was before."""
        if wanted.by_rest:
            async with self.world.rest() as client:
                response = await client.get(f"{JOBS_PATH}/{wanted.key}", params={"wait": 60})
            assert response.status_code in (200, 503), f"{wanted.key} is lost: {response.text}"
            if response.status_code == 503:
                raise PotluckError("shutting down")
            found = response.json()
            result = {name: found[name] for name in ("text", "finish_reason", "created", "ended")}
            state = found["status"]
        else:
            async with Client(self.world.address, timeout_s=5.0) as client:
                view = await client.job(wanted.key, 60.0)
            state, result = view.state, result_of(view)
        if state in ("queued", "running"):
            raise PotluckError("not yet")
        assert state == "finished", f"{wanted.key} is {state}"
        self.agree(wanted.key, result)
        self.ticks.put_nowait("fetched")

    def agree(self, key: str, result: dict[str, Any]) -> None:
        assert self.results.setdefault(key, result) == result, f"{key} has two results"


def result_of(view: JobView) -> dict[str, Any]:
    return {
        "text": view.text, "finish_reason": view.reason, "created": view.created_s, "ended": view.ended_s,
    }  # fmt: skip


async def kill_and_restart(world: World) -> int:
    """What it returns is the first epoch in which stages serve again."""
    world.broker.kill()
    await world.broker.process.wait()
    try:
        await world.cluster.restart_broker()
    finally:
        world.children.append(world.broker)
    async with Client(world.address) as client:
        return (await client.state()).epoch


def slices(world: World) -> list[Path]:
    return list((world.cluster.folder / "cache").rglob("*.gguf"))


@pytest.mark.timeout(120 + 30 * KILLS)
@pytest.mark.parametrize("seed", [SEED])
def test_no_acknowledged_job_is_lost_and_none_has_two_results(seed: int, killed: World) -> None:
    chance = random.Random(seed)

    async def story() -> None:
        taken_away = slices(killed)
        assert len(taken_away) == 2
        for slice_file in taken_away:
            slice_file.unlink()  # a stage that would load once more has to cut it anew
        load = Load(killed, chance)
        load.up.set()
        stages = {stage.stage for stage in (await killed.ready()).stages}
        epoch = (await killed.ready()).epoch
        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(load.client(number))
            group.create_task(load.person())
            for _ in range(KILLS):
                for _ in range(chance.randint(1, 120)):
                    await asyncio.wait_for(load.ticks.get(), 60)
                load.up.clear()
                first = await kill_and_restart(killed)
                load.up.set()
                assert first > epoch, "an epoch came again"
                view = await back(killed)
                assert {stage.stage for stage in view.stages} == stages
                epoch = view.epoch
                while not load.ticks.empty():
                    load.ticks.get_nowait()
            load.over = True
        await check(load)
        await kill_and_restart(killed)
        await back(killed)
        await check(load)
        assert slices(killed) == [], "a stage loaded its weights anew"

    killed.run(story(), within_s=100 + 30 * KILLS)


async def back(world: World) -> StateView:
    async with Client(world.address) as client:
        return await eventually(client.state, serving(2))


async def check(load: Load) -> None:
    """Every promise, from the outside: all have the one result, and handing them in again changes nothing."""
    async with Client(load.world.address, timeout_s=60.0) as client:
        for key, wanted in load.promised.items():
            view = await client.job(key, 60.0)
            assert view.state == "finished", f"{key} is {view.state}: {view.error}"
            assert view.usage.completion_tokens == wanted.max_tokens
            load.agree(key, result_of(view))
            await load.hand_in(wanted)
            load.agree(key, result_of(await client.job(key)))
        known = [job.key for job in await client.jobs(1_000)]
        assert len(known) == len(set(known))
        assert load.promised.keys() <= set(known)
        for wanted in [job for job in load.promised.values() if job.greedy][:10]:
            whole = await client.complete(
                wanted.prompt, max_tokens=wanted.max_tokens, sampling=wanted.sampling, ignore_eos=True
            )
            assert load.results[wanted.key]["text"] == whole.text, (
                f"{wanted.key} was interrupted and says else"
            )


@pytest.mark.timeout(300)
def test_ten_thousand_jobs_wait_without_taking_the_broker_s_memory(killed: World) -> None:
    """Handed in while no stage is there, so that all of them wait."""

    async def story() -> None:
        for stage in killed.cluster.stages:
            stage.kill()
            await stage.process.wait()
        process = psutil.Process(killed.broker.process.pid)
        async with killed.rest() as client:

            async def hand_in(first: int, count: int) -> None:
                for number in range(first, first + count):
                    response = await client.post(
                        JOBS_PATH, json={"prompt": "Once upon a time " * 8, "key": f"many-{number}"}
                    )
                    assert response.status_code == 202, response.text

            await hand_in(0, 200)
            before = process.memory_info().rss
            async with asyncio.TaskGroup() as group:
                for part in range(10):
                    group.create_task(hand_in(1_000 * (part + 1), 1_000))
            grown = process.memory_info().rss - before
        assert grown < 40e6, f"{grown / 1e6:.0f} MB for 10,000 jobs"

    killed.run(story(), within_s=280)
