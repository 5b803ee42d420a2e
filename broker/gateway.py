"""Where requests come in: turns a Submit into prompt tokens, and the core's effects into a stream.

REST handlers and the zmq side hold a `Ticket` for each request and read its events; leaving a ticket early cancels the
request. Knows no HTTP and no sockets; the server connects it to the core.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import msgspec

from potluck.broker.effects import RequestAccepted, RequestFailed, RequestFinished, RequestText
from potluck.broker.events import BrokerEvent, RequestCancelled, RequestSubmitted
from potluck.broker.requests import context_exceeded
from potluck.wire.errors import InvalidValueError, PotluckError, UnknownModelError
from potluck.wire.ids import RequestId
from potluck.wire.messages import ChatMessage, StateView, Submit

StreamEvent: TypeAlias = RequestText | RequestFinished
"""What a ticket yields: text as it comes, and how it ended."""

SPAN = 2
"""A token may stand for more characters than its piece has: a tokenizer may drop some before it looks them up."""

Sink: TypeAlias = Callable[[RequestText | RequestFinished | RequestFailed], None]
"""Takes a request's events as they come, on the event loop, without waiting."""


class PromptCodec(Protocol):
    """The served model's tokenizer and chat template."""

    def encode_prompt(self, text: str) -> list[int]:
        """Tokens of a bare prompt, with the model's own opening token."""

    def encode_chat(self, messages: tuple[ChatMessage, ...]) -> list[int]:
        """Tokens of a chat, by the model's template. Raises RequestError."""

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens."""

    def piece(self, token: int) -> bytes:
        """The bytes of one token, which may be part of a character."""

    @property
    def longest_piece(self) -> int:
        """Bytes of the longest token."""


@dataclass(slots=True)
class Ticket:
    """One request being served. `events()` yields until it ends, or raises the PotluckError it ended with.

    A ticket that was given a sink has no events of its own.
    """

    request: RequestId
    prompt_tokens: int
    _queue: asyncio.Queue[RequestText | RequestFinished | RequestFailed]
    _cancel: Callable[[RequestId], None]
    _sink: Sink
    _over: bool = field(default=False)

    async def events(self) -> AsyncGenerator[StreamEvent, None]:
        """The request's events in order, RequestFinished last. Leaving the loop early cancels the request."""
        try:
            while True:
                event = await self._queue.get()
                if isinstance(event, RequestFailed):
                    raise event.error
                yield event
                if isinstance(event, RequestFinished):
                    return
        finally:
            self.cancel()

    def cancel(self) -> None:
        """The client is gone; does nothing once the request has ended."""
        if not self._over:
            self._over = True
            self._cancel(self.request)


class Gateway:
    """Takes requests in and hands their events out."""

    def __init__(
        self,
        model: str,
        codec: PromptCodec,
        feed: Callable[[BrokerEvent], None],
        random_seed: Callable[[], int],
        view: Callable[[], StateView],
        context_tokens: int = 0,
    ) -> None:
        """`context_tokens` is what one sequence holds, 0 if it is not known."""
        self.model = model
        self.codec = codec
        self.view = view
        self.context_tokens = context_tokens
        self._feed = feed
        self._random_seed = random_seed
        self._tickets: dict[RequestId, Ticket] = {}

    def tokens_of(self, submit: Submit) -> tuple[int, ...]:
        """The prompt's tokens. Raises RequestError."""
        given = [submit.prompt is not None, submit.tokens is not None, submit.messages is not None]
        if sum(given) != 1:
            raise InvalidValueError("Give exactly one of prompt, tokens and messages.", param="prompt")
        if submit.model and submit.model not in (self.model, "default"):
            raise UnknownModelError(
                f"The model {submit.model} is not served here.",
                hint=f"Served is {self.model}.",
                param="model",
            )
        if submit.tokens is not None:
            return submit.tokens
        self._check_length(submit)
        if submit.messages is not None:
            return tuple(self.codec.encode_chat(submit.messages))
        return tuple(self.codec.encode_prompt(submit.prompt or ""))

    def _check_length(self, submit: Submit) -> None:
        """Refuses what can't fit the context before it is tokenized: that takes seconds for a few million characters,
        and the whole broker waits meanwhile. Raises ContextExceededError.
        """
        if self.context_tokens == 0:
            return
        texts = [submit.prompt or ""] if submit.messages is None else [m.content for m in submit.messages]
        size = sum(len(text) for text in texts)
        least = size // (SPAN * self.codec.longest_piece)
        if self.context_tokens <= least:
            said = f"The prompt has at least {least} tokens ({size} characters), the context {self.context_tokens}."
            raise context_exceeded(said, least, self.context_tokens)

    def settled(self, submit: Submit) -> Submit:
        """The same request with its prompt tokenized and its seed drawn: it asks for the same answer whenever it is
        submitted. Raises RequestError.
        """
        tokens, sampling = self.tokens_of(submit), submit.sampling
        if not submit.seed_given:
            sampling = msgspec.structs.replace(sampling, seed=self._random_seed())
        return msgspec.structs.replace(
            submit, model="", prompt=None, messages=None, tokens=tokens, sampling=sampling, seed_given=True
        )

    def submit(self, submit: Submit, cause: str, sink: Sink | None = None) -> Ticket:
        """Starts a request. Raises the RequestError or UnavailableError that refuses it."""
        settled = self.settled(submit)
        tokens = settled.tokens or ()
        request = RequestId(submit.request)
        if request in self._tickets:
            raise InvalidValueError(f"A request named {request} is already running.", param="request")
        queue: asyncio.Queue[RequestText | RequestFinished | RequestFailed] = asyncio.Queue()
        ticket = Ticket(request, len(tokens), queue, lambda name: self._leave(name, cause), queue.put_nowait)
        self._tickets[request] = ticket
        self._feed(submitted(settled, cause))
        self._checked(ticket)
        if sink is not None:
            ticket._sink = sink
        return ticket

    def deliver(self, effect: RequestAccepted | RequestText | RequestFinished | RequestFailed) -> None:
        """Called by the server for each effect that concerns a request."""
        ticket = self._tickets.get(effect.request)
        if ticket is None or isinstance(effect, RequestAccepted):
            return
        if isinstance(effect, RequestFinished | RequestFailed):
            del self._tickets[effect.request]
            ticket._over = True
        ticket._sink(effect)

    def _checked(self, ticket: Ticket) -> None:
        """The core answers a submission at once: if it refused, raise that here instead of in the stream."""
        if ticket.request in self._tickets or ticket._queue.empty():
            return
        first = ticket._queue.get_nowait()
        if isinstance(first, RequestFailed):
            raise first.error
        raise PotluckError("A request ended before it began.")

    def _leave(self, request: RequestId, cause: str) -> None:
        if self._tickets.pop(request, None) is not None:
            self._feed(RequestCancelled(cause=cause, request=request))

    def close(self, error: PotluckError) -> None:
        """Ends every ticket with an error."""
        for name in list(self._tickets):
            self.deliver(RequestFailed(name, error))


def submitted(settled: Submit, cause: str) -> RequestSubmitted:
    """What the core hears of a request."""
    return RequestSubmitted(
        cause=cause,
        request=RequestId(settled.request),
        tokens=settled.tokens or (),
        max_tokens=settled.max_tokens,
        stops=settled.stop,
        sampling=settled.sampling,
        ignore_eos=settled.ignore_eos,
        timeout_s=settled.timeout_s,
    )
