"""Streams that never pause: each asks for one answer after the other, and keeps every token with its time.

What a fault does to them is looked at from here alone, as a client sees it: no part of the broker is asked about its
memory. Whether an answer is whole is decided by `recovery_checks`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from potluck.runtime.client import Client
from potluck.wire.errors import PotluckError, UnavailableError
from potluck.wire.messages import Accepted, Delta, Finished
from potluck.wire.sampling import GREEDY, Sampling

SHORTEST, LONGEST = 40, 120
"""Tokens of an answer."""
CONTEXT_TOKENS = 512
"""Room for the longest prompt and the longest answer."""
RETRY_S = 0.2
"""A request that is refused before it was accepted is sent again after this long."""
REFUSED_S = 60.0
"""Refused for longer than this, it has failed."""

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    (
        "Once upon a time, in a small house at the edge of the forest, there lived an old clockmaker who had never "
        "told anyone how many clocks he owned. Every morning he wound them all, one by one, and every evening he"
    ),
    "Water boils at",
    "1, 2, 3, 4, 5,",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is the largest planet?\nA:",
    "import numpy as np\n\ndef mean(values):\n",
    "The quick brown fox jumps over the lazy dog, and then",
    "List three fruits and say for each of them when it is ripe:\n1.",
    (
        "In the year 1969 two people walked on the Moon for the first time. They had travelled for four days in a ship "
        "no larger than a car, with a computer slower than a pocket calculator. When they came back, they"
    ),
    "My favourite colour is",
    "A recipe for pancakes. You need two eggs, a cup of flour, a cup of milk and a pinch of salt. First,",
    "SELECT name, price FROM products WHERE",
    "The three laws of motion, in plain words, are these. First:",
    "Explain in a few sentences why the sky is blue.",
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request as it is sent, with and without a fault."""

    number: int
    prompt: str
    max_tokens: int
    sampling: Sampling

    @property
    def text(self) -> str:
        """For messages."""
        kind = "greedy" if self.sampling.temperature == 0.0 else f"seed {self.sampling.seed}"
        return f"request {self.number} ({self.prompt[:24]!r}, {kind})"


def make_asks(chance: random.Random, count: int) -> list[Ask]:
    """Half of them greedy, half drawn with a seed, and a third of those with a penalty on repeats."""
    asks = []
    for number in range(count):
        drawn = number // 2
        sampling = GREEDY
        if number % 2:
            penalty = 1.2 if drawn % 3 == 0 else 1.0
            sampling = Sampling(temperature=0.8, seed=chance.randrange(1, 1 << 32), repeat_penalty=penalty)
        prompt = PROMPTS[number % len(PROMPTS)]
        asks.append(Ask(number, prompt, chance.randint(SHORTEST, LONGEST), sampling))
    return asks


@dataclass(slots=True)
class Mark:
    """A fault in the middle of an answer. Times are the event loop's, in seconds."""

    at_s: float
    had: int
    """Tokens that had come."""
    closed: int | None = None
    """Tokens that had come once the broker had given up the chain: those between were already past the fault."""
    next_s: float | None = None
    """From the fault to the first token after that."""


@dataclass(slots=True)
class Answer:
    """One answer as it comes."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    accepted: bool = False
    finish: Finished | None = None
    error: PotluckError | None = None
    marks: list[Mark] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether it ended, well or badly."""
        return self.finish is not None or self.error is not None

    @property
    def waits(self) -> bool:
        """Whether it has been hit by a fault and has not gone on since."""
        return not self.over and any(mark.next_s is None for mark in self.marks)

    def take(self, delta: Delta, now: float) -> None:
        """More of it."""
        self.tokens += delta.tokens
        self.text.append(delta.text)
        for mark in self.marks:
            if mark.next_s is None and mark.closed is not None and len(self.tokens) > mark.closed:
                mark.next_s = now - mark.at_s


class Streams:
    """So many streams over one connection, until `stop`. `ended` has the answers that are over, in that order."""

    def __init__(self, client: Client, asks: Sequence[Ask], count: int) -> None:
        self.ended: list[Answer] = []
        self.tokens = 0
        """Of all answers so far."""
        self.refused = 0
        """Requests that had to be sent again because the broker took none."""
        self._client = client
        self._asks: Iterator[Ask] = itertools.cycle(asks)
        self._running: list[Answer | None] = [None] * count
        self._stopping = False
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._tasks = [self._loop.create_task(self._stream(index)) for index in range(count)]

    @property
    def running(self) -> list[Answer]:
        """Answers that have begun and are not over."""
        return [
            answer for answer in self._running if answer is not None and answer.tokens and not answer.over
        ]

    @property
    def all_run(self) -> bool:
        """Whether every stream is in the middle of an answer."""
        return len(self.running) == len(self._running)

    @property
    def waiting(self) -> list[Answer]:
        """Answers that a fault has hit and that have not gone on."""
        return [answer for answer in self._running if answer is not None and answer.waits]

    def hit(self) -> list[Mark]:
        """Notes a fault in every answer that runs, now."""
        marks = []
        for answer in self.running:
            marks.append(Mark(self._loop.time(), len(answer.tokens)))
            answer.marks.append(marks[-1])
        return marks

    def closed(self) -> None:
        """Notes that the broker has given up the chain that the fault hit: what comes now is of another one."""
        for answer in self.running:
            for mark in answer.marks:
                if mark.closed is None:
                    mark.closed = len(answer.tokens)
        self._tell()

    async def until(self, wanted: Callable[[], bool], within_s: float, what: str) -> None:
        """Waits until it is as wanted. Raises PotluckError after the deadline, or what a stream broke with."""
        try:
            async with asyncio.timeout(within_s):
                while not wanted():
                    self._news.clear()
                    await self._news.wait()
                    self._check()
        except TimeoutError:
            lines = "; ".join(
                f"{answer.ask.text} has {len(answer.tokens)} tokens"
                for answer in self._running
                if answer is not None and not answer.over
            )
            raise PotluckError(f"Not within {within_s:g} s: {what}. {lines}.") from None

    async def stop(self, within_s: float) -> None:
        """Lets every answer come to its end. Raises PotluckError after the deadline."""
        self._stopping = True
        self._tell()
        await self.until(lambda: all(task.done() for task in self._tasks), within_s, "all answers end")

    def cancel(self) -> None:
        """Ends the streams where they are."""
        for task in self._tasks:
            task.cancel()

    def _check(self) -> None:
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise task.exception() or PotluckError("A stream broke.")

    def _tell(self) -> None:
        self._news.set()

    async def _stream(self, index: int) -> None:
        try:
            while not self._stopping:
                answer = Answer(next(self._asks))
                self._running[index] = answer
                await self._answer(answer)
                self.ended.append(answer)
        finally:
            self._tell()

    async def _answer(self, answer: Answer) -> None:
        give_up_s = self._loop.time() + REFUSED_S
        while True:
            try:
                await self._once(answer)
            except UnavailableError as error:
                if answer.accepted or self._loop.time() > give_up_s:
                    answer.error = error
                    return
                self.refused += 1
                await asyncio.sleep(RETRY_S)
            except PotluckError as error:
                answer.error = error
                return
            else:
                return
            finally:
                self._tell()

    async def _once(self, answer: Answer) -> None:
        async for event in _events(self._client, answer.ask):
            match event:
                case Accepted():
                    answer.accepted = True
                case Delta():
                    answer.take(event, self._loop.time())
                    self.tokens += len(event.tokens)
                    self._tell()
                case Finished():
                    answer.finish = event


async def _events(client: Client, ask: Ask) -> AsyncIterator[Accepted | Delta | Finished]:
    stream = client.stream(
        ask.prompt, max_tokens=ask.max_tokens, sampling=ask.sampling, seed=ask.sampling.seed, ignore_eos=True
    )
    async with aclosing(stream) as events:
        async for event in events:
            yield event


async def undisturbed(
    client: Client, asks: Sequence[Ask], at_once: int, within_s: float
) -> dict[int, Answer]:
    """Every request once, by its number. Raises PotluckError if one fails."""
    places = asyncio.Semaphore(at_once)

    async def one(ask: Ask) -> Answer:
        answer = Answer(ask)
        async with places:
            async for event in _events(client, ask):
                if isinstance(event, Delta):
                    answer.take(event, 0.0)
                elif isinstance(event, Finished):
                    answer.finish = event
        return answer

    try:
        async with asyncio.timeout(within_s):
            answers = await asyncio.gather(*map(one, asks))
    except TimeoutError:
        raise PotluckError(
            f"The requests were not answered within {within_s:g} s, without any fault."
        ) from None
    return {answer.ask.number: answer for answer in answers}


__all__ = ["CONTEXT_TOKENS", "Answer", "Ask", "Mark", "Streams", "make_asks", "undisturbed"]
