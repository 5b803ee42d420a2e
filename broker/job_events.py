"""What can happen to jobs, and what their core wants done: one frozen class each. Pure.

An operation on the journal is an effect, and what became of it an event; `Journal.perform` turns the one into the
other. `ask` names who waits for an answer, `seq` a job: keys can come again after they were forgotten, numbers can't.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NewType, TypeAlias

from potluck.wire.errors import PotluckError
from potluck.wire.messages import ErrorInfo, JobView, Timings, Usage

Ask = NewType("Ask", int)
"""One question to the jobs, by number."""
Seq = NewType("Seq", int)
"""One job's number in its journal; they grow in the order in which jobs were accepted."""

ENDED = frozenset({"finished", "failed", "cancelled"})
"""States that a job does not leave."""


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to be written. `request` is opaque here, and all that a run needs: prompt tokens, seed, limits."""

    key: str
    digest: bytes
    """Of what the client sent; equal for the same job sent twice."""
    created_s: float
    """Seconds since 1970."""
    model: str
    request: bytes


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A written job that has no end yet."""

    seq: Seq
    key: str
    request: bytes


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended, for good. `error` is None if it has its answer."""

    ended_s: float
    """Seconds since 1970."""
    text: str = ""
    reason: str = ""
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    error: ErrorInfo | None = None


# ---- events, from those who ask


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    """Somebody hands in a job."""

    ask: Ask
    job: NewJob


@dataclass(frozen=True, slots=True)
class JobAsked:
    """Somebody wants to know about one job, at the latest after `wait_s`, or as soon as it has ended."""

    ask: Ask
    key: str
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JobsAsked:
    """Somebody wants the newest jobs."""

    ask: Ask
    most: int


@dataclass(frozen=True, slots=True)
class JobUnwanted:
    """Somebody wants a job cancelled and forgotten."""

    ask: Ask
    key: str


@dataclass(frozen=True, slots=True)
class AskerLeft:
    """Nobody waits for this answer any more. What was asked to be written is written all the same."""

    ask: Ask


# ---- events, from the journal


@dataclass(frozen=True, slots=True)
class JobStored:
    """A new job is on the disk."""

    ask: Ask
    seq: Seq
    size: int
    """Bytes of its request."""
    view: JobView


@dataclass(frozen=True, slots=True)
class JobKnown:
    """That very job was there already."""

    ask: Ask
    seq: Seq
    size: int
    view: JobView


@dataclass(frozen=True, slots=True)
class KeyTaken:
    """Another job has that key."""

    ask: Ask
    size: int
    view: JobView


@dataclass(frozen=True, slots=True)
class JobNotStored:
    """A job could not be written."""

    ask: Ask
    size: int
    error: PotluckError


@dataclass(frozen=True, slots=True)
class JobSeen:
    """A job as the journal has it."""

    ask: Ask
    seq: Seq
    view: JobView


@dataclass(frozen=True, slots=True)
class JobMissing:
    """The journal has no job of that key."""

    ask: Ask
    key: str


@dataclass(frozen=True, slots=True)
class JobsSeen:
    """The newest jobs as the journal has them, without their texts."""

    ask: Ask
    jobs: tuple[tuple[Seq, JobView], ...]


@dataclass(frozen=True, slots=True)
class JobErased:
    """A job is gone from the disk; `view` is the last that was known of it."""

    ask: Ask
    seq: Seq
    view: JobView


@dataclass(frozen=True, slots=True)
class AskFailed:
    """The journal could not be read, or the job not erased."""

    ask: Ask
    error: PotluckError


@dataclass(frozen=True, slots=True)
class JobsFetched:
    """The oldest jobs without an end after a number, in their order."""

    wanted: int
    jobs: tuple[QueuedJob, ...]


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """Unfinished jobs could not be read."""

    error: PotluckError


@dataclass(frozen=True, slots=True)
class EndStored:
    """A job's end is on the disk: the first that was written, should there have been two."""

    seq: Seq
    view: JobView


@dataclass(frozen=True, slots=True)
class EndVoid:
    """The job was erased: its end counts for nothing."""

    seq: Seq


@dataclass(frozen=True, slots=True)
class EndNotStored:
    """A job's end could not be written; it is tried again."""

    seq: Seq
    error: PotluckError


@dataclass(frozen=True, slots=True)
class JobsPurged:
    """Old jobs are gone from the disk."""

    count: int


@dataclass(frozen=True, slots=True)
class PurgeFailed:
    """Old jobs could not be erased; it is tried again."""

    error: PotluckError


# ---- events, from the chains and the clock


@dataclass(frozen=True, slots=True)
class RoomSeen:
    """So many slots of chains that serve are free now, of so many. No other request waits while one is free."""

    free: int
    slots: int


@dataclass(frozen=True, slots=True)
class RunEnded:
    """A job has its whole answer."""

    seq: Seq
    end: JobEnd


@dataclass(frozen=True, slots=True)
class RunFailed:
    """A job's run ended, or could not begin, for this reason."""

    seq: Seq
    error: PotluckError
    at_s: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """`next_deadline` has come. `at_s` is in seconds since 1970."""

    at_s: float


JobEvent: TypeAlias = (
    JobSubmitted | JobAsked | JobsAsked | JobUnwanted | AskerLeft
    | JobStored | JobKnown | KeyTaken | JobNotStored | JobSeen | JobMissing | JobsSeen | JobErased | AskFailed
    | JobsFetched | FetchFailed | EndStored | EndVoid | EndNotStored | JobsPurged | PurgeFailed
    | RoomSeen | RunEnded | RunFailed | TimePassed
)  # fmt: skip


# ---- effects: what the journal is to do, in order


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Write a job, unless its key is there. Becomes JobStored, JobKnown, KeyTaken, JobNotStored."""

    ask: Ask
    job: NewJob


@dataclass(frozen=True, slots=True)
class LookUp:
    """Read one job. Becomes JobSeen, JobMissing, AskFailed."""

    ask: Ask
    key: str


@dataclass(frozen=True, slots=True)
class ListJobs:
    """Read the newest jobs. Becomes JobsSeen, AskFailed."""

    ask: Ask
    most: int


@dataclass(frozen=True, slots=True)
class EraseJob:
    """Take a job off the disk. Becomes JobErased, JobMissing, AskFailed."""

    ask: Ask
    key: str


@dataclass(frozen=True, slots=True)
class FetchJobs:
    """Read the oldest jobs without an end whose numbers are above `after`. Becomes JobsFetched, FetchFailed."""

    after: Seq
    most: int


@dataclass(frozen=True, slots=True)
class StoreEnd:
    """Write a job's end, unless it has one. Becomes EndStored, EndVoid, EndNotStored."""

    seq: Seq
    end: JobEnd


@dataclass(frozen=True, slots=True)
class PurgeJobs:
    """Erase jobs that ended before `before_s`, and the oldest of more than `keep`. Becomes JobsPurged, PurgeFailed.

    At most `most` at once.
    """

    before_s: float
    keep: int
    most: int


JournalOp: TypeAlias = StoreJob | LookUp | ListJobs | EraseJob | FetchJobs | StoreEnd | PurgeJobs


# ---- effects: everything else


@dataclass(frozen=True, slots=True)
class StartRun:
    """Submit a job to the chains. Becomes RunEnded or RunFailed, once, unless it is stopped before."""

    seq: Seq
    request: bytes


@dataclass(frozen=True, slots=True)
class StopRun:
    """Cancel a job's run. Nothing more comes of it."""

    seq: Seq


@dataclass(frozen=True, slots=True)
class LookForRoom:
    """Say how many slots are free, after all that is going on now."""


@dataclass(frozen=True, slots=True)
class AnswerJob:
    """Tell who asked about a job."""

    ask: Ask
    view: JobView


@dataclass(frozen=True, slots=True)
class AnswerJobs:
    """Tell who asked for the newest jobs."""

    ask: Ask
    views: tuple[JobView, ...]


@dataclass(frozen=True, slots=True)
class RefuseAsk:
    """Tell who asked why not."""

    ask: Ask
    error: PotluckError


@dataclass(frozen=True, slots=True)
class Note:
    """One line for the log, in words; never a prompt or an answer."""

    level: str
    text: str


JobEffect: TypeAlias = (
    JournalOp | StartRun | StopRun | LookForRoom | AnswerJob | AnswerJobs | RefuseAsk | Note
)
