"""Whoever leaves in the middle of an answer frees its slot: with one slot, the next request is served at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

import pytest

from acceptance.cluster_world import DEADLINE_S, World, command_line, environment, eventually
from potluck.runtime.client import Client
from potluck.wire.messages import Accepted, Delta
from potluck.wire.sampling import GREEDY

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

LONG = 400
"""Tokens of an answer that nobody waits for: some seconds' worth."""
SHORT = 4


async def rest_leaves(world: World) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": LONG, "stream": True, "ignore_eos": True}
    async with world.rest() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        events = answer.aiter_lines()
        for _ in range(3):
            await anext(events)


async def rest_leaves_before_the_first_token(world: World) -> None:
    """Not streamed, so nothing has been answered yet when the client goes."""
    body = {"prompt": "Once upon a time", "max_tokens": LONG, "ignore_eos": True}
    async with world.rest() as client:
        task = asyncio.create_task(client.post("/v1/completions", json=body))
        await world.until(lambda view: view.running == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def zmq_leaves(world: World) -> None:
    async with Client(world.address) as client:
        stream = client.stream("Once upon a time", max_tokens=LONG, ignore_eos=True)
        async with aclosing(stream) as events:
            seen = 0
            async for event in events:
                seen += isinstance(event, Delta)
                if seen == 3:
                    break
        await world_is_idle(world)  # the connection is still there, only the stream was left


async def zmq_closes_its_connection(world: World) -> None:
    client = Client(world.address)
    stream = client.stream("Once upon a time", max_tokens=LONG, ignore_eos=True)
    while not isinstance(await anext(stream), Delta):
        pass
    client._dealer.close()  # without a word to the broker
    await stream.aclose()
    await client.close()


@asynccontextmanager
async def infer(world: World) -> AsyncIterator[asyncio.subprocess.Process]:
    """`potluck infer`, three tokens into its answer."""
    arguments = ("infer", "--broker", world.address, "--prompt", "Tell me a long story.", "-n", str(LONG))
    process = await asyncio.create_subprocess_exec(
        *command_line("potluck", *arguments, "--times"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
    )
    try:
        assert process.stdout is not None
        async for line in process.stdout:
            if line.startswith(b"Token 3:"):
                break
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def infer_is_interrupted(world: World) -> None:
    async with infer(world) as process:
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    assert process.returncode == 130
    assert f"Token {LONG}:".encode() not in out
    assert err.decode() == "Cancelled.\n"


async def infer_is_killed(world: World) -> None:
    async with infer(world) as process:
        process.kill()
        await process.communicate()


async def world_is_idle(world: World) -> None:
    """As REST says it."""
    async with world.rest() as client:

        async def state() -> dict[str, int]:
            view = (await client.get("/potluck/v1/state")).json()
            return {key: view[key] for key in ("running", "queued")}

        await eventually(state, lambda found: found == {"running": 0, "queued": 0})


@pytest.mark.parametrize(
    "leave",
    [
        rest_leaves,
        rest_leaves_before_the_first_token,
        zmq_leaves,
        zmq_closes_its_connection,
        infer_is_interrupted,
        infer_is_killed,
    ],
)
def test_a_client_that_leaves_frees_the_only_slot(
    half: World, leave: Callable[[World], Awaitable[None]]
) -> None:
    async def scenario() -> None:
        before = (await half.ready()).tokens_out
        await leave(half)
        async with Client(half.address) as client:
            answer = await client.complete("The capital of France is", max_tokens=SHORT, sampling=GREEDY)
        assert answer.tokens
        view = await half.until(lambda view: view.running == 0)
        assert view.tokens_out - before < LONG  # nobody has computed the rest of what was left behind
        await world_is_idle(half)

    half.run(scenario())


def test_a_client_that_leaves_the_queue_is_never_served(half: World) -> None:
    async def scenario() -> None:
        async with Client(half.address) as first, Client(half.address) as second:
            running = first.stream("Once upon a time", max_tokens=LONG, ignore_eos=True)
            async with aclosing(running) as events:
                while not isinstance(await anext(events), Delta):
                    pass
                waiting = second.stream("The capital of France is", max_tokens=SHORT)
                async with aclosing(waiting):
                    assert isinstance(await anext(waiting), Accepted)
                    await half.until(lambda view: (view.running, view.queued) == (1, 1))
                view = await half.until(lambda view: view.queued == 0)
                assert view.running == 1
        await world_is_idle(half)

    half.run(scenario(), DEADLINE_S)
