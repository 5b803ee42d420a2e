from __future__ import annotations

import asyncio

import pytest

from rest_world import HELLO, Call, World, in_world

PATHS = ["/v1/chat/completions", "/v1/completions", "/completion"]


def call(world: World, path: str, **extra: object) -> Call:
    world.core.holds = True
    return Call(
        world.app, path, {"messages": HELLO, **extra} if "chat" in path else {"prompt": "Once", **extra}
    )


@pytest.mark.parametrize("path", PATHS)
@in_world
async def test_every_token_is_sent_by_itself_as_soon_as_it_comes(world: World, path: str) -> None:
    made = call(world, path, stream=True)
    name = await world.core.arrivals.get()
    world.core.say(name, "a")
    assert (await made.sent())["status"] == 200
    while '"a"' not in str(await made.frame()).replace("'", '"'):
        pass
    for text in "bcd":
        assert made.nothing_sent
        world.core.say(name, text)
        assert f'"{text}"' in str(await made.frame()).replace("'", '"')
    world.core.finish(name)
    await made.task


@in_world
async def test_tokens_that_come_at_once_are_still_one_frame_each(world: World) -> None:
    made = call(world, "/completion", stream=True)
    name = await world.core.arrivals.get()
    for text in "abc":
        world.core.say(name, text)
    await made.sent()
    assert [(await made.frame())["content"] for _ in "abc"] == ["a", "b", "c"]
    world.core.finish(name)
    await made.task


@pytest.mark.parametrize("path", PATHS)
@in_world
async def test_a_client_that_leaves_a_stream_frees_its_slot(world: World, path: str) -> None:
    made = call(world, path, stream=True)
    name = await world.core.arrivals.get()
    world.core.say(name, "a")
    await made.sent()
    made.hang_up()
    assert await asyncio.wait_for(world.core.departures.get(), 10) == name
    await made.task


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", PATHS)
@in_world
async def test_a_client_that_leaves_before_the_first_token_frees_its_slot(
    world: World, path: str, stream: bool
) -> None:
    made = call(world, path, stream=stream)
    name = await world.core.arrivals.get()
    made.hang_up()
    assert await asyncio.wait_for(world.core.departures.get(), 10) == name
    await made.task
    assert (await made.sent())["status"] == 499


@in_world
async def test_a_client_that_leaves_frees_all_its_answers(world: World) -> None:
    made = call(world, "/v1/chat/completions", n=3)
    names = [await world.core.arrivals.get() for _ in range(3)]
    world.core.finish(names[1])
    made.hang_up()
    await made.task
    assert world.core.cancelled == [names[0], names[2]]


@in_world
async def test_an_answer_that_is_complete_is_not_cancelled(world: World) -> None:
    await world.chat(n=2)
    await world.chat(stream=True)
    assert world.core.cancelled == []


@in_world
async def test_a_server_that_stops_cancels_what_is_running(world: World) -> None:
    made = call(world, "/v1/chat/completions", stream=True)
    name = await world.core.arrivals.get()
    world.core.say(name, "a")
    await made.sent()
    made.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await made.task
    assert world.core.cancelled == [name]


@pytest.mark.parametrize("breaks_at", ["http.response.start", "http.response.body"])
@in_world
async def test_a_connection_that_breaks_while_sending_frees_its_slot(world: World, breaks_at: str) -> None:
    made = call(world, "/v1/chat/completions", stream=True)
    made.breaks_at = breaks_at
    name = await world.core.arrivals.get()
    world.core.say(name, "a")
    with pytest.raises(OSError, match="broken"):
        await made.task
    assert world.core.cancelled == [name]
