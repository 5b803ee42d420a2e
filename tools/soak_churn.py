"""A home whose devices come and go during a soak: they join, leave in order, leave at once, are killed, or sleep.

One device stays, so that what its process keeps shows. The others come back, at the latest for the next reading.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter

from potluck.tools.local import Child, LocalCluster

STAYS = "home-1"
OTHERS = ("home-2", "home-3", "home-4")
AT_READINGS = ("home-2", "home-3")
"""Who is there besides the one that stays when a reading is taken."""
LEAST = 2
"""Devices that are there at any time."""
SLEEP_S = 3.0
"""Longer than the broker waits for a sign of life."""
LEAVE_S = 30.0


class Churn:
    """The devices of one cluster."""

    def __init__(self, cluster: LocalCluster, chance: random.Random) -> None:
        self._cluster = cluster
        self._chance = chance
        self.done: Counter[str] = Counter()
        self.acts = 0
        """Comings and goings so far."""
        self.faults: list[str] = []
        self.ended: list[Child] = []
        """Processes that are gone."""
        self._acted = asyncio.Event()

    @property
    def _there(self) -> dict[str, Child]:
        return {child.name: child for child in self._cluster.stages}

    async def begin(self) -> None:
        """The devices of a reading join."""
        for name in (STAYS, *AT_READINGS):
            await self._cluster.start_stage(name)

    async def run(self, acts: int, pause_s: float) -> None:
        """So many comings and goings, one after another."""
        for _ in range(acts):
            await asyncio.sleep(self._chance.uniform(0.5, 1.5) * pause_s)
            await self._something()
            self.acts += 1
            self._acted.set()

    async def reached(self, acts: int) -> None:
        """Waits until there have been so many."""
        while self.acts < acts:
            self._acted.clear()
            await self._acted.wait()

    async def _something(self) -> None:
        there = [name for name in OTHERS if name in self._there]
        away = [name for name in OTHERS if name not in self._there]
        if away and (len(there) + 1 <= LEAST or self._chance.random() < 0.5):
            await self._join(self._chance.choice(away))
            return
        name = self._chance.choice(there)
        match self._chance.choice(("kill", "leave", "sleep")):
            case "kill":
                await self._kill(name)
            case "leave":
                await self._leave(name)
            case _:
                await self._sleep(name)

    async def as_at_readings(self) -> None:
        """The same devices as at every other reading."""
        for name in OTHERS:
            if name in AT_READINGS and name not in self._there:
                await self._join(name)
            elif name not in AT_READINGS and name in self._there:
                await self._leave(name)

    async def _join(self, name: str) -> None:
        self.done["joined"] += 1
        await self._cluster.start_stage(name)

    async def _kill(self, name: str) -> None:
        self.done["killed"] += 1
        child = self._there[name]
        child.kill()
        await self._gone(child)

    async def _leave(self, name: str) -> None:
        self.done["left"] += 1
        child = self._there[name]
        child.kill(signal.SIGTERM)
        await self._gone(child)
        if child.process.returncode not in (0, -signal.SIGTERM):  # the latter before it was fully there
            self.faults.append(f"{name} was told to leave and ended with {child.process.returncode}")

    async def _sleep(self, name: str) -> None:
        self.done["slept"] += 1
        child = self._there[name]
        child.kill(signal.SIGSTOP)
        await asyncio.sleep(SLEEP_S)
        child.kill(signal.SIGCONT)

    async def _gone(self, child: Child) -> None:
        self._cluster.stages.remove(child)
        self.ended.append(child)
        try:
            await asyncio.wait_for(child.process.wait(), LEAVE_S)
        except TimeoutError:
            self.faults.append(f"{child.name} did not leave within {LEAVE_S:g} s")
            child.kill()
            await child.process.wait()


__all__ = ["AT_READINGS", "STAYS", "Churn"]
