"""Asks a broker over ZeroMQ, with asyncio. For everything else there is `sync_client`.

    async with Client("192.168.1.10") as client:
        async for delta in client.stream(prompt="Hello", max_tokens=20):
            print(delta.text, end="")

Errors are those of `wire.errors`, rebuilt from what the broker said. Leaving a stream early cancels the request.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

import msgspec

from potluck.runtime.address import control_endpoint
from potluck.runtime.questions import Questions
from potluck.runtime.transport import Transport
from potluck.runtime.zmq_transport import ZmqTransport
from potluck.wire.errors import (
    FrameTooLargeError,
    InvalidValueError,
    MalformedError,
    NoBrokerError,
    PotluckError,
    UnavailableError,
    WireError,
)
from potluck.wire.frames import Buffer
from potluck.wire.messages import (
    Accepted,
    Cancel,
    ChatMessage,
    Delta,
    Drain,
    Draining,
    ErrorInfo,
    Finished,
    ForgetJob,
    JobQuery,
    JobsQuery,
    JobsView,
    JobView,
    PlanQuery,
    PlanView,
    Refused,
    Rejected,
    StateQuery,
    StateView,
    Submit,
    SubmitJob,
    decode,
    encode,
)
from potluck.wire.sampling import Sampling

ASK_S = 5.0
"""After this long without news of a request the broker is asked whether it is still there."""
AGAIN_S = 2.0
"""A question about jobs is asked again after this long without an answer."""
_Question: TypeAlias = SubmitJob | JobQuery | JobsQuery | ForgetJob
_Heard: TypeAlias = Accepted | Delta | Finished | Rejected | Refused

ACCEPT: frozenset[type] = frozenset(
    {Accepted, Delta, Finished, Rejected, StateView, PlanView, JobView, JobsView, Draining, Refused}
)


View = TypeVar("View", StateView, PlanView, Draining)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    text: str
    tokens: tuple[int, ...]
    finish: Finished


class Client:
    """One connection to one broker. `timeout_s` is the longest silence of the broker that is waited through.

    A broker that computes a long prompt is not silent: it is asked for its state now and then, and answers.
    """

    def __init__(self, broker: str, *, timeout_s: float = 20.0, transport: Transport | None = None) -> None:
        self.broker = broker
        self.timeout_s = timeout_s
        self._own_transport = transport is None
        where = control_endpoint(broker)  # raises before anything is open
        self._transport = transport or ZmqTransport()
        self._dealer = self._transport.dealer(where, f"client-{secrets.token_hex(8)}")
        self._streams: dict[str, asyncio.Queue[_Heard]] = {}
        self._views: list[asyncio.Future[StateView]] = []
        self._plans: list[asyncio.Future[PlanView]] = []
        self._drainings: list[asyncio.Future[Draining]] = []
        self._questions = Questions(self._dealer.send, self._silence)
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._loop.time()
        self._broker_born_s = float("-inf")
        """When the broker was started, on this side's clock."""
        self._reader = self._loop.create_task(self._read())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection; running requests are cancelled by the broker when it notices."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._dealer.close()
        if self._own_transport:
            self._transport.close()

    async def state(self, timeout_s: float = 5.0) -> StateView:
        """The cluster now. Raises NoBrokerError."""
        return await self._ask(StateQuery(), self._views, timeout_s)

    async def plan(self, query: PlanQuery | None = None, timeout_s: float = 20.0) -> PlanView:
        """The plan in force and its forecast. Raises NoBrokerError."""
        return await self._ask(query or PlanQuery(), self._plans, timeout_s)

    async def drain(self, device: str, *, back: bool = False, timeout_s: float = 20.0) -> Draining:
        """Has a device's work moved off it, or lets it have work again; asked again, how far that is.

        Raises NoBrokerError.
        """
        return await self._ask(Drain(device, back), self._drainings, timeout_s)

    async def _ask(
        self, query: StateQuery | PlanQuery | Drain, waiting: list[asyncio.Future[View]], timeout_s: float
    ) -> View:
        future: asyncio.Future[View] = self._loop.create_future()
        waiting.append(future)
        self._dealer.send(encode(query))
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise self._silence(timeout_s) from None
        finally:
            if future in waiting:
                waiting.remove(future)

    async def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[ChatMessage | dict[str, str]] | None = None,
        tokens: Sequence[int] | None = None,
        model: str = "",
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        sampling: Sampling | None = None,
        seed: int | None = None,
        ignore_eos: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Accepted | Delta | Finished]:
        """First Accepted, then a Delta per token, then Finished. Raises the PotluckError that ended the request.

        One that is not finished within `timeout_s` ends with RequestTimeoutError.
        """
        name = secrets.token_hex(8)
        submit = submit_of(
            name, prompt, messages=messages, tokens=tokens, model=model, max_tokens=max_tokens, stop=stop,
            sampling=sampling, seed=seed, ignore_eos=ignore_eos, timeout_s=timeout_s,
        )  # fmt: skip
        frames = _frames(submit)
        async with aclosing(self._run(name, frames)) as events:
            async for event in events:
                yield event

    async def complete(self, prompt: str | None = None, **settings: object) -> Answer:
        """The whole answer to one prompt; settings as for `stream`."""
        text: list[str] = []
        tokens: list[int] = []
        async with aclosing(self.stream(prompt, **settings)) as events:  # type: ignore[arg-type]
            async for event in events:
                if isinstance(event, Delta):
                    text.append(event.text)
                    tokens.extend(event.tokens)
                elif isinstance(event, Finished):
                    return Answer("".join(text), tuple(tokens), event)
        raise PotluckError("The stream ended without its last message.")

    async def submit_job(
        self,
        prompt: str | None = None,
        *,
        key: str | None = None,
        timeout_s: float = 20.0,
        **settings: object,
    ) -> JobView:
        """Hands a job in; it survives a restart of the broker once this returns. Settings as for `stream`.

        The same `key` again gives the same job, so this may be repeated after any error. Raises NoBrokerError,
        JobConflictError and whatever else refuses it.
        """
        submit = submit_of("job", prompt, **settings)  # type: ignore[arg-type]
        named = key or secrets.token_hex(12)
        return await self._ask_job(lambda name: SubmitJob(name, named, submit), timeout_s)

    async def job(self, key: str, wait_s: float = 0.0) -> JobView:
        """A job, at once or as soon as it has ended, at the latest after `wait_s`, which may be infinite.

        A broker that is away for less than the client's `timeout_s` is waited for. Raises UnknownJobError,
        NoBrokerError.
        """
        end_s = self._loop.time() + wait_s
        while True:
            left_s = min(ASK_S, max(0.0, end_s - self._loop.time()))
            view = await self._ask_job(
                partial(_job_query, key=key, wait_s=left_s), left_s + self.timeout_s, again_s=left_s + AGAIN_S
            )
            if view.ended_s is not None or view.state == "cancelled" or self._loop.time() >= end_s:
                return view

    async def jobs(self, most: int = 100) -> tuple[JobView, ...]:
        """The newest jobs, without their texts. Raises NoBrokerError."""
        found = await self._ask_jobs(lambda name: JobsQuery(name, most), self.timeout_s)
        assert isinstance(found, JobsView)
        return found.jobs

    async def forget_job(self, key: str) -> JobView:
        """Cancels a job if it has not ended, and forgets it. Raises UnknownJobError, NoBrokerError."""
        return await self._ask_job(lambda name: ForgetJob(name, key), self.timeout_s)

    async def _ask_job(
        self, question: Callable[[str], _Question], timeout_s: float, again_s: float = AGAIN_S
    ) -> JobView:
        found = await self._ask_jobs(question, timeout_s, again_s)
        assert isinstance(found, JobView)
        return msgspec.structs.replace(found, question="")

    async def _ask_jobs(
        self, question: Callable[[str], _Question], timeout_s: float, again_s: float = AGAIN_S
    ) -> JobView | JobsView:
        return await self._questions.ask(
            lambda name: _frames(question(name)), again_s=again_s, timeout_s=timeout_s
        )

    async def _run(self, name: str, frames: Sequence[Buffer]) -> AsyncGenerator[Accepted | Delta | Finished]:
        queue: asyncio.Queue[_Heard] = asyncio.Queue()
        self._streams[name] = queue
        over = False
        begun_s = self._heard_s = self._loop.time()
        try:
            if not self._dealer.send(frames):
                raise self._silence(0.0)
            while True:
                try:
                    async with asyncio.timeout(min(ASK_S, self.timeout_s / 2)):
                        message = await queue.get()
                except TimeoutError:
                    self._check_broker(begun_s)
                    continue
                if isinstance(message, Rejected | Refused):
                    over = True
                    raise message.error.restore()
                over = isinstance(message, Finished)
                yield message
                if over:
                    return
        finally:
            del self._streams[name]
            if not over:
                self._dealer.send(encode(Cancel(name)))

    def _check_broker(self, begun_s: float) -> None:
        """Asks a broker that says nothing for its state. Raises NoBrokerError if it has said nothing for too long, and
        UnavailableError if it was started anew since the request began.
        """
        silent_s = self._loop.time() - self._heard_s
        if silent_s >= self.timeout_s:
            raise self._silence(self.timeout_s)
        if self._broker_born_s > begun_s:
            raise UnavailableError(
                "The broker was restarted, and the request is lost.", hint="Send it again."
            )
        self._dealer.send(encode(StateQuery()))

    async def _read(self) -> None:
        while True:
            frames = await self._dealer.recv()
            self._heard_s = self._loop.time()
            try:
                message = decode(frames, ACCEPT).message
            except WireError as error:
                message = Refused(ErrorInfo.of(error))
            match message:
                case StateView():
                    self._broker_born_s = self._heard_s - message.uptime_s
                    for future in self._views:
                        if not future.done():
                            future.set_result(message)
                case PlanView():
                    for plan in self._plans[:1]:  # one answer per question, in their order
                        if not plan.done():
                            plan.set_result(message)
                    del self._plans[:1]
                case Draining():
                    for draining in self._drainings[:1]:
                        if not draining.done():
                            draining.set_result(message)
                    del self._drainings[:1]
                case Refused():
                    for queue in self._streams.values():
                        queue.put_nowait(message)
                    asked: list[asyncio.Future[Any]] = [*self._views, *self._plans, *self._drainings]
                    for question in asked:
                        if not question.done():
                            question.set_exception(message.error.restore())
                    self._questions.refused(message)
                case JobView() | JobsView():
                    self._questions.heard(message)
                case Rejected() if self._questions.heard(message):
                    pass
                case Accepted() | Delta() | Finished() | Rejected():
                    waiting = self._streams.get(message.request)
                    if waiting is not None:
                        waiting.put_nowait(message)
                case _:
                    raise MalformedError("Not a message for clients.")

    def _silence(self, waited_s: float) -> NoBrokerError:
        return NoBrokerError(
            f"No broker answers at {self.broker} ({waited_s:g} s).",
            hint="Start potluck-broker there, or name another address with --broker.",
        )


def submit_of(
    name: str,
    prompt: str | None = None,
    *,
    messages: Sequence[ChatMessage | dict[str, str]] | None = None,
    tokens: Sequence[int] | None = None,
    model: str = "",
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
    sampling: Sampling | None = None,
    seed: int | None = None,
    ignore_eos: bool = False,
    timeout_s: float | None = None,
) -> Submit:
    """The request that these settings mean. Raises InvalidValueError."""
    chosen = sampling or Sampling()
    if seed is not None:
        chosen = msgspec.structs.replace(chosen, seed=seed)
    return Submit(
        request=name,
        prompt=prompt,
        tokens=None if tokens is None else tuple(tokens),
        messages=None if messages is None else tuple(_message(m) for m in messages),
        model=model,
        max_tokens=max_tokens,
        stop=tuple(stop),
        sampling=chosen,
        seed_given=seed is not None or (sampling is not None and sampling.seed != 0),
        ignore_eos=ignore_eos,
        timeout_s=timeout_s,
    )


def _message(message: ChatMessage | dict[str, str]) -> ChatMessage:
    if isinstance(message, ChatMessage):
        return message
    try:
        return ChatMessage(message["role"], message["content"])
    except (KeyError, TypeError):
        raise InvalidValueError("A message needs a role and a content.", param="messages") from None


def _job_query(name: str, key: str, wait_s: float) -> JobQuery:
    return JobQuery(name, key, wait_s)


def _frames(submit: Submit | _Question) -> list[Buffer]:
    """The request's frames, checked as the broker would: it can't say which request of a connection a bad frame was.

    Raises InvalidValueError, FrameTooLargeError.
    """
    try:
        frames = encode(submit)
        decode(frames, frozenset({type(submit)}))
    except FrameTooLargeError as error:
        error.hint = "Shorten the prompt."
        raise
    except MalformedError as error:
        raise InvalidValueError(error.what.removeprefix(f"{type(submit).__name__}: ")) from error
    except (
        TypeError,
        ValueError,
        OverflowError,
    ) as error:  # text that is not Unicode, a number of over 64 bits
        raise InvalidValueError(f"The request can't be sent: {error}.") from error
    return frames


__all__ = ["Answer", "Client"]
