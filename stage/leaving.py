"""When a stage that was asked to leave may go: nothing is left to serve, or it waited long enough. Pure.

Until then it serves on, so that no request has to be computed again only because its owner wants the machine back.
"""

from __future__ import annotations

from collections.abc import Iterator

from potluck.stage.effects import Effect, Report, SendControl
from potluck.stage.events import LeaveAsked
from potluck.stage.state import StageState, StageStatus, words_of
from potluck.wire.messages import Leave
from potluck.wire.story import Story

_AT_WORK = (StageStatus.LOADING, StageStatus.SERVING)


class Leaving:
    """Whether one stage leaves. Shares its state with the machine; its times are on the core's clock."""

    def __init__(self, state: StageState, story: Story, wait_s: float) -> None:
        self.reason = ""
        """Why it leaves, once it was asked to."""
        self.due_s: float | None = None
        """When it goes whatever the broker says; None if nobody asked."""
        self._state = state
        self._story = story
        self._wait_s = wait_s
        self._untold = False

    def ask(self, event: LeaveAsked, now: float) -> Iterator[Effect]:
        """Somebody wants the stage to leave: the broker is told, if the stage is worth anything to it."""
        if self.due_s is not None:
            return
        self.reason, self.due_s = event.reason, now
        if self._wait_s > 0 and self._is_needed():
            self.due_s += self._wait_s
            self._story.tell(now, "broker", event.cause, f"wants to leave: {event.reason}")
            wanted = self._state.wanted
            assert wanted is not None, "it is needed for something"
            yield Report(
                "info",
                f"Leaving: waits up to {self._wait_s:g} s for others to take over {words_of(wanted.slice)}. "
                "Ctrl-C again leaves at once.",
            )
            yield SendControl(Leave(event.reason), self._state.epoch)

    def let_go(self, now: float) -> None:
        """The broker lets the stage go, or does not understand what it wants."""
        if self.due_s is not None:
            self.due_s = now

    def is_over(self, now: float) -> bool:
        """Whether the stage was asked to leave, and nothing keeps it any more."""
        return self.due_s is not None and (now >= self.due_s or not self._is_needed())

    def _is_needed(self) -> bool:
        """Whether the broker is there and counts on this stage."""
        return self._state.status in _AT_WORK and not self._state.broker.cut

    def not_sent(self) -> None:
        """The broker could not be told: the next beat tries again."""
        self._untold = True

    def tell_again(self) -> Iterator[Effect]:
        """What could not be sent."""
        if self._untold:
            self._untold = False
            yield SendControl(Leave(self.reason), self._state.epoch)


__all__ = ["Leaving"]
