"""The data path of a stage's shell: receive n+1, compute n and send n-1 at the same time. Decides nothing.

    PULL --receiver--> core --StartCompute--> lane --done--> core --ForwardBatch--> sender --> PUSH

Receiver and sender are tasks on the event loop, the lane computes beside it. At most `PLACES` micro-batches are inside,
from arrival until the next one has them; beyond that the receiver stops reading, ZeroMQ's short queues fill up, and the
sender before waits. So a slow stage or a dead one behind it holds few frames, and the lane still has the next job at
hand when it ends one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from potluck.runtime.address import seen_from
from potluck.runtime.replies import Replies
from potluck.runtime.transport import Pull, Push, Transport
from potluck.stage.compute import ComputeLane, LaneJob, Spent
from potluck.stage.effects import ConnectNext, ForwardBatch, SendResult, TakeCopy
from potluck.stage.events import (
    BatchArrived,
    BatchComputed,
    BatchComputeFailed,
    BatchSent,
    BatchSkipped,
    Computed,
    CopyArrived,
    CopyNotTaken,
    CopyTaken,
    DataRefused,
    Job,
    SendTimedOut,
    StageEvent,
)
from potluck.stage.holder import Holder
from potluck.stage.mirrors import Mirrors
from potluck.stage.probe import Prober
from potluck.wire.errors import EngineError, OutOfMemoryError, PotluckError, WireError
from potluck.wire.frames import Buffer
from potluck.wire.ids import Epoch
from potluck.wire.messages import BatchDone, MicroBatch, Ping, Pong, SlotCopy, decode, encode

log = logging.getLogger("potluck.stage")
T = TypeVar("T")

PLACES = 4
"""Micro-batches inside a stage: one that is sent, one that is computed, and two that wait for one or the other."""
ACCEPT: frozenset[type] = frozenset({MicroBatch, Ping, Pong, SlotCopy})


def attempt(work: Callable[[], T]) -> T | PotluckError:
    """The result of what runs on the lane, or its error: an engine's bug fails one micro-batch, never the lane."""
    try:
        return work()
    except PotluckError as error:
        return error
    except MemoryError:
        return OutOfMemoryError(
            hint="Start potluck-stage with a lower --max-memory-gb, or close other programs."
        )
    except Exception as error:
        log.exception("the engine raised what no engine should")
        return EngineError(f"The engine failed: {type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class _Parcel:
    """Frames on their way out."""

    epoch: Epoch
    batch: int
    push: Push
    frames: list[Buffer]


class _Way:
    """The way out during one epoch: to the next stage, and to the broker's results. One task sends, in order."""

    def __init__(
        self, next_push: Push, results: Push, send: Callable[[_Parcel], Coroutine[Any, Any, None]]
    ) -> None:
        self.next_push = next_push
        self.results = results
        self._send = send
        self._parcels: deque[_Parcel] = deque()
        self._more = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._run())

    def __len__(self) -> int:
        return len(self._parcels)

    def put(self, parcel: _Parcel) -> None:
        self._parcels.append(parcel)
        self._more.set()

    async def _run(self) -> None:
        while True:
            while not self._parcels:
                self._more.clear()
                await self._more.wait()
            await self._send(self._parcels[0])  # it keeps its place until it is gone
            self._parcels.popleft()

    def close(self) -> None:
        self.task.cancel()
        self._parcels.clear()
        self.next_push.close()
        self.results.close()


class Pipeline:
    """The three loops of one stage. `feed` takes their events to the core; the core's effects come back by the methods.

    `start` begins to receive; `close` ends all but the lane, which belongs to the worker.
    """

    def __init__(
        self,
        transport: Transport,
        pull: Pull,
        lane: ComputeLane,
        holder: Holder,
        feed: Callable[[StageEvent], None],
        *,
        broker_endpoint: str,
        data_endpoint: str,
        send_timeout_s: float,
        clock: Callable[[], float] = time.perf_counter,
        before_batch: Callable[[], None] = lambda: None,
    ) -> None:
        """`data_endpoint` is where others reach `pull`. `before_batch` is called on the lane before each one."""
        self._before_batch = before_batch
        self._transport = transport
        self._pull = pull
        self._lane = lane
        self._holder = holder
        self._feed = feed
        self._broker_endpoint = broker_endpoint
        self._send_timeout_s = send_timeout_s
        self._loop = asyncio.get_running_loop()
        self._replies = Replies(transport, broker_endpoint)
        self.prober = Prober(transport, broker_endpoint, data_endpoint, clock)
        self.mirrors = Mirrors(transport, broker_endpoint, self.prober, feed, send_timeout_s)
        self._way: _Way | None = None
        self._on_lane = 0
        self._generation = 0
        """Grows when an epoch ends: what was queued for the lane before is skipped."""
        self._sent: BatchSent | None = None
        self._room = asyncio.Event()
        self._receiver: asyncio.Task[None] | None = None

    @property
    def inside(self) -> int:
        """Micro-batches that have arrived and are not gone yet."""
        return self._on_lane + (len(self._way) if self._way is not None else 0)

    def start(self) -> asyncio.Task[None]:
        """Begins to receive. The task never ends by itself."""
        self._receiver = self._loop.create_task(self._receive())
        return self._receiver

    def close(self) -> None:
        """Stops receiving and sending."""
        if self._receiver is not None:
            self._receiver.cancel()
        self.disconnect()
        self._replies.close()
        self._pull.close()

    # ---- receive

    async def _receive(self) -> None:
        while True:
            while self.inside >= PLACES:
                self._room.clear()
                await self._room.wait()
            self._received(await self._pull.recv())  # no name here keeps the frames while it waits

    def _received(self, frames: Sequence[Buffer]) -> None:
        try:
            envelope = decode(frames, ACCEPT)
        except WireError as error:
            self._feed(DataRefused(cause="data frame", error=error))
            return
        message = envelope.message
        if isinstance(message, MicroBatch):
            cause = f"batch {message.batch}"
            self._feed(
                BatchArrived(cause=cause, epoch=envelope.epoch, message=message, arrays=envelope.arrays)
            )
        elif isinstance(message, SlotCopy):
            cause = f"copy after batch {message.batch}"
            self._feed(CopyArrived(cause=cause, message=message, arrays=envelope.arrays))
        elif isinstance(message, Ping):
            self._answer(message)
        elif isinstance(message, Pong):
            self.prober.heard(message)

    def _answer(self, ping: Ping) -> None:
        """By way of the lane, as a micro-batch would go, unless that is busy: the hand-over is part of a hop."""
        if self._on_lane == 0:
            self._lane.submit(LaneJob(lambda: None, lambda _, __: self._replies.answer(ping)))
        else:
            self._replies.answer(ping)

    # ---- compute

    def compute(self, job: Job) -> None:
        """Queues a micro-batch for the lane."""
        generation = self._generation

        def skipped() -> bool:
            return generation != self._generation

        def work() -> Computed | PotluckError | None:
            if skipped():
                return None
            self._before_batch()
            return attempt(lambda: self._holder.compute(job))

        def done(result: Computed | PotluckError | None, spent: Spent) -> None:
            self._on_lane -= 1
            self._feed(_outcome(job, result, spent))
            self._room.set()

        self._on_lane += 1
        self._lane.submit(LaneJob(work, done, lambda: 0.0 if skipped() else self._holder.cost_s(job)))

    def take_copy(self, effect: TakeCopy) -> None:
        """Queues the copying of a slot for the lane."""
        generation, cause = self._generation, f"copy {effect.number}"

        def work() -> tuple[SlotCopy, tuple[Buffer, ...]] | PotluckError | None:
            if generation != self._generation:
                return None
            return attempt(lambda: self._holder.take(effect.slice, effect.slot))

        def done(result: tuple[SlotCopy, tuple[Buffer, ...]] | PotluckError | None, spent: Spent) -> None:
            event: StageEvent
            if result is None or isinstance(result, PotluckError):
                event = CopyNotTaken(cause=cause, number=effect.number, error=result)
            else:
                message, arrays = result
                event = CopyTaken(
                    cause=cause, number=effect.number, message=message, arrays=arrays, took_s=spent.compute_s
                )
            self._feed(event)

        self._lane.submit(LaneJob(work, done))

    # ---- send

    def connect(self, to: ConnectNext) -> None:
        """Opens the way out of an epoch. An endpoint given as 0.0.0.0 is on the broker's host."""
        self.disconnect()
        next_push = self._transport.push(seen_from(self._broker_endpoint, to.next_endpoint))
        if to.results_endpoint == to.next_endpoint:
            results = next_push
        else:
            try:
                results = self._transport.push(seen_from(self._broker_endpoint, to.results_endpoint))
            except PotluckError:
                next_push.close()
                raise
        self._way = _Way(next_push, results, self._send)

    def disconnect(self) -> None:
        """Drops what waits for the lane or for a way out, and closes the ways."""
        self._generation += 1
        self.mirrors.close()
        if self._way is not None:
            self._way.close()
            self._way = None
        self._room.set()

    def forward(self, batch: ForwardBatch) -> None:
        """Sends a micro-batch to the next stage, or queues it if that would have to wait."""
        if self._way is not None:
            frames = encode(batch.message, batch.epoch, batch.arrays)
            self._out(self._way, _Parcel(batch.epoch, batch.message.batch, self._way.next_push, frames))

    def result(self, result: SendResult) -> None:
        """Sends the end of a micro-batch to the broker: results at the last stage, failures at any."""
        if self._way is not None:
            push = self._way.next_push if isinstance(result.message, BatchDone) else self._way.results
            frames = encode(result.message, result.epoch, result.arrays)
            self._out(self._way, _Parcel(result.epoch, result.message.batch, push, frames))

    def _out(self, way: _Way, parcel: _Parcel) -> None:
        """Most of the time ZeroMQ has room: then the frames leave now, without a turn of the event loop."""
        if len(way) == 0 and parcel.push.try_send(parcel.frames):
            self._note_sent(parcel, 0.0)
        else:
            way.put(parcel)

    def _note_sent(self, parcel: _Parcel, send_s: float) -> None:
        """Adds up what was sent, for `take_sent`: what follows a send delays the bytes on a machine of one core."""
        size = sum(memoryview(frame).nbytes for frame in parcel.frames)
        was = self._sent
        if was is not None and was.epoch == parcel.epoch:
            send_s, size = was.send_s + send_s, was.bytes_out + size
        self._sent = BatchSent(cause="data socket", epoch=parcel.epoch, send_s=send_s, bytes_out=size)

    def take_sent(self) -> BatchSent | None:
        """What has been sent since the last time this was asked."""
        sent, self._sent = self._sent, None
        return sent

    async def _send(self, parcel: _Parcel) -> None:
        begun_s = self._loop.time()
        cause = f"batch {parcel.batch}"
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await parcel.push.send(parcel.frames)
        except TimeoutError:
            self._feed(
                SendTimedOut(
                    cause=cause,
                    epoch=parcel.epoch,
                    batch=parcel.batch,
                    endpoint=parcel.push.endpoint,
                    after_s=self._send_timeout_s,
                )
            )
        else:
            self._note_sent(parcel, self._loop.time() - begun_s)
        self._loop.call_soon(self._room.set)  # once the parcel has given up its place


def _outcome(job: Job, result: Computed | PotluckError | None, spent: Spent) -> StageEvent:
    cause = f"batch {job.message.batch}"
    match result:
        case None:
            return BatchSkipped(cause=cause, job=job)
        case PotluckError():
            return BatchComputeFailed(cause=cause, job=job, error=result)
        case Computed():
            return BatchComputed(
                cause=cause, job=job, computed=result, compute_s=spent.compute_s, wait_s=spent.wait_s
            )


__all__ = ["ACCEPT", "PLACES", "Pipeline", "attempt"]
