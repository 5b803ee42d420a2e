"""The stock `openai` client against the app on a real port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from potluck.wire.errors import ContextExceededError, QueueFullError, StageLostError, UnavailableError
from rest_world import HELLO, MODEL, World, in_world


@contextlib.asynccontextmanager
async def client_of(world: World) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        world.on_a_port() as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client,
    ):
        yield client


@in_world
async def test_a_chat(world: World) -> None:
    async with client_of(world) as client:
        made = await client.chat.completions.create(
            model=MODEL, messages=HELLO, seed=3, extra_body={"min_p": 0.1}
        )
    assert made.choices[0].message.content == "Good day!"
    assert made.usage is not None
    assert made.usage.total_tokens == 14
    assert world.core.last.sampling.min_p == 0.1


@in_world
async def test_a_streamed_chat_with_usage_and_logprobs(world: World) -> None:
    async with client_of(world) as client:
        wanted = {
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": 1,
        }
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, **wanted)
        chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Good day!"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[1].choices[0].logprobs.content[0].top_logprobs[0].token == "A"


@in_world
async def test_the_client_s_own_stream_helper(world: World) -> None:
    async with (
        client_of(world) as client,
        client.chat.completions.stream(model=MODEL, messages=HELLO, n=2) as stream,
    ):
        final = await stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["Good day!", "Good day!"]


@in_world
async def test_a_completion_whole_and_streamed(world: World) -> None:
    async with client_of(world) as client:
        made = await client.completions.create(model=MODEL, prompt=["a", "b"], logprobs=1)
        stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert [choice.text for choice in made.choices] == ["Good day!", "Good day!"]
    assert text == "Good day!"


@in_world
async def test_models(world: World) -> None:
    async with client_of(world) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).owned_by == "potluck"


@in_world
async def test_errors_arrive_as_the_client_s_own_classes(world: World) -> None:
    async with client_of(world) as client:
        create = client.chat.completions.create
        with pytest.raises(openai.BadRequestError) as bad:
            await create(model=MODEL, messages=HELLO, temperature=5)
        with pytest.raises(openai.NotFoundError):
            await create(model="gpt-9", messages=HELLO)
        world.core.refuses = ContextExceededError("Too long.", n_prompt_tokens=9, n_ctx=8)
        with pytest.raises(openai.BadRequestError) as long:
            await create(model=MODEL, messages=HELLO, stream=True)
        world.core.refuses = QueueFullError("Full.", retry_after_s=3)
        with pytest.raises(openai.RateLimitError) as full:
            await create(model=MODEL, messages=HELLO)
        world.core.refuses = UnavailableError("Nothing serves.")
        with pytest.raises(openai.InternalServerError):
            await create(model=MODEL, messages=HELLO)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    assert long.value.code == "exceed_context_size"
    assert long.value.body["n_ctx"] == 8
    assert full.value.response.headers["retry-after"] == "3"


@in_world
async def test_an_error_inside_a_stream_is_raised_after_its_text(world: World) -> None:
    world.core.holds = True
    async with client_of(world) as client:
        create = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        asked = asyncio.create_task(create)
        name = await world.core.arrivals.get()
        world.core.say(name, "Go")
        stream = await asked
        texts = [(await anext(stream)).choices[0].delta.content for _ in range(2)]
        world.core.fail(name, StageLostError("mini is gone."))
        with pytest.raises(openai.APIError, match="mini is gone"):
            await anext(stream)
    assert texts == ["", "Go"]


@in_world
async def test_each_token_reaches_the_client_before_the_next_is_made(world: World) -> None:
    world.core.holds = True
    async with client_of(world) as client:
        asked = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=HELLO, stream=True))
        name = await world.core.arrivals.get()
        world.core.say(name, "0")
        stream = await asked
        seen = []
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                seen.append(chunk.choices[0].delta.content)
                if len(seen) == 5:
                    world.core.finish(name)
                else:
                    world.core.say(name, str(len(seen)))
    assert seen == ["0", "1", "2", "3", "4"]


@in_world
async def test_a_client_that_closes_its_stream_frees_the_slot(world: World) -> None:
    world.core.holds = True
    async with client_of(world) as client:
        asked = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=HELLO, stream=True))
        name = await world.core.arrivals.get()
        world.core.say(name, "Go")
        stream = await asked
        await stream.close()
        assert await asyncio.wait_for(world.core.departures.get(), 10) == name


@pytest.mark.parametrize("stream", [True, False])
@in_world
async def test_a_client_that_hangs_up_while_it_waits_frees_the_slot(world: World, stream: bool) -> None:
    world.core.holds = True
    async with client_of(world) as client:
        asked = asyncio.create_task(
            client.chat.completions.create(model=MODEL, messages=HELLO, stream=stream)
        )
        name = await world.core.arrivals.get()
        asked.cancel()
        assert await asyncio.wait_for(world.core.departures.get(), 10) == name
        with pytest.raises(asyncio.CancelledError):
            await asked


@in_world
async def test_one_connection_serves_one_request_after_another(world: World) -> None:
    async with world.on_a_port() as url, httpx.AsyncClient(limits=httpx.Limits(max_connections=1)) as client:
        for stream in (True, False, True):
            response = await client.post(f"{url}/completion", json={"prompt": "x", "stream": stream})
            assert "Good" in response.text
