"""The zmq clients' side of jobs: each question becomes a task, and its answer goes back under the question's name."""

from __future__ import annotations

import asyncio

import msgspec

from potluck.broker.clients import Reply
from potluck.broker.job_desk import JobDesk
from potluck.wire.errors import PotluckError, QueueFullError
from potluck.wire.messages import (
    ErrorInfo,
    ForgetJob,
    JobQuery,
    JobsQuery,
    JobsView,
    JobView,
    Rejected,
    SubmitJob,
)

Question = SubmitJob | JobQuery | JobsQuery | ForgetJob

QUESTIONS_MOST = 4_096
"""Questions of all clients that are open at the same time."""


class JobClients:
    """Questions of zmq clients that are open now."""

    def __init__(self, desk: JobDesk, reply: Reply) -> None:
        self._desk = desk
        self._reply = reply
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, peer: bytes, question: Question) -> None:
        """Answers as soon as that can be done."""
        if len(self._tasks) >= QUESTIONS_MOST:
            error = QueueFullError(
                f"{QUESTIONS_MOST} questions about jobs are open.", hint="Try again shortly.", retry_after_s=5
            )
            self._reply(peer, Rejected(question.question, ErrorInfo.of(error)))
            return
        task = asyncio.get_running_loop().create_task(self._answer(peer, question))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Ends every question without an answer."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, peer: bytes, question: Question) -> None:
        try:
            found = await self._found(question)
        except PotluckError as error:
            self._reply(peer, Rejected(question.question, ErrorInfo.of(error)))
            return
        self._reply(peer, found)

    async def _found(self, question: Question) -> JobView | JobsView:
        match question:
            case SubmitJob():
                view = await self._desk.submit(question.key, question.request)
            case JobQuery():
                view = await self._desk.job(question.key, question.wait_s)
            case ForgetJob():
                view = await self._desk.forget(question.key)
            case JobsQuery():
                return JobsView(question.question, await self._desk.jobs(question.most))
        return msgspec.structs.replace(view, question=question.question)
