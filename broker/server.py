"""The broker's shell: frames and timers in, the core's effects out. Decides nothing.

Control ROUTER and results PULL are read by one task each; each chain's micro-batches leave through a link of their own,
so that a chain that takes nothing never holds up another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeAlias

import numpy as np

from potluck.broker.clients import ZmqClients
from potluck.broker.draining import draining
from potluck.broker.effects import (
    CloseChain,
    Closed,
    ComputePlan,
    Effect,
    OpenChain,
    Report,
    RequestAccepted,
    RequestFailed,
    RequestFinished,
    RequestText,
    SendBatch,
    SendToStage,
)
from potluck.broker.events import (
    BatchBroke,
    BatchReturned,
    BrokerEvent,
    CloseAsked,
    DrainAsked,
    DrainEnded,
    LinkProbed,
    LinkSilent,
    PlanComputed,
    PlanNotFound,
    RequestSubmitted,
    SlotCopied,
    StageBeat,
    StageBroke,
    StageDied,
    StageLeaves,
    StageLeft,
    StageLoaded,
    StageMeasured,
    StageNotMeasured,
    StageNotPrepared,
    StagePrepared,
    StageProgressed,
    StageRegistered,
    TimePassed,
)
from potluck.broker.gateway import Gateway, PromptCodec
from potluck.broker.job_clients import JobClients
from potluck.broker.job_desk import JobDesk
from potluck.broker.journal import Journal
from potluck.broker.machine import BrokerMachine
from potluck.broker.planning import choose
from potluck.broker.planning_view import plan_view
from potluck.broker.requests import check_request
from potluck.broker.scheduler import room
from potluck.broker.view import snapshot
from potluck.runtime.address import seen_from
from potluck.runtime.clockwork import Clockwork
from potluck.runtime.loop import in_thread
from potluck.runtime.replies import Replies
from potluck.runtime.transport import PeerClosed, Push, Transport
from potluck.wire import limits
from potluck.wire.errors import (
    ClosingError,
    FrameTooLargeError,
    MalformedError,
    Phase,
    PlanError,
    PotluckError,
    WireError,
)
from potluck.wire.frames import Buffer
from potluck.wire.ids import BatchId, ChainId, DeviceName, Epoch, SlotId, StageId
from potluck.wire.measures import LinkTiming
from potluck.wire.messages import (
    BatchDone,
    BatchFailed,
    Cancel,
    Copied,
    Drain,
    Envelope,
    ErrorInfo,
    ForgetJob,
    Goodbye,
    Heartbeat,
    JobQuery,
    JobsQuery,
    Leave,
    Measured,
    MeasureFailed,
    Message,
    Obituary,
    Ping,
    PlanQuery,
    Prepared,
    PrepareFailed,
    Probed,
    Progress,
    Ready,
    Refused,
    Register,
    StageFailed,
    StateQuery,
    StateView,
    Submit,
    SubmitJob,
    decode,
    encode,
    int32_array,
)

log = logging.getLogger("potluck.broker")

CONTROL: frozenset[type] = frozenset(
    {
        Register, Heartbeat, Progress, Ready, StageFailed, Goodbye, Measured, MeasureFailed, Probed,
        Leave, Prepared, PrepareFailed, Copied, Obituary, Submit, Cancel, StateQuery, PlanQuery, Drain,
        SubmitJob, JobQuery, JobsQuery, ForgetJob,
    }
)  # fmt: skip
HERE = "tcp://127.0.0.1:0"
"""The host that a stage on this machine means by 0.0.0.0."""
LAST_WORDS_S = 1.0
"""What clients get to take the end of their requests from a broker that closes."""
RESULTS: frozenset[type] = frozenset({BatchDone, BatchFailed, Ping})


class _Link:
    """The way into one chain: a short queue and a task that pushes it."""

    def __init__(self, push: Push) -> None:
        self.push = push
        self.queue: asyncio.Queue[list[Buffer]] = asyncio.Queue()
        self.waiting = 0
        self.task = asyncio.get_running_loop().create_task(self._run())

    def send(self, frames: list[Buffer]) -> None:
        """At once if nothing waits before it and there is room, otherwise when there is."""
        if self.waiting > 0 or not self.push.try_send(frames):
            self.waiting += 1
            self.queue.put_nowait(frames)

    async def _run(self) -> None:
        while True:
            await self.push.send(await self.queue.get())
            self.waiting -= 1

    def close(self) -> None:
        self.task.cancel()
        self.push.close()


Beside: TypeAlias = Callable[[Callable[[], BrokerEvent]], Awaitable[BrokerEvent]]


class BrokerServer:
    """One broker on one event loop. `start`, then `gateway` takes requests until `close`."""

    def __init__(
        self,
        transport: Transport,
        machine: BrokerMachine,
        codec: PromptCodec,
        *,
        control: str,
        results: str,
        random_seed: Callable[[], int],
        beside: Beside = in_thread,
        journal: Journal | None = None,
        jobs_keep_s: float = 7 * 86_400.0,
    ) -> None:
        """`beside` is where the planner runs: beside the event loop. Without a `journal` there are no jobs; the server
        closes it, once it has been started.
        """
        self.machine = machine
        self.gateway = Gateway(
            machine.model.name, codec, self.feed, random_seed, self.view, machine.config.context_tokens
        )
        self.clients = ZmqClients(self.gateway, self._reply)
        self.jobs = JobDesk(self.gateway, journal, keep_s=jobs_keep_s, check=self._check, room=self._room)
        self._job_clients = JobClients(self.jobs, self._reply)
        self.refused_frames = 0
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._started_s = self._loop.time()
        self._control = transport.router(control, closings=True)
        try:
            self._results = transport.pull(results)
        except PotluckError:
            self._control.close()
            raise
        self._links: dict[ChainId, _Link] = {}
        self._replies = Replies(transport, HERE)
        self._clockwork: Clockwork[BrokerEvent, Effect] = Clockwork(machine, self._perform, self._tick)
        self._tasks: list[asyncio.Task[None]] = []
        self._beside = beside
        self._planning: set[asyncio.Task[None]] = set()
        self._last_refusal_log_s = float("-inf")
        self._over = asyncio.Event()

    @property
    def control_endpoint(self) -> str:
        """Where stages and clients connect."""
        return self._control.endpoint

    @property
    def results_endpoint(self) -> str:
        """Where last stages push."""
        return self._results.endpoint

    def start(self) -> None:
        """Begins to read the sockets."""
        self._spawn(self._read_control())
        self._spawn(self._read_results())
        self.jobs.start()

    def view(self) -> StateView:
        """The cluster now."""
        return snapshot(self.machine, self._loop.time(), self._started_s)

    async def changed(self) -> None:
        """Waits for the next event that the core handles; tests and live views wait on this."""
        await self._clockwork.changed()

    async def wait_ready(self) -> None:
        """Waits until a whole chain serves."""
        while not self.machine.state.ready:
            await self.changed()

    def ask_to_close(self, cause: str) -> None:
        """Takes no new requests and lets the others come to their end; asked again, ends them at once."""
        self.feed(CloseAsked(cause=cause))

    async def wait_closed(self) -> None:
        """Waits until a broker that was asked to close has nothing left to do."""
        await self._over.wait()

    async def close(self) -> None:
        """Closes the sockets, once what was said last is on its way; requests that still run end with an error."""
        self.jobs.stop()
        self.gateway.close(ClosingError(hint="Send the request again once a broker is there."))
        await self.jobs.close()
        await asyncio.sleep(0)  # lets the HTTP streams send their last frame
        self._clockwork.close()
        for link in self._links.values():
            link.close()
        self._replies.close()
        await self._job_clients.close()
        for task in (*self._tasks, *self._planning):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._control.close(LAST_WORDS_S)
        self._results.close()

    # ---- the core's clockwork

    def feed(self, event: BrokerEvent) -> None:
        """One event through the core, and its effects out."""
        self._clockwork.feed(event)

    def _tick(self) -> None:
        self.feed(TimePassed(cause="timer"))

    def _check(self, event: RequestSubmitted) -> None:
        check_request(event, self.machine.config, self.machine.core.vocabulary.size)

    def _room(self) -> tuple[int, int]:
        return room(self.machine.state)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case SendBatch(chain, epoch, message, tokens):
                frames = encode(message, epoch, [np.asarray(tokens, "<i4").tobytes()])
                link = self._links.get(chain)
                if link is not None:
                    link.send(frames)
            case RequestText() | RequestAccepted():
                self.gateway.deliver(effect)
            case RequestFinished() | RequestFailed():
                self.gateway.deliver(effect)
                self.jobs.look_for_room()
            case SendToStage(stage, message, epoch):
                self._control.send(stage.encode(), encode(message, epoch))
            case ComputePlan():
                task = self._loop.create_task(self._plan(effect))
                self._planning.add(task)
                task.add_done_callback(self._planning.discard)
            case OpenChain(chain, epoch, endpoint):
                # a stage on this machine gives 0.0.0.0: the broker's own host
                try:
                    push = self._transport.push(seen_from(HERE, endpoint))
                except PotluckError as error:
                    first = self.machine.state.chains[chain].stages[0]
                    broke = StageBroke(cause="broker", stage=first, epoch=epoch, error=error)
                    self._loop.call_soon(self.feed, broke)
                else:
                    self._links[chain] = _Link(push)
                    self.jobs.look_for_room()
            case CloseChain(chain):
                link = self._links.pop(chain, None)
                if link is not None:
                    link.close()
            case Closed():
                self._over.set()
            case Report(level, text):
                log.log(logging.getLevelNamesMapping()[level.upper()], text)

    async def _plan(self, ask: ComputePlan) -> None:
        core = self.machine.core

        def work() -> BrokerEvent:
            try:
                plan = choose(core.planner, core.shape, ask.choices, ask.network)
            except PlanError as error:
                return PlanNotFound(cause="planner", number=ask.number, error=error)
            except Exception as error:
                log.exception("the planner failed")
                failed = PlanError(
                    f"The planner failed: {error}",
                    hint="Give every device its layers with --layers, or start the broker with --plan even.",
                    phase=Phase.PLAN,
                )
                return PlanNotFound(cause="planner", number=ask.number, error=failed)
            return PlanComputed(cause="planner", number=ask.number, plan=plan)

        self.feed(await self._beside(work))

    # ---- frames in

    async def _read_control(self) -> None:
        while True:
            heard = await self._control.hear()
            peer = heard.peer if isinstance(heard, PeerClosed) else heard[0]
            try:
                if isinstance(heard, PeerClosed):
                    self._on_closed(peer)
                else:
                    self._on_control(peer, decode(heard[1], CONTROL))
            except WireError as error:
                self._refuse(peer, error)
                self._control.send(peer, encode(Refused(ErrorInfo.of(error)), self.machine.state.epoch))
            except Exception:  # a fault of ours must cost one message, never the broker's hearing
                log.exception("What came from %s could not be handled.", peer.hex())

    def _on_closed(self, peer: bytes) -> None:
        """Whoever it was: clients and stages that are not known are passed over."""
        self.clients.closed(peer)
        with contextlib.suppress(UnicodeDecodeError):
            stage = StageId(peer.decode())
            self.feed(StageLeft(cause=f"stage {stage}", stage=stage, reason="its connection closed"))

    def _on_control(self, peer: bytes, envelope: Envelope) -> None:
        message = envelope.message
        match message:
            case Obituary(stage, error):
                died = StageDied(cause=f"witness {peer.hex()}", stage=StageId(stage), error=error.restore())
                self.feed(died)
            case Submit():
                self.clients.submit(peer, message)
            case Cancel():
                self.clients.cancel(peer, message)
            case SubmitJob() | JobQuery() | JobsQuery() | ForgetJob():
                self._job_clients.ask(peer, message)
            case StateQuery():
                self._reply(peer, self.view())
            case Drain(device, back):
                name = DeviceName(device)
                cause = f"client {peer.hex()}"
                self.feed(
                    DrainEnded(cause=cause, device=name) if back else DrainAsked(cause=cause, device=name)
                )
                self._reply(peer, draining(self.machine.core, name))
            case PlanQuery():
                self._reply(peer, plan_view(self.machine.core, message))
            case _:
                self.feed(self._stage_event(peer, envelope.epoch, message))

    def _stage_event(self, peer: bytes, epoch: Epoch, message: Message) -> BrokerEvent:
        try:
            stage = StageId(peer.decode())
        except UnicodeDecodeError:
            raise MalformedError("A stage's identity is not text.") from None
        cause = f"stage {stage}"
        match message:
            case Register():
                if message.stage != stage:
                    raise MalformedError("A stage registers under another name than its connection's.")
                return StageRegistered(
                    cause=cause,
                    stage=stage,
                    device=DeviceName(message.device),
                    endpoint=message.data_endpoint,
                    models=message.models,
                    capabilities=message.capabilities,
                    version=message.version,
                )
            case Heartbeat():
                return StageBeat(
                    cause=cause, stage=stage, epoch=epoch, counters=message.counters, holds=message.holds
                )
            case Progress():
                share = f" {100 * message.done // message.total} %" if message.total else ""
                return StageProgressed(
                    cause=cause,
                    stage=stage,
                    epoch=epoch,
                    detail=f"{message.phase}{share}",
                    phase=message.phase,
                    share=min(1.0, message.done / message.total) if message.total else 0.0,
                )
            case Ready():
                return StageLoaded(
                    cause=cause,
                    stage=stage,
                    epoch=epoch,
                    load_s=message.load_s,
                    weights_bytes=message.weights_bytes,
                    kv_bytes=message.kv_bytes,
                    compute_bytes=message.compute_bytes,
                    kept=message.kept,
                )
            case StageFailed():
                return StageBroke(cause=cause, stage=stage, epoch=epoch, error=message.error.restore())
            case Measured():
                return StageMeasured(cause=cause, stage=stage, profile=message.profile)
            case MeasureFailed():
                return StageNotMeasured(cause=cause, stage=stage, error=message.error.restore())
            case Probed(number, None):
                return LinkSilent(cause=cause, stage=stage, number=number)
            case Probed(number, LinkTiming() as link):
                return LinkProbed(cause=cause, stage=stage, number=number, link=link)
            case Prepared():
                return StagePrepared(
                    cause=cause,
                    stage=stage,
                    number=message.number,
                    index=message.index,
                    load_s=message.load_s,
                )
            case PrepareFailed():
                return StageNotPrepared(
                    cause=cause,
                    stage=stage,
                    number=message.number,
                    index=message.index,
                    error=message.error.restore(),
                )
            case Copied(slice_, slot, tokens, batch):
                return SlotCopied(
                    cause=cause, stage=stage, slice=slice_, slot=SlotId(slot), tokens=tokens, batch=batch
                )
            case Leave():
                return StageLeaves(cause=cause, stage=stage, reason=message.reason or "it was stopped")
            case Goodbye():
                return StageLeft(cause=cause, stage=stage, reason=message.reason or "it left")
            case _:
                raise MalformedError(f"{type(message).__name__} is not for the broker.")

    async def _read_results(self) -> None:
        while True:
            self._read_result(await self._results.recv())  # no name here keeps the frames while it waits

    def _read_result(self, frames: Sequence[Buffer]) -> None:
        try:
            self._on_result(decode(frames, RESULTS))
        except WireError as error:
            self._refuse(b"", error)
        except Exception:
            log.exception("A result could not be handled.")

    def _on_result(self, envelope: Envelope) -> None:
        match envelope.message:
            case BatchDone() as done:
                raw = envelope.arrays[0]
                if memoryview(raw).nbytes > 4 * limits.BATCH_TOKENS:
                    raise FrameTooLargeError(
                        f"Results of {memoryview(raw).nbytes} bytes: at most {4 * limits.BATCH_TOKENS}."
                    )
                tokens = int32_array(raw, memoryview(raw).nbytes // 4)
                self.feed(
                    BatchReturned(
                        cause=f"batch {done.batch}",
                        epoch=envelope.epoch,
                        batch=BatchId(done.batch),
                        tokens=tuple(tokens.tolist()),
                        hops=done.hops,
                        logprobs=done.logprobs,
                    )
                )
            case BatchFailed() as failed:
                self.feed(
                    BatchBroke(
                        cause=f"batch {failed.batch}",
                        epoch=envelope.epoch,
                        batch=BatchId(failed.batch),
                        error=failed.error.restore(),
                    )
                )
            case Ping() as ping:
                self._replies.answer(ping)
            case other:
                raise MalformedError(f"{type(other).__name__} is no result.")

    def _refuse(self, peer: bytes, error: WireError) -> None:
        """Counts a bad frame; at most one log line a second, so that a peer can't fill the disk."""
        self.refused_frames += 1
        if self._loop.time() - self._last_refusal_log_s >= 1.0:
            self._last_refusal_log_s = self._loop.time()
            log.warning(
                "refused a frame from %s (%d so far): %s", peer.hex() or "?", self.refused_frames, error
            )

    # ---- frames out

    def _reply(self, peer: bytes, message: Message) -> bool:
        return self._control.send(peer, encode(message, self.machine.state.epoch))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        task.add_done_callback(_surface)
        self._tasks.append(task)


def _surface(task: asyncio.Task[None]) -> None:
    """A reader that ends by an error is a bug: say so at once instead of going silent."""
    if not task.cancelled() and task.exception() is not None:
        log.critical("a broker task ended: %r", task.exception(), exc_info=task.exception())


__all__ = ["CONTROL", "RESULTS", "BrokerServer"]
