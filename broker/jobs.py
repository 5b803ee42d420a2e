"""The core of jobs: requests that are on the disk before they are acknowledged, and whose ends are, too. Pure.

The truth about a job is in the journal. This core keeps only the few jobs that are at hand, and decides what is
written, what runs, and who is told when. It relies on the journal's order: operations are done, and their outcomes come
back, in the order in which they were asked for.

A job's way, and the step it has here (jobs of the other steps are in the journal alone, however many they are):

    handed in -> queued -> AT_HAND -> RUNNING -> ENDING -> ended
                              ^          |
                              +----------+   no chain could serve it: it waits and runs again, from its seed

Forgetting a job ends it at any step. Jobs are started only into slots that are free, so that no request of a person who
waits stands behind one that nobody waits for, and one slot is left free for such a request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from potluck.broker.job_events import (
    ENDED,
    AnswerJob,
    AnswerJobs,
    Ask,
    AskerLeft,
    AskFailed,
    EndNotStored,
    EndStored,
    EndVoid,
    EraseJob,
    FetchFailed,
    FetchJobs,
    JobAsked,
    JobEffect,
    JobEnd,
    JobErased,
    JobEvent,
    JobKnown,
    JobMissing,
    JobNotStored,
    JobsAsked,
    JobSeen,
    JobsFetched,
    JobsPurged,
    JobsSeen,
    JobStored,
    JobSubmitted,
    JobUnwanted,
    KeyTaken,
    ListJobs,
    LookForRoom,
    LookUp,
    Note,
    PurgeFailed,
    PurgeJobs,
    QueuedJob,
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
from potluck.wire import limits
from potluck.wire.errors import (
    InvalidValueError,
    JobConflictError,
    Phase,
    PlanError,
    PotluckError,
    QueueFullError,
    UnavailableError,
    UnknownJobError,
)
from potluck.wire.messages import ErrorInfo, JobView

KEY = re.compile(r"[A-Za-z0-9_=][A-Za-z0-9._:@+=~-]{0,127}")
"""What fits into the path of a URL, a log line and a shell as it is."""
AT_HAND_MOST = 8
"""Jobs that are read ahead, so that a slot does not stand empty while the next one is read."""
ENDING_MOST = 16
"""With so many ends that could not be written no further job is started."""
LEFT_FREE = 1
"""Slots that jobs leave to other requests, where there are several."""
ASKS_MOST = 4_096
STORING_BYTES = 64 << 20
"""Requests that may be on their way to the disk."""
UNFINISHED_MOST = 100_000
"""Jobs without an end in the journal."""
KEEP_MOST = 10_000
"""Jobs with an end in the journal."""
PURGE_EVERY_S = 600.0
PURGE_MOST = 1_000
"""Jobs erased in one go."""
RETRY_S = 2.0
"""What could not be written or started is tried again after this long."""


class Step(StrEnum):
    """Where a job is that this core holds."""

    AT_HAND = "at hand"
    RUNNING = "running"
    ENDING = "ending"


MOVES: dict[Step | None, frozenset[Step | None]] = {
    None: frozenset({Step.AT_HAND}),
    Step.AT_HAND: frozenset({Step.RUNNING, None}),
    Step.RUNNING: frozenset({Step.AT_HAND, Step.ENDING, None}),
    Step.ENDING: frozenset({None}),
}
"""From each step to which; None is "in the journal alone". Anything else is a fault of ours."""


@dataclass(slots=True)
class Held:
    """One job that is at hand."""

    job: QueuedJob
    step: Step = Step.AT_HAND
    end: JobEnd | None = None
    """How it ended, while that is being written."""
    retry_s: float | None = None
    """When that is tried again; None while it is being written."""


@dataclass(frozen=True, slots=True)
class Waiter:
    """Somebody who waits for a job's end."""

    seq: Seq
    until_s: float
    view: JobView


@dataclass(slots=True)
class JobsState:
    """What the core knows."""

    unfinished: int = 0
    """Jobs without an end in the journal."""
    ended: int = 0
    held: dict[Seq, Held] = field(default_factory=dict)
    cursor: int = 0
    """The highest number that was fetched."""
    fetching: bool = False
    more: bool = True
    """Whether the journal may have unfinished jobs above the cursor."""
    fetch_due_s: float | None = None
    """When to fetch again after that failed."""
    room_due_s: float | None = None
    """When to look for room again; None while no job is at hand."""
    purge_due_s: float = 0.0
    purging: bool = False
    storing_bytes: int = 0
    asks: dict[Ask, float] = field(default_factory=dict)
    """Open questions, each with how long it may wait for a job's end, in seconds."""
    waiters: dict[Ask, Waiter] = field(default_factory=dict)

    def count(self, step: Step) -> int:
        """Jobs at a step."""
        return sum(held.step is step for held in self.held.values())


class Jobs:
    """The core. `handle` for every event, then `next_deadline` for the time of the next TimePassed."""

    def __init__(self, *, unfinished: int, ended: int, keep_s: float) -> None:
        """`unfinished` and `ended` jobs are in the journal; the ended ones are kept for `keep_s` seconds."""
        self.state = JobsState(unfinished=unfinished, ended=ended)
        self._keep_s = keep_s

    def handle(self, event: JobEvent, now: float) -> list[JobEffect]:
        """What is to be done because of `event`, in order. `now` is in seconds and never goes back."""
        return [*self._handle(event, now), *self._fetch(now)]

    def _handle(self, event: JobEvent, now: float) -> Iterator[JobEffect]:
        match event:
            case JobSubmitted():
                return self._submitted(event)
            case JobAsked(ask, key) | JobUnwanted(ask, key) if KEY.fullmatch(key) is None:
                return iter([RefuseAsk(ask, _unknown(key[: limits.NAME_CHARS]))])
            case JobAsked(ask, key, wait_s):
                return self._asked(ask, wait_s, LookUp(ask, key))
            case JobsAsked(ask, most):
                return self._asked(ask, 0.0, ListJobs(ask, min(most, limits.JOBS)))
            case JobUnwanted(ask, key):
                return self._asked(ask, 0.0, EraseJob(ask, key))
            case AskerLeft(ask):
                return self._left(ask)
            case JobStored():
                return self._stored(event)
            case JobKnown(ask, seq, size, view):
                self.state.storing_bytes -= size
                self.state.more |= seq > self.state.cursor
                return self._answer(ask, self._now(seq, view))
            case KeyTaken(ask, size, view):
                self.state.storing_bytes -= size
                return self._refuse(ask, _conflict(view))
            case JobNotStored(ask, size, error):
                self.state.storing_bytes -= size
                return self._refuse(ask, error)
            case JobSeen(ask, seq, view):
                return self._seen(ask, seq, view, now)
            case JobMissing(ask, key):
                return self._refuse(ask, _unknown(key))
            case JobsSeen(ask, jobs):
                return self._listed(ask, jobs)
            case JobErased():
                return self._erased(event)
            case AskFailed(ask, error):
                return self._refuse(ask, error)
            case JobsFetched():
                return self._fetched(event)
            case FetchFailed(error):
                self.state.fetching, self.state.fetch_due_s = False, now + RETRY_S
                return iter([Note("error", f"Jobs that wait can't be read. {error}")])
            case EndStored(seq, view):
                return self._end_stored(seq, view)
            case EndVoid(seq):
                return self._end_void(seq)
            case EndNotStored(seq, error):
                return self._end_not_stored(seq, error, now)
            case JobsPurged(count):
                return self._purged(count, now)
            case PurgeFailed(error):
                self.state.purging, self.state.purge_due_s = False, now + PURGE_EVERY_S
                return iter([Note("warning", f"Old jobs can't be erased. {error}")])
            case RoomSeen(free, slots):
                return self._start(free, slots, now)
            case RunEnded(seq, end):
                return self._ended(seq, end)
            case RunFailed():
                return self._run_failed(event, now)
            case TimePassed(at_s):
                return self._time_passed(at_s, now)

    # ---- questions

    def _submitted(self, event: JobSubmitted) -> Iterator[JobEffect]:
        state, size = self.state, len(event.job.request)
        if KEY.fullmatch(event.job.key) is None:
            error: PotluckError = InvalidValueError(
                "A job's key has 1 to 128 letters, digits and ._:@+=~- and begins with a letter, digit, _ or =.",
                param="key",
            )
            yield RefuseAsk(event.ask, error)
        elif state.unfinished >= UNFINISHED_MOST:
            error = _full(f"{state.unfinished} jobs already wait.", 60)
            yield RefuseAsk(event.ask, error)
        elif state.storing_bytes + size > STORING_BYTES and state.storing_bytes > 0:
            error = _full("Jobs are handed in faster than they can be written.", 1)
            yield RefuseAsk(event.ask, error)
        else:
            state.storing_bytes += size
            yield from self._asked(event.ask, 0.0, StoreJob(event.ask, event.job), size)

    def _asked(self, ask: Ask, wait_s: float, effect: JobEffect, size: int = 0) -> Iterator[JobEffect]:
        if len(self.state.asks) >= ASKS_MOST:
            self.state.storing_bytes -= size
            yield RefuseAsk(ask, _full(f"{ASKS_MOST} questions about jobs already wait for an answer.", 5))
            return
        self.state.asks[ask] = wait_s
        yield effect

    def _left(self, ask: Ask) -> Iterator[JobEffect]:
        self.state.asks.pop(ask, None)
        self.state.waiters.pop(ask, None)
        return iter(())

    def _answer(self, ask: Ask, view: JobView) -> Iterator[JobEffect]:
        self.state.waiters.pop(ask, None)
        if self.state.asks.pop(ask, None) is not None:
            yield AnswerJob(ask, view)

    def _refuse(self, ask: Ask, error: PotluckError) -> Iterator[JobEffect]:
        if self.state.asks.pop(ask, None) is not None:
            yield RefuseAsk(ask, error)

    def _stored(self, event: JobStored) -> Iterator[JobEffect]:
        self.state.storing_bytes -= event.size
        self.state.unfinished += 1
        self.state.more = True
        return self._answer(event.ask, event.view)

    def _seen(self, ask: Ask, seq: Seq, view: JobView, now: float) -> Iterator[JobEffect]:
        wait_s = self.state.asks.get(ask, 0.0)
        if view.state in ENDED or wait_s <= 0.0:
            yield from self._answer(ask, self._now(seq, view))
        elif ask in self.state.asks:
            self.state.waiters[ask] = Waiter(seq, now + wait_s, view)

    def _listed(self, ask: Ask, jobs: tuple[tuple[Seq, JobView], ...]) -> Iterator[JobEffect]:
        if self.state.asks.pop(ask, None) is not None:
            yield AnswerJobs(ask, tuple(self._now(seq, view) for seq, view in jobs))

    def _now(self, seq: Seq, view: JobView) -> JobView:
        """The journal's word on a job, and whether it runs: that is not written."""
        held = self.state.held.get(seq)
        if view.state in ENDED or held is None or held.step is Step.AT_HAND:
            return view
        return msgspec.structs.replace(view, state="running")

    def _tell_waiters(self, seq: Seq, view: JobView) -> Iterator[JobEffect]:
        for ask in [ask for ask, waiter in self.state.waiters.items() if waiter.seq == seq]:
            yield from self._answer(ask, view)

    def _erased(self, event: JobErased) -> Iterator[JobEffect]:
        view = event.view
        if view.state in ENDED:
            self.state.ended = max(0, self.state.ended - 1)
        else:
            self.state.unfinished = max(0, self.state.unfinished - 1)
            view = msgspec.structs.replace(view, state="cancelled")
        held = self.state.held.get(event.seq)
        if held is not None:
            if held.step is Step.RUNNING:
                yield StopRun(event.seq)
            self._move(event.seq, held, None)
            yield LookForRoom()
        yield from self._answer(event.ask, view)
        yield from self._tell_waiters(event.seq, view)

    # ---- from the journal to the chains and back

    def _fetch(self, now: float) -> Iterator[JobEffect]:
        state = self.state
        at_hand = state.count(Step.AT_HAND)
        if state.fetching or not state.more or state.fetch_due_s is not None or at_hand >= AT_HAND_MOST:
            return
        state.fetching = True
        yield FetchJobs(Seq(state.cursor), AT_HAND_MOST - at_hand)

    def _fetched(self, event: JobsFetched) -> Iterator[JobEffect]:
        state = self.state
        state.fetching = False
        state.more = len(event.jobs) == event.wanted
        for job in event.jobs:
            held = Held(job)
            state.held[job.seq] = held
            state.cursor = max(state.cursor, job.seq)
        if event.jobs:
            yield LookForRoom()

    def _start(self, free: int, slots: int, now: float) -> Iterator[JobEffect]:
        """The oldest jobs first. While some are left, room is looked for also if nobody says that there may be some."""
        state = self.state
        room = min(free, max(1, slots - LEFT_FREE) - state.count(Step.RUNNING))
        if state.count(Step.ENDING) >= ENDING_MOST:
            room = 0
        waiting = sorted(seq for seq, held in state.held.items() if held.step is Step.AT_HAND)
        for seq in waiting[: max(0, room)]:
            held = state.held[seq]
            self._move(seq, held, Step.RUNNING)
            yield StartRun(seq, held.job.request)
        state.room_due_s = now + RETRY_S if state.count(Step.AT_HAND) else None

    def _ended(self, seq: Seq, end: JobEnd) -> Iterator[JobEffect]:
        held = self.state.held.get(seq)
        if held is None or held.step is not Step.RUNNING:
            return  # forgotten meanwhile
        held.end = end
        self._move(seq, held, Step.ENDING)
        yield StoreEnd(seq, end)
        yield LookForRoom()

    def _run_failed(self, event: RunFailed, now: float) -> Iterator[JobEffect]:
        held = self.state.held.get(event.seq)
        if held is None or held.step is not Step.RUNNING:
            return
        if isinstance(event.error, UnavailableError | PlanError):
            self._move(event.seq, held, Step.AT_HAND)
            self.state.room_due_s = now + RETRY_S
            return
        yield from self._ended(event.seq, JobEnd(event.at_s, error=ErrorInfo.of(event.error)))

    def _end_stored(self, seq: Seq, view: JobView) -> Iterator[JobEffect]:
        state = self.state
        state.unfinished = max(0, state.unfinished - 1)
        state.ended += 1
        held = state.held.get(seq)
        if held is not None:
            self._move(seq, held, None)
        if state.ended > KEEP_MOST and not state.purging:
            state.purge_due_s = 0.0
        yield from self._tell_waiters(seq, view)

    def _end_void(self, seq: Seq) -> Iterator[JobEffect]:
        """Forgotten meanwhile. Who waits was told, unless the erasing was said to have failed and had not."""
        held = self.state.held.get(seq)
        if held is not None:
            self.state.unfinished = max(0, self.state.unfinished - 1)
            self._move(seq, held, None)
        for ask in [ask for ask, waiter in self.state.waiters.items() if waiter.seq == seq]:
            view = self.state.waiters.pop(ask).view
            yield from self._refuse(ask, _unknown(view.key))

    def _end_not_stored(self, seq: Seq, error: PotluckError, now: float) -> Iterator[JobEffect]:
        held = self.state.held.get(seq)
        if held is not None:
            held.retry_s = now + RETRY_S
            yield Note("error", f"Job {held.job.key} has ended, but that can't be written yet. {error}")

    def _move(self, seq: Seq, held: Held, step: Step | None) -> None:
        assert step in MOVES[held.step], f"job {seq} can't go from {held.step} to {step}"
        if step is None:
            del self.state.held[seq]
        else:
            held.step = step

    # ---- time

    def _time_passed(self, at_s: float, now: float) -> Iterator[JobEffect]:
        state = self.state
        if state.fetch_due_s is not None and now >= state.fetch_due_s:
            state.fetch_due_s = None
        if state.room_due_s is not None and now >= state.room_due_s:
            state.room_due_s = None
            yield LookForRoom()
        for seq, held in state.held.items():
            if held.retry_s is not None and held.end is not None and now >= held.retry_s:
                held.retry_s = None
                yield StoreEnd(seq, held.end)
        for ask, waiter in list(state.waiters.items()):
            if now >= waiter.until_s:
                yield from self._answer(ask, self._now(waiter.seq, waiter.view))
        if now >= state.purge_due_s and not state.purging:
            state.purging = True
            yield PurgeJobs(at_s - self._keep_s, KEEP_MOST, PURGE_MOST)

    def _purged(self, count: int, now: float) -> Iterator[JobEffect]:
        state = self.state
        state.purging = False
        state.ended = max(0, state.ended - count)
        state.purge_due_s = now if count >= PURGE_MOST else now + PURGE_EVERY_S
        return iter(())

    def next_deadline(self) -> float | None:
        """When `handle(TimePassed())` is due, on the clock of `now`; None while nothing is waited for."""
        state = self.state
        due = [waiter.until_s for waiter in state.waiters.values()]
        due += [held.retry_s for held in state.held.values() if held.retry_s is not None]
        due += [at for at in (state.fetch_due_s, state.room_due_s) if at is not None]
        if not state.purging:
            due.append(state.purge_due_s)
        return min(due, default=None)

    def validate(self) -> None:
        """Raises AssertionError if the state contradicts itself."""
        state = self.state
        for seq, held in state.held.items():
            assert seq == held.job.seq, f"job {seq} is held as another"
            assert seq <= state.cursor, f"job {seq} is at hand and was not fetched"
            assert (held.end is not None) == (held.step is Step.ENDING), f"job {seq} has an end and has not"
            assert held.retry_s is None or held.step is Step.ENDING, f"job {seq} has nothing to be written"
        assert state.storing_bytes >= 0, "more was written than handed in"
        assert state.unfinished >= 0, "more jobs ended than there were"
        assert state.ended >= 0, "more jobs were erased than there were"
        assert set(state.waiters) <= set(state.asks), "somebody waits who did not ask"
        assert len(state.asks) <= ASKS_MOST, "too many ask"


def _full(what: str, retry_after_s: int) -> QueueFullError:
    return QueueFullError(what, hint="Try again later.", phase=Phase.SUBMIT, retry_after_s=retry_after_s)


def _conflict(view: JobView) -> JobConflictError:
    return JobConflictError(
        f"The key {view.key} names another job already.",
        hint="Send the same body again, or choose another key.",
        param="key",
        key=view.key,
    )


def _unknown(key: str) -> UnknownJobError:
    return UnknownJobError(
        f"There is no job {key}.",
        hint="It was never accepted, was forgotten, or is too old; potluck jobs lists those that are kept.",
        param="key",
        key=key,
    )
