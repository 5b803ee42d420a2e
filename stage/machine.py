"""The stage's core: events in, effects out. Knows no socket, clock or thread. Pure.

It decides which epoch is valid, whether a slice must be loaded, which micro-batches are let in and what becomes of
them. When to register and to beat is left to `membership`, how a slice is loaded to `holder`, what a micro-batch
becomes to `batch`, frames and queues to `pipeline`.
"""

from __future__ import annotations

from collections.abc import Iterator

from potluck.stage.batches import Batches
from potluck.stage.checks import check_assign
from potluck.stage.effects import (
    CancelLoad,
    ClearCaches,
    ConnectNext,
    Disconnect,
    Effect,
    Exit,
    Report,
    SendControl,
    StartLoad,
)
from potluck.stage.events import (
    Assigned,
    BatchArrived,
    BatchComputed,
    BatchComputeFailed,
    BatchSent,
    BatchSkipped,
    ControlNotSent,
    ControlRefused,
    DataRefused,
    LoadCancelled,
    LoadFailed,
    LoadFinished,
    LoadProgressed,
    MeasureAsked,
    MeasureBroke,
    MeasureCancelled,
    MeasureFinished,
    MeasureProgressed,
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
from potluck.stage.measuring import Measuring
from potluck.stage.membership import Membership
from potluck.stage.state import Assignment, Held, Load, SliceKey, StageIdentity, StageState, StageStatus, Sums
from potluck.wire.errors import MalformedError, Phase, PotluckError, StageError, VersionMismatchError
from potluck.wire.ids import Epoch
from potluck.wire.messages import (
    ErrorInfo,
    Goodbye,
    Heartbeat,
    Progress,
    Ready,
    StageFailed,
)
from potluck.wire.story import Story

RELOAD_AFTER_BREAKS = 2
"""After this many failed micro-batches in a row the engine is not trusted any more: the next epoch loads it anew."""
PROGRESS_EVERY_S = 0.5


class StageMachine:
    """One stage's core. `handle` for every event, then `next_deadline` for the time of the next TimePassed."""

    def __init__(self, me: StageIdentity, broker: str, *, keep_trying: bool = False) -> None:
        self.me = me
        self.keep_trying = keep_trying
        self.state = StageState()
        self.story = Story()
        self.batches = Batches(me, self.state, self.story)
        self.membership = Membership(me, broker, self.state.broker, self.story)
        self.measuring = Measuring(me.placed)
        self._loads = 0
        self._progress: tuple[str, float] = ("", float("-inf"))
        self._now = 0.0

    # ---- the interface

    def handle(self, event: StageEvent, now: float) -> list[Effect]:
        """What is to be done because of `event`, in order. `now` never goes back."""
        self._now = now
        return [] if self.state.stopped else list(self._handle(event))

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
            case LoadProgressed():
                yield from self._progressed(event)
            case LoadFinished() | LoadFailed() | LoadCancelled():
                yield from self._load_ended(event)
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
            case BatchComputeFailed():
                yield from self.batches.failed(event, self._now)
            case BatchSkipped():
                self.batches.skipped(event, self._now)
            case BatchSent():
                if self.state.is_current(event.epoch):
                    self.state.sums.send_s += event.send_s
                    self.state.sums.bytes_out += event.bytes_out
            case SendTimedOut():
                yield from self.batches.timed_out(event, self._now)
            case TimePassed():
                yield from self._time_passed(event)
            case StopAsked():
                yield from self._stop(event)

    def next_deadline(self) -> float | None:
        """When `handle(TimePassed())` is due, on the clock of `now`; None while nothing is waited for."""
        return self.membership.next_deadline()

    def validate(self) -> None:
        """Raises AssertionError if the state contradicts itself."""
        self.state.validate()

    # ---- membership

    def _welcomed(self, event: Welcomed) -> Iterator[Effect]:
        if self.membership.is_awaited():
            yield from self._forget_assignment()
            self.state.epoch, self.state.spoken = event.epoch, False
            yield from self.membership.welcome(event, self._now)

    def _refused(self, event: RefusedBy) -> Iterator[Effect]:
        """One code says that the broker does not know the stage, the others that it won't have it or its message."""
        if event.error.code == StageError.code:
            yield from self._part(event.cause)
        elif self.state.broker.joined:
            text = f"The broker refused a message: {event.error.what} {event.error.hint}"
            yield Report("warning", text.rstrip())
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
            yield from self._forget_assignment()
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

    def _stop(self, event: StopAsked) -> Iterator[Effect]:
        self._halt()
        self._tell("broker", event.cause, f"stopped: {event.reason}")
        yield from self.measuring.cancel()
        yield Disconnect()
        yield SendControl(Goodbye(event.reason), self.state.epoch)
        yield Exit(0)

    def _halt(self) -> None:
        self.state.stopped = True
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
        state.epoch, state.spoken, state.sums = event.epoch, True, Sums()
        state.wanted = wanted = Assignment(event.epoch, event.assign)
        assign = event.assign
        layers = f"layers {assign.first}-{assign.end - 1} of {assign.model.name}"
        self._tell(
            f"epoch {event.epoch}", event.cause, f"assigned {layers}, stage {assign.index} of {assign.stages}"
        )
        try:
            check_assign(assign)
        except MalformedError as error:
            yield from self._conclude(wanted, error, event.cause)
            return
        yield Report("info", f"Assigned {layers}, as stage {assign.index + 1} of {assign.stages}.")
        yield from self.measuring.cancel()
        yield ConnectNext(event.epoch, assign.next_endpoint, assign.results_endpoint)
        yield from self._pursue()

    def _released(self, event: Released) -> Iterator[Effect]:
        if not self._is_news(event.epoch):
            return
        yield from self._forget_assignment()
        self.state.epoch, self.state.spoken, self.state.sums = event.epoch, True, Sums()
        self._tell(f"epoch {event.epoch}", event.cause, "released")
        yield from self._cancel_load()
        yield Report("info", "Nothing to serve, standing by.")

    def _is_news(self, epoch: Epoch) -> bool:
        """Whether the broker's word on this epoch is the first one, and of no older epoch."""
        state = self.state
        return state.broker.joined and (epoch > state.epoch or (epoch == state.epoch and not state.spoken))

    def _forget_assignment(self) -> Iterator[Effect]:
        if self.state.wanted is not None:
            self.state.wanted = None
            yield Disconnect()

    # ---- loading

    def _pursue(self) -> Iterator[Effect]:
        """Takes the next step from what is held to what is wanted; a load that runs must end first."""
        state, wanted = self.state, self.state.wanted
        if wanted is None or wanted.outcome is not None:
            return
        if state.load is not None:
            if state.load.key != wanted.key:
                yield from self._cancel_load()
            return
        held, state.held = state.held, None
        self._loads += 1
        keep = held is not None and held.key == wanted.key and state.breaks < RELOAD_AFTER_BREAKS
        state.load = Load(self._loads, wanted.key, only_clears=keep)
        self._progress = ("", float("-inf"))
        if keep:
            yield ClearCaches(self._loads)
        else:
            yield StartLoad(self._loads, wanted.assign)

    def _cancel_load(self) -> Iterator[Effect]:
        load = self.state.load
        if load is not None and not load.cancelled:
            load.cancelled = True
            yield CancelLoad(load.number)

    def _progressed(self, event: LoadProgressed) -> Iterator[Effect]:
        load, wanted = self.state.load, self.state.wanted
        if load is None or load.number != event.number or wanted is None or wanted.key != load.key:
            return
        phase, told_s = self._progress
        if event.phase != phase or event.done >= event.total or self._now - told_s >= PROGRESS_EVERY_S:
            self._progress = (event.phase, self._now)
            yield SendControl(Progress(Phase(event.phase), event.done, event.total), wanted.epoch)

    def _load_ended(self, event: LoadFinished | LoadFailed | LoadCancelled) -> Iterator[Effect]:
        state, load = self.state, self.state.load
        if load is None or load.number != event.number:
            return
        state.load, state.breaks = None, 0
        wanted = state.wanted if state.wanted is not None and state.wanted.outcome is None else None
        ours = wanted is not None and wanted.key == load.key
        match event:
            case LoadFinished():
                state.held = Held(load.key, event.loaded)
                if wanted is not None and ours:
                    sizes = event.loaded
                    weights = sizes.weights_bytes + sizes.copied_bytes
                    ready = Ready(event.load_s, weights, sizes.kv_bytes, sizes.compute_bytes)
                    yield from self._conclude(wanted, ready, event.cause)
                    return
            case LoadFailed():
                if wanted is not None and ours and not load.only_clears:
                    yield from self._conclude(wanted, event.error, event.cause)
                    return
            case LoadCancelled():
                pass
        yield from self._pursue()

    def _conclude(self, wanted: Assignment, outcome: Ready | PotluckError, cause: str) -> Iterator[Effect]:
        """Tells the broker how loading ended."""
        if isinstance(outcome, Ready):
            wanted.outcome = outcome
            text = f"ready after {outcome.load_s:.1f} s"
            yield Report("info", f"{text[:1].upper()}{text[1:]}.")
        else:
            error = self.me.placed(outcome, Phase.LOAD)
            wanted.outcome = StageFailed(ErrorInfo.of(error))
            text = f"failed: {error}"
            yield Report("error", str(error))
        self._tell(f"epoch {wanted.epoch}", cause, text)
        yield SendControl(wanted.outcome, wanted.epoch)

    def _not_sent(self, event: ControlNotSent) -> None:
        wanted = self.state.wanted
        if wanted is not None and wanted.epoch == event.epoch and wanted.outcome == event.message:
            wanted.told = False  # the next beat tries again

    # ---- time

    def _time_passed(self, event: TimePassed) -> Iterator[Effect]:
        state, wanted = self.state, self.state.wanted
        if self.membership.must_register(self._now):
            yield from self.membership.register(event.cause, state.epoch, self._now, anew=True)
        if self.membership.must_beat(self._now):
            yield SendControl(Heartbeat(state.sums.snapshot()), state.epoch)
            if wanted is not None and not wanted.told and wanted.outcome is not None:
                wanted.told = True
                yield SendControl(wanted.outcome, wanted.epoch)

    # ---- helpers

    def _tell(self, subject: str, cause: str, text: str) -> None:
        self.story.tell(self._now, subject, cause, text)


__all__ = ["SliceKey", "StageIdentity", "StageMachine", "StageStatus"]
