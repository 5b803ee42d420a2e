"""The journal's thread for virtual time: the real journal, whose commits take a moment on the event loop.

What was taken in and is not committed yet goes with the broker's host, as it does when the real one is killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from potluck.broker.job_events import JobEvent, JournalOp
from potluck.broker.journal import Journal

COMMIT_S = 0.005


class InlineJournal:
    """See JournalThread."""

    def __init__(self, journal: Journal, deliver: Callable[[Sequence[JobEvent]], None]) -> None:
        self._journal = journal
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._ops: list[JournalOp] = []

    def put(self, op: JournalOp) -> None:
        """Takes an operation in."""
        if not self._ops:
            self._loop.call_later(COMMIT_S, self._commit)
        self._ops.append(op)

    def _commit(self) -> None:
        ops, self._ops = self._ops, []
        outcomes = self._journal.perform(ops)
        self._loop.call_soon(self._deliver, outcomes)

    async def close(self) -> None:
        """Does what was taken in, then closes the journal."""
        if self._ops:
            self._deliver(self._journal.perform(self._ops))
        self._journal.close()
