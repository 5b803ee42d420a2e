"""A broker process that is stopped by Ctrl-C: what its clients get, and what remains of it on the machine."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from acceptance.cluster_world import FAST, World, serving, text_of
from potluck.runtime.client import Client
from potluck.runtime.signals import ONE_SIGNAL_S
from potluck.wire.errors import ClosingError
from potluck.wire.sampling import GREEDY
from tiny_models import write_tiny

pytestmark = pytest.mark.slow

OPTIONS = ("--context", "4096", "--slots", "2", "--drain-timeout", "60", *FAST)
SOME, MANY = 600, 4000
"""Tokens of answers that are to end, and of those that would take too long."""
PLACES = ("TMPDIR", "HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[World]:
    """Two stages of a tiny model, two slots, in an environment whose every folder is looked at afterwards."""
    folder = tmp_path / "cluster"
    with pytest.MonkeyPatch.context() as patch:
        for place in PLACES:
            (tmp_path / place).mkdir()
            patch.setenv(place, str(tmp_path / place))
        patch.setenv("POTLUCK_CACHE_DIR", str(tmp_path / "cache"))
        folder.mkdir()
        made = World(write_tiny(folder / "tiny.gguf", layers=4), folder)
        with made.runner:
            try:
                made.run(made.start(2, *OPTIONS))
                yield made
            finally:
                made.run(made.close())
        made.check_ended()
        left = [str(path) for place in PLACES for path in (tmp_path / place).rglob("*") if path.is_file()]
        assert not left


class Stopped:
    """What is seen of the broker before it is stopped, to compare with afterwards."""

    def __init__(self, made: World) -> None:
        self.made = made
        self.ports = made.listening
        self.children = psutil.Process(made.broker.process.pid).children(recursive=True)
        assert len(self.ports) == 3

    async def expect_nothing_left(self) -> None:
        """It ended with 0, its ports are free, nothing that it started runs, and its stages are still there."""
        assert await self.made.broker.process.wait() == 0
        for port in self.ports:
            with socket.create_server(("127.0.0.1", port)):
                pass
        assert not any(child.is_running() for child in self.children)
        assert all(stage.alive for stage in self.made.cluster.stages)

    def log(self) -> str:
        return self.made.broker.log.read_text()


async def rest_stream(made: World, count: int) -> list[str]:
    """The data lines of a streamed answer."""
    body = {"prompt": "a", "max_tokens": count, "stream": True, "ignore_eos": True}
    async with made.rest() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        return [line async for line in answer.aiter_lines() if line]


async def zmq_stream(made: World, prompt: str, count: int) -> int:
    async with Client(made.address) as client:
        stream = client.stream(prompt, max_tokens=count, sampling=GREEDY, ignore_eos=True)
        return len((await text_of(stream))[1])


def test_the_first_ctrl_c_finishes_what_runs_and_waits_and_refuses_what_is_new(pair: World) -> None:
    async def scenario() -> None:
        before = Stopped(pair)
        async with asyncio.TaskGroup() as group:
            web = [group.create_task(rest_stream(pair, SOME)) for _ in range(2)]
            zmq = [group.create_task(zmq_stream(pair, prompt, SOME)) for prompt in ("hello", "world")]
            await pair.until(lambda view: (view.running, view.queued) == (2, 2) and view.tokens_out > 0)
            pair.broker.kill(signal.SIGINT)
            closing = await pair.until(lambda view: not view.ready)
            assert "closing" in closing.detail
            async with pair.rest() as client:
                refused = await client.post("/v1/completions", json={"prompt": "a"})
                assert refused.status_code == 503
                assert 1 <= int(refused.headers["retry-after"]) <= 600
                assert refused.json()["error"]["code"] == "closing"
                assert (await client.get("/health")).status_code == 503
            with pytest.raises(ClosingError, match="takes no new requests"):
                await zmq_stream(pair, "late", SOME)
        assert [task.result() for task in zmq] == [SOME, SOME]
        for task in web:
            assert task.result()[-1] == "data: [DONE]"
            assert '"finish_reason":"length"' in task.result()[-2]
        await before.expect_nothing_left()
        assert "2 requests are running, 2 wait; Ctrl-C again ends them" in before.log()

    pair.run(scenario())


def test_the_second_ctrl_c_ends_streams_with_a_last_error_and_the_broker_with_0(pair: World) -> None:
    async def scenario() -> None:
        before = Stopped(pair)
        async with asyncio.TaskGroup() as group:
            web = [group.create_task(rest_stream(pair, MANY)) for _ in range(2)]
            await pair.until(lambda view: view.running == 2)
            waits = group.create_task(rest_stream(pair, MANY))
            zmq = group.create_task(expect_closing(pair))
            await pair.until(lambda view: (view.running, view.queued) == (2, 2) and view.tokens_out > 0)
            pair.broker.kill(signal.SIGINT)
            seen = await pair.until(lambda view: not view.ready)
            await pair.until(lambda view: view.uptime_s > seen.uptime_s + ONE_SIGNAL_S + 0.1)
            pair.broker.kill(signal.SIGINT)
        for task in web:
            assert task.result()[-1].startswith('data: {"error":')
            assert '"code":"closing"' in task.result()[-1]
        assert '"code":"closing"' in waits.result()[-1]  # the whole answer: it had not begun to stream
        assert zmq.result() is None
        await before.expect_nothing_left()

    pair.run(scenario())


async def expect_closing(made: World) -> None:
    with pytest.raises(ClosingError, match="ended the request before it was done"):
        await zmq_stream(made, "hello", MANY)


def test_stages_of_a_broker_that_was_drained_serve_the_next_one(pair: World) -> None:
    async def scenario() -> None:
        control, web = pair.address.rpartition(":")[2], pair.http.removeprefix("http://")
        pair.broker.kill(signal.SIGTERM)
        assert await pair.broker.process.wait() == 0
        with pytest.raises(httpx.ConnectError):
            await rest_stream(pair, SOME)
        await pair.start_broker("--stages", "2", "--port", control, "--http", web, *OPTIONS)
        await pair.until(serving(2))

    pair.run(scenario())
