"""What becomes of a stage's micro-batches: which are computed, what follows, and what is told when one fails. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from potluck.stage import hanging
from potluck.stage.checks import check_batch, phase_of
from potluck.stage.effects import Effect, ForwardBatch, Report, SendResult, StartCompute
from potluck.stage.events import (
    BatchArrived,
    BatchComputed,
    BatchComputeFailed,
    BatchSkipped,
    DataRefused,
    Job,
    SendTimedOut,
)
from potluck.stage.state import Running, StageIdentity, StageState, StageStatus
from potluck.wire.errors import MalformedError, Phase, PotluckError, StageError
from potluck.wire.ids import Epoch
from potluck.wire.messages import BatchDone, BatchFailed, ErrorInfo, Hop
from potluck.wire.story import Story

REPORT_EVERY_S = 10.0
"""At most one line in this time about bad data frames."""


class Batches:
    """The micro-batches of one stage. Shares its state with the machine; its times are on the core's clock."""

    def __init__(self, me: StageIdentity, state: StageState, story: Story) -> None:
        self._me = me
        self._state = state
        self._story = story
        self._bad_frames_reported_s = float("-inf")

    def arrived(self, event: BatchArrived, now: float) -> Iterator[Effect]:
        """A micro-batch came in: computed if it is of this epoch, fits the assignment and is new."""
        message, wanted = event.message, self._state.wanted
        if (
            wanted is None
            or not self._state.is_current(event.epoch)
            or self._state.status is not StageStatus.SERVING
        ):
            self._drop(now, self._state.epoch, message.batch, event.cause, f"it is of epoch {event.epoch}")
            return
        try:
            check_batch(wanted.assign, message, event.arrays)
        except MalformedError as error:
            self._state.sums.refused_frames += 1
            yield from self._fail_batch(
                now,
                event.epoch,
                message.batch,
                StageError(
                    f"Micro-batch {message.batch} does not fit this stage. {error.what}",
                    hint="Check that all devices run the same version of Potluck.",
                ),
                phase_of(message),
                event.cause,
            )
            return
        if message.batch <= wanted.newest:
            self._drop(now, event.epoch, message.batch, event.cause, "it has come before")
            return
        wanted.newest = message.batch
        size = sum(memoryview(array).nbytes for array in event.arrays)
        job = Job(event.epoch, wanted.assign, message, event.arrays, size)
        self._state.running.append(Running(job))
        yield StartCompute(job)

    def refused(self, event: DataRefused, now: float) -> Iterator[Effect]:
        """Something came in that is no micro-batch."""
        sums = self._state.sums
        sums.refused_frames += 1
        if now - self._bad_frames_reported_s >= REPORT_EVERY_S:
            self._bad_frames_reported_s = now
            yield Report("warning", f"Refused a data frame ({sums.refused_frames} so far): {event.error}")

    def computed(self, event: BatchComputed, now: float) -> Iterator[Effect]:
        """A micro-batch is computed: on to the next stage, or back to the broker."""
        job, state = event.job, self._state
        self._left_lane(job)
        hanging.note(state, job, event.compute_s)
        held = state.held.get(job.assign.slice)
        if held is not None:
            held.breaks = 0
        if not self._state.is_current(job.epoch):
            self._drop(
                now, job.epoch, job.message.batch, event.cause, "its epoch ended while it was computed"
            )
            return
        sums = state.sums
        sums.batches += 1
        sums.tokens += job.message.tokens
        sums.compute_s += event.compute_s
        sums.wait_s += event.wait_s
        sums.bytes_in += job.bytes_in
        hops = (*job.message.hops, Hop(job.assign.index, event.compute_s, event.wait_s, job.bytes_in))
        arrays, activation = event.computed.arrays, job.assign.activation
        if job.assign.is_last:
            done = BatchDone(job.message.batch, hops, event.computed.logprobs)
            yield SendResult(job.epoch, done, arrays)
        else:
            onward = msgspec.structs.replace(job.message, hops=hops, activation=activation)
            yield ForwardBatch(job.epoch, onward, arrays)

    def failed(self, event: BatchComputeFailed, now: float) -> Iterator[Effect]:
        """The engine could not compute a micro-batch: the broker is told who and why."""
        job = event.job
        self._left_lane(job)
        held = self._state.held.get(job.assign.slice)
        if held is not None:
            held.breaks += 1
        if not self._state.is_current(job.epoch):
            self._drop(
                now, job.epoch, job.message.batch, event.cause, "its epoch ended while it was computed"
            )
            return
        yield from self._fail_batch(
            now, job.epoch, job.message.batch, event.error, phase_of(job.message), event.cause
        )

    def _left_lane(self, job: Job) -> None:
        running = self._state.running
        running[:] = [each for each in running if each.job is not job]

    def _fail_batch(
        self, now: float, epoch: Epoch, batch: int, error: PotluckError, phase: Phase, cause: str
    ) -> Iterator[Effect]:
        placed = self._me.placed(error, phase)
        self._story.tell(now, f"batch {batch}", cause, f"failed: {placed}")
        yield Report("error", str(placed))
        yield SendResult(epoch, BatchFailed(batch, ErrorInfo.of(placed)))

    def timed_out(self, event: SendTimedOut, now: float) -> Iterator[Effect]:
        """The next stage took nothing: the broker's deadline will find it."""
        self._drop(now, event.epoch, event.batch, event.cause, f"{event.endpoint} did not take it")
        yield Report(
            "warning",
            f"Micro-batch {event.batch} is dropped: {event.endpoint} took nothing for {event.after_s:g} s.",
        )

    def _drop(self, now: float, epoch: Epoch, batch: int, cause: str, why: str) -> None:
        if epoch == self._state.epoch:
            self._state.sums.dropped_frames += 1
        self._story.tell(now, f"batch {batch}", cause, f"dropped: {why}")

    def skipped(self, event: BatchSkipped, now: float) -> None:
        """A micro-batch was not computed, because its epoch ended while it waited."""
        self._left_lane(event.job)
        self._drop(now, event.job.epoch, event.job.message.batch, event.cause, "its epoch ended in the queue")
