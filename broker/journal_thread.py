"""The thread on which a journal writes. What comes while it writes goes to the disk together, in the next commit.

Operations keep their order, and so do their outcomes, which arrive on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence

from potluck.broker.job_events import JobEvent, JournalOp
from potluck.broker.journal import Journal, failed
from potluck.wire.errors import JournalError

log = logging.getLogger("potluck.broker")

TOGETHER = 256
"""Operations in one commit."""


class JournalThread:
    """Owns an open journal until `close`."""

    def __init__(self, journal: Journal, deliver: Callable[[Sequence[JobEvent]], None]) -> None:
        """`deliver` takes outcomes, on the event loop."""
        self._journal = journal
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._ops: queue.SimpleQueue[JournalOp | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="potluck-journal", daemon=True)
        self._thread.start()

    def put(self, op: JournalOp) -> None:
        """Takes an operation in, without waiting."""
        self._ops.put(op)

    async def close(self) -> None:
        """Does what was taken in, then closes the journal. What it brings forth is still delivered."""
        self._ops.put(None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.sleep(0)  # lets the last outcomes arrive

    def _run(self) -> None:
        open_ = True
        while open_:
            ops, open_ = self._batch()
            if ops:
                outcomes = self._perform(ops)
                with contextlib.suppress(RuntimeError):  # the loop was closed: nobody is there to be told
                    self._loop.call_soon_threadsafe(self._deliver, outcomes)
        self._journal.close()

    def _batch(self) -> tuple[list[JournalOp], bool]:
        ops: list[JournalOp] = []
        op = self._ops.get()
        while op is not None:
            ops.append(op)
            if len(ops) == TOGETHER or self._ops.empty():
                return ops, True
            op = self._ops.get()
        return ops, False

    def _perform(self, ops: list[JournalOp]) -> list[JobEvent]:
        try:
            return self._journal.perform(ops)
        except Exception:  # a fault of ours must be told to those who wait, and must not end the thread
            log.exception("The journal of jobs failed.")
            error = JournalError(
                "The journal of jobs failed.", hint="The broker's log says why.", retry_after_s=30
            )
            return [failed(op, error) for op in ops]
