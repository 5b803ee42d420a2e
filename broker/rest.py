"""HTTP for people and programs: OpenAI's endpoints, llama.cpp's /completion, health and state, as one FastAPI app.

Decides only what a path means. What bodies and answers look like is in `rest_chat`, `rest_text` and `rest_llama`; how
they flow and what a client that leaves means, in `rest_stream`; errors in `rest_errors`. The only way to the broker is
its Gateway. Serving the app (host, port, TLS, keys) is the server's business.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from potluck.broker import rest_jobs
from potluck.broker.gateway import Gateway
from potluck.broker.job_desk import JobDesk
from potluck.broker.rest_body import read_body
from potluck.broker.rest_chat import ChatAnswer, ChatBody, ChatCompletion, ChatCompletionChunk
from potluck.broker.rest_errors import HANDLERS, ErrorBody, error_response, json_response
from potluck.broker.rest_jobs import add_job_routes
from potluck.broker.rest_llama import LlamaAnswer, LlamaAnswerBody, LlamaBody, LlamaPiece
from potluck.broker.rest_openai import Header, OpenAIBody
from potluck.broker.rest_stream import respond, start
from potluck.broker.rest_text import Completion, CompletionBody, TextAnswer
from potluck.wire.errors import RequestError, UnavailableError, UnknownModelError
from potluck.wire.messages import StateView

_REF = "#/components/schemas/{name}"
_DOCUMENTED = [
    ChatBody, ChatCompletion, ChatCompletionChunk, CompletionBody, Completion,
    LlamaBody, LlamaAnswerBody, LlamaPiece, StateView, ErrorBody, *rest_jobs.DOCUMENTED,
]  # fmt: skip
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def make_app(
    gateway: Gateway, *, new_id: Callable[[], str], clock: Callable[[], float], jobs: JobDesk | None = None
) -> FastAPI:
    """The app. `new_id` gives names that are never used twice, `clock` the seconds since 1970."""
    app = _App(
        title="Potluck",
        version=version("potluck"),
        summary="One language model on the computers you already own.",
        redirect_slashes=False,
        redoc_url=None,
    )
    for kind, handler in HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.add_middleware(RequestIds, new_id=new_id)
    started = int(clock())

    def header(prefix: str, body: OpenAIBody) -> Header:
        return Header(
            id=f"{prefix}-{new_id()}",
            created=int(clock()),
            model=gateway.model,
            codec=gateway.codec,
            n=body.choices,
            include_usage=body.include_usage,
        )

    @app.post(
        "/v1/chat/completions", tags=["OpenAI"], **_documented(ChatBody, ChatCompletion, ChatCompletionChunk)
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a chat, as OpenAI does."""
        body = await read_body(request, ChatBody)
        head = header("chatcmpl", body)
        try:
            tickets = start(gateway, [body.submit()], head.n, head.id, _cause(request))
        except RequestError as error:
            if error.param == "prompt":  # what the core calls a prompt, this client sent as messages
                error.param = "messages"
            raise
        answer = ChatAnswer(head, logprobs=bool(body.logprobs))
        return await respond(request, tickets, answer, stream=bool(body.stream))

    @app.post("/v1/completions", tags=["OpenAI"], **_documented(CompletionBody, Completion, Completion))
    async def completions(request: Request) -> Response:
        """Go on from one or several prompts, as OpenAI does."""
        body = await read_body(request, CompletionBody)
        head = header("cmpl", body)
        tickets = start(gateway, body.submits(), head.n, head.id, _cause(request))
        answer = TextAnswer(head, logprobs=body.logprobs is not None)
        return await respond(request, tickets, answer, stream=bool(body.stream))

    @app.post("/completion", tags=["llama.cpp"], **_documented(LlamaBody, LlamaAnswerBody, LlamaPiece))
    async def completion(request: Request) -> Response:
        """Go on from a prompt, as the llama.cpp server does."""
        body = await read_body(request, LlamaBody)
        tickets = start(gateway, [body.submit()], 1, f"llama-{new_id()}", _cause(request))
        answer = LlamaAnswer(body, gateway.model, gateway.codec)
        return await respond(request, tickets, answer, stream=bool(body.stream))

    def model_card() -> dict[str, object]:
        """OpenAI's fields, and vLLM's name for the context."""
        context = gateway.view().context_tokens
        card: dict[str, object] = {"id": gateway.model, "object": "model", "created": started}
        return {**card, "owned_by": "potluck", "max_model_len": context}

    @app.get("/v1/models", tags=["OpenAI"])
    async def models() -> Response:
        """The one model that is served."""
        return json_response({"object": "list", "data": [model_card()]})

    @app.get("/v1/models/{model:path}", tags=["OpenAI"])
    async def model_of_name(model: str) -> Response:
        """The model, if it is the one that is served."""
        if model != gateway.model:
            raise UnknownModelError(
                f"The model {model} is not served here.", hint=f"Served is {gateway.model}.", param="model"
            )
        return json_response(model_card())

    @app.get("/health", tags=["Potluck"])
    async def health() -> Response:
        """200 when requests can be served now, else 503 and what is missing."""
        view = gateway.view()
        if view.ready:
            return json_response({"status": "ok"})
        return error_response(
            UnavailableError(view.detail, retry_after_s=max(1.0, view.retry_after_s)), status="loading"
        )

    @app.get("/potluck/v1/state", tags=["Potluck"], responses=_answers(StateView))
    async def state() -> Response:
        """The cluster at this moment, as `potluck ps --json` prints it."""
        return json_response(_all_fields(gateway.view()))

    if jobs is not None:
        add_job_routes(app, jobs, new_id)
    return app


class RequestIds:
    """ASGI middleware: every answer carries x-request-id, the client's own if it sent a sane one.

    Plain ASGI and not Starlette's BaseHTTPMiddleware, which would stand between a stream and its client's leaving.
    """

    def __init__(self, app: ASGIApp, new_id: Callable[[], str]) -> None:
        self.app = app
        self.new_id = new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else self.new_id()
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)


class _App(FastAPI):
    """FastAPI whose OpenAPI page also knows the msgspec structs."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            schema = super().openapi()
            _, schemas = msgspec.json.schema_components(_DOCUMENTED, ref_template=_REF)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        return super().openapi()


def _documented(body: type, whole: type, chunk: type) -> dict[str, Any]:
    """What the OpenAPI page says of a generating endpoint."""
    request = {"required": True, "content": {"application/json": {"schema": _ref(body)}}}
    answers = _answers(whole)
    answers[200]["content"]["text/event-stream"] = {"schema": _ref(chunk)}
    failures = (
        (400, "a field is wrong"),
        (404, "another model"),
        (429, "queue is full"),
        (503, "nothing serves yet"),
        (504, "not finished within its time"),
    )
    for status, why in failures:
        answers[status] = {"description": why, "content": {"application/json": {"schema": _ref(ErrorBody)}}}
    return {"openapi_extra": {"requestBody": request}, "responses": answers}


def _answers(body: type) -> dict[int | str, dict[str, Any]]:
    return {200: {"description": "served", "content": {"application/json": {"schema": _ref(body)}}}}


def _ref(body: type) -> dict[str, str]:
    return {"$ref": _REF.format(name=body.__name__)}


def _cause(request: Request) -> str:
    """What the story of a request says brought it in."""
    return f"{request.url.path} {request.state.request_id}"


def _all_fields(value: object) -> object:
    """Structs as maps with every field: on the wire defaults are left out, but a reader of JSON wants to see them."""
    match value:
        case msgspec.Struct():
            return {name: _all_fields(getattr(value, name)) for name in value.__struct_fields__}
        case tuple():
            return [_all_fields(item) for item in value]
        case _:
            return value
