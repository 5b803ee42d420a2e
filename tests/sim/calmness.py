"""What must hold once every fault has ended and enough devices are there.

Each request has ended, and each promised job has, within a bounded time; every chain serves; a new request gets its
answer; then nothing of all that is left in anybody's hands.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from potluck.broker.effects import RequestFailed
from potluck.wire.messages import Finished
from sim.asks import ADMIN, Clients, Job
from sim.cluster import House
from sim.steps import Submit
from sim.watched import FOR_EVER_S

BOUND_S = 60.0
"""Within this time after the last fault every request has ended, beside what computing it takes."""
TOKEN_S = 0.1
"""What a token may take on the slowest chain."""
STORY_LINES = 4096


class Calmness:
    """Waits for what must come, and checks it."""

    def __init__(self, house: House, clients: Clients) -> None:
        self.house = house
        self.clients = clients

    async def check(self, counts: Counter[str]) -> None:
        """Everything that is said above. Adds to `counts` how requests and jobs have ended."""
        house, clients = self.house, self.clients
        work_s = TOKEN_S * sum(ask.tokens for ask in (*clients.running, *clients.jobs))
        async with self._within(BOUND_S + work_s):
            await house.until(lambda: not clients.running, FOR_EVER_S)
            for job in clients.jobs:
                await self._end_of(job)
            await house.until(lambda: not house.core.state.requests, FOR_EVER_S)
            await house.until(self._whole, FOR_EVER_S)
        for request, (end, _) in house.server.ends.items():
            if isinstance(end, RequestFailed):
                assert end.error.code != "internal_error", f"{request}: {end.error}"
        last = clients.submit(Submit(0, 0, 9, 5), name=ADMIN)
        async with self._within(BOUND_S):
            await house.until(lambda: last.end is not None, FOR_EVER_S)
            await house.quiet()
            await house.until(self._idle, FOR_EVER_S)
        assert isinstance(last.end, Finished), f"after the calm: {last}"
        self._check_nothing_left()
        for ask in clients.asks:
            counts[ask.end if isinstance(ask.end, str) else type(ask.end).__name__] += 1
        for job in clients.jobs:
            counts[f"job {job.view.state if job.view else 'forgotten'}"] += 1
        clients.asks.clear()
        clients.jobs.clear()

    async def _end_of(self, job: Job) -> None:
        """Its client has heard the job's end, if it is still there; and the broker says the same to others."""
        if not job.task.done():
            await self.house.until(job.task.done, FOR_EVER_S)
        if not job.task.cancelled() and job.task.exception() is not None:
            raise AssertionError(f"{job.key} can't be had") from job.task.exception()
        if not job.promised:
            job.unwanted = True  # its client went before it was told
        await self.clients.follow(self.clients.named(ADMIN), job)

    def _whole(self) -> bool:
        """Whether every chain of the plan serves."""
        chains = self.house.core.state.chains.values()
        return bool(chains) and all(chain.open for chain in chains)

    def _idle(self) -> bool:
        """Whether nothing is measured, and no stage computes what nobody waits for."""
        stages = self.house.workers.values()
        return not self.house.core.state.probes and not any(stage._pipeline.inside for stage in stages)

    def _within(self, seconds: float) -> _Within:
        return _Within(self, seconds)

    def open_ends(self) -> str:
        """What has not ended."""
        core = self.house.core
        return (
            f"{[str(ask) for ask in self.clients.running]}, jobs "
            f"{[job.key for job in self.clients.jobs if job.promised and job.view is None]}; the broker has "
            f"{list(core.state.requests)} and is ready: {core.state.ready}. {core.missing}"
        )

    def _check_nothing_left(self) -> None:
        house = self.house
        state, server = house.core.state, house.server
        assert not state.requests, f"requests are left: {list(state.requests)}"
        assert not state.waiting, f"requests still wait: {list(state.waiting)}"
        for chain in state.chains.values():
            assert set(chain.slots) == {None}, f"slots are taken: {chain.slots}"
            assert not chain.in_flight, f"micro-batches are left: {list(chain.in_flight)}"
        assert not server.gateway._tickets, "tickets are left"
        assert not server.clients._tickets, "tickets of zmq clients are left"
        assert not server.jobs._tickets, "tickets of jobs are left"
        assert not server.jobs._asked, "questions about jobs are left"
        assert len(house.core.story) <= STORY_LINES
        for worker in house.workers.values():
            assert len(worker.machine.story) <= STORY_LINES
        for client in self.clients.connected:
            assert not client._streams, f"streams are left: {list(client._streams)}"


class _Within:
    """A deadline that says what had not ended."""

    def __init__(self, calmness: Calmness, seconds: float) -> None:
        self._calmness = calmness
        self._timeout = asyncio.timeout(seconds)
        self._seconds = seconds

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *what: object) -> None:
        try:
            await self._timeout.__aexit__(*what)  # type: ignore[arg-type]
        except TimeoutError:
            raise AssertionError(
                f"not over {self._seconds:g} s after the last fault: {self._calmness.open_ends()}"
            ) from None
