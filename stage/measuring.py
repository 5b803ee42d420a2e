"""What the core knows of measuring: which profile was asked for, whether it is under way, what came of it. Pure.

The broker asks again where an answer may have been lost, so a question that was answered is answered again. An
assignment is worth more than a profile: it ends measuring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from potluck.stage.effects import CancelMeasure, Effect, Report, SendControl, StartMeasure, StartProbe
from potluck.stage.events import (
    MeasureAsked,
    MeasureBroke,
    MeasureCancelled,
    MeasureFinished,
    MeasureProgressed,
    ProbeAsked,
    ProbeEnded,
)
from potluck.wire.errors import Phase, PotluckError
from potluck.wire.ids import Epoch
from potluck.wire.messages import ErrorInfo, Measure, Measured, MeasureFailed, Probed, Progress

PROGRESS_EVERY_S = 0.5
SAY_EVERY_S = 5.0


class Measuring:
    """The timing of layers and links of one stage. `placed` gives an error this stage's name."""

    def __init__(self, placed: Callable[[PotluckError, Phase], PotluckError]) -> None:
        self._placed = placed
        self.number = 0
        """Of the last measurement that was begun."""
        self.under_way: Measure | None = None
        self.asked: Measure | None = None
        """What `outcome` answers."""
        self.outcome: Measured | MeasureFailed | None = None
        self._told_s = float("-inf")
        self._said_s = 0.0

    def ask(self, event: MeasureAsked, epoch: Epoch, now: float) -> Iterator[Effect]:
        """Begins to measure, or answers at once."""
        if self.asked == event.message and self.outcome is not None:
            yield SendControl(self.outcome, epoch)
        elif self.under_way is None:
            self.number += 1
            self.under_way, self._told_s, self._said_s = event.message, float("-inf"), now
            yield Report("info", f"Measuring how fast this device is at {event.message.model.name}.")
            yield StartMeasure(self.number, event.message)
        elif self.under_way != event.message:
            yield from self.cancel()  # the broker asks again, and then it begins

    def progressed(self, event: MeasureProgressed, epoch: Epoch, now: float) -> Iterator[Effect]:
        """Tells the broker how far it is, not too often."""
        if event.number == self.number and (
            event.done >= event.total or now >= self._told_s + PROGRESS_EVERY_S
        ):
            self._told_s = now
            if now >= self._said_s + SAY_EVERY_S and event.total > 1:
                self._said_s = now
                yield Report("info", f"Measuring: {100 * event.done // event.total} %.")
            yield SendControl(Progress(Phase(event.phase), event.done, event.total), epoch)

    def ended(
        self, event: MeasureFinished | MeasureBroke | MeasureCancelled, epoch: Epoch
    ) -> Iterator[Effect]:
        """Tells the broker what came of it."""
        if event.number != self.number or self.under_way is None:
            return
        asked, self.under_way = self.under_way, None
        match event:
            case MeasureCancelled():
                return
            case MeasureFinished(profile=profile):
                self.outcome = Measured(profile)
                yield Report(
                    "info", "Measured before." if profile.kept else f"Measured in {profile.took_s:.1f} s."
                )
            case MeasureBroke(error=error):
                placed = self._placed(error, Phase.MEASURE)
                self.outcome = MeasureFailed(ErrorInfo.of(placed))
                yield Report("warning", f"Could not measure this device: {placed}")
        self.asked = asked
        yield SendControl(self.outcome, epoch)

    def cancel(self) -> Iterator[Effect]:
        """Something else is wanted of the lane."""
        if self.under_way is not None:
            yield CancelMeasure(self.number)

    def probe(self, event: ProbeAsked) -> Iterator[Effect]:
        """Measures a link."""
        yield StartProbe(event.message)

    def probed(self, event: ProbeEnded, epoch: Epoch) -> Iterator[Effect]:
        """Tells the broker what a link is like."""
        yield SendControl(Probed(event.number, event.link), epoch)
