"""Plays a schedule of `steps` over a household, and says what must hold at every moment and at every calm.

At every moment: the invariants of every core (see `watched`), and that no client hears a token that isn't the next one
of the undisturbed answer (see `asks`). At every calm: see `calmness`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from potluck.broker import job_desk
from potluck.broker.state import StageStatus
from potluck.planner.even import plan_even
from potluck.planner.plan import NO_NETWORK, Candidate, ModelShape, Network, Plan
from potluck.runtime import client as client_module
from sim.asks import CLIENTS, Clients
from sim.calmness import Calmness
from sim.cluster import BROKER, CONFIG, Cost, House, in_house
from sim.inline_journal import InlineJournal
from sim.steps import (
    EVEN_THE_LAST,
    Break,
    BrokerDies,
    BrokerSleeps,
    Calm,
    Cancel,
    ChainsOf,
    ClientGoes,
    Cut,
    Double,
    Drain,
    EngineFails,
    EngineHangs,
    ForgetJob,
    Freeze,
    Heal,
    Join,
    Kill,
    Late,
    Leave,
    LeaveInOrder,
    LoadsFail,
    LoadsTake,
    Lose,
    Schedule,
    Slow,
    Step,
    Submit,
    SubmitJob,
    Thaw,
    Wait,
)
from sim.watched import FOR_EVER_S, LAYERS, Troubles
from sim.weather import Forecast, Rule

WALK = dataclasses.replace(CONFIG, slots=3, queue_limit=12, wait_limit_s=15.0, patience=1.0)
DEVICES = [f"s{number}" for number in range(6)]


class Groups:
    """A planner of even chains of so many stages each; what is left over joins the last one."""

    def __init__(self) -> None:
        self.stages = 0

    def __call__(
        self, model: ModelShape, candidates: Sequence[Candidate], network: Network = NO_NETWORK
    ) -> Plan:
        ordered = sorted(candidates, key=lambda candidate: (candidate.device, candidate.stage))
        size = self.stages or max(1, len(ordered))
        groups = [ordered[at : at + size] for at in range(0, max(1, len(ordered) - size + 1), size)]
        groups[-1] += ordered[sum(map(len, groups)) :]
        plans = [plan_even(model, group, network) for group in groups]
        return Plan(tuple(plan.chains[0] for plan in plans), tuple(r for plan in plans for r in plan.reasons))


class _Names:
    """Stands in for `secrets` in the client, so that a schedule is the same each time."""

    def __init__(self) -> None:
        self._count = itertools.count()

    def token_hex(self, size: int) -> str:
        return f"{next(self._count):0{2 * size}x}"


class Walk:
    """One schedule being played."""

    def __init__(self, house: House, planner: Groups) -> None:
        self.house = house
        self.planner = planner
        self.clients = Clients(house)
        self.played = 0
        self.calms = 0
        self.frozen: set[str] = set()
        self.cuts: list[tuple[str, str]] = []
        house.faultless = True
        self.counts: Counter[str] = Counter()
        """How the requests have ended."""

    async def run(self, schedule: Schedule) -> None:
        for step in schedule:
            await self.play(step)
            self.house.check()
            self.played += 1
        await self.calm()

    def faults(self) -> None:
        """From here on they have."""
        self.house.faultless = False
        self.clients.faults()

    # ---- steps

    async def play(self, step: Step) -> None:
        house = self.house
        match step:
            case Wait(ms):
                await asyncio.sleep(ms / 1000)
            case Submit():
                self.clients.submit(step)
            case SubmitJob():
                self.clients.hand_in(step)
            case ForgetJob(which) if self.clients.jobs:
                self.clients.background(
                    self.clients.forget(self.clients.jobs[which % len(self.clients.jobs)])
                )
            case Cancel(which) if self.clients.running:
                self.clients.cancel(self.clients.running[which % len(self.clients.running)])
            case ClientGoes(client):
                await self.clients.goes(CLIENTS[client])
            case Join(batch_ms, load_ms, again):
                self.join(Cost(batch_ms / 1000, load_s=load_ms / 1000), again=again)
            case Kill(which) if self.may_go(which):
                name = self.stage(which)
                self.frozen.discard(name)
                await house.kill(name)
            case Leave(which) if self.may_go(which) and self.awake:
                await house.leave(self.awake[which % len(self.awake)])
            case LeaveInOrder(which) if self.may_go(which) and self.awake:
                name = self.awake[which % len(self.awake)]
                house.tell(f"{name} wants to leave")
                house.workers[name].leave("it wants to")
            case Drain(which, back):
                self.clients.drain(DEVICES[which], back=back)
            case BrokerDies(ms):
                self.faults()
                self.clients.broker_died()
                await house.kill(BROKER)
                await asyncio.sleep(ms / 1000)
                house.start_broker()
            case Freeze(which) if self.may_go(which) and self.awake:
                name = self.awake[which % len(self.awake)]
                self.frozen.add(name)
                house.freeze(name)
            case Thaw(which) if self.frozen:
                name = sorted(self.frozen)[which % len(self.frozen)]
                self.frozen.discard(name)
                house.thaw(name)
            case BrokerSleeps(ms):
                self.faults()
                house.freeze(BROKER)
                await asyncio.sleep(ms / 1000)
                house.thaw(BROKER)
            case EngineFails(which, batches) if house.living:
                self.trouble(which, f"fails in {batches} micro-batches").failing_batches += batches
                house.workers[self.stage(which)].lossless = False  # what follows a failed one finds a gap
            case EngineHangs(which, ms) if house.living:
                troubles = self.trouble(which, f"hangs for {ms or 'ever'} ms")
                troubles.hanging_batches, troubles.hang_s = 1, ms / 1000 or FOR_EVER_S
            case LoadsFail(which, loads) if house.living:
                self.trouble(which, f"fails in {loads} loads").failing_loads += loads
            case LoadsTake(which, ms) if house.living:
                house.workers[self.stage(which)].load_s = ms / 1000
                if ms / 1000 >= house.config.load_timeout_s:
                    self.faults()
            case Slow(source, target, ms):
                house.weather.slow(*self.link(source, target, CLIENTS), ms / 1000)
            case Late(source, target, frames, ms):
                self.faults()
                self.rule(source, target, CLIENTS, Rule(times=frames, delay_s=ms / 1000))
            case Lose(source, target, frames):
                self.lossy()
                self.rule(source, target, [], Rule(times=frames, lose=True))
            case Double(source, target, frames, ms):
                self.lossy()
                self.rule(source, target, [], Rule(times=frames, also_s=(ms / 1000,)))
            case Cut(one, other):
                self.lossy()
                self.cut(*self.link(one, other, []))
            case Break(party):
                self.faults()
                name = [*DEVICES, *CLIENTS][party]
                house.tell(f"the connection of {name} breaks")
                self.clients.connection_broke(name)
                house.network.sever(name, BROKER)
            case Heal(which) if self.cuts:
                house.heal(*self.cuts.pop(which % len(self.cuts)))
            case ChainsOf(stages):
                house.tell(f"plans are of chains of {stages or 'all'} stages")
                self.planner.stages = stages
            case Calm():
                await self.calm()
            case _:
                pass  # there is nobody it could be done to

    @property
    def awake(self) -> list[str]:
        """Stages that run and are not frozen."""
        workers = self.house.workers
        return [name for name in self.house.living if name not in self.frozen and workers[name].running]

    def may_go(self, which: int) -> bool:
        """Whether a stage may be taken away."""
        return bool(self.house.living) and (len(self.awake) > 1 or which == EVEN_THE_LAST)

    def stage(self, which: int) -> str:
        living = self.house.living
        return living[which % len(living)]

    def link(self, one: int, other: int, more: Sequence[str]) -> tuple[str, str]:
        """Two different parties."""
        parties = [BROKER, *DEVICES, *more]
        source, target = one % len(parties), other % len(parties)
        if source == target:
            target = (target + 1) % len(parties)
        return parties[source], parties[target]

    def rule(self, source: int, target: int, more: Sequence[str], rule: Rule) -> None:
        rule.source, rule.target = self.link(source, target, more)
        rules = self.house.weather.rules
        rules[:] = [*(old for old in rules if old.times != 0), rule]
        self.house.tell(f"from now on, {rule.source} to {rule.target}: {rule}")

    def cut(self, one: str, other: str) -> None:
        if (one, other) not in self.cuts:
            self.cuts.append((one, other))
            self.house.partition(one, other)

    def lossy(self) -> None:
        """From here on engines may see gaps."""
        self.faults()
        for worker in self.house.workers.values():
            worker.lossless = False

    def trouble(self, which: int, what: str) -> Troubles:
        self.faults()
        self.house.tell(f"{self.stage(which)}: its engine {what}")
        return self.house.troubles(self.stage(which))

    def join(self, cost: Cost, *, again: bool = False) -> None:
        absent = [name for name in DEVICES if name not in self.house.living]
        if absent:
            worker = self.house.add_stage(absent[0 if again else -1], cost)
            worker.lossless = not self.cuts and not self.house.weather.rules

    async def calm(self) -> None:
        """The faults end; whatever was under way must, too."""
        self.house.tell("calm")
        await self.end_faults()
        await Calmness(self.house, self.clients).check(self.counts)
        self.house.faultless = True
        for worker in self.house.workers.values():
            worker.lossless = True  # every slot is emptied before it is used again
        self.calms += 1

    async def end_faults(self) -> None:
        """Links are as they should be, what hangs or has failed is switched off, and enough devices are there."""
        house = self.house
        for name in sorted(self.frozen):
            house.thaw(name)
        self.frozen.clear()
        for one, other in self.cuts:
            house.heal(one, other)
        self.cuts.clear()
        house.weather.rules.clear()
        house.weather.fair()
        for name in house.living:
            troubles = house.troubles(name)
            stage = house.core.state.stages.get(house.stage_id(name))
            broken = stage is not None and stage.status is StageStatus.FAILED
            if broken or troubles.stuck:
                await house.kill(name)
                continue
            troubles.failing_batches = troubles.failing_loads = troubles.hanging_batches = 0
            house.workers[name].load_s = 0.1
        for device in DEVICES:
            self.clients.drain(device, back=True)
        await self.clients.settle()
        while sum(not house.workers[name].goes for name in house.living) < 2:
            self.join(Cost(0.005, load_s=0.1))


def play(schedule: Schedule, seed: int = 0) -> Walk:
    """Plays a schedule to its end. Raises what went wrong, with everything that happened in its notes."""
    walks: list[Walk] = []
    planner = Groups()

    async def story(house: House) -> None:
        walk = Walk(house, planner)
        walks.append(walk)
        await walk.run(schedule)

    with tempfile.TemporaryDirectory(prefix="potluck-walk-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_module, "secrets", _Names())
        patch.setattr(job_desk, "JournalThread", InlineJournal)
        in_house(
            story,
            config=WALK,
            weather=Forecast(seed),
            planner=planner,
            journal=Path(folder) / "jobs.sqlite3",
            within_s=FOR_EVER_S,
        )
    return walks[0]


def fails(schedule: Schedule) -> bool:
    """Whether anything goes wrong."""
    try:
        play(schedule)
    except Exception:  # noqa: BLE001, anything is a failure
        return True
    return False


__all__ = ["LAYERS", "Walk", "fails", "play"]
