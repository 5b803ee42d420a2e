"""The stage's core: events in, effects out. Knows no socket, clock or thread. Pure.

It decides which epoch is valid, what follows from the broker's words, and when the stage ends. When to register and to
beat is left to `membership`, what is held and loaded to `loading`, how long to stay to `leaving`, what counts as hung
to `hanging`, what becomes of micro-batches to `batches`, which slots are copied to others to `mirroring`, what becomes
of others' copies to `copies`, how a slice is loaded to `holder`, what the layers make of a micro-batch to `batch`,
frames and queues to `pipeline`.
"""

from __future__ import annotations

from collections.abc import Iterator

from potluck.stage import hanging
from potluck.stage.batches import Batches
from potluck.stage.checks import check_assign, check_copy
from potluck.stage.copies import Copies
from potluck.stage.effects import (
    ConnectNext,
    Disconnect,
    Effect,
    Exit,
    Report,
    SendControl,
)
from potluck.stage.events import (
    Assigned,
    BatchArrived,
    BatchComputed,
    BatchComputeFailed,
    BatchSent,
    BatchSkipped,
    BrokerCut,
    BrokerReached,
    ControlNotSent,
    ControlRefused,
    CopyArrived,
    CopyNotRestored,
    CopyNotTaken,
    CopyRestored,
    CopySent,
    CopyTaken,
    DataRefused,
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
    MirrorLost,
    PrepareAsked,
    ProbeAsked,
    ProbeEnded,
    RefusedBy,
    Released,
    SendTimedOut,
    StageEvent,
    Started,
    StopAsked,
    TimePassed,
    Welcomed,
)
from potluck.stage.leaving import Leaving
from potluck.stage.loading import Loading
from potluck.stage.measuring import Measuring
from potluck.stage.membership import Membership
from potluck.stage.mirroring import Mirroring
from potluck.stage.state import Assignment, StageIdentity, StageState, StageStatus, Sums, words_of
from potluck.wire.errors import (
    EngineHangsError,
    MalformedError,
    Phase,
    PotluckError,
    StageError,
    VersionMismatchError,
)
from potluck.wire.ids import Epoch
from potluck.wire.messages import (
    Goodbye,
    Heartbeat,
    Leave,
    Prepared,
    PrepareFailed,
    Ready,
    StageFailed,
)
from potluck.wire.story import Story


class StageMachine:
    """One stage's core. `handle` for every event, then `next_deadline` for the time of the next TimePassed."""

    def __init__(
        self,
        me: StageIdentity,
        broker: str,
        *,
        drain_timeout_s: float,
        hang_s: float,
        keep_trying: bool = False,
    ) -> None:
        """`broker` is its address, for people; StageSettings explains the others."""
        self.me = me
        self.keep_trying = keep_trying
        self.hang_s = hang_s
        self.state = StageState()
        self.story = Story()
        self.batches = Batches(me, self.state, self.story)
        self.loading = Loading(me, self.state, self.story)
        self.membership = Membership(me, broker, self.state.broker, self.story)
        self.measuring = Measuring(me.placed)
        self.leaving = Leaving(self.state, self.story, drain_timeout_s)
        self.mirroring = Mirroring(self.state, self.story)
        self.copies = Copies(self.state, self.story, lambda: self.measuring.under_way is not None)
        self._now = 0.0

    # ---- the interface

    def handle(self, event: StageEvent, now: float) -> list[Effect]:
        """What is to be done because of `event`, in order. `now` never goes back."""
        self._now = now
        effects = [] if self.state.stopped else list(self._handle(event))
        if not self.state.stopped and self.copies.waits:
            effects += self.copies.step()
        if not self.state.stopped and self.leaving.is_over(now):
            effects += self._stop(event.cause, self.leaving.reason)
        return effects

    def _handle(self, event: StageEvent) -> Iterator[Effect]:
        match event:
            case Started():
                yield from self.membership.register(event.cause, self.state.epoch, self._now)
            case Welcomed():
                yield from self._welcomed(event)
            case RefusedBy():
                yield from self._refused(event)
            case Assigned():
                yield from self._assigned(event)
            case Released():
                yield from self._released(event)
            case ControlRefused():
                yield from self._control_refused(event)
            case ControlNotSent():
                self._not_sent(event)
            case PrepareAsked():
                if self.state.broker.joined:
                    yield from self.loading.prepare(event, self._now)
            case Dismissed():
                self.leaving.let_go(self._now)
            case BrokerReached():
                self.state.broker.cut = False
            case BrokerCut():
                self.state.broker.cut = True
            case LoadProgressed():
                yield from self.loading.progressed(event, self._now)
            case LoadFinished() | LoadFailed() | LoadCancelled():
                yield from self.loading.ended(event, self._now)
            case MeasureAsked():
                if self.state.broker.joined:
                    yield from self.measuring.ask(event, self.state.epoch, self._now)
            case MeasureProgressed():
                yield from self.measuring.progressed(event, self.state.epoch, self._now)
            case MeasureFinished() | MeasureBroke() | MeasureCancelled():
                yield from self.measuring.ended(event, self.state.epoch)
            case ProbeAsked():
                if self.state.broker.joined:
                    yield from self.measuring.probe(event)
            case ProbeEnded():
                if self.state.broker.joined:
                    yield from self.measuring.probed(event, self.state.epoch)
            case BatchArrived():
                yield from self.batches.arrived(event, self._now)
            case DataRefused():
                yield from self.batches.refused(event, self._now)
            case BatchComputed():
                yield from self.batches.computed(event, self._now)
                yield from self.mirroring.computed(event, self._now)
                yield from self._lane_moved(event)
            case BatchComputeFailed():
                yield from self.batches.failed(event, self._now)
                yield from self._lane_moved(event)
            case BatchSkipped():
                self.batches.skipped(event, self._now)
                yield from self._lane_moved(event)
            case BatchSent():
                if self.state.is_current(event.epoch):
                    self.state.sums.send_s += event.send_s
                    self.state.sums.bytes_out += event.bytes_out
            case SendTimedOut():
                yield from self.batches.timed_out(event, self._now)
            case MirrorAsked():
                yield from self.mirroring.ask(event, self._now)
            case CopyTaken() | CopyNotTaken():
                yield from self.mirroring.taken(event, self._now)
                yield from self._lane_moved(event)
            case CopySent():
                yield from self.mirroring.sent(event, self._now)
            case MirrorLost():
                yield from self.mirroring.lost(event, self._now)
            case CopyArrived():
                yield from self._copy_arrived(event)
            case CopyRestored() | CopyNotRestored():
                yield from self.copies.ended(event, self._now)
                yield from self.loading.settle(event.cause, self._now)
            case TimePassed():
                yield from self._time_passed(event)
                yield from self.mirroring.step(self._now)
            case LeaveAsked():
                yield from self.leaving.ask(event, self._now)
            case StopAsked():
                yield from self._stop(event.cause, event.reason)

    def next_deadline(self) -> float | None:
        """When `handle(TimePassed())` is due, on the clock of `now`; None while nothing is waited for."""
        dues = (
            self.membership.next_deadline(),
            self.leaving.due_s,
            self.state.hang_due_s,
            self.mirroring.next_deadline(),
        )
        return None if self.state.stopped else min((due for due in dues if due is not None), default=None)

    def validate(self) -> None:
        """Raises AssertionError if the state contradicts itself."""
        self.state.validate()

    # ---- membership

    def _welcomed(self, event: Welcomed) -> Iterator[Effect]:
        if self.membership.is_awaited():
            self.loading.spare()
            self.copies.forget()
            yield from self._forget_assignment()
            self.state.broker.cut = False
            self.state.epoch, self.state.spoken = event.epoch, False
            yield from self.membership.welcome(event, self._now)

    def _refused(self, event: RefusedBy) -> Iterator[Effect]:
        """One code says that the broker does not know the stage, the others that it won't have it or its message."""
        if event.error.code == StageError.code:
            yield from self._part(event.cause)
        elif self.state.broker.joined:
            text = f"The broker refused a message: {event.error.what} {event.error.hint}"
            yield Report("warning", text.rstrip())
            self.leaving.let_go(self._now)
        else:
            yield from self._turned_away(event.error.restore(), event.cause)

    def _control_refused(self, event: ControlRefused) -> Iterator[Effect]:
        if not isinstance(event.error, VersionMismatchError):
            yield Report("warning", f"A control message can't be read: {event.error}")
        elif self.state.broker.joined:
            yield from self._part(event.cause)
        else:
            yield from self._turned_away(event.error, event.cause)

    def _part(self, cause: str) -> Iterator[Effect]:
        """The broker does not know the stage any more: what it assigned is void, what is loaded stays."""
        if self.state.broker.joined:  # otherwise an answer to what was sent before the registration under way
            self.loading.spare()
            yield from self._forget_assignment()
            if self.leaving.due_s is not None:
                yield from self._stop(cause, self.leaving.reason)
                return
            yield from self.membership.part(cause, self.state.epoch, self._now)

    def _turned_away(self, error: PotluckError, cause: str) -> Iterator[Effect]:
        """The broker won't have the stage as it is."""
        self._tell("broker", cause, f"turned away: {error.what}")
        if self.keep_trying:
            yield self.membership.wait(error, self._now)
        else:
            self._halt()
            yield Disconnect()
            yield Exit(1, error)

    def _stop(self, cause: str, reason: str) -> Iterator[Effect]:
        yield from self._end(cause, reason)
        yield Exit(0)

    def _hangs(self, cause: str) -> Iterator[Effect]:
        """The engine does not come back, and its thread can't be ended without the process."""
        error = self.me.placed(
            EngineHangsError(
                f"The engine hangs: what it still computes was given up by the broker {self.hang_s:g} s ago or more.",
                hint="Only a new process helps. If that hangs, too: try --threads 1, or --max-vram-gb 0.",
            ),
            Phase.SERVE,
        )
        yield Report("error", str(error))
        yield from self._end(cause, error.what)
        yield Exit(1, error, restart=True)

    def _end(self, cause: str, reason: str) -> Iterator[Effect]:
        self._halt()
        self._tell("broker", cause, f"stopped: {reason}")
        yield from self.measuring.cancel()
        yield from self.loading.cancel()
        yield Disconnect()
        yield SendControl(Goodbye(reason), self.state.epoch)

    def _halt(self) -> None:
        self.state.stopped = True
        self.mirroring.end()
        self.state.broker.register_due_s = self.state.broker.beat_due_s = None

    # ---- assignments

    def _assigned(self, event: Assigned) -> Iterator[Effect]:
        state, wanted = self.state, self.state.wanted
        if not self._is_news(event.epoch):
            if wanted is None or event.epoch != wanted.epoch:
                self._tell(f"epoch {event.epoch}", event.cause, f"assignment ignored in epoch {state.epoch}")
            elif wanted.assign != event.assign:
                yield Report("error", f"Epoch {event.epoch} assigns twice; the first assignment stays.")
            elif wanted.outcome is not None:
                yield SendControl(wanted.outcome, wanted.epoch)
            return
        yield from self._forget_assignment()
        hanging.watch(self.state, self._now, self.hang_s)
        state.epoch, state.spoken, state.sums = event.epoch, True, Sums()
        state.wanted = wanted = Assignment(event.epoch, event.assign)
        state.spared = frozenset()
        assign = event.assign
        layers = words_of(assign.slice)
        self._tell(
            f"epoch {event.epoch}", event.cause, f"assigned {layers}, stage {assign.index} of {assign.stages}"
        )
        try:
            check_assign(assign)
        except MalformedError as error:
            yield from self.loading.conclude(wanted, error, event.cause, self._now)
            yield from self.loading.settle(event.cause, self._now)
            return
        yield Report("info", f"Assigned {layers}, as stage {assign.index + 1} of {assign.stages}.")
        yield from self.measuring.cancel()
        yield ConnectNext(event.epoch, assign.next_endpoint, assign.results_endpoint)
        yield from self.loading.settle(event.cause, self._now)

    def _released(self, event: Released) -> Iterator[Effect]:
        if not self._is_news(event.epoch):
            return
        state = self.state
        if state.wanted is not None and state.wanted.slice in state.held:
            state.spared = frozenset({state.wanted.slice})
        yield from self._forget_assignment()
        hanging.watch(self.state, self._now, self.hang_s)
        state.epoch, state.spoken, state.sums = event.epoch, True, Sums()
        self._tell(f"epoch {event.epoch}", event.cause, "released")
        yield Report("info", "Nothing to serve, standing by.")
        yield from self.loading.settle(event.cause, self._now)

    def _is_news(self, epoch: Epoch) -> bool:
        """Whether the broker's word on this epoch is the first one, and of no older epoch."""
        state = self.state
        return state.broker.joined and (epoch > state.epoch or (epoch == state.epoch and not state.spoken))

    def _forget_assignment(self) -> Iterator[Effect]:
        if self.state.wanted is not None:
            self.state.wanted = None
            self.mirroring.end()
            yield Disconnect()

    def _not_sent(self, event: ControlNotSent) -> None:
        """The next beat tries again."""
        match event.message:
            case Leave():
                self.leaving.not_sent()
            case Prepared() | PrepareFailed() as answer:
                self.loading.not_sent(answer)
            case Ready() | StageFailed() as outcome:
                wanted = self.state.wanted
                if wanted is not None and wanted.epoch == event.epoch and wanted.outcome == outcome:
                    wanted.told = False

    def _copy_arrived(self, event: CopyArrived) -> Iterator[Effect]:
        try:
            check_copy(event.message, event.arrays)
        except MalformedError as error:
            yield from self.batches.refused(DataRefused(cause=event.cause, error=error), self._now)
        else:
            self.copies.arrived(event)

    def _lane_moved(
        self, event: BatchComputed | BatchComputeFailed | BatchSkipped | CopyTaken | CopyNotTaken
    ) -> Iterator[Effect]:
        if self.loading.waits:
            yield from self.loading.settle(event.cause, self._now)

    # ---- time

    def _time_passed(self, event: TimePassed) -> Iterator[Effect]:
        state, wanted = self.state, self.state.wanted
        if self.membership.must_register(self._now):
            yield from self.membership.register(event.cause, state.epoch, self._now, anew=True)
        if self.membership.must_beat(self._now):
            yield SendControl(Heartbeat(state.sums.snapshot(), state.holds), state.epoch)
            if wanted is not None and not wanted.told and wanted.outcome is not None:
                wanted.told = True
                yield SendControl(wanted.outcome, wanted.epoch)
            yield from self.loading.tell_again()
            yield from self.leaving.tell_again()
        hang_due_s = state.hang_due_s
        if hang_due_s is not None and self._now >= hang_due_s:
            yield from self._hangs(event.cause)

    # ---- helpers

    def _tell(self, subject: str, cause: str, text: str) -> None:
        self.story.tell(self._now, subject, cause, text)


__all__ = ["StageIdentity", "StageMachine", "StageStatus"]
