"""A broker process with one slot and room for one more: what those get who come too many, or run out of time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest

from acceptance.cluster_world import FAST, World, command, eventually, idle, text_of, world
from potluck.runtime.client import Client
from potluck.wire.errors import QueueFullError, RequestTimeoutError
from potluck.wire.messages import Accepted
from potluck.wire.sampling import GREEDY
from tiny_models import write_tiny

pytestmark = pytest.mark.slow

LONG = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}
"""Some seconds of computing."""


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("one")
    options = ("--context", "4096", "--slots", "1", "--queue", "1", *FAST)
    with world(write_tiny(folder / "tiny.gguf", layers=4), folder, 2, *options) as made:
        yield made


@asynccontextmanager
async def busy(made: World, requests: int) -> AsyncIterator[None]:
    """So many requests run or wait as long as the block lasts."""
    async with Client(made.address) as client:
        streams = [client.stream("b", max_tokens=4000, ignore_eos=True) for _ in range(requests)]
        for stream in streams:
            assert isinstance(await anext(stream), Accepted)
        yield
        for stream in streams:
            await stream.aclose()
        await eventually(client.state, idle)


def test_whoever_finds_the_queue_full_is_told_when_to_come_back(one: World) -> None:
    async def scenario() -> None:
        async with busy(one, 2), one.rest() as client:
            for path in ("/v1/completions", "/completion"):
                answer = await client.post(path, json=LONG)
                assert answer.status_code == 429
                assert 1 <= int(answer.headers["retry-after"]) <= 600
                assert answer.json()["error"]["code"] == "queue_full"
            async with Client(one.address) as zmq:
                with pytest.raises(QueueFullError) as caught:
                    await text_of(zmq.stream("c", max_tokens=4))
            assert caught.value.facts["retry_after_s"] == int(answer.headers["retry-after"])

    one.run(scenario())


def test_a_whole_answer_that_is_not_finished_in_time_is_504_and_frees_its_slot(one: World) -> None:
    async def scenario() -> None:
        async with one.rest() as client:
            answer = await client.post("/v1/completions", json={**LONG, "timeout_s": 0.3})
            assert answer.status_code == 504
            assert answer.json()["error"]["type"] == "timeout_error"
            assert answer.json()["error"]["timeout_s"] == pytest.approx(0.3)
            await one.until(idle)
            assert (await client.post("/v1/completions", json={**LONG, "max_tokens": 3})).status_code == 200

    one.run(scenario())


def test_a_stream_that_is_not_finished_in_time_ends_with_an_error_frame(one: World) -> None:
    async def scenario() -> None:
        body = {**LONG, "stream": True, "timeout_s": 0.5}
        async with one.rest() as client, client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            lines = [line async for line in answer.aiter_lines() if line]
        assert len(lines) > 1
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "timeout"
        await one.until(idle)

    one.run(scenario())


def test_openais_client_passes_the_time_on_and_gets_its_own_kind_of_error(one: World) -> None:
    async def scenario() -> None:
        async with one.openai() as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.completions.create(
                    model="tiny",
                    prompt="a",
                    max_tokens=4000,
                    extra_body={"timeout_s": 0.3, "ignore_eos": True},
                )
        assert caught.value.status_code == 504
        assert caught.value.code == "timeout"

    one.run(scenario())


def test_one_that_waits_for_its_slot_runs_out_of_time_over_zmq_too(one: World) -> None:
    async def scenario() -> None:
        async with busy(one, 1), Client(one.address) as client:
            with pytest.raises(RequestTimeoutError, match="it waited for a slot"):
                await text_of(client.stream("c", max_tokens=4, sampling=GREEDY, timeout_s=0.2))

    one.run(scenario())


def test_potluck_infer_says_that_the_time_was_not_enough(one: World, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with busy(one, 1):
            arguments = ("infer", "--broker", one.address, "-p", "hello", "--raw", "--timeout", "0.5")
            ended = await asyncio.to_thread(command, "potluck", *arguments)
        assert ended.code == 1
        assert ended.lines[-1].startswith("potluck: The request was not finished within 0.5 s")

    one.run(scenario())
