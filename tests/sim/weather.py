"""Faults by script: what becomes of frames between two hosts, and a loop on which a whole host can stand still.

Chance is a seeded generator's, so that a run can be repeated. `Forecast.log` says what was done to which frame.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Coroutine, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from potluck.runtime.memory import Fate, Weather
from potluck.wire.frames import Buffer, unpack_header
from potluck.wire.messages import KINDS, Message
from sim.virtual_time import VirtualLoop

# ---- frames


@dataclass
class Rule:
    """Something that happens to `times` frames of these kinds (all, if none is named), each with this chance.

    `also_s` has one delay per further copy; with `lose` nothing arrives at all.
    """

    kinds: tuple[type[Message], ...] = ()
    source: str | None = None
    target: str | None = None
    chance: float = 1.0
    times: int | None = None
    delay_s: float = 0.0
    also_s: tuple[float, ...] = ()
    lose: bool = False

    def fits(self, source: str, target: str, kind: type[Message], dice: random.Random) -> bool:
        return (
            self.times != 0
            and (not self.kinds or kind in self.kinds)
            and self.source in (None, source)
            and self.target in (None, target)
            and (self.chance >= 1.0 or dice.random() < self.chance)
        )


class Forecast(Weather):
    """Fair weather but for the links that are slow or cut, and the rules, of which the first that fits decides."""

    def __init__(self, seed: int = 0, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.rules: list[Rule] = []
        self.log: list[str] = []
        self._dice = random.Random(seed)
        self._slow: dict[tuple[str, str], float] = {}
        self._cut: set[frozenset[str]] = set()

    def slow(self, source: str, target: str, delay_s: float) -> None:
        """From now on frames from one to the other take this long."""
        self._slow[source, target] = delay_s

    def cut(self, one: str, other: str) -> None:
        """Nothing passes between the two in either direction; a push waits."""
        self._cut.add(frozenset((one, other)))

    def heal(self, one: str, other: str) -> None:
        self._cut.discard(frozenset((one, other)))

    def fair(self) -> None:
        """No link is slow any more."""
        self._slow.clear()

    def connected(self, source: str, target: str) -> bool:
        return frozenset((source, target)) not in self._cut

    def closing(self, source: str, target: str) -> Fate:
        if not self.connected(source, target):
            return Fate(())
        return Fate((self._slow.get((source, target), self.delay_s),))

    def fate(self, source: str, target: str, frames: Sequence[Buffer]) -> Fate:
        if not self.connected(source, target):
            return Fate(())
        delay_s = self._slow.get((source, target), self.delay_s)
        if self.rules:
            kind = KINDS[unpack_header(frames).kind]
            for rule in self.rules:
                if rule.fits(source, target, kind, self._dice):
                    return self._apply(rule, delay_s, f"{kind.__name__} {source}>{target}")
        return Fate((delay_s,))

    def _apply(self, rule: Rule, delay_s: float, what: str) -> Fate:
        if rule.times is not None:
            rule.times -= 1
        first_s = delay_s + rule.delay_s
        delays = () if rule.lose else (first_s, *(first_s + more for more in rule.also_s))
        self.log.append(f"{what}: arrives after {', '.join(f'{d:g} s' for d in delays) or 'never'}")
        return Fate(delays)


# ---- hosts

HOST: ContextVar[str] = ContextVar("HOST")
"""Whose code runs. Tasks, timers and callbacks inherit it, so that everything a host ever started is known as its."""


class HostsLoop(VirtualLoop):
    """Virtual time for several hosts in one process, each of which can be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self._frozen: dict[str, list[asyncio.Handle]] = {}
        self._tasks: dict[str, WeakSet[asyncio.Task[Any]]] = {}

    def freeze(self, host: str) -> None:
        """From now on nothing of the host runs, as after SIGSTOP; what reaches it meanwhile waits."""
        self._frozen.setdefault(host, [])

    def thaw(self, host: str) -> None:
        """All that was held back happens at once: what was ready first, then the timers in the order of their times."""
        held = [handle for handle in self._frozen.pop(host, []) if not handle.cancelled()]
        timers = [handle for handle in held if isinstance(handle, asyncio.TimerHandle)]
        self._ready.extend(handle for handle in held if not isinstance(handle, asyncio.TimerHandle))
        for timer in sorted(timers, key=lambda timer: timer.when()):
            timer._scheduled = True  # type: ignore[attr-defined]
            heapq.heappush(self._scheduled, timer)

    def thaw_all(self) -> None:
        for host in list(self._frozen):
            self.thaw(host)

    async def end(self, host: str) -> None:
        """Ends whatever the host started: tasks, callbacks and timers."""
        self.thaw(host)
        tasks = [task for task in self._tasks.pop(host, ()) if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for handle in (*self._ready, *self._scheduled):
            if handle._context.get(HOST, "") == host:
                handle.cancel()

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        context = copy_context() if context is None else context
        task = super().create_task(coro, name=name, context=context)
        self._tasks.setdefault(context.get(HOST, ""), WeakSet()).add(task)
        return task

    def _run_once(self) -> None:
        if self._frozen:
            self._hold_back()
        super()._run_once()  # type: ignore[misc]

    def _hold_back(self) -> None:
        ready = list(self._ready)
        self._ready.clear()
        for handle in ready:
            self._frozen.get(handle._context.get(HOST, ""), self._ready).append(handle)
        running = []
        for timer in self._scheduled:
            held = self._frozen.get(timer._context.get(HOST, ""))
            if held is None:
                running.append(timer)
            elif not timer.cancelled():
                timer._scheduled = False
                held.append(timer)
        self._scheduled[:] = running
        heapq.heapify(self._scheduled)
