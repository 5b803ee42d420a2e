"""The shell of jobs: connects their core to the journal's thread, to the gateway, and to those who ask.

Decides nothing. A broker without a journal has a desk, too: it says so to everybody.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from potluck.broker.effects import RequestFailed, RequestFinished, RequestText
from potluck.broker.events import RequestSubmitted
from potluck.broker.gateway import Gateway, Ticket, submitted
from potluck.broker.job_events import (
    AnswerJob,
    AnswerJobs,
    Ask,
    AskerLeft,
    EraseJob,
    FetchJobs,
    JobAsked,
    JobEffect,
    JobEnd,
    JobEvent,
    JobsAsked,
    JobSubmitted,
    JobUnwanted,
    ListJobs,
    LookForRoom,
    LookUp,
    NewJob,
    Note,
    PurgeJobs,
    RefuseAsk,
    RoomSeen,
    RunEnded,
    RunFailed,
    Seq,
    StartRun,
    StopRun,
    StoreEnd,
    StoreJob,
    TimePassed,
)
from potluck.broker.jobs import Jobs
from potluck.broker.journal import Journal, decode_request, digest_of, encode_request
from potluck.broker.journal_thread import JournalThread
from potluck.runtime.clockwork import Clockwork
from potluck.wire.errors import ClosingError, JobsOffError, Phase, PotluckError
from potluck.wire.messages import JobView, Submit

log = logging.getLogger("potluck.broker")


class JobDesk:
    """Takes jobs and questions about them. `start`, then `stop` before the gateway closes, then `close`."""

    def __init__(
        self,
        gateway: Gateway,
        journal: Journal | None,
        *,
        keep_s: float,
        check: Callable[[RequestSubmitted], None],
        room: Callable[[], tuple[int, int]],
    ) -> None:
        """`check` raises the RequestError of a request that can never be served; `room` gives the slots of chains that
        serve, those that are free and all. Ended jobs are kept for `keep_s` seconds.
        """
        self._gateway = gateway
        self._check = check
        self._room = room
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._asked: dict[Ask, asyncio.Future[JobView | tuple[JobView, ...]]] = {}
        self._tickets: dict[Seq, Ticket] = {}
        self._looking = False
        self._stopped = False
        self._journal = journal
        self._thread: JournalThread | None = None
        unfinished, ended = (0, 0) if journal is None else (journal.unfinished, journal.ended)
        self.core = Jobs(unfinished=unfinished, ended=ended, keep_s=keep_s)
        self._clockwork: Clockwork[JobEvent, JobEffect] = Clockwork(self.core, self._perform, self._tick)

    def start(self) -> None:
        """Begins with the jobs that are there. From here on the journal is this desk's."""
        if self._journal is not None:
            self._thread = JournalThread(self._journal, self._outcomes)
            self._tick()

    def stop(self) -> None:
        """Starts no more jobs; those that run stay in the journal without an end."""
        self._stopped = True

    async def close(self) -> None:
        """Writes what was taken in, and closes the journal. Who still waits gets a ClosingError."""
        if self._thread is None:
            return
        self._stopped = True
        await self._thread.close()
        self._clockwork.close()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(_closing())

    # ---- questions

    async def submit(self, key: str, submit: Submit) -> JobView:
        """Takes a job in; it is on the disk when this returns. The job of that key if there is one already.

        Raises RequestError, JobConflictError, QueueFullError, JournalError, JobsOffError.
        """
        self._must_be_on()
        digest = digest_of(submit)
        settled = self._gateway.settled(msgspec.structs.replace(submit, request="job"))
        self._check(submitted(settled, "job"))
        job = NewJob(key, digest, time.time(), self._gateway.model, encode_request(settled))
        return await self._ask_one(partial(JobSubmitted, job=job))

    async def job(self, key: str, wait_s: float = 0.0) -> JobView:
        """The job, as soon as it has ended, at the latest after `wait_s`. Raises UnknownJobError, JournalError."""
        return await self._ask_one(partial(JobAsked, key=key, wait_s=wait_s))

    async def forget(self, key: str) -> JobView:
        """Cancels and forgets a job. Raises UnknownJobError, JournalError."""
        return await self._ask_one(partial(JobUnwanted, key=key))

    async def jobs(self, most: int) -> tuple[JobView, ...]:
        """The newest jobs, without their texts. Raises JournalError."""
        found = await self._ask(partial(JobsAsked, most=most))
        assert isinstance(found, tuple)
        return found

    async def _ask_one(self, question: Callable[[Ask], JobEvent]) -> JobView:
        found = await self._ask(question)
        assert isinstance(found, JobView)
        return found

    async def _ask(self, question: Callable[[Ask], JobEvent]) -> JobView | tuple[JobView, ...]:
        self._must_be_on()
        ask = Ask(next(self._numbers))
        future: asyncio.Future[JobView | tuple[JobView, ...]] = self._loop.create_future()
        self._asked[ask] = future
        try:
            self._feed(question(ask))
            return await future
        finally:
            del self._asked[ask]
            if future.cancelled():
                self._feed(AskerLeft(ask))

    def _must_be_on(self) -> None:
        if self._thread is None:
            raise JobsOffError(hint="Start potluck-broker without --no-journal.")
        if self._stopped:
            raise _closing()

    # ---- the core's clockwork

    def look_for_room(self) -> None:
        """A slot may have become free. Looked at later: the effects of this moment are still being carried out."""
        if self._thread is not None and not self._looking and not self._stopped:
            self._looking = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        if not self._stopped:
            self._feed(RoomSeen(*self._room()))

    def _feed(self, event: JobEvent) -> None:
        self._clockwork.feed(event)

    def _outcomes(self, events: Sequence[JobEvent]) -> None:
        for event in events:
            self._feed(event)

    def _tick(self) -> None:
        self._feed(TimePassed(time.time()))

    def _perform(self, effect: JobEffect) -> None:
        match effect:
            case StoreJob() | LookUp() | ListJobs() | EraseJob() | FetchJobs() | StoreEnd() | PurgeJobs():
                if self._thread is not None:
                    self._thread.put(effect)
            case StartRun(seq, request):
                self._start(seq, request)
            case StopRun(seq):
                ticket = self._tickets.pop(seq, None)
                if ticket is not None:
                    ticket.cancel()
            case LookForRoom():
                self.look_for_room()
            case AnswerJob(ask, view):
                self._settle(ask, view)
            case AnswerJobs(ask, views):
                self._settle(ask, views)
            case RefuseAsk(ask, error):
                future = self._asked.get(ask)
                if future is not None and not future.done():
                    future.set_exception(error)
            case Note(level, text):
                log.log(logging.getLevelNamesMapping()[level.upper()], text)

    def _settle(self, ask: Ask, found: JobView | tuple[JobView, ...]) -> None:
        future = self._asked.get(ask)
        if future is not None and not future.done():
            future.set_result(found)

    # ---- runs

    def _start(self, seq: Seq, request: bytes) -> None:
        run = _Run(self, seq)
        try:
            submit = msgspec.structs.replace(decode_request(request), request=f"job-{seq}")
            self._tickets[seq] = self._gateway.submit(submit, cause=f"job {seq}", sink=run.take)
        except PotluckError as error:
            self._loop.call_soon(self.run_over, RunFailed(seq, error, time.time()))

    def run_over(self, event: RunEnded | RunFailed) -> None:
        """A run has ended, well or badly."""
        self._tickets.pop(event.seq, None)
        if not self._stopped:
            self._feed(event)


class _Run:
    """Gathers what one job's run brings forth."""

    def __init__(self, desk: JobDesk, seq: Seq) -> None:
        self._desk = desk
        self._seq = seq
        self._pieces: list[str] = []

    def take(self, event: RequestText | RequestFinished | RequestFailed) -> None:
        """The gateway's sink."""
        over: RunEnded | RunFailed
        match event:
            case RequestText():
                self._pieces.append(event.text)
                return
            case RequestFinished():
                end = JobEnd(time.time(), "".join(self._pieces), event.reason, event.usage, event.timings)
                over = RunEnded(self._seq, end)
            case RequestFailed():
                over = RunFailed(self._seq, event.error, time.time())
        # Not at once: the core's effects of this moment are still being carried out.
        asyncio.get_running_loop().call_soon(self._desk.run_over, over)


def _closing() -> ClosingError:
    return ClosingError(
        "The broker is closing and takes no new jobs.",
        hint="Send it again once a broker is there; a job that was taken in is done then.",
        phase=Phase.SUBMIT,
        retry_after_s=10,
    )
