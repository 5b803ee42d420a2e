"""Plays a schedule of `steps` over a household, and says what must hold at every moment and at every calm.

At every moment: the invariants of every core (see `watched`), and that no client hears a token that isn't the next one
of the undisturbed answer. At every calm: each request has ended once, within a bounded time, well or with an error that
the schedule gives a reason for; then a new request is served, and nothing of the others is left in anybody's hands.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from potluck.broker.effects import RequestFailed
from potluck.broker.state import StageStatus
from potluck.planner.even import plan_even
from potluck.planner.plan import NO_NETWORK, Candidate, ModelShape, Network, Plan
from potluck.runtime import client as client_module
from potluck.runtime.client import Client
from potluck.wire.errors import CancelledError, NoBrokerError, PotluckError, QueueFullError, UnavailableError
from potluck.wire.messages import Accepted, Delta, Finished
from potluck.wire.sampling import GREEDY, Sampling
from sim.cluster import BROKER, CODEC, CONFIG, Cost, House, in_house
from sim.steps import (
    EVEN_THE_LAST,
    BrokerSleeps,
    Calm,
    Cancel,
    ChainsOf,
    ClientGoes,
    Cut,
    CutClient,
    Double,
    EngineFails,
    EngineHangs,
    Freeze,
    Heal,
    Join,
    Kill,
    Late,
    Leave,
    LoadsFail,
    LoadsTake,
    Lose,
    Schedule,
    Slow,
    Step,
    Submit,
    Thaw,
    Wait,
)
from sim.watched import FOR_EVER_S, LAYERS, Troubles, undisturbed
from sim.weather import Forecast, Rule

WALK = dataclasses.replace(CONFIG, slots=3, queue_limit=12, wait_limit_s=15.0, patience=1.0)
DEVICES = [f"s{number}" for number in range(6)]
CLIENTS = [f"c{number}" for number in range(3)]
TEXT = "The quick brown fox jumps over the lazy dog"
BOUND_S = 60.0
"""Within this time after the last fault every request has ended, beside what computing it takes."""


@dataclass
class Ask:
    """One request and what its client has heard."""

    number: int
    client: str
    prompt: tuple[int, ...]
    tokens: int
    sampling: Sampling
    stops: tuple[str, ...]
    begun_s: float
    expected: list[int]
    accepted: bool = False
    heard: list[int] = field(default_factory=list)
    text: str = ""
    end: Finished | PotluckError | str | None = None
    ended_s: float = 0.0
    cancelled: bool = False
    spoilt: bool = False
    """Frames between its client and the broker may have been lost."""
    task: asyncio.Task[None] = field(init=False)

    def __str__(self) -> str:
        return f"#{self.number} of {self.client}: {len(self.prompt)}+{self.tokens}, {len(self.heard)} heard, {self.end}"


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
        self.asks: list[Ask] = []
        self.played = 0
        self.calms = 0
        self.frozen: set[str] = set()
        self.cuts: list[tuple[str, str]] = []
        house.faultless = True
        self.counts: Counter[str] = Counter()
        """How the requests have ended."""
        self.clients: dict[str, Client] = {}
        self.slowest_calm_s = 0.0
        self._weights = {name: Cost(0.005) for name in DEVICES}

    async def run(self, schedule: Schedule) -> None:
        for step in schedule:
            await self.play(step)
            self.house.check()
            self.played += 1
        await self.calm()

    @property
    def faulty(self) -> bool:
        """Whether a link, an engine or a pause has given requests a reason to fail, since the last calm."""
        return not self.house.faultless

    def faults(self) -> None:
        """From here on they have."""
        self.house.faultless = False

    # ---- steps

    async def play(self, step: Step) -> None:
        house = self.house
        match step:
            case Wait(ms):
                await asyncio.sleep(ms / 1000)
            case Submit():
                self.submit(step)
            case Cancel(which):
                running = [ask for ask in self.asks if ask.end is None]
                if running:
                    self.cancel(running[which % len(running)])
            case ClientGoes(client):
                await self.client_goes(CLIENTS[client])
            case Join(batch_ms, load_ms, again):
                self.join(Cost(batch_ms / 1000, load_s=load_ms / 1000), again=again)
            case Kill(which) if self.may_go(which):
                name = self.stage(which)
                self.frozen.discard(name)
                await house.kill(name)
            case Leave(which) if self.may_go(which) and self.awake:
                await house.leave(self.awake[which % len(self.awake)])
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
            case CutClient(client):
                for ask in self.asks:
                    if ask.client == CLIENTS[client] and ask.end is None:
                        ask.spoilt = True
                self.cut(BROKER, CLIENTS[client])
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

    # ---- clients

    def submit(self, step: Submit) -> None:
        name = CLIENTS[step.client]
        if name not in self.clients:
            self.clients[name] = self.house.client(name)
        client = self.clients[name]
        prompt = tuple(CODEC.encode((chr(97 + step.letter) + TEXT)[: step.length]))
        sampling = GREEDY if step.seed == 0 else Sampling(temperature=1.0, seed=step.seed)
        tokens = min(step.tokens, WALK.context_tokens - len(prompt))
        stops = ()
        if step.stop:
            text = CODEC.decode(undisturbed(prompt, tokens, sampling))
            at = min(2 * step.stop, max(0, len(text) - 2))
            stops = (text[at : at + 2] or "zz",)
        expected = undisturbed(prompt, tokens, sampling, stops)
        ask = Ask(len(self.asks), name, prompt, tokens, sampling, stops, self.house.now, expected)
        ask.spoilt = (BROKER, name) in self.cuts
        self.house.tell(f"#{ask.number} is asked by {name}: {len(prompt)}+{tokens}")
        context = self.house.context(name)
        ask.task = self.house.loop.create_task(self._ask(client, ask), context=context)
        ask.task.add_done_callback(lambda _: self._ended(ask))  # also if it was cancelled before it began
        self.asks.append(ask)

    async def _ask(self, client: Client, ask: Ask) -> None:
        house = self.house
        try:
            stream = client.stream(
                tokens=ask.prompt,
                max_tokens=ask.tokens,
                sampling=ask.sampling,
                seed=ask.sampling.seed,
                stop=ask.stops,
            )
            async with aclosing(stream) as events:
                async for event in events:
                    match event:
                        case Accepted():
                            ask.accepted = True
                        case Delta(_, text, tokens):
                            ask.text += text
                            ask.heard += tokens
                            with house.noticing():
                                assert ask.spoilt or ask.heard == ask.expected[: len(ask.heard)], (
                                    f"{ask} hears {ask.heard} instead of {ask.expected}"
                                )
                        case Finished():
                            ask.end = event
        except PotluckError as error:
            ask.end = error

    def _ended(self, ask: Ask) -> None:
        if ask.end is None:
            ask.end = "cancelled" if ask.cancelled else "its client is gone"
        ask.ended_s = self.house.now
        with self.house.noticing():
            self._check_end(ask)
        self.house.stir()

    def _check_end(self, ask: Ask) -> None:
        """Whether it may have ended like this."""
        match ask.end:
            case Finished():
                assert ask.spoilt or ask.heard == ask.expected, f"{ask} instead of {ask.expected}"
            case NoBrokerError():
                assert ask.spoilt or self.faulty, f"{ask}"
            case CancelledError():
                assert ask.spoilt, f"{ask}: nobody cancelled it"
            case QueueFullError():
                assert not ask.accepted, f"{ask}"
            case UnavailableError():
                pass
            case PotluckError():
                assert self.faulty, f"{ask}: there was no fault"
            case _:
                pass

    def cancel(self, ask: Ask) -> None:
        ask.cancelled = True
        self.house.tell(f"#{ask.number} is cancelled")
        ask.task.cancel()

    async def client_goes(self, name: str) -> None:
        if self.clients.pop(name, None) is not None:
            await self.house.kill(name)

    # ---- calm

    async def calm(self) -> None:
        """The faults end; whatever was under way must, too."""
        house = self.house
        house.tell("calm")
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
        while len(house.living) < 2:
            self.join(Cost(0.005, load_s=0.1))
        for ask in self.asks:
            if ask.spoilt and ask.end is None:
                self.cancel(ask)  # a client can't tell yet that its answer is lost: it waits for ever
        begun_s = house.now
        work_s = 0.1 * sum(ask.tokens for ask in self.asks if ask.end is None)
        async with self._in_time(BOUND_S + work_s):
            await house.until(lambda: all(ask.end is not None for ask in self.asks), FOR_EVER_S)
            await house.until(lambda: not house.core.state.requests, FOR_EVER_S)
            await house.until(self._whole, FOR_EVER_S)
        self.slowest_calm_s = max(self.slowest_calm_s, house.now - begun_s)
        self._check_broker()
        self.submit(Submit(0, 0, 9, 5))
        last = self.asks[-1]
        async with self._in_time(BOUND_S):
            await house.until(lambda: last.end is not None, FOR_EVER_S)
            await house.quiet()
            await house.until(lambda: not house.core.state.probes, FOR_EVER_S)
            await house.until(
                lambda: not any(worker._pipeline.inside for worker in house.workers.values()), FOR_EVER_S
            )
        assert isinstance(last.end, Finished), f"after the calm: {last}"
        self._check_nothing_left()
        for ask in self.asks:
            self.counts[ask.end if isinstance(ask.end, str) else type(ask.end).__name__] += 1
        self.asks.clear()
        house.faultless = True
        for worker in house.workers.values():
            worker.lossless = True  # every slot is emptied before it is used again
        self.calms += 1

    def _whole(self) -> bool:
        """Whether every chain of the plan serves."""
        chains = self.house.core.state.chains.values()
        return bool(chains) and all(chain.open for chain in chains)

    def _in_time(self, seconds: float) -> _InTime:
        return _InTime(self, seconds)

    def _check_broker(self) -> None:
        """Every end that the broker gave had a reason."""
        for request, (end, _) in self.house.server.ends.items():
            if isinstance(end, RequestFailed):
                assert end.error.code != "internal_error", f"{request}: {end.error}"

    def _check_nothing_left(self) -> None:
        house = self.house
        state, server = house.core.state, house.server
        assert not state.requests, f"requests are left: {list(state.requests)}"
        assert not state.waiting, f"requests still wait: {list(state.waiting)}"
        for chain in state.chains.values():
            assert set(chain.slots) == {None}, f"slots are taken: {chain.slots}"
            assert not chain.in_flight
        assert not server.gateway._tickets, "tickets are left"
        assert not server.clients._tickets, "tickets of zmq clients are left"
        assert len(house.core.story) <= 4096
        for worker in house.workers.values():
            assert len(worker.machine.story) <= 4096
        for client in self.clients.values():
            assert not client._streams, f"streams are left: {list(client._streams)}"


class _InTime:
    """A deadline that says what had not ended."""

    def __init__(self, walk: Walk, seconds: float) -> None:
        self._walk = walk
        self._timeout = asyncio.timeout(seconds)
        self._seconds = seconds

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *what: object) -> None:
        try:
            await self._timeout.__aexit__(*what)  # type: ignore[arg-type]
        except TimeoutError:
            open_asks = [str(ask) for ask in self._walk.asks if ask.end is None]
            core = self._walk.house.core
            raise AssertionError(
                f"not over {self._seconds:g} s after the last fault: {open_asks}; the broker has "
                f"{list(core.state.requests)} and is ready: {core.state.ready}. {core.missing}"
            ) from None


def play(schedule: Schedule, seed: int = 0) -> Walk:
    """Plays a schedule to its end. Raises what went wrong, with everything that happened in its notes."""
    walks: list[Walk] = []
    planner = Groups()

    async def story(house: House) -> None:
        walk = Walk(house, planner)
        walks.append(walk)
        await walk.run(schedule)

    real, client_module.secrets = client_module.secrets, _Names()  # type: ignore[assignment]
    try:
        in_house(story, config=WALK, weather=Forecast(seed), planner=planner, within_s=FOR_EVER_S)
    finally:
        client_module.secrets = real
    return walks[0]


def fails(schedule: Schedule) -> bool:
    """Whether anything goes wrong."""
    try:
        play(schedule)
    except Exception:  # noqa: BLE001, anything is a failure
        return True
    return False


__all__ = ["LAYERS", "Walk", "fails", "play"]
