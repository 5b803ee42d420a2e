"""The people of a soak: short requests over ZeroMQ and REST, jobs, and some who leave before their answer is whole.

Every answer is compared with the first one to the same question; the cluster has to run with --exact. A request that
was refused before it was accepted is sent again; one that ends in any other way than its client wanted is a fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from potluck.runtime.client import Client
from potluck.wire.errors import PotluckError, UnavailableError
from potluck.wire.messages import Accepted, Delta, Finished
from potluck.wire.sampling import GREEDY, Sampling

PROMPTS = ("Hello", "1, 2, 3,", "The quick brown fox", "a", "Water boils at", "Once upon a time")
TOKENS = (3, 5, 8)
QUESTIONS_PER_CONNECTION = 8
RETRY_S = 0.2
ANSWER_S = 120.0
"""The longest that anybody waits for one answer."""


@dataclass(frozen=True, slots=True)
class Question:
    """One of few different requests, so that each is asked often."""

    prompt: str
    tokens: int
    seed: int
    """0: greedy."""

    @property
    def sampling(self) -> Sampling:
        """As it travels; every setting is named, because REST and ZeroMQ have defaults of their own."""
        if self.seed == 0:
            return GREEDY
        return Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=self.seed)


def draw_question(chance: random.Random) -> Question:
    """One of them."""
    return Question(chance.choice(PROMPTS), chance.choice(TOKENS), chance.choice((0, 0, 1, 2)))


@dataclass(slots=True)
class Tally:
    """How requests have ended."""

    ends: Counter[str] = field(default_factory=Counter)
    """finished, cancelled, left, job."""
    refused: int = 0
    """Attempts that no chain could take, and that were repeated."""
    faults: list[str] = field(default_factory=list)
    answers: dict[Question, str] = field(default_factory=dict)

    @property
    def ended(self) -> int:
        """Requests that are over."""
        return sum(self.ends.values())

    def compare(self, question: Question, text: str, how: str) -> None:
        """Whether it is the same answer as before."""
        known = self.answers.setdefault(question, text)
        if text != known:
            self.faults.append(f"{question} over {how} gave {text!r}, and {known!r} before")


class Person:
    """Asks one question after the other, over a connection that is made anew now and then."""

    def __init__(self, number: int, broker: str, http: str, tally: Tally, chance: random.Random) -> None:
        self._name = f"person {number}"
        self._broker = broker
        self._http = http
        self._tally = tally
        self._chance = chance
        self._client: Client | None = None
        self._asked = 0

    async def ask(self) -> None:
        """One question, to its end."""
        question = draw_question(self._chance)
        ways = [(self._stream, 10), (self._stream_and_cancel, 2), (self._go_away, 1), (self._rest, 4),
                (self._rest_and_leave, 1), (self._job, 2)]  # fmt: skip
        way = self._chance.choices([way for way, _ in ways], [often for _, often in ways])[0]
        try:
            async with asyncio.timeout(ANSWER_S):
                self._tally.ends[await way(question)] += 1
        except (PotluckError, OSError, TimeoutError, ValueError) as error:
            self._tally.ends["failed"] += 1
            self._tally.faults.append(f"{question} ({way.__name__}): {type(error).__name__} {error}")

    async def close(self) -> None:
        """Hangs up."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _connected(self) -> Client:
        self._asked += 1
        if self._asked % QUESTIONS_PER_CONNECTION == 0:
            await self.close()
        if self._client is None:
            self._client = Client(self._broker, timeout_s=60.0)
        return self._client

    # ---- over ZeroMQ

    async def _stream(self, question: Question) -> str:
        text, ends = "", 0
        async for event in self._events(question):
            if isinstance(event, Delta):
                text += event.text
            elif isinstance(event, Finished):
                ends += 1
        if ends != 1:
            self._tally.faults.append(f"{question} ended {ends} times")
        self._tally.compare(question, text, "ZeroMQ")
        return "finished"

    async def _stream_and_cancel(self, question: Question) -> str:
        async with aclosing(self._events(question)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    break
        return "cancelled"

    async def _go_away(self, question: Question) -> str:
        async with aclosing(self._events(question)) as events:
            await anext(events)
            await self.close()  # in the middle of an answer
        return "left"

    async def _events(self, question: Question) -> AsyncGenerator[Accepted | Delta | Finished]:
        """A stream that was accepted."""
        while True:
            client = await self._connected()
            stream = client.stream(
                question.prompt, max_tokens=question.tokens, sampling=question.sampling, ignore_eos=True
            )
            async with aclosing(stream) as events:
                try:
                    first = await anext(events)
                except UnavailableError:
                    self._tally.refused += 1
                    await asyncio.sleep(RETRY_S)
                    continue
                yield first
                async for event in events:
                    yield event
                return

    async def _job(self, question: Question) -> str:
        client = await self._connected()
        view = await client.submit_job(
            question.prompt, max_tokens=question.tokens, sampling=question.sampling, ignore_eos=True
        )
        view = await client.job(view.key, ANSWER_S)
        if view.state != "finished":
            self._tally.faults.append(f"{question} as a job is {view.state}: {view.error}")
        else:
            self._tally.compare(question, view.text, "a job")
        return "job"

    # ---- over REST, by hand: what a library pools would be counted as ours

    async def _rest(self, question: Question) -> str:
        text, ends = "", 0
        async for data in self._rest_events(question):
            if data == "[DONE]":
                ends += 1
                continue
            event = json.loads(data)
            if "error" in event:
                raise PotluckError(f"REST: {event['error']}")
            text += "".join(choice["text"] for choice in event["choices"])
        if ends != 1:
            self._tally.faults.append(f"{question} over REST ended {ends} times")
        self._tally.compare(question, text, "REST")
        return "finished"

    async def _rest_and_leave(self, question: Question) -> str:
        async with aclosing(self._rest_events(question)) as events:
            await anext(events)
        return "left"

    async def _rest_events(self, question: Question) -> AsyncGenerator[str]:
        """The data lines of a stream that was accepted."""
        body = {
            "prompt": question.prompt,
            "max_tokens": question.tokens,
            "stream": True,
            "ignore_eos": True,
            "temperature": question.sampling.temperature,
            "top_k": question.sampling.top_k,
            "top_p": question.sampling.top_p,
            "min_p": question.sampling.min_p,
            "seed": question.seed,
        }
        while True:
            reader, writer = await self._post("/v1/completions", body)
            try:
                status = int((await reader.readline()).split()[1])
                while (await reader.readline()).strip():
                    pass  # headers
                if status == UnavailableError.http_status:
                    self._tally.refused += 1
                    await asyncio.sleep(RETRY_S)
                    continue
                if status != 200:
                    raise PotluckError(f"REST answered {status}: {await reader.read()!r}")
                while line := await reader.readline():
                    if line.startswith(b"data: "):
                        yield line[6:].decode().strip()
                return
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    async def _post(
        self, path: str, body: dict[str, object]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        where = urlsplit(self._http)
        raw = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
            + raw
        )
        return reader, writer


__all__ = ["Person", "Question", "Tally"]
