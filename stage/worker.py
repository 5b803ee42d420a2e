"""A stage's shell: the connection to the broker, the data socket, the timer, the lanes. Decides nothing.

Many workers can run in one process: everything that differs comes in by `StageSettings`, a transport and lanes.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from importlib.metadata import version
from typing import Any, TypeAlias

from potluck.runtime.address import endpoint
from potluck.runtime.clockwork import Clockwork
from potluck.runtime.transport import Dealer, Pull, Transport
from potluck.stage.bench import Bench, BenchSettings
from potluck.stage.bench_plan import times_gpu
from potluck.stage.compute import ComputeLane, LaneJob, Spent, ThreadLane
from potluck.stage.effects import (
    CancelLoad,
    CancelMeasure,
    ClearCaches,
    CloseSlices,
    ConnectNext,
    Disconnect,
    Effect,
    Exit,
    ForwardBatch,
    Reconnect,
    Report,
    RestoreCopy,
    SendControl,
    SendCopy,
    SendResult,
    SetMirrors,
    StartCompute,
    StartLoad,
    StartMeasure,
    StartProbe,
    TakeCopy,
)
from potluck.stage.engine import Engine, Loaded
from potluck.stage.engines import make_engine
from potluck.stage.events import (
    Assigned,
    BrokerCut,
    BrokerReached,
    ControlNotSent,
    ControlRefused,
    CopyNotRestored,
    CopyRestored,
    Dismissed,
    LeaveAsked,
    LoadCancelled,
    LoadFailed,
    LoadFinished,
    LoadProgressed,
    MeasureAsked,
    MeasureBroke,
    MeasureCancelled,
    MeasureFinished,
    MeasureProgressed,
    MirrorAsked,
    PrepareAsked,
    ProbeAsked,
    ProbeEnded,
    RefusedBy,
    Released,
    StageEvent,
    Started,
    StopAsked,
    TimePassed,
    Welcomed,
)
from potluck.stage.holder import Cleared, Holder, Models, Progressed
from potluck.stage.machine import StageMachine
from potluck.stage.pipeline import Pipeline, attempt
from potluck.stage.settings import StageSettings
from potluck.stage.state import StageIdentity
from potluck.wire.errors import Phase, PotluckError, WireError
from potluck.wire.ids import Epoch
from potluck.wire.measures import Profile
from potluck.wire.messages import (
    Assign,
    Envelope,
    Farewell,
    Leave,
    Measure,
    Mirror,
    Prepare,
    Prepared,
    PrepareFailed,
    Probe,
    Ready,
    Refused,
    Release,
    Slice,
    StageFailed,
    Welcome,
    decode,
    encode,
)

log = logging.getLogger("potluck.stage")

CONTROL: frozenset[type] = frozenset(
    {Welcome, Refused, Assign, Release, Measure, Probe, Prepare, Farewell, Mirror}
)
Measurer: TypeAlias = Callable[[Measure, Callable[[], bool], Progressed], Profile | None]
"""Measures this device; None if that was no longer wanted on the way. Raises PotluckError. Runs on the load lane."""
RETOLD = Ready | StageFailed | Prepared | PrepareFailed | Leave
"""What the core wants to hear of if it could not be sent."""
GOODBYE_S = 0.05
"""What the goodbye gets to leave this machine before its socket is closed."""


class StageWorker:
    """One stage. `run` until it ends by itself or by `stop`; what it ended by is then in `error`."""

    def __init__(
        self,
        transport: Transport,
        broker_endpoint: str,
        settings: StageSettings,
        *,
        lane: Callable[[], ComputeLane] = ThreadLane,
        engine: Callable[[], Engine] | None = None,
        stage_id: str | None = None,
        measure: Measurer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`engine` makes the engine in place of the one that the settings name, `measure` takes the place of the
        benchmark.
        """
        self.settings = settings
        self.stage_id = stage_id or f"{settings.device}/{secrets.token_hex(3)}"
        self.error: PotluckError | None = None
        self._transport = transport
        self._broker_endpoint = broker_endpoint
        self._make_lane = lane
        self._clock = clock
        models = Models(settings.models, settings.cache_dir)
        make = engine or (lambda: make_engine(settings.engine))
        self._holder = Holder(make, models, settings.threads, mlock=settings.mlock)
        bench = BenchSettings(
            settings.device,
            settings.engine,
            settings.threads,
            gpu=times_gpu(settings.capabilities),
            capabilities=settings.capabilities,
        )
        self._measurer: Measurer = measure or Bench(make, models, bench)
        self._loop: asyncio.AbstractEventLoop
        self._machine: StageMachine | None = None
        self._pipeline: Pipeline
        self._lane: ComputeLane
        self._load_lane: ComputeLane
        self._dealer: Dealer
        self._ears: list[asyncio.Task[None]] = []
        """What listens on the dealer."""
        self._hangs = False
        self._clockwork: Clockwork[StageEvent, Effect]
        self._exit: asyncio.Future[Exit]
        self._cancelled_load = 0
        self._cancelled_measure = 0
        self._probes: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()

    @property
    def machine(self) -> StageMachine:
        """The core, once `run` has begun."""
        if self._machine is None:
            raise RuntimeError("the worker does not run yet")
        return self._machine

    # ---- life

    async def run(self) -> int:
        """Serves until it is stopped or refused. Returns the exit code.

        Raises PortInUseError, SettingsError, and EngineHangsError if only a new process helps.
        """
        self._loop = asyncio.get_running_loop()
        self._exit = self._loop.create_future()
        settings = self.settings
        pull = self._transport.pull(endpoint(settings.listen_address, settings.data_port or "*"))
        try:
            self._dealer = self._transport.dealer(self._broker_endpoint, self.stage_id, watched=True)
        except PotluckError:
            pull.close()
            raise
        self._lane, self._load_lane = self._make_lane(), self._make_lane()
        self._machine = StageMachine(
            self._identity(pull),
            self._broker_endpoint.removeprefix("tcp://"),
            keep_trying=settings.keep_trying,
            drain_timeout_s=settings.drain_timeout_s,
            hang_s=settings.hang_s,
        )
        self._clockwork = Clockwork(self._machine, self._perform, self._tick)
        self._pipeline = Pipeline(
            self._transport,
            pull,
            self._lane,
            self._holder,
            self.feed,
            broker_endpoint=self._broker_endpoint,
            data_endpoint=self._machine.me.data_endpoint,
            send_timeout_s=settings.send_timeout_s,
            clock=self._clock,
            before_batch=settings.before_batch,
        )
        try:
            self._guard(self._pipeline.start())
            self._listen()
            self.feed(Started(cause="start"))
            ended = await self._exit
            self.error = ended.error
            await asyncio.sleep(GOODBYE_S)
            if ended.restart and ended.error is not None:
                self._hangs = True
                raise ended.error
            return ended.code
        finally:
            await self._close()

    def leave(self, reason: str) -> None:
        """Asks the broker to do without this stage. `run` ends when it can, or no longer answers."""
        self.feed(LeaveAsked(cause="leave", reason=reason))

    @property
    def stays(self) -> bool:
        """Whether it was asked to leave and is still needed."""
        return self.machine.leaving.due_s is not None and not self.machine.state.stopped

    async def stop(self, reason: str = "it was stopped") -> None:
        """Says goodbye and waits until `run` has ended."""
        self.feed(StopAsked(cause="stop", reason=reason))
        await self._ended.wait()

    async def changed(self) -> None:
        """Waits for the next event that the core handles; tests wait on this."""
        await self._clockwork.changed()

    async def _close(self) -> None:
        self._clockwork.close()
        self._hang_up()
        for probe in self._probes:
            probe.cancel()
        self._pipeline.close()
        patience_s = 0.0 if self._hangs else self.settings.close_timeout_s
        await asyncio.gather(
            self._lane.close(self._holder.close, patience_s), self._load_lane.close(_nothing, patience_s)
        )
        self._ended.set()

    def _identity(self, pull: Pull) -> StageIdentity:
        settings, bound = self.settings, pull.endpoint
        if settings.advertise_address is not None:
            bound = endpoint(settings.advertise_address, bound.rpartition(":")[2])
        return StageIdentity(
            stage=self.stage_id,
            device=settings.device,
            version=version("potluck"),
            engine=settings.engine,
            data_endpoint=bound,
            models=tuple(settings.models),
            capabilities=settings.capabilities,
        )

    # ---- the core's clockwork

    def feed(self, event: StageEvent) -> None:
        """One event through the core, and its effects out."""
        self._clockwork.feed(event)

    def _tick(self) -> None:
        sent = self._pipeline.take_sent()
        if sent is not None:
            self.machine.handle(sent, self._loop.time())  # only counted: the heartbeat that is due tells it
        self.feed(TimePassed(cause="timer"))

    def _perform(self, effect: Effect) -> None:
        match effect:
            case StartCompute(job):
                self._pipeline.compute(job)
            case ForwardBatch():
                self._pipeline.forward(effect)
            case SendResult():
                self._pipeline.result(effect)
            case SendControl(message, epoch):
                if not self._dealer.send(encode(message, epoch)) and isinstance(message, RETOLD):
                    event = ControlNotSent(cause="control socket", epoch=epoch, message=message)
                    self._loop.call_soon(self.feed, event)
            case Reconnect():
                self._hang_up()
                self._dealer = self._transport.dealer(self._broker_endpoint, self.stage_id, watched=True)
                self._listen()
            case StartMeasure(number, message):
                self._measure(number, message)
            case CancelMeasure(number):
                self._cancelled_measure = number
            case StartProbe(message):
                probe = self._spawn(self._probe(message))
                self._probes.add(probe)
                probe.add_done_callback(self._probes.discard)
            case StartLoad(number, wished):
                self._load(number, wished)
            case CloseSlices(slices):
                self._load_lane.submit(LaneJob(lambda: attempt(lambda: self._holder.drop(slices)), _ignore))
            case ClearCaches(number, held, keep):
                self._on_lane(self._lane, number, lambda: self._holder.clear(held, keep))
            case SetMirrors(endpoints):
                self._pipeline.mirrors.set(endpoints)
            case TakeCopy():
                self._pipeline.take_copy(effect)
            case SendCopy():
                self._pipeline.mirrors.send(effect)
            case RestoreCopy():
                self._restore(effect)
            case CancelLoad(number):
                self._cancelled_load = number
            case ConnectNext():
                try:
                    self._pipeline.connect(effect)
                except PotluckError as error:
                    log.error("The way to %s can't be opened: %s", effect.next_endpoint, error)
            case Disconnect():
                self._pipeline.disconnect()
            case Report(level, text):
                log.log(logging.getLevelNamesMapping()[level.upper()], text)
            case Exit():
                if not self._exit.done():
                    self._exit.set_result(effect)

    # ---- measuring: layers on the lane for loading, links beside it

    def _measure(self, number: int, message: Measure) -> None:
        cause = f"measurement {number}"

        def wanted() -> bool:
            return self._cancelled_measure < number

        def progressed(phase: Phase, done: int, total: int) -> None:
            event = MeasureProgressed(cause=cause, number=number, phase=phase, done=done, total=total)
            self._loop.call_soon_threadsafe(self.feed, event)

        def done(result: Profile | PotluckError | None, _: Spent) -> None:
            match result:
                case None:
                    self.feed(MeasureCancelled(cause=cause, number=number))
                case PotluckError():
                    self.feed(MeasureBroke(cause=cause, number=number, error=result))
                case Profile():
                    self.feed(MeasureFinished(cause=cause, number=number, profile=result))

        measure = self._measurer
        self._load_lane.submit(LaneJob(lambda: attempt(lambda: measure(message, wanted, progressed)), done))

    async def _probe(self, message: Probe) -> None:
        link = await self._pipeline.prober.run(message)
        self.feed(ProbeEnded(cause=f"probe {message.number}", number=message.number, link=link))

    # ---- loading, on a lane of its own, and emptying caches, between micro-batches

    def _load(self, number: int, wished: Slice) -> None:
        def wanted() -> bool:
            return self._cancelled_load < number

        def progressed(phase: Phase, done: int, total: int) -> None:
            event = LoadProgressed(cause=f"load {number}", number=number, phase=phase, done=done, total=total)
            self._loop.call_soon_threadsafe(self.feed, event)

        self._on_lane(self._load_lane, number, lambda: self._holder.load(wished, wanted, progressed))

    def _restore(self, effect: RestoreCopy) -> None:
        number, cause = effect.number, f"copy after batch {effect.message.batch}"

        def done(error: PotluckError | None, _: Spent) -> None:
            if error is None:
                self.feed(CopyRestored(cause=cause, number=number))
            else:
                self.feed(CopyNotRestored(cause=cause, number=number, error=error))

        work = functools.partial(self._holder.restore, effect.message, effect.arrays)
        self._load_lane.submit(LaneJob(lambda: attempt(work), done))

    def _on_lane(self, lane: ComputeLane, number: int, work: Callable[[], Loaded | Cleared | None]) -> None:
        def done(result: Loaded | Cleared | PotluckError | None, spent: Spent) -> None:
            cause = f"load {number}"
            kept = isinstance(result, Cleared) and result.kept
            if isinstance(result, Cleared):
                result = result.loaded
            match result:
                case None:
                    self.feed(LoadCancelled(cause=cause, number=number))
                case PotluckError():
                    self.feed(LoadFailed(cause=cause, number=number, error=result))
                case Loaded():
                    load_s = spent.compute_s
                    self.feed(
                        LoadFinished(cause=cause, number=number, loaded=result, load_s=load_s, kept=kept)
                    )

        lane.submit(LaneJob(lambda: attempt(work), done))

    # ---- frames from the broker

    def _listen(self) -> None:
        self._ears = [
            self._spawn(self._read_control(self._dealer)),
            self._spawn(self._watch_connection(self._dealer)),
        ]

    def _hang_up(self) -> None:
        for ear in self._ears:
            ear.cancel()
        self._dealer.close()

    async def _watch_connection(self, dealer: Dealer) -> None:
        while True:
            if await dealer.connection():
                self.feed(BrokerReached(cause="connection"))
            else:
                self.feed(BrokerCut(cause="connection"))

    async def _read_control(self, dealer: Dealer) -> None:
        while True:
            frames = await dealer.recv()
            try:
                event = _event_of(decode(frames, CONTROL))
            except WireError as error:
                event = ControlRefused(cause="broker", error=error)
            self.feed(event)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._guard(self._loop.create_task(work))

    def _guard(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        """A reader that ends by an error is a bug: the stage ends with it instead of going silent."""

        def ended(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None and not self._exit.done():
                self._exit.set_exception(error)

        task.add_done_callback(ended)
        return task


def _nothing() -> None:
    """The last word of the lane for loading: what it loaded is closed by the other one."""


def _ignore(result: object, spent: Spent) -> None:
    """Nobody waits for it."""


def _event_of(envelope: Envelope) -> StageEvent:
    cause = "broker"
    epoch: Epoch = envelope.epoch
    match envelope.message:
        case Welcome(broker_version, heartbeat_s, misses):
            return Welcomed(
                cause=cause,
                epoch=epoch,
                heartbeat_s=heartbeat_s,
                misses=misses,
                broker_version=broker_version,
            )
        case Refused(error):
            return RefusedBy(cause=cause, error=error)
        case Assign() as assign:
            return Assigned(cause=cause, epoch=epoch, assign=assign)
        case Release():
            return Released(cause=cause, epoch=epoch)
        case Mirror() as mirror:
            return MirrorAsked(cause=cause, epoch=epoch, message=mirror)
        case Prepare() as prepare:
            return PrepareAsked(cause=cause, message=prepare)
        case Farewell():
            return Dismissed(cause=cause)
        case Measure() as measure:
            return MeasureAsked(cause=cause, message=measure)
        case Probe() as probe:
            return ProbeAsked(cause=cause, message=probe)
        case other:
            raise WireError(f"{type(other).__name__} is not for a stage.")


__all__ = ["CONTROL", "StageSettings", "StageWorker"]
