"""What the tests of the HTTP side share: a scripted core behind a real Gateway, and ways to call the app.

`@in_world` runs a test in its own loop with a `World`, and afterwards checks that no request is still running in the
core and that no task was left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from potluck.broker.effects import RequestAccepted, RequestFailed, RequestFinished, RequestText
from potluck.broker.events import BrokerEvent, RequestCancelled, RequestSubmitted
from potluck.broker.gateway import Gateway
from potluck.broker.rest import make_app
from potluck.wire.errors import PotluckError, RequestError
from potluck.wire.ids import RequestId
from potluck.wire.messages import ChatMessage, StageView, StateView, Timings, Usage
from potluck.wire.sampling import TokenLogprobs

MODEL = "house/tiny"
HELLO = [{"role": "user", "content": "Hello"}]


class Words:
    """A tokenizer for tests: one token per character, chats as lines."""

    def encode_prompt(self, text: str) -> list[int]:
        return [1, *map(ord, text)]

    def encode_chat(self, messages: tuple[ChatMessage, ...]) -> list[int]:
        if any(message.content == "FORBIDDEN" for message in messages):
            raise RequestError("The template refuses this chat.", param="messages")
        return [ord(c) for message in messages for c in f"{message.role}:{message.content}\n"]

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


class Core:
    """Plays the broker's core. By default it answers `says` and ends; with `holds` the test says what comes when."""

    def __init__(self) -> None:
        self.gateway: Gateway
        self.says = ["Good", " day", "!"]
        self.reason, self.stop = "stop", None
        self.refuses: PotluckError | None = None
        self.accepts = 1 << 30
        self.holds = False
        self.cached = 0
        self.ready, self.detail = True, ""
        self.submitted: list[RequestSubmitted] = []
        self.running: dict[RequestId, RequestSubmitted] = {}
        self.cancelled: list[RequestId] = []
        self.arrivals: asyncio.Queue[RequestId] = asyncio.Queue()
        self.departures: asyncio.Queue[RequestId] = asyncio.Queue()
        self._said: dict[RequestId, int] = {}

    @property
    def last(self) -> RequestSubmitted:
        return self.submitted[-1]

    def feed(self, event: BrokerEvent) -> None:
        match event:
            case RequestSubmitted(request=name):
                if self.refuses is not None and len(self.submitted) >= self.accepts % (1 << 30):
                    self.gateway.deliver(RequestFailed(name, self.refuses))
                    return
                self.submitted.append(event)
                self.running[name], self._said[name] = event, 0
                self.gateway.deliver(RequestAccepted(name, len(event.tokens)))
                if not self.holds:  # a real core answers later, too
                    asyncio.get_running_loop().call_soon(self._answer, name)
                self.arrivals.put_nowait(name)
            case RequestCancelled(request=name):
                del self.running[name]
                self.cancelled.append(name)
                self.departures.put_nowait(name)

    def _answer(self, name: RequestId) -> None:
        for text in self.says:
            self.say(name, text)
        self.finish(name)

    def say(self, name: RequestId, text: str, token: int | None = None) -> None:
        wanted = self.running[name].sampling.top_logprobs
        logprobs = (TokenLogprobs(-0.5, ((65, -0.25), (66, float("-inf")))[:wanted]),) if wanted >= 0 else ()
        self._said[name] += 1
        spoken = token if token is not None else ord(text[0]) if text else 0
        self.gateway.deliver(RequestText(name, text, (spoken,), logprobs))

    def finish(self, name: RequestId) -> None:
        event = self.running.pop(name)
        usage = Usage(len(event.tokens), self._said[name], self.cached)
        timings = Timings(queued_s=0.5, first_token_s=1.5, total_s=3.5)
        self.gateway.deliver(RequestFinished(name, self.reason, usage, timings, self.stop))

    def fail(self, name: RequestId, error: PotluckError) -> None:
        del self.running[name]
        self.gateway.deliver(RequestFailed(name, error))

    def view(self) -> StateView:
        stage = StageView("mini/1", "mini", "serving")
        return StateView(3, MODEL, self.ready, (stage,), context_tokens=2048, slots=8, detail=self.detail)


class Call:
    """One HTTP request made by hand, so that a test sees every single send and can hang up."""

    def __init__(
        self, app: FastAPI, path: str, body: object, *, method: str = "POST", query: bytes = b""
    ) -> None:
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._inbox.put_nowait(
            {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        )
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "method": method, "headers": [], "scheme": "http", "path": path, "raw_path": path.encode(),
            "query_string": query, "server": ("house", 80), "client": ("127.0.0.1", 1), "root_path": "",
        }  # fmt: skip
        self.breaks_at = ""
        self.task = asyncio.create_task(app(scope, self._inbox.get, self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == self.breaks_at:
            raise OSError("broken pipe")
        self._sent.put_nowait(message)

    async def sent(self) -> dict[str, Any]:
        return await asyncio.wait_for(self._sent.get(), 10)

    @property
    def nothing_sent(self) -> bool:
        return self._sent.empty()

    async def frame(self) -> Any:
        message = await self.sent()
        assert message["type"] == "http.response.body"
        return one_frame(message["body"])

    def hang_up(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})


class World:
    """A core, the app in front of it, and a client that calls the app without a network."""

    def __init__(self) -> None:
        self.core = Core()
        seeds = itertools.count(1000)
        gateway = Gateway(MODEL, Words(), self.core.feed, lambda: next(seeds), self.core.view)
        self.core.gateway = self.gateway = gateway
        ids = itertools.count(1)
        self.app = make_app(gateway, new_id=lambda: f"id{next(ids)}", clock=lambda: 1_700_000_000.9)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://house")

    async def post(self, path: str, **body: object) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def chat(self, **body: object) -> httpx.Response:
        return await self.post("/v1/chat/completions", **{"messages": HELLO, **body})

    async def complete(self, **body: object) -> httpx.Response:
        return await self.post("/v1/completions", **{"prompt": "Once", **body})

    async def llama(self, **body: object) -> httpx.Response:
        return await self.post("/completion", **{"prompt": "Once", **body})

    @contextlib.asynccontextmanager
    async def on_a_port(self) -> AsyncIterator[str]:
        """The app behind a real uvicorn; the URL of it. Calls wait in the socket's queue until it serves."""
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(
            uvicorn.Config(self.app, log_config=None, lifespan="off", timeout_graceful_shutdown=2)
        )
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task
            listener.close()


def in_world(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs `async def test(world, ...)` as a pytest test."""

    async def run(*args: object, **given: object) -> None:
        world, before = World(), asyncio.all_tasks()
        async with world.client:
            await test(world, *args, **given)
        assert world.core.running == {}, "requests that nobody reads are still running"
        assert world.gateway._tickets == {}
        assert asyncio.all_tasks() - before == set(), "tasks were left behind"

    @functools.wraps(test)
    def wrapper(*args: object, **given: object) -> None:
        asyncio.run(run(*args, **given))

    signature = inspect.signature(test)
    wrapper.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    return wrapper


def one_frame(raw: bytes) -> Any:
    """What one server-sent event says; fails unless `raw` is exactly one."""
    said = raw.removeprefix(b"data: ").removesuffix(b"\n\n")
    assert raw == b"data: " + said + b"\n\n", raw
    assert b"\n\n" not in said, raw
    return "[DONE]" if said == b"[DONE]" else json.loads(said)


def frames(response: httpx.Response) -> list[Any]:
    """The events of a streamed answer."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return [one_frame(raw + b"\n\n") for raw in response.content.split(b"\n\n") if raw]


def error(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of an answer, which must have OpenAI's shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert "detail" not in body
    found: dict[str, Any] = body["error"]
    assert {"message", "type", "param", "code"} <= found.keys()
    assert found["message"]
    return found
