"""Whatever a body holds, the answer is an answer or an error that says what is wrong, and never a fault of ours."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from potluck.broker.rest_body import Body
from potluck.broker.rest_chat import ChatBody
from potluck.broker.rest_llama import LlamaBody
from potluck.broker.rest_text import CompletionBody
from rest_world import HELLO, World, error, in_world

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
small = st.sampled_from(
    [0, 1, 2, 0.5, -1, True, False, "x", "", [], {}, ["x"], [1], {"5": 1}, [[5, False]], HELLO]
)
anything = small | st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)


def bodies(kind: type[Body]) -> st.SearchStrategy[dict]:
    names = st.sampled_from(kind.__struct_fields__) | st.text(max_size=5)
    valid = {"messages": HELLO} if kind is ChatBody else {"prompt": "Once"}
    return st.dictionaries(names, anything, max_size=6).map(lambda extra: {**valid, **extra})


async def check(world: World, path: str, body: dict) -> None:
    response = await world.client.post(path, content=msgspec.json.encode(body))
    if response.status_code != 200:
        found = error(response, 404 if response.status_code == 404 and "model" in body else 400)
        assert found["type"] == "invalid_request_error"
    elif response.headers["content-type"] == "application/json":
        assert response.json()["model"]
    else:
        assert b'"error"' not in response.content


@given(body=bodies(ChatBody))
@in_world
async def test_any_chat_is_answered_or_refused(world: World, body: dict) -> None:
    await check(world, "/v1/chat/completions", body)


@given(body=bodies(CompletionBody))
@in_world
async def test_any_completion_is_answered_or_refused(world: World, body: dict) -> None:
    await check(world, "/v1/completions", body)


@given(body=bodies(LlamaBody))
@in_world
async def test_any_llama_cpp_body_is_answered_or_refused(world: World, body: dict) -> None:
    await check(world, "/completion", body)
