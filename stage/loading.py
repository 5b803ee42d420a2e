"""What a stage holds: what is loaded, cleared and closed, in which order, and what the broker is told of it. Pure.

What is assigned comes before what is only prepared. One load runs at a time, beside the micro-batches; what is not to
stay is closed before it, so that there is room, but never while the compute lane uses it. Nothing is done twice: a
load that is under way becomes whatever wants its slice when it ends.
"""

from __future__ import annotations

from collections.abc import Iterator

from potluck.stage.checks import check_slice
from potluck.stage.effects import CancelLoad, ClearCaches, CloseSlices, Effect, Report, SendControl, StartLoad
from potluck.stage.engine import Loaded
from potluck.stage.events import LoadCancelled, LoadFailed, LoadFinished, LoadProgressed, PrepareAsked
from potluck.stage.state import (
    RELOAD_AFTER_BREAKS,
    Assignment,
    Clearing,
    Held,
    Load,
    Preparation,
    StageIdentity,
    StageState,
    words_of,
)
from potluck.wire.errors import MalformedError, Phase, PotluckError
from potluck.wire.messages import (
    ErrorInfo,
    Prepared,
    PrepareFailed,
    Progress,
    Ready,
    Slice,
    StageFailed,
)
from potluck.wire.story import Story

PROGRESS_EVERY_S = 0.5


class Loading:
    """The slices of one stage. Shares its state with the machine; its times are on the core's clock."""

    def __init__(self, me: StageIdentity, state: StageState, story: Story) -> None:
        self.waits = False
        """Whether something can't be closed before the compute lane is done with it."""
        self._me = me
        self._state = state
        self._story = story
        self._number = 0
        self._progress: tuple[str, float] = ("", float("-inf"))

    # ---- what is to be held

    def prepare(self, event: PrepareAsked, now: float) -> Iterator[Effect]:
        """The broker wants slices held besides the active one, and nothing else."""
        asked, known = event.message, self._state.prepare
        subject = f"prepare {asked.number}"
        if known.number is not None and asked.number < known.number:
            self._story.tell(now, subject, event.cause, f"ignored after {known.number}")
            return
        if asked.number == known.number:
            if asked.slices != known.slices:
                yield Report("error", f"Two wishes of number {asked.number} differ; the first one stays.")
                return
            known.untold.clear()
            for _, outcome in sorted(known.outcomes.items()):
                yield SendControl(outcome, self._state.epoch)
            return
        self._story.tell(now, subject, event.cause, f"{len(asked.slices)} slices")
        self._state.prepare, self._state.spared = Preparation(asked.number, asked.slices), frozenset()
        for index, wished in enumerate(asked.slices):
            try:
                check_slice(wished)
            except MalformedError as error:
                yield from self._answer(now, index, error, event.cause)
        yield from self.settle(event.cause, now)

    def spare(self) -> None:
        """The assignment is over and the broker a new one, perhaps: what is held stays until it says otherwise, and
        nobody waits for what was prepared.
        """
        state = self._state
        loading = frozenset() if state.load is None else frozenset({state.load.slice})
        state.spared = frozenset(state.held) | loading
        state.prepare = Preparation(slices=state.prepare.slices)

    def settle(self, cause: str, now: float) -> Iterator[Effect]:
        """Takes the next steps from what is held to what is wanted."""
        yield from self._close()
        for index, wished in self._state.prepare.open():
            if wished in self._state.held and wished not in self._surplus():
                yield from self._answer(now, index, _ready(self._state.held[wished].loaded, 0.0), cause)
        yield from self._clear()
        yield from self._load()

    def _surplus(self) -> list[Slice]:
        """What is held and should not be: nobody wants it, or it is asked for and its engine broke."""
        state, keep = self._state, self._state.keep
        asked = {each for _, each in state.prepare.open() if not state.serves(each)}
        if state.wanted is not None and state.wanted.is_open:
            asked.add(state.wanted.slice)
        return [
            each
            for each, held in state.held.items()
            if each not in keep or (each in asked and not held.is_trusted)
        ]

    def _close(self) -> Iterator[Effect]:
        surplus, busy = self._surplus(), self._state.busy
        free = tuple(each for each in surplus if each not in busy)
        self.waits = len(free) < len(surplus)
        for each in free:
            del self._state.held[each]
        if free:
            yield CloseSlices(free)

    def _clear(self) -> Iterator[Effect]:
        """What is assigned and held already needs empty caches, but for what is to be kept, and no more."""
        state, wanted = self._state, self._state.wanted
        if wanted is None or not wanted.is_open or state.clearing is not None:
            return
        if state.restoring is not None and state.restoring.message.slice == wanted.slice:
            return  # its engine is in the hands of the other lane for a moment
        held = state.held.get(wanted.slice)
        if held is not None and held.is_trusted:
            self._number += 1
            state.clearing = Clearing(self._number, wanted.slice)
            held.copies.clear()
            yield ClearCaches(self._number, wanted.slice, wanted.assign.keep)

    def _load(self) -> Iterator[Effect]:
        state = self._state
        wanted = state.wanted if state.wanted is not None and state.wanted.is_open else None
        first = wanted.slice if wanted is not None and wanted.slice not in state.held else None
        if state.load is not None:
            if state.load.slice not in state.keep or first not in (None, state.load.slice):
                yield from self.cancel()
            return
        if self.waits:
            return  # there is no room yet
        if first is None:
            first = next((each for _, each in state.prepare.open() if each not in state.held), None)
        if first is not None:
            self._number += 1
            state.load = Load(self._number, first)
            self._progress = ("", float("-inf"))
            yield StartLoad(self._number, first)

    def cancel(self) -> Iterator[Effect]:
        """The load under way is not wanted now."""
        load = self._state.load
        if load is not None and not load.cancelled:
            load.cancelled = True
            yield CancelLoad(load.number)

    # ---- how it goes

    def progressed(self, event: LoadProgressed, now: float) -> Iterator[Effect]:
        """Tells the broker how far what it assigned is, not too often."""
        load, wanted = self._state.load, self._state.wanted
        if load is None or load.number != event.number or wanted is None or wanted.slice != load.slice:
            return
        phase, told_s = self._progress
        if event.phase != phase or event.done >= event.total or now - told_s >= PROGRESS_EVERY_S:
            self._progress = (event.phase, now)
            yield SendControl(Progress(Phase(event.phase), event.done, event.total), wanted.epoch)

    def ended(self, event: LoadFinished | LoadFailed | LoadCancelled, now: float) -> Iterator[Effect]:
        """A load has ended, or the emptying of caches."""
        state = self._state
        if state.clearing is not None and state.clearing.number == event.number:
            ended, state.clearing = state.clearing.slice, None
            yield from self._cleared(event, ended, now)
        elif state.load is not None and state.load.number == event.number:
            ended, state.load = state.load.slice, None
            yield from self._loaded(event, ended, now)
        else:
            return
        yield from self.settle(event.cause, now)

    def _cleared(
        self, event: LoadFinished | LoadFailed | LoadCancelled, ended: Slice, now: float
    ) -> Iterator[Effect]:
        if not isinstance(event, LoadFinished):
            self._state.held[ended].breaks = RELOAD_AFTER_BREAKS  # it is loaded anew
            return
        self._state.held[ended].breaks = 0
        wanted = self._state.wanted
        if wanted is not None and wanted.is_open and wanted.slice == ended:
            if event.kept:
                wanted.held = {keep.slot: keep.tokens for keep in wanted.assign.keep}
                wanted.fresh = dict(wanted.held)
            ready = _ready(event.loaded, event.load_s, kept=event.kept)
            yield from self.conclude(wanted, ready, event.cause, now)

    def _loaded(
        self, event: LoadFinished | LoadFailed | LoadCancelled, ended: Slice, now: float
    ) -> Iterator[Effect]:
        match event:
            case LoadFinished():
                self._state.held[ended] = Held(event.loaded)
                outcome: Ready | PotluckError = _ready(event.loaded, event.load_s)
            case LoadFailed():
                outcome = event.error
            case LoadCancelled():
                return
        wanted = self._state.wanted
        if wanted is not None and wanted.is_open and wanted.slice == ended:
            yield from self.conclude(wanted, outcome, event.cause, now)
        for index, wished in self._state.prepare.open():
            if wished == ended:
                yield from self._answer(now, index, outcome, event.cause)

    # ---- what the broker is told

    def conclude(
        self, wanted: Assignment, outcome: Ready | PotluckError, cause: str, now: float
    ) -> Iterator[Effect]:
        """What came of the assignment."""
        if isinstance(outcome, Ready):
            wanted.outcome = outcome
            text = f"ready after {outcome.load_s:.1f} s"
            yield Report("info", f"{text[:1].upper()}{text[1:]}.")
        else:
            error = self._me.placed(outcome, Phase.LOAD)
            wanted.outcome = StageFailed(ErrorInfo.of(error))
            text = f"failed: {error}"
            yield Report("error", str(error))
        self._story.tell(now, f"epoch {wanted.epoch}", cause, text)
        yield SendControl(wanted.outcome, wanted.epoch)

    def _answer(self, now: float, index: int, outcome: Ready | PotluckError, cause: str) -> Iterator[Effect]:
        """What came of a slice that was to be prepared."""
        prepare = self._state.prepare
        assert prepare.number is not None, "somebody waits for the answer"
        what = words_of(prepare.slices[index])
        answer: Prepared | PrepareFailed
        if isinstance(outcome, Ready):
            sizes = (outcome.weights_bytes, outcome.kv_bytes, outcome.compute_bytes)
            answer = Prepared(prepare.number, index, outcome.load_s, *sizes)
            text = (
                f"{what} stand by" if outcome.load_s == 0 else f"{what} stand by after {outcome.load_s:.1f} s"
            )
            if outcome.load_s > 0:
                yield Report("info", f"{text[:1].upper()}{text[1:]}.")
        else:
            error = self._me.placed(outcome, Phase.LOAD)
            answer = PrepareFailed(prepare.number, index, ErrorInfo.of(error))
            text = f"{what} can't stand by: {error}"
            yield Report("warning", f"{text[:1].upper()}{text[1:]}")
        prepare.outcomes[index] = answer
        self._story.tell(now, f"prepare {prepare.number}", cause, text)
        yield SendControl(answer, self._state.epoch)

    def not_sent(self, answer: Prepared | PrepareFailed) -> None:
        """An answer did not leave this machine: the next beat tries again."""
        prepare = self._state.prepare
        if prepare.number == answer.number and prepare.outcomes.get(answer.index) == answer:
            prepare.untold.add(answer.index)

    def tell_again(self) -> Iterator[Effect]:
        """The answers that did not leave this machine."""
        prepare = self._state.prepare
        untold, prepare.untold = sorted(prepare.untold), set()
        for index in untold:
            yield SendControl(prepare.outcomes[index], self._state.epoch)


def _ready(loaded: Loaded, load_s: float, *, kept: bool = False) -> Ready:
    weights_bytes = loaded.weights_bytes + loaded.copied_bytes
    return Ready(load_s, weights_bytes, loaded.kv_bytes, loaded.compute_bytes, kept)


__all__ = ["PROGRESS_EVERY_S", "Loading"]
