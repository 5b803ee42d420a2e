"""A client's questions about jobs: each has a name, by which its answer is known, and may be asked again.

Asking twice does no harm: a job is handed in under a key, and a key names one job. So a broker that is killed and comes
back between question and answer is only a delay.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import TypeAlias

from potluck.wire.errors import PotluckError
from potluck.wire.frames import Buffer
from potluck.wire.messages import JobsView, JobView, Refused, Rejected

Answer: TypeAlias = JobView | JobsView


class Questions:
    """The open questions of one connection."""

    def __init__(
        self, send: Callable[[Sequence[Buffer]], bool], silence: Callable[[float], PotluckError]
    ) -> None:
        """`send` sends frames to the broker; `silence` is the error after so many seconds without an answer."""
        self._send = send
        self._silence = silence
        self._open: dict[str, asyncio.Future[Answer]] = {}

    async def ask(
        self, frames: Callable[[str], Sequence[Buffer]], *, again_s: float, timeout_s: float
    ) -> Answer:
        """The answer. `frames` makes the question of a name; it is asked again every `again_s`.

        Raises the PotluckError that the broker answers, and NoBrokerError after `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        name = secrets.token_hex(8)
        question = frames(name)
        future: asyncio.Future[Answer] = loop.create_future()
        self._open[name] = future
        end_s = loop.time() + timeout_s
        try:
            while (left_s := end_s - loop.time()) > 0:
                self._send(question)
                await asyncio.wait([future], timeout=min(again_s, left_s))
                if future.done():
                    return future.result()
            raise self._silence(timeout_s)
        finally:
            del self._open[name]

    def heard(self, message: JobView | JobsView | Rejected) -> bool:
        """Takes an answer in; False if nobody asked that."""
        name = message.request if isinstance(message, Rejected) else message.question
        future = self._open.get(name)
        if future is None:
            return False
        if not future.done():
            if isinstance(message, Rejected):
                future.set_exception(message.error.restore())
            else:
                future.set_result(message)
        return True

    def refused(self, message: Refused) -> None:
        """The broker could not read something of ours, and can't say what it was."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(message.error.restore())
