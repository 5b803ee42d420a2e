"""The clients of a walk: what they ask for, what they hear, and whether it may have ended like that.

A request is checked token by token as it is heard. A job is handed in until somebody says it is on the disk; from then
on it must come to the undisturbed answer, whatever becomes of its client and of the broker.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from contextlib import aclosing
from dataclasses import dataclass, field

from potluck.runtime.client import Client
from potluck.wire.errors import (
    CancelledError,
    NoBrokerError,
    PotluckError,
    QueueFullError,
    UnavailableError,
    UnknownJobError,
)
from potluck.wire.messages import Accepted, Delta, Finished, JobView
from potluck.wire.sampling import GREEDY, Sampling
from sim.cluster import BROKER, CODEC, House
from sim.steps import Submit, SubmitJob
from sim.watched import undisturbed

CLIENTS = [f"c{number}" for number in range(3)]
ADMIN = "admin"
"""A client whose link is never cut, and which never goes."""
TEXT = "The quick brown fox jumps over the lazy dog"
RETRY_S = 1.0


@dataclass
class Ask:
    """One request and what its client has heard."""

    number: int
    client: str
    prompt: tuple[int, ...]
    tokens: int
    sampling: Sampling
    stops: tuple[str, ...]
    expected: list[int]
    accepted: bool = False
    heard: list[int] = field(default_factory=list)
    text: str = ""
    end: Finished | PotluckError | str | None = None
    cancelled: bool = False
    orphaned: bool = False
    """The broker was killed under it, or its client's connection broke."""
    task: asyncio.Task[None] = field(init=False)

    def __str__(self) -> str:
        end = type(self.end).__name__ if isinstance(self.end, Finished) else self.end
        return f"#{self.number} of {self.client} ({len(self.prompt)}+{self.tokens}, {len(self.heard)} heard, {end})"


@dataclass
class Job:
    """One job and what was said of it."""

    key: str
    prompt: tuple[int, ...]
    tokens: int
    sampling: Sampling
    promised: bool = False
    """Somebody was told that it is on the disk."""
    unwanted: bool = False
    view: JobView | None = None
    """Its end, once somebody was told."""
    faulty: bool = False
    """It met with faults that may be its end."""
    task: asyncio.Task[None] = field(init=False)

    @property
    def expected(self) -> str:
        return CODEC.decode(undisturbed(self.prompt, self.tokens, self.sampling))


def prompt_of(step: Submit | SubmitJob) -> tuple[int, ...]:
    return tuple(CODEC.encode((chr(97 + step.letter) + TEXT)[: step.length]))


def sampling_of(step: Submit | SubmitJob) -> Sampling:
    return GREEDY if step.seed == 0 else Sampling(temperature=1.0, seed=step.seed)


class Clients:
    """All clients of a household, and what they wait for."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.asks: list[Ask] = []
        self.jobs: list[Job] = []
        self._count = 0
        self._clients: dict[str, Client] = {}
        self._drains: set[asyncio.Task[None]] = set()

    def named(self, name: str) -> Client:
        """The client's connection; a new one if it has none."""
        if name not in self._clients:
            self._clients[name] = self.house.client(name)
        return self._clients[name]

    @property
    def connected(self) -> list[Client]:
        return list(self._clients.values())

    async def goes(self, name: str) -> None:
        """The client's machine is switched off."""
        if self._clients.pop(name, None) is not None:
            await self.house.kill(name)

    @property
    def running(self) -> list[Ask]:
        return [ask for ask in self.asks if ask.end is None]

    # ---- requests

    def submit(self, step: Submit, *, name: str | None = None) -> Ask:
        house = self.house
        name = name or CLIENTS[step.client]
        client = self.named(name)
        prompt, sampling = prompt_of(step), sampling_of(step)
        tokens = min(step.tokens, house.config.context_tokens - len(prompt))
        stops: tuple[str, ...] = ()
        if step.stop:
            text = CODEC.decode(undisturbed(prompt, tokens, sampling))
            at = min(2 * step.stop, max(0, len(text) - 2))
            stops = (text[at : at + 2] or "zz",)
        expected = undisturbed(prompt, tokens, sampling, stops)
        ask = Ask(self._count, name, prompt, tokens, sampling, stops, expected)
        self._count += 1
        house.tell(f"#{ask.number} is asked by {name}: {len(prompt)}+{tokens}")
        ask.task = house.loop.create_task(self._ask(client, ask), context=house.context(name))
        ask.task.add_done_callback(lambda _: self._ended(ask))  # also if it was cancelled before it began
        self.asks.append(ask)
        return ask

    def cancel(self, ask: Ask) -> None:
        ask.cancelled = True
        self.house.tell(f"#{ask.number} is cancelled")
        ask.task.cancel()

    async def _ask(self, client: Client, ask: Ask) -> None:
        stream = client.stream(
            tokens=ask.prompt,
            max_tokens=ask.tokens,
            sampling=ask.sampling,
            seed=ask.sampling.seed,
            stop=ask.stops,
        )
        try:
            async with aclosing(stream) as events:
                async for event in events:
                    match event:
                        case Accepted():
                            ask.accepted = True
                        case Delta(_, text, tokens):
                            ask.text += text
                            ask.heard += tokens
                            with self.house.noticing():
                                assert ask.heard == ask.expected[: len(ask.heard)], (
                                    f"{ask} hears {ask.heard} instead of {ask.expected}"
                                )
                        case Finished():
                            ask.end = event
        except PotluckError as error:
            ask.end = error

    def _ended(self, ask: Ask) -> None:
        if ask.end is None:
            ask.end = "cancelled" if ask.cancelled else "its client is gone"
        with self.house.noticing():
            self._check_end(ask)
        self.house.stir()

    def _check_end(self, ask: Ask) -> None:
        """Whether it may have ended like this."""
        match ask.end:
            case Finished():
                assert ask.heard == ask.expected, f"{ask} instead of {ask.expected}"
            case NoBrokerError():
                assert ask.orphaned or not self.house.faultless, f"{ask}"
            case CancelledError():
                raise AssertionError(f"{ask}: nobody cancelled it")
            case QueueFullError():
                assert not ask.accepted, f"{ask}"
            case UnavailableError():
                pass
            case PotluckError():
                assert ask.orphaned or not self.house.faultless, f"{ask}: there was no fault"
            case _:
                pass

    # ---- jobs

    def hand_in(self, step: SubmitJob) -> None:
        """A client hands a job in, and waits for its end."""
        house, name = self.house, CLIENTS[step.client]
        client = self.named(name)
        prompt = prompt_of(step)
        job = Job(
            f"job-{self._count}",
            prompt,
            min(step.tokens, house.config.context_tokens - len(prompt)),
            sampling_of(step),
        )
        self._count += 1
        house.tell(f"{job.key} is handed in by {name}: {len(prompt)}+{job.tokens}")
        job.task = house.loop.create_task(self._job(client, job), context=house.context(name))
        job.task.add_done_callback(lambda _: house.stir())
        self.jobs.append(job)

    async def _job(self, client: Client, job: Job) -> None:
        while not job.promised:
            try:
                await client.submit_job(
                    key=job.key,
                    tokens=job.prompt,
                    max_tokens=job.tokens,
                    sampling=job.sampling,
                    seed=job.sampling.seed,
                )
                job.promised = True
            except UnavailableError:  # no broker, or a queue that is full: the same key may be sent again
                await asyncio.sleep(RETRY_S)
        await self.follow(client, job)

    async def follow(self, client: Client, job: Job) -> None:
        """Waits for the job's end, and holds it against what was said before."""
        while True:
            try:
                view = await client.job(job.key, math.inf)
            except UnavailableError:
                await asyncio.sleep(RETRY_S)
            except UnknownJobError as error:
                if not job.unwanted:
                    self.house.faults.append(AssertionError(f"{job.key} was promised and is lost: {error}"))
                return
            else:
                with self.house.noticing():
                    self._check_job(job, view)
                job.view = view
                return

    def _check_job(self, job: Job, view: JobView) -> None:
        if view.state == "cancelled":
            assert job.unwanted, f"{job.key}: nobody cancelled it"
        elif view.state == "failed":
            assert job.faulty or not self.house.faultless, f"{job.key} failed: {view.error}"
        else:
            assert view.text == job.expected, f"{job.key} says {view.text!r} instead of {job.expected!r}"
        if job.view is not None:
            assert (view.state, view.text) == (job.view.state, job.view.text), f"{job.key} has two ends"

    async def forget(self, job: Job) -> None:
        """Nobody wants it any more."""
        self.house.tell(f"{job.key} is not wanted any more")
        job.unwanted = True
        with contextlib.suppress(PotluckError):
            await self.named(ADMIN).forget_job(job.key)

    # ---- drains

    def drain(self, device: str, *, back: bool) -> None:
        """Somebody wants a device to have no work."""

        async def ask() -> None:
            with contextlib.suppress(NoBrokerError):
                await self.named(ADMIN).drain(device, back=back)

        self.house.tell(f"{device} is {'not ' if back else ''}to be drained")
        self.background(ask())

    def background(self, work: object) -> None:
        self.named(ADMIN)
        task = self.house.loop.create_task(work, context=self.house.context(ADMIN))  # type: ignore[arg-type]
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)

    async def settle(self) -> None:
        """Waits until the questions of the admin are answered."""
        while self._drains:
            await asyncio.wait(set(self._drains))

    def broker_died(self) -> None:
        """What ran is lost, but for jobs."""
        for ask in self.running:
            ask.orphaned = True

    def connection_broke(self, name: str) -> None:
        """The broker ends what a client has asked for over a connection that broke."""
        for ask in self.running:
            if ask.client == name:
                ask.orphaned = True

    def faults(self) -> None:
        """What runs may fail."""
        for job in self.jobs:
            job.faulty = job.faulty or job.view is None


__all__ = ["ADMIN", "BROKER", "CLIENTS", "Ask", "Clients", "Job"]
