"""A household in one process on virtual time: the real broker, REST app, stages and clients, each on its own host.

Only the engine, the prompts' codec and the network are not the real ones. After every event that a core handles, its
invariants are checked; `House.close` checks that nothing was left behind. A story is a coroutine over a `House`, run
by `in_house`, which ends it at a deadline of virtual time: nothing can hang.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from fastapi import FastAPI

from potluck.broker.config import BrokerConfig
from potluck.broker.events import BrokerEvent
from potluck.broker.journal import Journal
from potluck.broker.machine import BrokerMachine
from potluck.broker.rest import make_app
from potluck.planner.even import plan_even
from potluck.planner.plan import ModelShape, Planner
from potluck.runtime.client import Client
from potluck.runtime.memory import MemoryNetwork, MemoryTransport
from potluck.stage.compute import InlineLane
from potluck.stage.engines.fake import FakeEngine
from potluck.stage.engines.fake_model import VOCAB, WIDTH
from potluck.stage.engines.fake_vocabulary import FakeVocabulary
from potluck.stage.settings import StageSettings
from potluck.wire.errors import EngineHangsError
from potluck.wire.ids import Epoch, StageId
from potluck.wire.messages import ChatMessage, ModelRef
from sim.call import Call
from sim.watched import LAYERS, TroubledEngine, Troubles, WatchedBroker, WatchedStage, undisturbed
from sim.weather import HOST, Forecast, HostsLoop

T = TypeVar("T")

MODEL = ModelRef("toy", "fp-toy", LAYERS, WIDTH, "fake")
SHAPE = ModelShape("toy", LAYERS, WIDTH, (100,) * LAYERS, 0, 50, frozenset(range(1, LAYERS)))
CONFIG = BrokerConfig(
    heartbeat_s=0.5,
    misses=3,
    slots=8,
    context_tokens=64,
    chunk_tokens=16,
    settle_s=0.2,
    load_timeout_s=10.0,
    batch_timeout_s=5.0,
    wait_limit_s=20.0,
)
BROKER = "broker"
CONTROL, RESULTS = "tcp://broker:7946", "tcp://broker:7947"


async def at_once(work: Callable[[], BrokerEvent]) -> BrokerEvent:
    """The planner takes no time: on virtual time nothing runs beside the loop."""
    return work()


class HouseCodec(FakeVocabulary):
    """Prompts for the fake model; a chat is its lines."""

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def encode_chat(self, messages: tuple[ChatMessage, ...]) -> list[int]:
        return self.encode("".join(f"{message.role}: {message.content}\n" for message in messages))


CODEC = HouseCodec(VOCAB)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a stage's device takes, in seconds of virtual time."""

    batch_s: float = 0.0
    token_layer_s: float = 0.0
    load_s: float = 0.0


class House:
    """The broker and whoever else there is. Stages run until they are killed, leave, or the house closes."""

    def __init__(
        self,
        config: BrokerConfig = CONFIG,
        weather: Forecast | None = None,
        planner: Planner = plan_even,
        journal: Path | None = None,
    ) -> None:
        """`journal` is the file of the broker's jobs; without one there are none."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, HostsLoop)
        self.loop = loop
        self.config = config
        self.planner = planner
        self.journal_path = journal
        self._journal: Journal | None = None
        self.weather = weather or Forecast()
        self.network = MemoryNetwork(self.weather)
        self.workers: dict[str, WatchedStage] = {}
        self.log: list[str] = []
        self.faults: list[BaseException] = []
        self.faultless = False
        """Set by a story in which nobody has a reason to report an error."""
        self.server: WatchedBroker
        self.app: FastAPI
        self._hosts: dict[str, tuple[MemoryTransport, Context]] = {}
        self._starting: set[asyncio.Task[None]] = set()
        self._runs: dict[str, asyncio.Task[int]] = {}
        self._clients: list[Client] = []
        self._engines: dict[str, WeakSet[FakeEngine]] = {}
        self._troubles: dict[str, Troubles] = {}
        self._stirred = asyncio.Event()
        self._starts = itertools.count(1)
        self._ids = itertools.count(1)
        self._seeds = itertools.count(1000)
        loop.set_exception_handler(self._on_loop_error)
        self.start_broker()

    # ---- the broker

    def start_broker(self) -> None:
        """A broker with no memory of any former one but the journal, at the same endpoints."""
        transport, context = self._host(BROKER)
        if self.journal_path is not None:
            self._journal = Journal.open(self.journal_path, MODEL.fingerprint)
        machine = BrokerMachine(
            self.config,
            MODEL,
            SHAPE,
            CODEC,
            self.planner,
            lambda stage: RESULTS,
            "sim",
            first_epoch=Epoch(1000 * next(self._starts)),
        )
        self.server = context.run(
            lambda: WatchedBroker(
                transport,
                machine,
                CODEC,
                control=CONTROL,
                results=RESULTS,
                random_seed=lambda: next(self._seeds),
                beside=at_once,
                journal=self._journal,
            )
        )
        self.server.watch = self
        context.run(self.server.start)
        self.app = make_app(
            self.server.gateway,
            new_id=lambda: f"id{next(self._ids)}",
            clock=lambda: 1_700_000_000 + self.now,
        )
        self.tell("the broker starts")

    @property
    def core(self) -> BrokerMachine:
        return self.server.machine

    # ---- stages

    def add_stage(self, name: str, cost: Cost = Cost()) -> WatchedStage:
        """A stage worker on a host of its own; one that was there before is started anew."""
        transport, context = self._host(name)
        self._engines.pop(name, None)
        self._troubles.pop(name, None)
        worker = WatchedStage(
            transport,
            CONTROL,
            StageSettings(name, {MODEL.fingerprint: None}, engine="fake", listen_address="*"),
            lane=InlineLane,
            engine=lambda: self._engine(name, cost),
            stage_id=f"{name}/{next(self._starts)}",
            clock=self.loop.time,
        )
        worker.watch, worker.load_s = self, cost.load_s
        self.workers[name] = worker
        run = self._runs[name] = self.loop.create_task(worker.run(), context=context)
        run.add_done_callback(lambda run: self._ended(run, worker, cost))
        self.tell(f"{name} starts ({cost})")
        return worker

    def _ended(self, run: asyncio.Task[int], worker: WatchedStage, cost: Cost) -> None:
        """A stage has ended by itself. One whose engine hangs is started anew, as its command does; the others are
        gone.
        """
        name = worker.settings.device
        if run.cancelled() or self.workers.get(name) is not worker:
            return
        match run.exception():
            case None:
                self.tell(f"{name} has ended: {run.result()}")
                self.workers.pop(name)
            case EngineHangsError():
                self.tell(f"{name} starts anew: its engine hangs")
                self._starting.add(again := self.loop.create_task(self._start_anew(name, cost)))
                again.add_done_callback(self._starting.discard)
            case error:
                self.faults.append(error)
        self.stir()

    async def _start_anew(self, name: str, cost: Cost) -> None:
        await self.kill(name)
        self.add_stage(name, cost)

    def _engine(self, name: str, cost: Cost) -> FakeEngine:
        engine = TroubledEngine(self.troubles(name), cost.token_layer_s, cost.batch_s)
        self._engines.setdefault(name, WeakSet()).add(engine)
        return engine

    def troubles(self, name: str) -> Troubles:
        """What goes wrong next with the device's engine; a stage that is started anew begins without."""
        return self._troubles.setdefault(name, Troubles())

    def pace(self, name: str, cost: Cost) -> None:
        """From now on the device takes this much, whatever it was measured with."""
        for engine in self._engines[name]:
            engine.seconds_per_token, engine.seconds_per_batch = cost.token_layer_s, cost.batch_s

    async def serving(self, *names: str, cost: Cost = Cost()) -> None:
        """Adds the stages and waits until one chain of all of them serves."""
        for name in names:
            self.add_stage(name, cost)
        await self.until(lambda: self.chain == sorted(names))

    @property
    def chain(self) -> list[str]:
        """The hosts of the open chain, in order; empty if none is open."""
        for chain in self.core.state.chains.values():
            if chain.open:
                return [name.partition("/")[0] for name in chain.stages]
        return []

    @property
    def living(self) -> list[str]:
        """Stages that were neither killed nor left."""
        return sorted(self.workers)

    def stage_id(self, name: str) -> StageId:
        return StageId(self.workers[name].stage_id)

    async def leave(self, name: str) -> None:
        """The stage says goodbye and ends."""
        self.tell(f"{name} leaves")
        worker = self.workers.pop(name)
        await worker.stop("it leaves")
        assert await self._runs.pop(name) == 0

    # ---- faults

    async def kill(self, name: str) -> None:
        """SIGKILL: nobody says goodbye, nothing that was queued goes out. For stages, clients and the broker."""
        self.tell(f"{name} is killed")
        transport, _ = self._hosts.pop(name)
        transport.close()
        self.workers.pop(name, None)
        self._runs.pop(name, None)
        await self.loop.end(name)
        if name == BROKER and self._journal is not None:
            self._journal.close()

    def freeze(self, name: str) -> None:
        """SIGSTOP."""
        self.tell(f"{name} is frozen")
        self.loop.freeze(name)

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        self.tell(f"{name} goes on")
        self.loop.thaw(name)

    def partition(self, one: str, other: str) -> None:
        self.tell(f"nothing passes between {one} and {other}")
        self.weather.cut(one, other)

    def heal(self, one: str, other: str) -> None:
        self.tell(f"{one} and {other} reach each other again")
        self.weather.heal(one, other)

    # ---- clients

    def client(self, name: str = "guest") -> Client:
        """A zmq client on a host of its own."""
        transport, context = self._host(name)
        client = context.run(lambda: Client(CONTROL, transport=transport))
        self._clients.append(client)
        return client

    def call(self, path: str, body: dict[str, Any], hang_up_after: int | None = None) -> Call:
        """One HTTP request; its answer comes while the house goes on."""
        call = Call(f"call-{next(self._starts)}", path, body, self.now, hang_up_after)
        call.start(self.app, self.loop, self._hosts[BROKER][1].copy())
        return call

    # ---- time

    @property
    def now(self) -> float:
        return self.loop.time()

    async def until(self, condition: Callable[[], bool], within_s: float = 120.0) -> None:
        """Waits for the events of the broker and the stages until the condition holds."""
        async with asyncio.timeout(within_s):
            while not condition():
                self.check()
                self._stirred.clear()
                await self._stirred.wait()

    async def quiet(self) -> None:
        """Waits until no micro-batch is on its way."""
        await self.until(lambda: not any(chain.in_flight for chain in self.core.state.chains.values()))

    async def close(self) -> None:
        """Ends everybody, and checks that nothing was left: no request, ticket, slot, micro-batch or task."""
        self.tell("the house closes")
        await self.quiet()
        state, server = self.core.state, self.server
        with self.noticing():
            assert not state.requests, f"requests are left: {list(state.requests)}"
            assert not state.waiting
            for chain in state.chains.values():
                assert set(chain.slots) == {None}, f"slots are taken: {chain.slots}"
            assert not server.gateway._tickets, "tickets are left"
            assert not server.clients._tickets, "tickets of zmq clients are left"
        for client in self._clients:
            await client.close()
        while self.living:
            self.loop.thaw(self.living[0])
            await self.leave(self.living[0])
        await server.close()
        for name in list(self._hosts):
            self._hosts.pop(name)[0].close()
        await asyncio.sleep(1.0)  # what is still on its way arrives nowhere
        with self.noticing():
            for sockets in (self.network._bound, self.network._dealers):
                assert not sockets, f"sockets are left: {sockets}"
        self.check()

    # ---- what goes wrong

    def tell(self, text: str) -> None:
        """One line for whoever has to understand a failure."""
        self.log.append(f"{self.now:9.3f}  {text}")

    def noticing(self) -> _Noticing:
        """Keeps what fails inside, wherever it would get lost, for `check`."""
        return _Noticing(self)

    def check(self) -> None:
        """Raises the first thing that went wrong."""
        if self.faults:
            raise self.faults[0]

    def stir(self) -> None:
        """Something happened."""
        self._stirred.set()

    def report(self) -> str:
        """What happened, in order."""
        story = [str(line) for line in self.core.story][-200:]
        weather = self.weather.log[-50:]
        return "\n".join(
            ["", "-- the script", *self.log, "-- the weather", *weather, "-- the broker's story", *story]
        )

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.faults.append(context.get("exception") or AssertionError(context["message"]))
        self.stir()

    def context(self, name: str) -> Context:
        """What marks tasks as the host's: they freeze and die with it."""
        return self._hosts[name][1].copy()

    def _host(self, name: str) -> tuple[MemoryTransport, Context]:
        """A new process on that host: its transport, and the context that marks what it starts as its own."""
        context = copy_context()
        context.run(HOST.set, name)
        self._hosts[name] = (self.network.host(name), context)
        return self._hosts[name]


class _Noticing:
    """See `House.noticing`."""

    def __init__(self, house: House) -> None:
        self._house = house

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, AssertionError):
            self._house.faults.append(error)
            self._house.stir()


def in_house(
    story: Callable[[House], Awaitable[T]],
    *,
    config: BrokerConfig = CONFIG,
    weather: Forecast | None = None,
    planner: Planner = plan_even,
    journal: Path | None = None,
    within_s: float = 600.0,
) -> T:
    """Runs a story in a new house to its end, and fails if that is not reached within this much virtual time."""

    async def run() -> T:
        house = House(config, weather, planner, journal)
        try:
            async with asyncio.timeout(within_s):
                result = await story(house)
                await house.close()
        except BaseException as error:
            error.add_note(house.report())
            for fault in house.faults:
                if fault is not error:
                    raise fault from error
            raise
        finally:
            house.loop.thaw_all()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks are left: {left}"
        return result

    with asyncio.Runner(loop_factory=HostsLoop) as runner:
        return runner.run(run())


__all__ = [
    "BROKER",
    "CODEC",
    "CONFIG",
    "CONTROL",
    "LAYERS",
    "MODEL",
    "RESULTS",
    "SHAPE",
    "Cost",
    "House",
    "in_house",
    "undisturbed",
]
