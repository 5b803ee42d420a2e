"""Processes killed, frozen and stopped in the middle of answers: no token is lost, none comes twice."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import openai
import pytest

from acceptance.cluster_world import DEADLINE_S, FAST, World, idle, serving
from potluck.runtime.client import Client
from potluck.wire.errors import PotluckError
from potluck.wire.messages import Delta, Finished
from potluck.wire.sampling import GREEDY, Sampling
from tiny_models import write_tiny

pytestmark = pytest.mark.slow

STAGES = ("stage-1", "stage-2", "stage-3")
NEW_TOKENS = 400
"""Enough for an answer to be under way while something happens to the cluster."""
UNDER_WAY = 10
SAMPLINGS = {
    "hello": GREEDY,
    "the world": GREEDY,
    "a": Sampling(temperature=1.0, seed=1),
    "Once upon a time there was": Sampling(temperature=1.0, seed=2),
}
"""Greedy, and seeded: an answer that never repeats itself shows every token that is lost or doubled."""


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Three stages of a tiny model, with --exact; tests may hurt them."""
    folder = tmp_path_factory.mktemp("trio")
    made = World(write_tiny(folder / "tiny.gguf", layers=6), folder)
    with made.runner:
        try:
            made.run(made.start(3, *OPTIONS))
            yield made
        finally:
            made.run(made.close())
    made.check_ended()


OPTIONS = ("--exact", "--context", "512", "--slots", "4", *FAST)


@pytest.fixture
def whole(trio: World) -> World:
    """The three stages serve, whatever the test before has done to them."""

    async def mend() -> None:
        for name in STAGES:
            if not trio.stage(name).alive:
                trio.cluster.stages.remove(trio.stage(name))
                await trio.start_stage(name)
        await trio.until(lambda view: serving(3)(view) and len(view.stages) == 3)

    trio.run(mend())
    return trio


@dataclass
class Streams:
    """Answers under way."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def one(self, client: Client, prompt: str, count: int) -> None:
        self.tokens[prompt], self.texts[prompt] = [], ""
        stream = client.stream(prompt, max_tokens=count, sampling=SAMPLINGS[prompt], ignore_eos=True)
        async for event in stream:
            if isinstance(event, Delta):
                self.tokens[prompt] += event.tokens
                self.texts[prompt] += event.text
            elif isinstance(event, Finished):
                assert event.usage.completion_tokens == len(self.tokens[prompt])
                self.reasons[prompt] = event.reason
            self.news.set()

    async def under_way(self) -> None:
        """Until every answer has some tokens; none has ended."""
        while len(self.tokens) < len(SAMPLINGS) or min(map(len, self.tokens.values())) < UNDER_WAY:
            self.news.clear()
            await self.news.wait()
        assert not self.reasons


async def undisturbed(made: World) -> Streams:
    streams = Streams()
    async with Client(made.address) as client, asyncio.TaskGroup() as group:
        for prompt in SAMPLINGS:
            group.create_task(streams.one(client, prompt, NEW_TOKENS))
    return streams


async def expect_as_undisturbed(made: World, streams: Streams) -> None:
    found = await undisturbed(made)
    assert streams.reasons == dict.fromkeys(SAMPLINGS, "length")
    assert streams.tokens == found.tokens
    assert streams.texts == found.texts
    assert {len(tokens) for tokens in streams.tokens.values()} == {NEW_TOKENS}
    assert len(set(found.tokens["a"])) > 20
    assert idle(await made.until(idle))


@pytest.mark.parametrize("victim", STAGES)
def test_a_stage_killed_between_two_tokens_loses_none(whole: World, victim: str) -> None:
    async def scenario() -> None:
        epoch = (await whole.ready()).epoch
        streams = Streams()
        async with Client(whole.address) as client, asyncio.TaskGroup() as group:
            for prompt in SAMPLINGS:
                group.create_task(streams.one(client, prompt, NEW_TOKENS))
            await streams.under_way()
            whole.stage(victim).kill(signal.SIGKILL)
        view = await whole.until(serving(2))
        assert view.epoch > epoch
        assert {stage.device for stage in view.stages} == {*STAGES} - {victim}
        await expect_as_undisturbed(whole, streams)

    whole.run(scenario())


def test_a_frozen_stage_is_left_out_and_comes_back_when_it_wakes(whole: World) -> None:
    async def scenario() -> None:
        frozen = whole.stage("stage-2")
        streams = Streams()
        async with Client(whole.address) as client, asyncio.TaskGroup() as group:
            for prompt in SAMPLINGS:
                group.create_task(streams.one(client, prompt, NEW_TOKENS))
            await streams.under_way()
            frozen.kill(signal.SIGSTOP)
        view = await whole.until(serving(2))
        assert {stage.device for stage in view.stages} == {"stage-1", "stage-3"}
        await expect_as_undisturbed(whole, streams)
        frozen.kill(signal.SIGCONT)
        await whole.until(serving(3))
        await expect_as_undisturbed(whole, streams)
        assert frozen.alive

    whole.run(scenario())


def test_a_stage_that_is_stopped_leaves_once_its_work_has_moved(whole: World) -> None:
    async def scenario() -> None:
        leaving = whole.stage("stage-3")
        streams = Streams()
        async with Client(whole.address) as client, asyncio.TaskGroup() as group:
            for prompt in SAMPLINGS:
                group.create_task(streams.one(client, prompt, NEW_TOKENS))
            await streams.under_way()
            leaving.kill(signal.SIGTERM)
            assert await asyncio.wait_for(leaving.process.wait(), DEADLINE_S) == 0
        assert "stage-3 is gone: it left in order" in whole.broker.log.read_text()
        await expect_as_undisturbed(whole, streams)

    whole.run(scenario())


def test_a_rest_stream_goes_on_when_a_stage_is_killed(whole: World) -> None:
    asked = {"model": "tiny", "prompt": "hello", "max_tokens": NEW_TOKENS, "temperature": 0}

    async def scenario() -> None:
        async with whole.openai() as client:
            stream = await client.completions.create(
                **asked, stream=True, extra_body={"ignore_eos": True, "stop": None}
            )
            text, killed = "", False
            async for chunk in stream:
                text += chunk.choices[0].text
                if len(text) > UNDER_WAY and not killed:
                    killed = True
                    whole.stage("stage-1").kill(signal.SIGKILL)
            again = await client.completions.create(**asked, extra_body={"ignore_eos": True})
        assert killed
        assert text == again.choices[0].text

    whole.run(scenario())


def test_every_stage_killed_leaves_requests_waiting_for_new_ones(whole: World) -> None:
    async def scenario() -> None:
        streams = Streams()
        async with Client(whole.address) as client, asyncio.TaskGroup() as group:
            for prompt in SAMPLINGS:
                group.create_task(streams.one(client, prompt, NEW_TOKENS))
            await streams.under_way()
            for name in STAGES:
                whole.stage(name).kill(signal.SIGKILL)
            await whole.until(lambda view: not view.stages)
            async with whole.rest() as http:
                refused = await http.post("/v1/completions", json={"prompt": "hello"})
                assert refused.status_code == 503
                assert (await http.get("/health")).status_code == 503
            await whole.start_stage("stage-1")
        await expect_as_undisturbed(whole, streams)

    whole.run(scenario())


def test_a_killed_broker_that_comes_back_finds_its_stages_again(whole: World) -> None:
    async def scenario() -> None:
        before = await undisturbed(whole)
        pids = [whole.stage(name).process.pid for name in STAGES]
        control, web = whole.address.rpartition(":")[2], whole.http.removeprefix("http://")
        whole.broker.kill(signal.SIGKILL)
        await whole.broker.process.wait()
        await whole.start_broker("--stages", "3", "--port", control, "--http", web, *OPTIONS)
        assert whole.address.rpartition(":")[2] == control
        await whole.until(serving(3))
        assert [whole.stage(name).process.pid for name in STAGES if whole.stage(name).alive] == pids
        await expect_as_undisturbed(whole, before)

    whole.run(scenario())


# Last, because it ends the broker.
def test_a_broker_that_is_stopped_tells_its_clients_at_once_and_frees_its_ports(whole: World) -> None:
    async def scenario() -> None:
        ports = whole.listening
        assert len(ports) == 3
        ended: list[str] = []

        async def over_zmq() -> None:
            streams = Streams()
            async with Client(whole.address, timeout_s=DEADLINE_S) as client:
                with pytest.raises(PotluckError) as caught:
                    await streams.one(client, "hello", NEW_TOKENS)
            ended.append(str(caught.value))

        async def rest_stream() -> None:
            settings = {"max_tokens": NEW_TOKENS, "extra_body": {"ignore_eos": True}}
            async with whole.openai() as client:
                async for _ in await client.completions.create(
                    model="tiny", prompt="a", stream=True, **settings
                ):
                    pass

        async def over_rest() -> None:
            with pytest.raises(
                openai.APIError
            ) as caught:  # the stream's last event, or 503 if it never began
                await rest_stream()
            ended.append(str(caught.value))

        async with asyncio.TaskGroup() as group:
            for over in (over_zmq, over_zmq, over_zmq, over_rest, over_zmq):  # the last one waits for a slot
                group.create_task(over())
            await whole.until(lambda view: (view.running, view.queued) == (4, 1))
            await whole.until(lambda view: view.tokens_out > UNDER_WAY)
            whole.broker.kill(signal.SIGTERM)
            async with asyncio.timeout(DEADLINE_S):
                assert await whole.broker.process.wait() == 0
        assert len(ended) == 5
        assert all("broker is closing" in error for error in ended), ended
        for port in ports:
            with socket.create_server(("127.0.0.1", port)):
                pass
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(f"{whole.http}/health")

    whole.run(scenario())


def test_the_stages_of_a_broker_that_was_stopped_wait_for_the_next(trio: World) -> None:
    async def scenario() -> None:
        control, web = trio.address.rpartition(":")[2], trio.http.removeprefix("http://")
        trio.broker.kill(signal.SIGTERM)
        await trio.broker.process.wait()
        await trio.start_broker("--stages", "3", "--port", control, "--http", web, *OPTIONS)
        await trio.until(serving(3))

    trio.run(scenario())
