"""A core of jobs over a real journal, without a thread, a loop or a clock: what is on its way is in the test's hands.

Operations wait in `to_disk` until `write` lets the journal do some; their outcomes wait in `from_disk` until `tell`. A
crash drops both, and goes on from a copy of the files as they were at that moment, as after SIGKILL.
"""

from __future__ import annotations

import itertools
import shutil
import sqlite3
from collections import deque
from collections.abc import Callable
from pathlib import Path

from potluck.broker.job_events import (
    AnswerJob,
    AnswerJobs,
    Ask,
    JobAsked,
    JobEffect,
    JobEnd,
    JobEvent,
    JobsAsked,
    JobSubmitted,
    JobUnwanted,
    JournalOp,
    LookForRoom,
    NewJob,
    Note,
    RefuseAsk,
    RoomSeen,
    RunEnded,
    Seq,
    StartRun,
    StopRun,
    TimePassed,
)
from potluck.broker.jobs import Jobs
from potluck.broker.journal import Journal
from potluck.wire.errors import PotluckError
from potluck.wire.messages import JobView

FINGERPRINT = "f" * 64
AT_S = 1_700_000_000.0
DAY_S = 86_400.0


def new_job(key: str, body: str = "a prompt", created_s: float = AT_S) -> NewJob:
    return NewJob(key, body.encode(), created_s, "tiny", b"request of " + body.encode())


class JobsWorld:
    """See above. `answers` and `refusals` are by ask, `said` has both in their order, `running` the requests of jobs
    that run.
    """

    def __init__(self, folder: Path, *, keep_s: float = DAY_S) -> None:
        self.folder = folder
        self.keep_s = keep_s
        self.now = 0.0
        self._asks = itertools.count(1)
        self._copies = itertools.count(1)
        self.journal = Journal.open(folder / "0" / "jobs.sqlite3", FINGERPRINT)
        self.start()

    def start(self) -> None:
        self.core = Jobs(unfinished=self.journal.unfinished, ended=self.journal.ended, keep_s=self.keep_s)
        self.to_disk: deque[JournalOp] = deque()
        self.from_disk: deque[JobEvent] = deque()
        self.answers: dict[Ask, JobView] = {}
        self.lists: dict[Ask, tuple[JobView, ...]] = {}
        self.refusals: dict[Ask, PotluckError] = {}
        self.said: deque[tuple[Ask, JobView | PotluckError]] = deque()
        self.running: dict[Seq, bytes] = {}
        self.notes: list[Note] = []
        self.wants_room = False
        self.feed(TimePassed(AT_S))

    def crash(self) -> None:
        """Everything but the files is gone."""
        old = self.journal.path.parent
        copy = self.folder / str(next(self._copies))
        shutil.copytree(old, copy)
        self.journal.close()
        shutil.rmtree(old)
        self.journal = Journal.open(copy / self.journal.path.name, FINGERPRINT)
        self.start()

    def close(self) -> None:
        self.journal.close()

    # ---- the shell's work

    def feed(self, event: JobEvent) -> None:
        for effect in self.core.handle(event, self.now):
            self._perform(effect)
        self.core.validate()

    def _perform(self, effect: JobEffect) -> None:
        match effect:
            case StartRun(seq, request):
                assert seq not in self.running, f"job {seq} runs twice"
                self.running[seq] = request
            case StopRun(seq):
                del self.running[seq]
            case LookForRoom():
                self.wants_room = True
            case AnswerJob(ask, view):
                assert ask not in self.answers, f"{ask} is answered twice"
                self.answers[ask] = view
                self.said.append((ask, view))
            case AnswerJobs(ask, views):
                self.lists[ask] = views
            case RefuseAsk(ask, error):
                assert ask not in self.refusals, f"{ask} is refused twice"
                self.refusals[ask] = error
                self.said.append((ask, error))
            case Note():
                self.notes.append(effect)
            case _:
                self.to_disk.append(effect)

    def ask(self, question: Callable[[Ask], JobEvent]) -> Ask:
        ask = Ask(next(self._asks))
        self.feed(question(ask))
        return ask

    def write(self, most: int = 1_000) -> None:
        """Lets the journal do the next operations, in one commit."""
        ops = [self.to_disk.popleft() for _ in range(min(most, len(self.to_disk)))]
        if ops:
            self.from_disk += self.journal.perform(ops)

    def tell(self, most: int = 1_000) -> None:
        """Lets the core hear the next outcomes."""
        for _ in range(min(most, len(self.from_disk))):
            self.feed(self.from_disk.popleft())

    def settle(self) -> None:
        """Until nothing is on its way."""
        while self.to_disk or self.from_disk:
            self.write()
            self.tell()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        due = self.core.next_deadline()
        if due is not None and due <= self.now:
            self.feed(TimePassed(AT_S + self.now))

    def fill_disk(self) -> None:
        """No further page fits."""
        pages = self.database.execute("PRAGMA page_count").fetchone()[0]
        self.database.execute(f"PRAGMA max_page_count = {pages}")

    def make_room_on_disk(self) -> None:
        self.database.execute("PRAGMA max_page_count = 1000000")

    @property
    def database(self) -> sqlite3.Connection:
        return self.journal._db

    # ---- whole steps, for tests that are not about what is on its way

    def submit(self, key: str, body: str = "a prompt") -> JobView | PotluckError:
        return self._outcome(self.ask(lambda ask: JobSubmitted(ask, new_job(key, body))))

    def look(self, key: str) -> JobView | PotluckError:
        return self._outcome(self.ask(lambda ask: JobAsked(ask, key)))

    def forget(self, key: str) -> JobView | PotluckError:
        return self._outcome(self.ask(lambda ask: JobUnwanted(ask, key)))

    def list(self, most: int = 100) -> list[str]:
        ask = self.ask(lambda ask: JobsAsked(ask, most))
        self.settle()
        return [view.key for view in self.lists[ask]]

    def _outcome(self, ask: Ask) -> JobView | PotluckError:
        self.settle()
        return self.answers[ask] if ask in self.answers else self.refusals[ask]

    def room(self, free: int, slots: int = 9) -> None:
        self.feed(RoomSeen(free, slots))
        self.settle()

    def seq_of(self, body: str) -> Seq:
        return next(seq for seq, raw in self.running.items() if raw == b"request of " + body.encode())

    def finish(self, seq: Seq, text: str = "an answer") -> None:
        del self.running[seq]
        self.feed(RunEnded(seq, JobEnd(AT_S + self.now, text, "stop")))
