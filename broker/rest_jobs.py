"""/potluck/v1/jobs: requests that outlive the connection they came over, and the broker that took them in.

A body is OpenAI's chat or completion body, or what of it has a meaning for an answer that is kept as text. The key is
drawn here if the client gives none; giving one makes it safe to send the same job again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Request, Response
from msgspec import Meta
from starlette.requests import ClientDisconnect

from potluck.broker.job_desk import JobDesk
from potluck.broker.rest_body import decode, read_bytes, unsupported
from potluck.broker.rest_chat import ChatBody
from potluck.broker.rest_errors import error_object, json_response
from potluck.broker.rest_openai import PromptDetails, UsageBody
from potluck.broker.rest_text import CompletionBody
from potluck.wire import limits
from potluck.wire.errors import InvalidValueError, PotluckError
from potluck.wire.messages import JobView, Submit, Timings

PATH = "/potluck/v1/jobs"
LISTED = 100
"""Jobs in a list if the client does not say."""

Key = Annotated[str, Meta(min_length=1, max_length=limits.NAME_CHARS)]


class JobChatBody(ChatBody, kw_only=True, frozen=True):
    """A chat as a job."""

    key: Key | None = None


class JobCompletionBody(CompletionBody, kw_only=True, frozen=True):
    """A bare prompt as a job."""

    key: Key | None = None


class JobBody(msgspec.Struct, kw_only=True):
    """One job as it stands."""

    key: str
    object: str = "job"
    status: str
    """queued, running, finished, failed or cancelled."""
    model: str
    created: float
    """Seconds since 1970."""
    ended: float | None = None
    text: str | None = None
    """The answer, once the job is finished."""
    finish_reason: str | None = None
    usage: UsageBody | None = None
    timings: Timings | None = None
    error: dict[str, Any] | None = None
    """Why it failed, as any request that fails is answered."""


class JobList(msgspec.Struct, kw_only=True):
    """The newest jobs, without their texts."""

    object: str = "list"
    data: list[JobBody]


DOCUMENTED = [JobChatBody, JobCompletionBody, JobBody, JobList]


def add_job_routes(app: FastAPI, desk: JobDesk, new_id: Callable[[], str]) -> None:
    """Adds the four routes."""

    @app.post(PATH, tags=["Jobs"], status_code=202)
    async def submit_job(request: Request) -> Response:
        """Take a job in: it is on the disk when this answers, and the same key again gives the same job."""
        body = _body(await read_bytes(request))
        key = _key(request.headers.get("idempotency-key"), body.key) or new_id()
        return json_response(_shown(await desk.submit(key, _submit(body))), 202)

    @app.get(PATH, tags=["Jobs"])
    async def list_jobs(request: Request) -> Response:
        """The newest jobs first, without their texts."""
        most = _number(request, "limit", LISTED, 1, limits.JOBS)
        jobs = await desk.jobs(int(most))
        return json_response(JobList(data=[_shown(view, with_text=False) for view in jobs]))

    @app.get(PATH + "/{key}", tags=["Jobs"])
    async def show_job(request: Request, key: str) -> Response:
        """One job, at once or, with ?wait=SECONDS, as soon as it has ended."""
        wait_s = _number(request, "wait", 0.0, 0.0, limits.JOB_WAIT_S)
        return json_response(_shown(await _unless_gone(request, desk, key, wait_s)))

    @app.delete(PATH + "/{key}", tags=["Jobs"])
    async def forget_job(key: str) -> Response:
        """Cancel a job if it has not ended, and forget it. Answers what it was."""
        return json_response(_shown(await desk.forget(key)))


def _body(raw: bytes) -> JobChatBody | JobCompletionBody:
    """Whichever of the two it is. Raises RequestError."""
    fields: dict[str, msgspec.Raw] = {}
    with suppress(msgspec.MsgspecError, RecursionError, UnicodeError):  # `decode` says better what is wrong
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    given = {name for name, value in fields.items() if bytes(value) != b"null"}
    body: JobChatBody | JobCompletionBody
    if "messages" in given:
        body = decode(raw, JobChatBody)
    else:
        body = decode(raw, JobCompletionBody)
    body.refuse_unsupported()
    if {"messages", "prompt"} <= given:
        raise InvalidValueError("Give either messages or prompt.", param="prompt")
    _refuse_unkept(body)
    return body


def _refuse_unkept(body: JobChatBody | JobCompletionBody) -> None:
    """Raises InvalidValueError for what would be missing from the answer that is kept."""
    if body.choices != 1:
        raise unsupported("n", "A job has one answer.")
    if body.stream:
        raise unsupported("stream", "A job's answer is fetched when it is there.")
    if body.logprobs is not None and body.logprobs is not False:
        raise unsupported("logprobs", "A job keeps the text of its answer.")


def _submit(body: JobChatBody | JobCompletionBody) -> Submit:
    if isinstance(body, JobChatBody):
        submit = body.submit()
    else:
        submits = body.submits()
        if len(submits) != 1:
            raise InvalidValueError("prompt: a job has one prompt.", param="prompt")
        submit = submits[0]
    return submit


def _key(header: str | None, field: str | None) -> str | None:
    """The client's key, wherever it stands. The header's may be in quotes, as the draft of that header has it."""
    if header is not None and len(header) > 1 and header[0] == header[-1] == '"':
        header = header[1:-1]
    if header is not None and field is not None and header != field:
        raise InvalidValueError("The header Idempotency-Key and the field key differ.", param="key")
    return field if header is None else header


def _number(request: Request, name: str, default: float, low: float, high: float) -> float:
    given = request.query_params.get(name)
    if given is None:
        return default
    try:
        number = float(given)
    except ValueError:
        number = float("nan")
    if not low <= number <= high:
        raise InvalidValueError(f"{name}: a number from {low:g} to {high:g}.", param=name)
    return number


async def _unless_gone(request: Request, desk: JobDesk, key: str, wait_s: float) -> JobView:
    """The job; ClientDisconnect as soon as nobody waits for it any more."""
    if wait_s == 0:
        return await desk.job(key)

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    job = asyncio.ensure_future(desk.job(key, wait_s))
    gone = asyncio.ensure_future(watch())
    try:
        await asyncio.wait({job, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise ClientDisconnect
        return job.result()
    finally:
        for task in (job, gone):
            task.cancel()
        await asyncio.gather(job, gone, return_exceptions=True)


def _shown(view: JobView, *, with_text: bool = True) -> JobBody:
    body = JobBody(
        key=view.key, status=view.state, model=view.model, created=view.created_s, ended=view.ended_s,
        error=None if view.error is None else error_object(_error(view)),
    )  # fmt: skip
    if view.state == "finished":
        usage = view.usage
        body.text = view.text if with_text else None
        body.finish_reason, body.timings = view.reason, view.timings
        total = usage.prompt_tokens + usage.completion_tokens
        body.usage = UsageBody(
            usage.prompt_tokens, usage.completion_tokens, total, PromptDetails(usage.cached_tokens)
        )
    return body


def _error(view: JobView) -> PotluckError:
    assert view.error is not None
    return view.error.restore()
