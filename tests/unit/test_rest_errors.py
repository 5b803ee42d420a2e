from __future__ import annotations

import pytest

from potluck.broker.rest_body import BODY_BYTES
from potluck.wire.errors import (
    ContextExceededError,
    InvalidValueError,
    Phase,
    PlanError,
    QueueFullError,
    StageLostError,
    UnavailableError,
)
from rest_world import HELLO, Call, World, error, frames, in_world

TOO_LONG = ContextExceededError(
    "Too long.", hint="Shorten it.", param="prompt", n_prompt_tokens=3000, n_ctx=2048
)
PATHS = ["/v1/chat/completions", "/v1/completions", "/completion"]


def body_for(path: str, **extra: object) -> dict:
    return {"messages": HELLO, **extra} if "chat" in path else {"prompt": "Once", **extra}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
@in_world
async def test_a_prompt_over_the_context_says_by_how_much(world: World, path: str, stream: bool) -> None:
    world.core.refuses = TOO_LONG
    found = error(await world.client.post(path, json=body_for(path, stream=stream)))
    assert (found["code"], found["n_prompt_tokens"], found["n_ctx"]) == ("exceed_context_size", 3000, 2048)
    assert found["message"] == "Too long. Shorten it."


@in_world
async def test_a_chat_over_the_context_names_messages_not_prompt(world: World) -> None:
    world.core.refuses = ContextExceededError(param="prompt")
    assert error(await world.chat())["param"] == "messages"
    world.core.refuses = ContextExceededError(param="prompt")
    assert error(await world.complete())["param"] == "prompt"


@pytest.mark.parametrize(
    ("refusal", "status", "after"),
    [
        (UnavailableError("Nothing serves.", retry_after_s=2), 503, "2"),
        (UnavailableError("Nothing serves.", retry_after_s=1.2), 503, "2"),
        (UnavailableError("Nothing serves."), 503, "5"),
        (PlanError("Too few devices."), 503, "5"),
        (QueueFullError("Full.", retry_after_s=7), 429, "7"),
    ],
)
@in_world
async def test_who_should_come_back_is_told_when(
    world: World, refusal: UnavailableError, status: int, after: str
) -> None:
    world.core.refuses = refusal
    response = await world.chat()
    assert error(response, status)["code"] == refusal.code
    assert response.headers["retry-after"] == after


@pytest.mark.parametrize("path", PATHS)
@in_world
async def test_another_model_is_not_found(world: World, path: str) -> None:
    found = error(await world.client.post(path, json=body_for(path, model="gpt-9")), 404)
    assert (found["param"], found["code"]) == ("model", "model_not_found")


@in_world
async def test_an_error_says_where_it_happened(world: World) -> None:
    world.core.refuses = StageLostError("Gone.", device="mini", stage="mini/1", phase=Phase.SERVE)
    found = error(await world.chat(), 500)
    assert (found["device"], found["stage"], found["phase"]) == ("mini", "mini/1", "serve")


@in_world
async def test_a_refused_second_answer_cancels_the_first(world: World) -> None:
    world.core.holds, world.core.accepts, world.core.refuses = True, 1, QueueFullError("Full.")
    error(await world.chat(n=2), 429)
    assert len(world.core.cancelled) == 1


@pytest.mark.parametrize("path", PATHS)
@in_world
async def test_an_error_before_the_first_event_of_a_stream_has_its_status(world: World, path: str) -> None:
    world.core.holds = True
    call = Call(world.app, path, body_for(path, stream=True))
    name = await world.core.arrivals.get()
    assert call.nothing_sent
    world.core.fail(name, UnavailableError("Waited too long.", retry_after_s=30))
    head = await call.sent()
    assert head["status"] == 503
    assert (b"retry-after", b"30") in head["headers"]
    await call.task


@pytest.mark.parametrize("path", PATHS)
@in_world
async def test_an_error_after_the_first_event_is_the_last_event(world: World, path: str) -> None:
    world.core.holds = True
    call = Call(world.app, path, body_for(path, stream=True))
    name = await world.core.arrivals.get()
    world.core.say(name, "Go")
    assert (await call.sent())["status"] == 200
    while "Go" not in str(await call.frame()):
        pass
    world.core.fail(name, StageLostError("mini is gone.", device="mini"))
    last = await call.frame()
    assert (last["error"]["code"], last["error"]["device"]) == ("stage_lost", "mini")
    assert await call.sent() == {"type": "http.response.body", "body": b"", "more_body": False}
    await call.task


@in_world
async def test_one_failed_answer_of_several_ends_them_all(world: World) -> None:
    world.core.holds = True
    call = Call(world.app, "/v1/chat/completions", {"messages": HELLO, "n": 2})
    first, second = await world.core.arrivals.get(), await world.core.arrivals.get()
    world.core.fail(second, StageLostError("mini is gone."))
    assert (await call.sent())["status"] == 500
    assert world.core.cancelled == [first]
    await call.task


NO_JSON = [
    b"",
    b"{",
    b"{} {}",
    b"\xff",
    b'{"messages": NaN}',
    b'{"x": "\\ud800"}',
    b'{"x": ' + b"[" * 100_000,
]
NO_OBJECT = [b"[]", b'"hi"', b"null", b"{'messages': 1}"]


@pytest.mark.parametrize("raw", [*NO_JSON, *NO_OBJECT])
@in_world
async def test_what_is_no_json_object_is_refused(world: World, raw: bytes) -> None:
    assert error(await world.client.post("/v1/chat/completions", content=raw))["code"].startswith("invalid_")


@in_world
async def test_a_number_too_large_names_its_field(world: World) -> None:
    raw = b'{"messages": [], "temperature": 1e999}'
    assert error(await world.client.post("/v1/chat/completions", content=raw))["param"] in {
        "messages",
        "temperature",
    }


@in_world
async def test_a_body_over_the_limit_is_refused_before_it_is_read(world: World) -> None:
    found = error(await world.client.post("/completion", content=b"x" * (BODY_BYTES + 1)), 413)
    assert (found["code"], found["limit_bytes"]) == ("body_too_large", BODY_BYTES)


@in_world
async def test_a_chunked_body_over_the_limit_is_refused_too(world: World) -> None:
    async def chunks():
        for _ in range(9):
            yield b" " * (1 << 20)

    error(await world.client.post("/completion", content=chunks()), 413)


@pytest.mark.parametrize("path", ["/", "/v1/chat", "/v1/chat/completions/", "/v1/embeddings"])
@in_world
async def test_a_path_that_is_not_there_is_an_openai_error(world: World, path: str) -> None:
    assert error(await world.client.post(path, json={}), 404)["code"] == "not_found"


@in_world
async def test_a_wrong_method_is_an_openai_error(world: World) -> None:
    response = await world.client.get("/v1/chat/completions")
    assert error(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


@in_world
async def test_a_fault_of_ours_shows_no_inner_text(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.gateway, "submit", lambda *_: 1 / 0)
    response = await world.chat()
    found = error(response, 500)
    assert "division" not in response.text
    assert found["request_id"] == response.headers["x-request-id"]


@in_world
async def test_a_fault_of_ours_inside_a_stream_is_an_event(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.gateway.codec, "decode", lambda _: 1 / 0)
    response = await world.chat(stream=True, logprobs=True)
    assert frames(response)[-1]["error"]["code"] == "internal_error"
    assert "division" not in response.text


@in_world
async def test_the_core_s_own_name_for_a_field_is_passed_on(world: World) -> None:
    world.core.refuses = InvalidValueError("Outside the vocabulary.", param="logit_bias")
    assert error(await world.chat(logit_bias={"999": 1}))["param"] == "logit_bias"
