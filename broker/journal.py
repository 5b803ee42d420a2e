"""The journal of jobs: one SQLite file for one model. What it has said is written is on the disk.

`perform` does several operations in one transaction and says what became of them only after the commit has reached the
disk (write-ahead log, synchronous=FULL). It blocks: `journal_thread` calls it away from the event loop. One process at
a time has the file; SQLite's lock on it ends with that process, however it ends. The file has mode 0600: it holds
prompts, each until its job has ended, and answers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import msgspec
import platformdirs

from potluck.broker.job_events import (
    AskFailed,
    EndNotStored,
    EndStored,
    EndVoid,
    EraseJob,
    FetchFailed,
    FetchJobs,
    JobErased,
    JobEvent,
    JobKnown,
    JobMissing,
    JobNotStored,
    JobSeen,
    JobsFetched,
    JobsPurged,
    JobsSeen,
    JobStored,
    JournalOp,
    KeyTaken,
    ListJobs,
    LookUp,
    NewJob,
    PurgeFailed,
    PurgeJobs,
    QueuedJob,
    Seq,
    StoreEnd,
    StoreJob,
)
from potluck.wire.errors import JournalBusyError, JournalError, Phase, RequestError
from potluck.wire.messages import ErrorInfo, JobView, Submit, Timings, Usage

APPLICATION = 0x504C4A31
"""In the file's header ("PLJ1"): says that it is ours."""
SCHEMA = 1
EPOCHS = 1 << 12
"""A broker reserves this many epochs when it starts: its clock may be set back before the next one starts."""
READS = (LookUp, ListJobs, FetchJobs)

_SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    key TEXT NOT NULL UNIQUE,
    digest BLOB NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('queued', 'finished', 'failed')),
    created_s REAL NOT NULL,
    ended_s REAL,
    model TEXT NOT NULL,
    outcome BLOB,
    text TEXT,
    request BLOB,
    CHECK ((state = 'queued') = (ended_s IS NULL)),
    CHECK ((state = 'queued') = (request IS NOT NULL))
);
CREATE INDEX unfinished ON jobs (seq) WHERE state = 'queued';
CREATE INDEX ended ON jobs (ended_s, seq) WHERE ended_s IS NOT NULL;
"""
_VIEW = "seq, key, state, created_s, ended_s, model, outcome"


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """What of a job's end is not in a column of its own."""

    reason: str = ""
    usage: Usage = Usage()
    timings: Timings = Timings()
    error: ErrorInfo | None = None


def state_dir() -> Path:
    """Where a broker keeps what must not be lost: `$POTLUCK_STATE_DIR`, else `potluck` in the user's state folder."""
    chosen = os.environ.get("POTLUCK_STATE_DIR")
    return Path(chosen) if chosen else Path(platformdirs.user_state_path("potluck", appauthor=False))


def default_path(fingerprint: str) -> Path:
    """The journal of the model with this fingerprint."""
    return state_dir() / f"jobs-{fingerprint[:16]}.sqlite3"


def encode_request(submit: Submit) -> bytes:
    """What a job's run needs, as the journal keeps it."""
    return msgspec.msgpack.encode(submit)


def decode_request(raw: bytes) -> Submit:
    """The request again. Raises RequestError if these bytes are none that this version of Potluck can read."""
    try:
        return msgspec.msgpack.decode(raw, type=Submit)
    except msgspec.DecodeError as error:
        raise RequestError(
            f"What the journal has of this job can't be read: {error}.",
            hint="Hand it in anew under another key.",
        ) from error


def digest_of(submit: Submit) -> bytes:
    """Equal for two requests that ask for the same thing, whatever they are called."""
    return hashlib.sha256(encode_request(msgspec.structs.replace(submit, request="-"))).digest()


class Journal:
    """One open journal. `unfinished` and `ended` are the numbers of its jobs when it was opened."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._db = connection
        self.unfinished: int = self._one("SELECT count(*) FROM jobs WHERE state = 'queued'")
        self.ended: int = self._one("SELECT count(*) FROM jobs WHERE ended_s IS NOT NULL")

    @classmethod
    def open(cls, path: Path, fingerprint: str) -> Self:
        """Opens or makes the file. Raises JournalBusyError, JournalError naming the file and what to do."""
        _make(path)
        with _said(path, Phase.START):
            connection = sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False)
            try:
                _set_up(path, connection, fingerprint)
                return cls(path, connection)
            except BaseException:
                connection.close()
                raise

    def first_epoch(self, at_s: int) -> int:
        """An epoch above any that was ever used with this journal; `at_s` or more. Raises JournalError."""
        with _said(self.path, Phase.START), self._transaction():
            last = self._db.execute("SELECT value FROM facts WHERE name = 'epoch'").fetchone()
            first = max(at_s, 0 if last is None else last[0] + 1)
            self._db.execute("INSERT OR REPLACE INTO facts VALUES ('epoch', ?)", (first + EPOCHS,))
        return first

    def perform(self, ops: Sequence[JournalOp]) -> list[JobEvent]:
        """What became of each operation, in order. All of them are committed together, if that fails one by one."""
        try:
            return self._together(ops)
        except (JournalError, sqlite3.Error, ValueError):
            return [self._alone(op) for op in ops]

    def close(self) -> None:
        """Folds the log into the file and lets another process have it."""
        self._db.close()

    def _together(self, ops: Sequence[JournalOp]) -> list[JobEvent]:
        if all(isinstance(op, READS) for op in ops):
            return [self._do(op) for op in ops]
        with self._transaction():
            return [self._do(op) for op in ops]

    def _alone(self, op: JournalOp) -> JobEvent:
        try:
            with _said(self.path, None):
                return self._together([op])[0]
        except JournalError as error:
            return failed(op, error)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # some errors have ended it already
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
            raise

    def _do(self, op: JournalOp) -> JobEvent:
        match op:
            case StoreJob():
                return self._store(op)
            case LookUp(ask, key):
                found = self._job("key", key)
                return JobMissing(ask, key) if found is None else JobSeen(ask, *found)
            case ListJobs(ask, most):
                rows = self._db.execute(f"SELECT {_VIEW} FROM jobs ORDER BY seq DESC LIMIT ?", (most,))
                return JobsSeen(ask, tuple(_view((*row, None)) for row in rows))
            case EraseJob(ask, key):
                found = self._job("key", key)
                if found is None:
                    return JobMissing(ask, key)
                self._db.execute("DELETE FROM jobs WHERE seq = ?", (found[0],))
                return JobErased(ask, *found)
            case FetchJobs(after, most):
                rows = self._db.execute(
                    "SELECT seq, key, request FROM jobs WHERE state = 'queued' AND seq > ? ORDER BY seq LIMIT ?",
                    (after, most),
                )
                return JobsFetched(most, tuple(QueuedJob(Seq(seq), key, raw) for seq, key, raw in rows))
            case StoreEnd():
                return self._end(op)
            case PurgeJobs():
                return self._purge(op)

    def _store(self, op: StoreJob) -> JobEvent:
        job, size = op.job, len(op.job.request)
        found = self._job("key", job.key)
        if found is not None:
            seq, view = found
            digest = self._db.execute("SELECT digest FROM jobs WHERE seq = ?", (seq,)).fetchone()[0]
            return JobKnown(op.ask, seq, size, view) if digest == job.digest else KeyTaken(op.ask, size, view)
        made = self._db.execute(
            "INSERT INTO jobs (key, digest, state, created_s, model, request) VALUES (?, ?, 'queued', ?, ?, ?)",
            (job.key, job.digest, job.created_s, job.model, job.request),
        )
        return JobStored(op.ask, Seq(made.lastrowid or 0), size, _new(job))

    def _end(self, op: StoreEnd) -> JobEvent:
        end = op.end
        outcome = Outcome(end.reason, end.usage, end.timings, end.error)
        self._db.execute(
            "UPDATE jobs SET state = ?, ended_s = ?, outcome = ?, text = ?, request = NULL "
            "WHERE seq = ? AND state = 'queued'",
            (
                "finished" if end.error is None else "failed",
                end.ended_s,
                msgspec.msgpack.encode(outcome),
                end.text,
                op.seq,
            ),
        )
        found = self._job("seq", op.seq)
        return EndVoid(op.seq) if found is None else EndStored(*found)

    def _purge(self, op: PurgeJobs) -> JobEvent:
        over = max(0, self._one("SELECT count(*) FROM jobs WHERE ended_s IS NOT NULL") - op.keep)
        oldest = "SELECT seq FROM jobs WHERE ended_s IS NOT NULL {} ORDER BY ended_s, seq LIMIT ?"
        count = self._db.execute(
            f"DELETE FROM jobs WHERE seq IN ({oldest.format('')})", (min(over, op.most),)
        ).rowcount
        count += self._db.execute(
            f"DELETE FROM jobs WHERE seq IN ({oldest.format('AND ended_s < ?')})",
            (op.before_s, op.most - count),
        ).rowcount
        return JobsPurged(count)

    def _job(self, column: str, value: str | int) -> tuple[Seq, JobView] | None:
        row = self._db.execute(f"SELECT {_VIEW}, text FROM jobs WHERE {column} = ?", (value,)).fetchone()
        return None if row is None else _view(row)

    def _one(self, query: str) -> int:
        found: int = self._db.execute(query).fetchone()[0]
        return found


def _make(path: Path) -> None:
    """The file, empty and readable by its owner alone, if there is none; its folder, too. Raises JournalError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600))
        if hasattr(os, "O_DIRECTORY"):  # the file's name must be on the disk, too
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except OSError as error:
        raise JournalError(
            f"The journal of jobs {path} can't be written: {error.strerror}.",
            hint="Give it a place with --journal PATH, or start with --no-journal.",
            phase=Phase.START,
        ) from error


def _set_up(path: Path, db: sqlite3.Connection, fingerprint: str) -> None:
    """Takes the file as ours; one that is not is left as it is. Raises sqlite3.Error, JournalError."""
    # Exclusive before the first look at the file: then the log's index is in memory, and the lock is kept.
    db.execute("PRAGMA locking_mode = EXCLUSIVE")
    is_new = _is_new(path, db, fingerprint)
    _mine(path)
    db.execute("PRAGMA secure_delete = ON")  # forgotten prompts are not left in free pages
    mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        raise _unusable(path, f"its file system does not take a write-ahead log ({mode})")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("BEGIN EXCLUSIVE")  # from here on nobody else gets in
    if is_new:
        for statement in filter(str.strip, _SCHEMA.split(";")):
            db.execute(statement)
        db.execute("INSERT INTO facts VALUES ('fingerprint', ?)", (fingerprint,))
        db.execute(f"PRAGMA application_id = {APPLICATION}")
        db.execute(f"PRAGMA user_version = {SCHEMA}")
    db.execute("COMMIT")


def _is_new(path: Path, db: sqlite3.Connection, fingerprint: str) -> bool:
    """Whether there is nothing in the file yet. Raises JournalError if there is, and it is not ours."""
    application = db.execute("PRAGMA application_id").fetchone()[0]
    schema = db.execute("PRAGMA user_version").fetchone()[0]
    if (
        application == 0
        and schema == 0
        and db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    ):
        return True
    if application != APPLICATION:
        raise _unusable(path, "it is the database of another program")
    if schema != SCHEMA:
        raise _unusable(path, f"it was written by another version of Potluck (format {schema}, not {SCHEMA})")
    if db.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
        raise _unusable(path, "it is damaged")
    owner = db.execute("SELECT value FROM facts WHERE name = 'fingerprint'").fetchone()
    if owner is None or owner[0] != fingerprint:
        raise _unusable(path, "its jobs are another model's")
    return False


def _mine(path: Path) -> None:
    """Nobody but the owner reads it. Raises JournalError."""
    try:
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
    except OSError as error:
        raise _unusable(path, f"others can read it, and that can't be changed: {error.strerror}") from error


def _unusable(path: Path, why: str) -> JournalError:
    return JournalError(
        f"{path} can't be used as the journal of jobs: {why}.",
        hint="Name another file with --journal PATH, move this one away, or start with --no-journal.",
        phase=Phase.START,
    )


@contextlib.contextmanager
def _said(path: Path, phase: Phase | None) -> Iterator[None]:
    """SQLite's errors as ours."""
    try:
        yield
    except (sqlite3.Error, ValueError) as error:  # the latter for text that is not Unicode
        raise _error(path, error, phase) from error


def _error(path: Path, error: Exception, phase: Phase | None) -> JournalError:
    code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
    match code:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return JournalBusyError(
                f"Another broker uses the journal of jobs {path}.",
                hint="Stop that one, or give this one its own: --journal PATH.",
                phase=phase,
            )
        case sqlite3.SQLITE_FULL:
            what, hint = "the disk is full", "Make room on that disk."
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_CANTOPEN:
            what, hint = (
                "the broker may not write there",
                "Check the folder's owner, or choose --journal PATH.",
            )
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            what, hint = (
                "it is damaged, or not a journal",
                "Move it away, or name another one: --journal PATH.",
            )
        case sqlite3.SQLITE_TOOBIG:
            what, hint = "this is too large for it", "Make the request smaller."
        case _:
            what, hint = str(error), "Check that disk, or choose --journal PATH."
    return JournalError(
        f"The journal of jobs {path} failed: {what}.", hint=hint, phase=phase, retry_after_s=30
    )


def failed(op: JournalOp, error: JournalError) -> JobEvent:
    """The outcome of an operation that was not done."""
    match op:
        case StoreJob(ask, job):
            return JobNotStored(ask, len(job.request), error)
        case LookUp(ask) | ListJobs(ask) | EraseJob(ask):
            return AskFailed(ask, error)
        case FetchJobs():
            return FetchFailed(error)
        case StoreEnd(seq):
            return EndNotStored(seq, error)
        case PurgeJobs():
            return PurgeFailed(error)


def _new(job: NewJob) -> JobView:
    return JobView(job.key, "queued", job.created_s, model=job.model)


def _view(
    row: tuple[int, str, str, float, float | None, str, bytes | None, str | None],
) -> tuple[Seq, JobView]:
    """A row of the columns _VIEW and the text."""
    seq, key, state, created_s, ended_s, model, raw, text = row
    try:
        outcome = Outcome() if raw is None else msgspec.msgpack.decode(raw, type=Outcome)
    except msgspec.DecodeError:  # another version's: the text and how it ended are in columns of their own
        outcome = Outcome()
    return Seq(seq), JobView(
        key, state, created_s, ended_s, model, text or "", outcome.reason, outcome.usage, outcome.timings, outcome.error
    )  # fmt: skip
