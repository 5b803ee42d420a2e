"""Asks a broker without asyncio.

    with SyncClient("192.168.1.10") as client:
        print(client.complete("Hello", max_tokens=20).text)

What is asked, and how it fails, is `client`'s.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from potluck.runtime.client import Answer, Client
from potluck.wire.errors import UsageError
from potluck.wire.messages import Accepted, Delta, Finished, JobView, StateView

T = TypeVar("T")


class SyncClient:
    """`Client` without asyncio: the connection lives on a thread of its own.

    After `close`, calls and streams raise UsageError, also those that other threads wait for.
    """

    def __init__(self, broker: str, *, timeout_s: float = 20.0) -> None:
        self._loop = asyncio.new_event_loop()
        self._gate = threading.Lock()
        """Held to hand work to the loop, so that none comes after the last."""
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="potluck-client", daemon=True)
        self._thread.start()
        try:
            self._client = self._call(self._open(broker, timeout_s))
        except BaseException:
            self._end_thread()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def state(self, timeout_s: float = 5.0) -> StateView:
        """The cluster now. Raises NoBrokerError."""
        return self._call(self._client.state(timeout_s))

    def submit_job(
        self,
        prompt: str | None = None,
        *,
        key: str | None = None,
        timeout_s: float = 20.0,
        **settings: object,
    ) -> JobView:
        """Hands a job in, as `Client.submit_job`."""
        return self._call(self._client.submit_job(prompt, key=key, timeout_s=timeout_s, **settings))

    def job(self, key: str, wait_s: float = 0.0) -> JobView:
        """A job, as `Client.job`."""
        return self._call(self._client.job(key, wait_s))

    def jobs(self, most: int = 100) -> tuple[JobView, ...]:
        """The newest jobs, without their texts. Raises NoBrokerError."""
        return self._call(self._client.jobs(most))

    def forget_job(self, key: str) -> JobView:
        """Cancels and forgets a job, as `Client.forget_job`."""
        return self._call(self._client.forget_job(key))

    def complete(self, prompt: str | None = None, **settings: object) -> Answer:
        """The whole answer to one prompt; settings as for `Client.stream`."""
        return self._call(self._client.complete(prompt, **settings))

    def stream(
        self, prompt: str | None = None, **settings: object
    ) -> Generator[Accepted | Delta | Finished, None, None]:
        """The events of one request; settings as for `Client.stream`. Closing the generator cancels the request."""
        events = self._client.stream(prompt, **settings)  # type: ignore[arg-type]
        try:
            while True:
                try:
                    yield self._call(_next(events))
                except _Ended:
                    return
        finally:
            with suppress(UsageError):  # closing the client has ended it
                self._call(_end(events))

    def close(self) -> None:
        """Closes the connection and ends the thread. A second time it does nothing."""
        with self._gate:
            if self._closed:
                return
            self._closed = True
            last = asyncio.run_coroutine_threadsafe(self._shut(), self._loop)
        last.result()
        self._end_thread()

    async def _shut(self) -> None:
        """Ends what still runs, so that its requests are cancelled before the connection closes."""
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        await self._client.close()

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        with self._gate:
            if self._closed:
                work.close()
                raise _closed()
            future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise _closed() from None
        except KeyboardInterrupt:
            future.cancel()
            raise

    @staticmethod
    async def _open(broker: str, timeout_s: float) -> Client:
        return Client(broker, timeout_s=timeout_s)


async def _next(events: AsyncGenerator[Accepted | Delta | Finished]) -> Accepted | Delta | Finished:
    """One event; a StopAsyncIteration can't leave a coroutine as it is, so the end is an error of its own."""
    try:
        return await anext(events)
    except StopAsyncIteration:
        raise _Ended from None


async def _end(events: AsyncGenerator[Accepted | Delta | Finished]) -> None:
    await events.aclose()


def _closed() -> UsageError:
    return UsageError("The client is closed.", hint="Make a new one.")


class _Ended(Exception):
    """A stream has no more events."""


__all__ = ["SyncClient"]
