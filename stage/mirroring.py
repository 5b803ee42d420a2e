"""Which slot a stage copies to its mirrors next, and when: as much as disturbs nobody. Pure.

A copy holds up the compute lane while it is taken and the network while it is sent. So there is one at a time, and
after each nothing is copied for `PAUSE` times as long as it took. It carries the number of the micro-batch after which
it was taken: whatever became of the slot since is the broker's to know.
"""

from __future__ import annotations

from collections.abc import Iterator

from potluck.stage.effects import Effect, Report, SendCopy, SetMirrors, TakeCopy
from potluck.stage.events import BatchComputed, CopyNotTaken, CopySent, CopyTaken, MirrorAsked, MirrorLost
from potluck.stage.state import Assignment, StageState
from potluck.wire import limits
from potluck.wire.messages import MicroBatch
from potluck.wire.story import Story

LEAST_TOKENS = 8
"""A slot with fewer new tokens is not copied: they are computed again as fast."""
PAUSE = 9.0
"""The pause after a copy, in times of what it took: at most a tenth of the lane and of the link is used."""
FIRST_PAUSE = 1.0
"""The same while a sequence has no copy at all yet: its loss would cost the most."""
LEAST_PAUSE_S = 0.01


class Mirroring:
    """The copies one stage makes of its slots. Shares its state with the machine; its times are on the core's clock."""

    def __init__(self, state: StageState, story: Story) -> None:
        self.mirrors: tuple[str, ...] = ()
        """Where copies go in the current epoch."""
        self._state = state
        self._story = story
        self._number = 0
        self._under_way = False
        """Whether the copy of that number is being taken or sent."""
        self._took_s = 0.0
        self._resume_s = float("-inf")
        self._copied: set[int] = set()
        """Slots of which the mirrors have a copy of what they hold now."""
        self._is_due = False
        """Whether some slot may have enough new tokens."""
        self._too_many = float("inf")
        """As many tokens of a slot and more are too large for one message, in this epoch."""

    def ask(self, event: MirrorAsked, now: float) -> Iterator[Effect]:
        """The broker says where copies are to go. To new ones nothing has been copied yet."""
        wanted = self._state.wanted
        if wanted is None or event.epoch != wanted.epoch or event.message.endpoints == self.mirrors:
            return
        self.mirrors, self._under_way = event.message.endpoints, False
        self._copied.clear()
        self._story.tell(
            now, f"epoch {wanted.epoch}", event.cause, f"copies go to {len(self.mirrors)} mirrors"
        )
        wanted.fresh = dict(wanted.held)
        self._is_due = True
        yield SetMirrors(self.mirrors)
        yield from self.step(now)

    def end(self) -> None:
        """The epoch is over, and with it the ways to its mirrors."""
        self.mirrors, self._under_way, self._is_due = (), False, False
        self._copied.clear()
        self._too_many = float("inf")

    def computed(self, event: BatchComputed, now: float) -> Iterator[Effect]:
        """A micro-batch is computed: its slots have more tokens now."""
        wanted = self._state.wanted
        if wanted is not None and event.job.epoch == wanted.epoch:
            note(wanted, event.job.message)
            self._copied.difference_update(s.slot for s in event.job.message.spans if s.position == 0)
            self._is_due = True
            yield from self.step(now)

    def step(self, now: float) -> Iterator[Effect]:
        """Begins the next copy, if it is time for one."""
        wanted, due_s = self._state.wanted, self.next_deadline()
        if wanted is None or due_s is None or now < due_s:
            return
        slot = self._next(wanted)
        self._is_due = slot is not None
        if slot is not None:
            self._number += 1
            self._under_way = True
            self._state.copying = (self._number, wanted.slice)
            yield TakeCopy(self._number, wanted.slice, slot)

    def _next(self, wanted: Assignment) -> int | None:
        """Those without a copy first, then the slot with the most new tokens; the lowest of several."""
        able = [
            (slot in self._copied, -fresh, slot)
            for slot, fresh in wanted.fresh.items()
            if fresh >= LEAST_TOKENS and wanted.held[slot] < self._too_many
        ]
        return min(able)[2] if able else None

    def taken(self, event: CopyTaken | CopyNotTaken, now: float) -> Iterator[Effect]:
        """The compute lane is done with a copy: it goes out, if it is still wanted."""
        state, wanted = self._state, self._state.wanted
        if state.copying is None or state.copying[0] != event.number:
            return
        state.copying = None
        if not self._under_way or event.number != self._number or wanted is None:
            yield from self.step(now)
            return
        match event:
            case CopyNotTaken():
                yield from self._give_up(event, now)
            case CopyTaken(message=message, arrays=arrays):
                self._took_s = event.took_s
                wanted.fresh[message.slot] = 0
                self._copied.add(message.slot)
                self._is_due = True
                if any(memoryview(array).nbytes > limits.ARRAY_BYTES for array in arrays):
                    self._too_many = min(self._too_many, message.tokens)
                    yield Report("warning", f"A slot of {message.tokens} tokens is too large to be copied.")
                    self._pause(now)
                elif message.tokens == 0:
                    self._pause(now)
                else:
                    yield SendCopy(event.number, wanted.epoch, message, arrays)

    def _give_up(self, event: CopyNotTaken, now: float) -> Iterator[Effect]:
        self.end()
        if event.error is not None:
            self._story.tell(now, "mirrors", event.cause, f"no copies: {event.error}")
            yield Report("warning", f"Slots can't be copied, which takes a takeover longer. {event.error}")
            yield SetMirrors(())

    def sent(self, event: CopySent, now: float) -> Iterator[Effect]:
        """A copy is at its mirrors."""
        if self._under_way and event.number == self._number:
            self._took_s += event.took_s
            self._pause(now)
            yield from self.step(now)

    def _pause(self, now: float) -> None:
        self._under_way = False
        wanted = self._state.wanted
        waiting = wanted is not None and any(
            fresh >= LEAST_TOKENS and slot not in self._copied for slot, fresh in wanted.fresh.items()
        )
        self._resume_s = now + max(LEAST_PAUSE_S, (FIRST_PAUSE if waiting else PAUSE) * self._took_s)

    def lost(self, event: MirrorLost, now: float) -> Iterator[Effect]:
        """A mirror took nothing: the others go on."""
        if event.endpoint in self.mirrors:
            self.mirrors = tuple(each for each in self.mirrors if each != event.endpoint)
            self._story.tell(now, "mirrors", event.cause, f"{event.endpoint} took nothing")
            yield Report(
                "warning",
                f"{event.endpoint} gets no more copies of slots: it took none for {event.after_s:.0f} s.",
            )

    def next_deadline(self) -> float | None:
        """When the next copy may begin."""
        idle = self._is_due and not self._under_way and self._state.copying is None
        return self._resume_s if self.mirrors and idle and self._state.sums.batches else None


def note(wanted: Assignment, message: MicroBatch) -> None:
    """What the slots hold after a micro-batch. What is forgotten again is what came last."""
    held, fresh = wanted.held, wanted.fresh
    for trim in message.trims:
        gone = held.get(trim.slot, 0) - trim.keep
        held[trim.slot] = trim.keep
        fresh[trim.slot] = max(0, fresh.get(trim.slot, 0) - gone)
    for span in message.spans:
        held[span.slot] = span.position + span.tokens
        fresh[span.slot] = fresh.get(span.slot, 0) + span.tokens


__all__ = ["LEAST_PAUSE_S", "LEAST_TOKENS", "PAUSE", "Mirroring", "note"]
