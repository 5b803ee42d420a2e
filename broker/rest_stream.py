"""From tickets to an HTTP answer, whole or streamed, in whatever dialect; and what happens when the client leaves.

An answer is a stream of (choice, event) pairs. Whoever stops reading it, for whatever reason, cancels every ticket in
it and leaves no task behind. Knows no endpoint; how an answer looks is an `Answer`'s business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from potluck.broker.effects import RequestFinished, RequestText
from potluck.broker.gateway import Gateway, StreamEvent, Ticket
from potluck.broker.rest_errors import error_object, json_response
from potluck.wire.errors import PotluckError
from potluck.wire.messages import Submit
from potluck.wire.sampling import TokenLogprobs

log = logging.getLogger(__name__)

Events: TypeAlias = AsyncGenerator[tuple[int, StreamEvent], None]
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Reply:
    """What one choice has said so far."""

    prompt_tokens: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: RequestFinished | None = None

    def add(self, event: RequestText) -> None:
        """Takes in what came."""
        self.text += event.text
        self.tokens += event.tokens
        self.logprobs += event.logprobs

    @property
    def end(self) -> RequestFinished:
        """How it ended; ask only when it has."""
        if self.finished is None:
            raise PotluckError("An answer was asked how it ended before it had.")
        return self.finished


class Answer(Protocol):
    """One endpoint's way to say what a request brought forth. One per HTTP request."""

    ending: bytes
    """What a stream ends with after its last frame."""

    def piece(self, choice: int, event: RequestText, before: Reply) -> Iterable[msgspec.Struct]:
        """Frames for new text; `before` is the reply without it."""

    def last(self, choice: int, reply: Reply) -> Iterable[msgspec.Struct]:
        """Frames for the end of a choice."""

    def closing(self, replies: Sequence[Reply]) -> Iterable[msgspec.Struct]:
        """Frames after the last choice has ended."""

    def whole(self, replies: Sequence[Reply]) -> msgspec.Struct:
        """The answer in one piece."""


def start(gateway: Gateway, prompts: Sequence[Submit], n: int, name: str, cause: str) -> list[Ticket]:
    """`n` tickets for each prompt, in order, or none. Raises the error that refuses the first one refused.

    A prompt is tokenized once. The choices of one prompt differ in their seeds: the client's and those after it.
    """
    tickets: list[Ticket] = []
    try:
        for prompt in prompts:
            tokens = gateway.tokens_of(prompt)
            for nth in range(n):
                sampling = msgspec.structs.replace(
                    prompt.sampling, seed=(prompt.sampling.seed + nth) % (1 << 32)
                )
                submit = msgspec.structs.replace(
                    prompt,
                    request=name if len(prompts) * n == 1 else f"{name}-{len(tickets)}",
                    prompt=None,
                    messages=None,
                    tokens=tokens,
                    sampling=sampling,
                )
                tickets.append(gateway.submit(submit, cause))
    except BaseException:
        for ticket in tickets:
            ticket.cancel()
        raise
    return tickets


async def merged(request: Request, tickets: Sequence[Ticket]) -> Events:
    """Every ticket's events as they come, until all have ended.

    Raises the first PotluckError of any of them, and ClientDisconnect as soon as the client is gone.
    """
    inbox: asyncio.Queue[tuple[int, StreamEvent] | Exception] = asyncio.Queue()

    async def pump(choice: int, ticket: Ticket) -> None:
        try:
            async for event in ticket.events():
                inbox.put_nowait((choice, event))
        except PotluckError as error:
            inbox.put_nowait(error)

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        inbox.put_nowait(ClientDisconnect())

    tasks = [asyncio.create_task(pump(choice, ticket)) for choice, ticket in enumerate(tickets)]
    tasks.append(asyncio.create_task(watch()))
    running = len(tickets)
    try:
        while running:
            item = await inbox.get()
            if isinstance(item, Exception):
                raise item
            running -= isinstance(item[1], RequestFinished)
            yield item
    finally:
        for ticket in tickets:
            ticket.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def respond(request: Request, tickets: Sequence[Ticket], answer: Answer, *, stream: bool) -> Response:
    """The HTTP answer. A stream's headers wait for its first event, so that an error before it has its own status."""
    replies = [Reply(ticket.prompt_tokens) for ticket in tickets]
    events = merged(request, tickets)
    if stream:
        first = await anext(events)
        return EventStream(frames(first, events, replies, answer), events)
    async with aclosing(events):
        async for choice, event in events:
            match event:
                case RequestText():
                    replies[choice].add(event)
                case RequestFinished():
                    replies[choice].finished = event
    return json_response(answer.whole(replies))


async def frames(
    first: tuple[int, StreamEvent], events: Events, replies: Sequence[Reply], answer: Answer
) -> AsyncGenerator[bytes, None]:
    """The SSE frames of a stream, one at least for every event that has something to say; an error is the last one."""
    try:
        item: tuple[int, StreamEvent] | None = first
        while item is not None:
            choice, event = item
            reply = replies[choice]
            match event:
                case RequestText():
                    for chunk in answer.piece(choice, event, reply):
                        yield frame(chunk)
                    reply.add(event)
                case RequestFinished():
                    reply.finished = event
                    for chunk in answer.last(choice, reply):
                        yield frame(chunk)
            item = await anext(events, None)
        for chunk in answer.closing(replies):
            yield frame(chunk)
        if answer.ending:
            yield answer.ending
    except ClientDisconnect:
        return
    except PotluckError as error:
        yield frame({"error": error_object(error)})
    except Exception:
        log.exception("A stream broke.")
        yield frame({"error": error_object(PotluckError("Something went wrong here."))})


def frame(chunk: object) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


class EventStream(StreamingResponse):
    """Sends each frame as it comes, and closes the events however it ends.

    Starlette's own way of noticing that the client left is not used: `merged` does it, also while nothing is sent.
    """

    def __init__(self, body: AsyncGenerator[bytes, None], events: Events) -> None:
        super().__init__(
            body,
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
            media_type="text/event-stream",
        )
        self._body = body
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the stream."""
        async with aclosing(self._events), aclosing(self._body):
            await self.stream_response(send)
