"""A lane: jobs one after the other, strictly in the order they came, beside the event loop.

A stage has two of them: one computes micro-batches, the other loads, closes and measures.

`ThreadLane` has a thread of its own that goes from one job to the next without asking the loop, so that the engine is
never idle while jobs wait. `InlineLane` computes on the loop and lets each job take the time it says it costs: many
stages then share one process and one virtual clock. What a job does is its own affair; it reports errors in its result.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

log = logging.getLogger("potluck.stage")


class Spent(NamedTuple):
    """Seconds a job took, and seconds the lane had nothing to do before it."""

    compute_s: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class LaneJob:
    """`work` runs on the lane and must not raise; `done` gets its result on the event loop."""

    work: Callable[[], Any]
    done: Callable[[Any, Spent], None]
    cost_s: Callable[[], float] = lambda: 0.0
    """What the job costs on a lane of virtual time; asked when its turn has come."""


class ComputeLane(Protocol):
    """Where a stage computes."""

    def submit(self, job: LaneJob) -> None:
        """Queues a job. Ignored once closed."""

    async def close(self, last: Callable[[], object], patience_s: float) -> None:
        """Ends the lane: the job that runs is finished, those after it are dropped, then `last` runs on the lane. Waits
        for all that at most `patience_s`. No `done` is called any more.
        """


class ThreadLane:
    """A thread with a queue. Made on the event loop that submits."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, name: str = "potluck-compute") -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[LaneJob | None] = queue.SimpleQueue()
        self._closed = False
        self._last: Callable[[], object] = lambda: None
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: LaneJob) -> None:
        """See ComputeLane."""
        if not self._closed:
            self._queue.put(job)

    async def close(self, last: Callable[[], object], patience_s: float) -> None:
        """See ComputeLane. A job that hangs is left behind: the thread ends with the process."""
        if not self._closed:
            self._last, self._closed = last, True
            self._queue.put(None)
        try:
            async with asyncio.timeout(patience_s):
                await self._ended.wait()
        except TimeoutError:
            log.warning("a thread is still busy; it is left behind")

    def _run(self) -> None:
        free_s = self._clock()
        while (job := self._queue.get()) is not None and not self._closed:
            free_s = self._do(job, free_s)
            del job  # or it would be kept, with all it holds, until the next one comes
        self._last()
        self._hand_over(self._ended.set)

    def _do(self, job: LaneJob, free_s: float) -> float:
        """One job, on a lane that was free since then. Returns when it ended."""
        begun_s = self._clock()
        result = job.work()
        ended_s = self._clock()
        self._hand_over(self._finish, job, result, Spent(ended_s - begun_s, begun_s - free_s))
        return ended_s

    def _finish(self, job: LaneJob, result: Any, spent: Spent) -> None:
        if not self._closed:
            job.done(result, spent)

    def _hand_over(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            self._closed = True  # the loop is gone, and with it whoever wanted the result


class InlineLane:
    """Computes on the event loop. A job takes `cost_s` on the loop's clock, or what the job itself says."""

    def __init__(self, cost_s: float | None = None) -> None:
        self._cost_s = cost_s
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[LaneJob] = asyncio.Queue()
        self._closed = False
        self._task = self._loop.create_task(self._run())

    def submit(self, job: LaneJob) -> None:
        """See ComputeLane."""
        if not self._closed:
            self._queue.put_nowait(job)

    async def close(self, last: Callable[[], object], patience_s: float) -> None:
        """See ComputeLane."""
        self._closed = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        last()

    async def _run(self) -> None:
        free_s = self._loop.time()
        while True:
            free_s = await self._do(await self._queue.get(), free_s)

    async def _do(self, job: LaneJob, free_s: float) -> float:
        """One job, on a lane that was free since then. Returns when it ended."""
        begun_s = self._loop.time()
        await asyncio.sleep(job.cost_s() if self._cost_s is None else self._cost_s)
        result = job.work()
        ended_s = self._loop.time()
        self._loop.call_soon(self._finish, job, result, Spent(ended_s - begun_s, begun_s - free_s))
        return ended_s

    def _finish(self, job: LaneJob, result: Any, spent: Spent) -> None:
        if not self._closed:
            job.done(result, spent)


__all__ = ["ComputeLane", "InlineLane", "LaneJob", "Spent", "ThreadLane"]
