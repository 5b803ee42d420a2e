"""What a served cluster says to requests it can't serve; afterwards it serves the next good one as before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from acceptance.cluster_world import FAST, World, command, idle, world
from potluck.runtime.client import Client
from potluck.wire.errors import (
    ContextExceededError,
    FrameTooLargeError,
    InvalidValueError,
    PotluckError,
    UnknownModelError,
)
from potluck.wire.sampling import GREEDY, Sampling
from tiny_models import write_tiny

CONTEXT = 64
GOOD = {"prompt": "hello world", "temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two stages of a tiny model with a small context."""
    folder = tmp_path_factory.mktemp("small")
    with world(write_tiny(folder / "tiny.gguf"), folder, 2, "--context", str(CONTEXT), *FAST) as made:
        yield made


async def good_answer(made: World) -> str:
    async with made.rest() as client:
        answer = await client.post("/v1/completions", json=GOOD)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    assert text
    return text


@pytest.fixture(autouse=True)
def nothing_is_lost(small: World) -> Iterator[None]:
    """Every test leaves a cluster that answers as before, with the same processes."""
    before = small.run(good_answer(small))
    yield
    assert small.run(good_answer(small)) == before
    small.run(small.until(idle))
    assert all(child.alive for child in small.children)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello " * CONTEXT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello " * CONTEXT}]}),
        ("/completion", {"prompt": [9] * CONTEXT}),
    ],
)
def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(
    small: World, path: str, body: dict[str, Any], stream: bool
) -> None:
    async def scenario() -> None:
        async with small.rest() as client:
            answer = await client.post(path, json={**body, "stream": stream})
        error = error_of(answer)
        assert (answer.status_code, error["code"]) == (400, "exceed_context_size")
        assert error["n_ctx"] == CONTEXT
        assert error["n_prompt_tokens"] >= CONTEXT
        assert f"{error['n_prompt_tokens']} tokens" in error["message"]
        assert str(CONTEXT) in error["message"]

    small.run(scenario())


def test_a_prompt_that_just_fits_gets_one_token(small: World) -> None:
    async def scenario() -> None:
        async with small.rest() as client:
            body = {"prompt": [9] * (CONTEXT - 1), "max_tokens": 10, "ignore_eos": True}
            answer = await client.post("/v1/completions", json=body)
        assert answer.json()["usage"]["completion_tokens"] == 1
        assert answer.json()["choices"][0]["finish_reason"] == "length"

    small.run(scenario())


@pytest.mark.parametrize(
    ("raw", "status", "words"),
    [
        (b'{"prompt": "hel', 400, "JSON"),
        (b"", 400, "JSON"),
        (b"[1, 2]", 400, "object"),
        (b'{"prompt": "\xff\xfe"}', 400, "JSON"),
        (b'{"prompt": ' + b"[" * 100_000, 400, ""),
        (b'{"max_tokens": 3}', 400, "prompt"),
        (b'{"prompt": "x", "max_tokens": 0}', 400, "max_tokens"),
        (b'{"prompt": "x", "temperature": "hot"}', 400, "temperature"),
        (b'{"prompt": "x", "model": "gpt-5"}', 404, "gpt-5"),
        (b'{"prompt": []}', 400, "prompt"),
        (b'{"prompt": [999999]}', 400, "vocabulary"),
        (b'{"prompt": "x", "logit_bias": {"999999": 1}}', 400, "vocabulary"),
        (b'{"prompt": "' + b"x" * (9 << 20) + b'"}', 413, "limit"),
    ],
    ids=lambda value: value[:20].decode(errors="replace") if isinstance(value, bytes) else None,
)
def test_a_body_that_is_wrong_is_refused_with_what_is_wrong(
    small: World, raw: bytes, status: int, words: str
) -> None:
    async def scenario() -> None:
        async with small.rest() as client:
            answer = await client.post(
                "/v1/completions", content=raw, headers={"content-type": "application/json"}
            )
        assert answer.status_code == status
        assert words in error_of(answer)["message"]

    small.run(scenario())


def test_paths_and_methods_that_do_not_exist_have_errors_of_the_same_shape(small: World) -> None:
    async def scenario() -> None:
        async with small.rest() as client:
            assert error_of(await client.get("/v1/nothing"))["code"] == "not_found"
            wrong_method = await client.get("/v1/completions")
            assert (wrong_method.status_code, error_of(wrong_method)["type"]) == (
                405,
                "invalid_request_error",
            )

    small.run(scenario())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"tokens": [9] * CONTEXT}, ContextExceededError),
        ({"prompt": "x", "model": "gpt-5"}, UnknownModelError),
        ({"tokens": []}, InvalidValueError),
        ({"prompt": "\ud800"}, InvalidValueError),
        ({"prompt": "x", "seed": 1 << 70}, InvalidValueError),
        ({}, InvalidValueError),
        ({"prompt": "x", "tokens": [1]}, InvalidValueError),
        ({"prompt": "x", "max_tokens": 0}, InvalidValueError),
        ({"prompt": "x", "max_tokens": -3}, InvalidValueError),
        ({"prompt": "x", "stop": [""]}, InvalidValueError),
        ({"prompt": "x", "stop": ["a"] * 17}, InvalidValueError),
        ({"tokens": [-1]}, InvalidValueError),
        ({"prompt": "x", "seed": -1}, InvalidValueError),
        ({"prompt": "x", "sampling": Sampling(temperature=-1.0)}, InvalidValueError),
        ({"messages": []}, InvalidValueError),
        ({"messages": [{"role": "user"}]}, InvalidValueError),
        ({"prompt": "x" * (5 << 20)}, FrameTooLargeError),
        ({"prompt": "x" * 2_500_000}, InvalidValueError),
        ({"prompt": "🚀" * 1_500_000}, FrameTooLargeError),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else None,
)
def test_a_zmq_client_s_bad_request_fails_alone(
    small: World, settings: dict[str, Any], expected: type[PotluckError]
) -> None:
    """The other streams of the same connection go on."""

    async def scenario() -> None:
        async with Client(small.address, timeout_s=20) as client:
            other = client.stream("hello", max_tokens=40, sampling=GREEDY, ignore_eos=True)
            events = [await anext(other)]
            with pytest.raises(expected):
                await client.complete(**settings)
            events += [event async for event in other]
            assert len(events) == 1 + 40 + 1
            assert (await client.state()).ready

    small.run(scenario(), 30)


def test_infer_says_what_is_wrong_with_a_request(small: World) -> None:
    asked = ("infer", "-b", small.address)
    too_long = command("potluck", *asked, "-p", "hello " * 500)
    assert too_long.code == 1
    assert str(CONTEXT) in too_long.err
    assert len(too_long.lines) == 1
    empty_stop = command("potluck", *asked, "-p", "hello", "--stop", "")
    assert empty_stop.code in (1, 2)
    assert "stop" in empty_stop.err
    assert len(empty_stop.lines) == 1
    no_unicode = command("potluck", *asked, "-p", os.fsdecode(b"caf\xe9"))
    assert (no_unicode.code, len(no_unicode.lines)) == (1, 1)
    no_unicode = command("potluck", *asked, stdin=os.fsdecode(b"caf\xe9"))
    assert (no_unicode.code, len(no_unicode.lines)) == (1, 1)
