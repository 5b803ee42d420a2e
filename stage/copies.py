"""What a stage does with copies of other stages' slots: which it takes in, in which order, and what it forgets. Pure.

A copy goes into the slot of a slice that is held and idle, on the lane for loading, one at a time. For each slot only
the newest one waits. Whoever takes the slice over says in its Assign which of them are still worth something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from potluck.stage.effects import Effect, Report, RestoreCopy, SendControl
from potluck.stage.events import CopyArrived, CopyNotRestored, CopyRestored
from potluck.stage.state import Restoring, StageState, words_of
from potluck.wire import limits
from potluck.wire.messages import Copied, Slice
from potluck.wire.story import Story

WAITING_BYTES = limits.ARRAY_BYTES
"""Copies that wait hold no more than this together; what comes on top is dropped."""
REPORT_EVERY_S = 10.0
"""At most one line in this time about copies that could not be taken in."""


class Copies:
    """The copies that one stage keeps for others. Shares its state with the machine; times are on the core's clock."""

    def __init__(self, state: StageState, story: Story, is_measuring: Callable[[], bool]) -> None:
        """`is_measuring` says whether the lane for loading is timing layers."""
        self._state = state
        self._story = story
        self._is_measuring = is_measuring
        self._number = 0
        self._waiting: dict[tuple[Slice, int], CopyArrived] = {}
        self._reported_s = float("-inf")

    @property
    def waits(self) -> bool:
        """Whether some copy is not taken in yet."""
        return bool(self._waiting)

    def arrived(self, event: CopyArrived) -> None:
        """A copy that fits its slice came in: it waits, unless nobody needs it."""
        copy = event.message
        key = (copy.slice, copy.slot)
        if not self._is_kept(copy.slice) or copy.batch <= self._newest(key):
            return
        size = _size(event) + sum(_size(other) for at, other in self._waiting.items() if at != key)
        if size <= WAITING_BYTES:
            self._waiting[key] = event

    def _is_kept(self, wished: Slice) -> bool:
        """Whether copies are kept for a slice: it is held, and not what this stage serves."""
        state = self._state
        serves = state.wanted is not None and state.wanted.slice == wished
        return state.broker.joined and wished in state.held and not serves

    def _newest(self, key: tuple[Slice, int]) -> int:
        """The micro-batch of the newest copy that has come for a slot; -1 if none has."""
        wished, slot = key
        newest = self._state.held[wished].copies.get(slot, -1)
        if key in self._waiting:
            newest = max(newest, self._waiting[key].message.batch)
        goes_in = self._state.restoring
        if goes_in is not None and (goes_in.message.slice, goes_in.message.slot) == key:
            newest = max(newest, goes_in.message.batch)
        return newest

    def step(self) -> Iterator[Effect]:
        """Begins to take in the copy that waits longest, once the lane for loading has nothing long to do."""
        state = self._state
        for each in [key for key in self._waiting if not self._is_kept(key[0])]:
            del self._waiting[each]
        if state.restoring is not None or state.load is not None or self._is_measuring():
            return
        key = next((key for key in self._waiting if key[0] not in state.busy), None)
        if key is not None:
            event = self._waiting.pop(key)
            self._number += 1
            held = state.held[key[0]]
            held.copies.pop(key[1], None)
            state.restoring = Restoring(self._number, event.message, held)
            yield RestoreCopy(self._number, event.message, event.arrays)

    def ended(self, event: CopyRestored | CopyNotRestored, now: float) -> Iterator[Effect]:
        """The engine has taken a copy in, or can't."""
        state, goes_in = self._state, self._state.restoring
        if goes_in is None or goes_in.number != event.number:
            return
        state.restoring = None
        copy = goes_in.message
        if goes_in.void or state.held.get(copy.slice) is not goes_in.held or not self._is_kept(copy.slice):
            return
        if isinstance(event, CopyRestored):
            goes_in.held.copies[copy.slot] = copy.batch
            yield SendControl(Copied(copy.slice, copy.slot, copy.tokens, copy.batch), state.epoch)
        elif now - self._reported_s >= REPORT_EVERY_S:
            self._reported_s = now
            text = f"A copy of a slot of {words_of(copy.slice)} can't be taken in: {event.error}"
            self._story.tell(now, "copies", event.cause, text)
            yield Report("warning", text)

    def forget(self) -> None:
        """Another broker: what its predecessor had copied means nothing to it."""
        self._waiting.clear()
        for held in self._state.held.values():
            held.copies.clear()
        if self._state.restoring is not None:
            self._state.restoring.void = True


def _size(event: CopyArrived) -> int:
    return sum(memoryview(array).nbytes for array in event.arrays)


__all__ = ["REPORT_EVERY_S", "WAITING_BYTES", "Copies"]
