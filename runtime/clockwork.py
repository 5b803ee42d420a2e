"""What turns a pure core: events in, effects out, a timer for the core's next deadline, and whoever waits for a change.

The shells of broker and stage are built around one of these. It decides nothing but one thing: a timer that comes late
because the loop was held up lets what has arrived meanwhile be handled first, or the silence of this side would be
taken for the silence of the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

Event_contra = TypeVar("Event_contra", contravariant=True)
Effect_co = TypeVar("Effect_co", covariant=True)

LATE_S = 0.1
"""A timer that is later than this has been held up; it waits this long once more."""


class Core(Protocol[Event_contra, Effect_co]):
    """A pure core."""

    def handle(self, event: Event_contra, now: float) -> Sequence[Effect_co]:
        """What is to be done because of the event."""

    def next_deadline(self) -> float | None:
        """When the core wants to hear that time has passed."""


E = TypeVar("E")
F = TypeVar("F")


class Clockwork(Generic[E, F]):
    """Feeds one core on one event loop."""

    def __init__(self, core: Core[E, F], perform: Callable[[F], None], tick: Callable[[], None]) -> None:
        """`perform` carries out one effect; `tick` is called when the core's deadline has come, and feeds it that."""
        self._core = core
        self._perform = perform
        self._on_tick = tick
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._due_s: float | None = None
        self._watchers: set[asyncio.Event] = set()

    def feed(self, event: E) -> None:
        """One event through the core, and its effects out."""
        for effect in self._core.handle(event, self._loop.time()):
            self._perform(effect)
        self._set_timer()
        for watcher in self._watchers:
            watcher.set()

    async def changed(self) -> None:
        """Waits for the next event that the core handles."""
        seen = asyncio.Event()
        self._watchers.add(seen)
        try:
            await seen.wait()
        finally:
            self._watchers.discard(seen)

    def close(self) -> None:
        """No deadline comes any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        due = self._core.next_deadline()
        if due == self._due_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = due  # kept here: uvloop's handle of a time that has passed does not know it
        self._timer = None if due is None else self._loop.call_at(due, self._come)

    def _come(self) -> None:
        if self._due_s is not None and self._loop.time() - self._due_s > LATE_S:
            self._timer = self._loop.call_later(LATE_S, self._tick)
            return
        self._tick()

    def _tick(self) -> None:
        self._timer = self._due_s = None
        self._on_tick()
