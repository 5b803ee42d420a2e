"""How a stage stands with its broker: when it asks to join, and when it beats. Pure.

Silence: the broker says nothing to a stage it is content with, so silence alone is no sign. A broker that does not know
a stage (it was restarted, or had given the stage up) answers its next heartbeat with Refused, code `stage_failed`; then
the stage registers again, and keeps what it has loaded. Until it is welcomed it asks again at growing intervals.
"""

from __future__ import annotations

from collections.abc import Iterator

from potluck.stage.effects import Effect, Reconnect, Report, SendControl
from potluck.stage.events import Welcomed
from potluck.stage.state import Broker, StageIdentity
from potluck.wire.errors import PotluckError
from potluck.wire.ids import Epoch
from potluck.wire.messages import Register
from potluck.wire.story import Story

REGISTER_FIRST_S = 0.25
REGISTER_MOST_S = 5.0
"""An unanswered registration is repeated after the first time, then after twice as long, up to the second."""
REFUSED_RETRY_S = 30.0
"""With `keep_trying`, a registration that was refused is repeated after this long."""
SILENT_AFTER, SILENT_EVERY = 4, 20
"""Unanswered registrations after which a line says so, and between two such lines."""


class Membership:
    """Registrations and beats of one stage. Shares its state with the machine; its times are on the core's clock."""

    def __init__(self, me: StageIdentity, address: str, broker: Broker, story: Story) -> None:
        self.me = me
        self.address = address
        """The broker's, for people."""
        self.broker = broker
        self._story = story
        self._attempts = 0

    def register(self, cause: str, epoch: Epoch, now: float, *, anew: bool = False) -> Iterator[Effect]:
        """Asks to join. `anew` after a registration that got no answer: over a connection of its own, so that a broker
        that was away does not find a queue of them.
        """
        broker, me = self.broker, self.me
        if anew:
            yield Reconnect()
        broker.asked += 1
        broker.register_due_s = now + min(REGISTER_FIRST_S * 2.0**self._attempts, REGISTER_MOST_S)
        self._attempts = min(self._attempts + 1, 1_000)
        self._story.tell(now, "broker", cause, f"registration {self._attempts}")
        yield SendControl(
            Register(
                me.stage, me.device, me.version, me.engine, me.data_endpoint, me.models, me.capabilities
            ),
            epoch,
        )
        if self._attempts == SILENT_AFTER or self._attempts % SILENT_EVERY == 0:
            yield Report("warning", f"No broker answers at {self.address}; {me.device} keeps asking.")

    def is_awaited(self) -> bool:
        """Whether a welcome answers a registration; otherwise it is a copy of one that was taken up already."""
        return self.broker.asked > 0

    def welcome(self, event: Welcomed, now: float) -> Iterator[Effect]:
        """The broker has taken the stage in."""
        broker = self.broker
        broker.asked -= 1
        broker.joined, broker.register_due_s = True, None
        broker.heartbeat_s, broker.beat_due_s = event.heartbeat_s, now + event.heartbeat_s
        self._attempts = 0
        self._story.tell(now, "broker", event.cause, f"welcomed in epoch {event.epoch}")
        yield Report(
            "info", f"{self.me.device} joined the broker at {self.address} ({event.broker_version})."
        )

    def part(self, cause: str, epoch: Epoch, now: float) -> Iterator[Effect]:
        """The broker does not know the stage any more: asks at once."""
        self.broker.joined, self.broker.beat_due_s, self.broker.asked = False, None, 0
        yield Report("warning", f"The broker at {self.address} does not know this stage; it registers again.")
        yield from self.register(cause, epoch, now)

    def wait(self, error: PotluckError, now: float) -> Report:
        """The broker won't have the stage: asks again much later."""
        self._attempts = self.broker.asked = 0
        self.broker.register_due_s = now + REFUSED_RETRY_S
        return Report("error", f"{error} Asking again in {REFUSED_RETRY_S:g} s.")

    def must_register(self, now: float) -> bool:
        """Whether the answer has been waited for long enough."""
        return self.broker.register_due_s is not None and now >= self.broker.register_due_s

    def must_beat(self, now: float) -> bool:
        """Whether a beat is due; the next one is due an interval later."""
        if self.broker.beat_due_s is None or now < self.broker.beat_due_s:
            return False
        self.broker.beat_due_s = now + self.broker.heartbeat_s
        return True

    def next_deadline(self) -> float | None:
        """When one of the two will be due."""
        times = (self.broker.register_due_s, self.broker.beat_due_s)
        return min((due for due in times if due is not None), default=None)


__all__ = ["REFUSED_RETRY_S", "REGISTER_FIRST_S", "REGISTER_MOST_S", "Membership"]
