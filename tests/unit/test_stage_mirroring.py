"""The stage's core on copies of slots: which is taken when, which is let in, and what an Assign keeps."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.stage.copies import WAITING_BYTES
from potluck.stage.effects import (
    ClearCaches,
    CloseSlices,
    Effect,
    RestoreCopy,
    SendControl,
    SendCopy,
    SetMirrors,
    StartCompute,
    StartLoad,
    TakeCopy,
)
from potluck.stage.events import (
    BatchComputed,
    Computed,
    CopyArrived,
    CopyNotRestored,
    CopyNotTaken,
    CopyRestored,
    CopySent,
    CopyTaken,
    LoadFinished,
    MirrorAsked,
    MirrorLost,
    PrepareAsked,
    Released,
)
from potluck.stage.machine import StageStatus
from potluck.stage.mirroring import FIRST_PAUSE, LEAST_PAUSE_S, LEAST_TOKENS, PAUSE, note
from potluck.stage.state import Assignment
from potluck.wire import limits
from potluck.wire.errors import EngineError
from potluck.wire.ids import Epoch
from potluck.wire.messages import (
    Copied,
    Keep,
    MicroBatch,
    Mirror,
    Prepare,
    Ready,
    Slice,
    SlotCopy,
    Span,
    Trim,
)
from stage_core import LOADED, SLICE, Core, quiet, sent
from stage_world import assignment, int32, prompt_batch

FRONT = assignment(0, 2).slice
HERE, THERE = "tcp://here:1", "tcp://there:1"


class Stage(Core):
    """A core that serves the whole model in epoch 1."""

    def __init__(self) -> None:
        super().__init__()
        self.serve()

    def mirror(self, *endpoints: str, epoch: int = 1) -> list[Effect]:
        return quiet(
            self.do(MirrorAsked(cause="broker", epoch=Epoch(epoch), message=Mirror(tuple(endpoints))))
        )

    def compute(self, message: MicroBatch, *, epoch: int = 1) -> list[Effect]:
        """Lets a micro-batch in and computes it; what is to be done besides sending its result on."""
        (start,) = self.arrive(message, int32(*range(message.tokens)), epoch=epoch)
        done = Computed((int32(*range(message.wants)),))
        event = BatchComputed(cause="batch", job=start.job, computed=done, compute_s=0.1, wait_s=0.0)  # type: ignore[union-attr]
        return quiet(self.do(event))[1:]

    def taken(self, take: TakeCopy, tokens: int, took_s: float = 0.002, size: int = 100) -> list[Effect]:
        message = SlotCopy(take.slice, take.slot, tokens, 1)
        arrays = (memoryview(bytearray(size)), bytes(4 * tokens))
        return quiet(
            self.do(
                CopyTaken(cause="copy", number=take.number, message=message, arrays=arrays, took_s=took_s)
            )
        )

    def sent(self, number: int, took_s: float = 0.1) -> list[Effect]:
        return quiet(self.do(CopySent(cause="copy", number=number, took_s=took_s)))


class Standby(Core):
    """A core that holds the whole model and serves nothing, or the front of it in epoch 1."""

    def __init__(self, *, serves: bool = False) -> None:
        super().__init__()
        self.start()
        self.welcome()
        number = 1
        if serves:
            self.assign(1, assignment(0, 2))
            self.loaded(number)
            number += 1
        self.prepare(1, SLICE)
        self.loaded(number)

    def prepare(self, number: int, *slices: Slice) -> list[Effect]:
        return quiet(self.do(PrepareAsked(cause="broker", message=Prepare(number, slices))))

    def arrives(self, slot: int = 0, batch: int = 5, tokens: int = 9, size: int = 50) -> list[Effect]:
        copy = SlotCopy(SLICE, slot, tokens, batch)
        arrays = (memoryview(bytearray(size)), int32(*range(tokens)))
        return quiet(self.do(CopyArrived(cause="copy", message=copy, arrays=arrays)))

    def restored(self, number: int) -> list[Effect]:
        return quiet(self.do(CopyRestored(cause="copy", number=number)))

    @property
    def copies(self) -> dict[int, int]:
        return self.machine.state.held[SLICE].copies


def taking(effects: list[Effect]) -> TakeCopy:
    (effect,) = effects
    assert isinstance(effect, TakeCopy)
    return effect


def restoring(effects: list[Effect]) -> RestoreCopy:
    (effect,) = effects
    assert isinstance(effect, RestoreCopy)
    return effect


# ---- the stage that is copied


def test_a_slot_is_copied_once_it_has_enough_new_tokens_and_not_before() -> None:
    stage = Stage()
    assert stage.mirror(HERE) == [SetMirrors((HERE,))]
    assert stage.compute(prompt_batch(0, LEAST_TOKENS - 1)) == []
    take = taking(stage.compute(MicroBatch(1, (Span(0, LEAST_TOKENS - 1, 1, 1),))))
    assert (take.slice, take.slot) == (SLICE, 0)


def test_a_copy_goes_out_with_the_epoch_and_a_pause_of_nine_times_its_time_follows() -> None:
    stage = Stage()
    stage.mirror(HERE)
    take = taking(stage.compute(prompt_batch(0, 9)))
    (send,) = stage.taken(take, 9, took_s=0.01)
    assert isinstance(send, SendCopy)
    assert (send.number, send.epoch, send.message) == (take.number, 1, SlotCopy(SLICE, 0, 9, 1))
    assert stage.compute(prompt_batch(1, 12, position=9)) == []
    stage.now = 0.2
    assert stage.sent(take.number, took_s=0.03) == []
    due = stage.machine.next_deadline()
    assert due == pytest.approx(0.2 + PAUSE * 0.04)
    assert taking(stage.wait()).slot == 0
    assert stage.now == due


def test_sequences_without_any_copy_are_copied_first_and_with_short_pauses() -> None:
    stage = Stage()
    stage.mirror(HERE)
    take = taking(stage.compute(prompt_batch(0, 9)))
    stage.taken(take, 9, took_s=0.01)
    stage.compute(prompt_batch(1, 14, position=9))
    stage.compute(prompt_batch(2, 12, slot=1))
    stage.now = 0.2
    assert stage.sent(take.number, took_s=0.03) == []
    assert stage.machine.next_deadline() == pytest.approx(0.2 + FIRST_PAUSE * 0.04)
    assert taking(stage.wait()).slot == 1


def test_the_least_pause_is_kept_after_copies_that_took_no_time() -> None:
    stage = Stage()
    stage.mirror(HERE)
    take = taking(stage.compute(prompt_batch(0, 9)))
    stage.compute(prompt_batch(1, 9, slot=1))
    stage.taken(take, 9, took_s=0.0)
    stage.sent(take.number, took_s=0.0)
    assert stage.machine.next_deadline() == stage.now + LEAST_PAUSE_S


def test_the_slot_with_the_most_new_tokens_comes_first() -> None:
    stage = Stage()
    for number, tokens in enumerate((8, 12, 10)):
        stage.compute(prompt_batch(number, tokens, slot=number))
    order = []
    effects = stage.mirror(HERE)[1:]
    for _ in range(3):
        take = taking(effects)
        order.append(take.slot)
        stage.taken(take, 12)
        stage.sent(take.number, took_s=0.0)
        effects = stage.wait()
    assert order == [1, 2, 0]


def test_tokens_that_are_forgotten_again_are_no_reason_for_a_copy() -> None:
    stage = Stage()
    stage.mirror(HERE)
    stage.compute(prompt_batch(0, 7))
    assert stage.compute(MicroBatch(1, (Span(0, 3, 1, 1),), (Trim(0, 3),))) == []
    assert stage.compute(MicroBatch(2, (Span(0, 4, 4, 1),))) != []


def test_tokens_computed_while_a_copy_is_on_its_way_count_for_the_next_one() -> None:
    stage = Stage()
    stage.mirror(HERE)
    take = taking(stage.compute(prompt_batch(0, 9)))
    stage.taken(take, 9)
    stage.compute(MicroBatch(1, (Span(0, 9, LEAST_TOKENS, 1),)))
    stage.sent(take.number)
    assert taking(stage.wait()).slot == 0


def test_new_mirrors_get_what_old_ones_have_had() -> None:
    stage = Stage()
    stage.mirror(HERE)
    take = taking(stage.compute(prompt_batch(0, 9)))
    stage.taken(take, 9)
    stage.sent(take.number)
    assert stage.mirror(HERE) == []
    assert stage.mirror(HERE, THERE) == [SetMirrors((HERE, THERE))]
    assert taking(stage.wait()).slot == 0


def test_nothing_is_copied_without_a_mirror_or_for_another_epoch() -> None:
    stage = Stage()
    assert stage.mirror(HERE, epoch=2) == []
    assert stage.compute(prompt_batch(0, 9)) == []
    assert stage.mirror(HERE)[0] == SetMirrors((HERE,))
    assert stage.mirror() == [SetMirrors(())]
    assert stage.compute(prompt_batch(1, 9, slot=1)) == []


def test_the_end_of_an_epoch_ends_its_copies_and_a_late_one_is_not_sent() -> None:
    stage = Stage()
    stage.mirror(HERE)
    take = taking(stage.compute(prompt_batch(0, 9)))
    (*_, clear) = stage.assign(2)
    assert isinstance(clear, ClearCaches)
    assert stage.mirror(THERE, epoch=2) == [SetMirrors((THERE,))]
    assert stage.taken(take, 9) == []
    stage.loaded(clear.number)
    assert stage.machine.mirroring.next_deadline() is None
    assert taking(stage.compute(prompt_batch(5, 9), epoch=2)).number > take.number


def test_a_slice_is_not_closed_while_one_of_its_slots_is_copied() -> None:
    stage = Stage()
    stage.mirror(HERE)
    take = taking(stage.compute(prompt_batch(0, 9)))
    stage.do(Released(cause="broker", epoch=Epoch(2)))
    stage.do(PrepareAsked(cause="broker", message=Prepare(1)))
    assert SLICE in stage.machine.state.held
    effects = quiet(stage.do(CopyNotTaken(cause="copy", number=take.number, error=None)))
    assert effects == [CloseSlices((SLICE,))]


def test_a_copy_too_large_for_a_message_is_not_sent_nor_taken_again() -> None:
    stage = Stage()
    stage.mirror(HERE)
    take = taking(stage.compute(prompt_batch(0, 10)))
    stage.compute(prompt_batch(1, 9, slot=1))
    assert stage.taken(take, 10, size=limits.ARRAY_BYTES + 1) == []
    take = taking(stage.wait())
    assert take.slot == 1
    stage.compute(MicroBatch(2, (Span(0, 10, 10, 1),)))
    stage.taken(take, 9)
    stage.sent(take.number)
    assert not any(isinstance(effect, TakeCopy) for effect in stage.wait())


def test_a_stage_whose_engine_can_not_copy_stops_and_says_so() -> None:
    stage = Stage()
    stage.mirror(HERE)
    take = taking(stage.compute(prompt_batch(0, 9)))
    effects = stage.do(CopyNotTaken(cause="copy", number=take.number, error=EngineError("no state")))
    assert quiet(effects) == [SetMirrors(())]
    assert len(effects) == 2
    assert stage.compute(prompt_batch(1, 9, slot=1)) == []


def test_a_mirror_that_is_lost_gets_nothing_more_and_the_last_one_ends_it() -> None:
    stage = Stage()
    stage.mirror(HERE, THERE)
    take = taking(stage.compute(prompt_batch(0, 9)))
    stage.taken(take, 9)
    for endpoint in (HERE, HERE, THERE):
        stage.do(MirrorLost(cause="copy", endpoint=endpoint, after_s=5.0))
    stage.sent(take.number)
    assert stage.machine.mirroring.mirrors == ()
    assert stage.compute(prompt_batch(1, 9, slot=1)) == []


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(1, 9), st.booleans()), max_size=30)
)
def test_new_tokens_are_those_of_a_slot_that_no_copy_has(
    steps: list[tuple[int, int, int, bool]],
) -> None:
    """Against lists of tokens, each with whether it was there at the last copy."""
    wanted = Assignment(Epoch(1), assignment())
    model: dict[int, list[bool]] = {}
    for number, (slot, keep, tokens, copied) in enumerate(steps):
        rows = model.setdefault(slot, [])
        keep = min(keep, len(rows))
        del rows[keep:]
        rows += [True] * tokens
        note(wanted, MicroBatch(number, (Span(slot, keep, tokens, 1),), (Trim(slot, keep),)))
        if copied:
            wanted.fresh[slot] = 0
            model[slot] = [False] * len(rows)
    assert wanted.held == {slot: len(rows) for slot, rows in model.items()}
    assert wanted.fresh == {slot: sum(rows) for slot, rows in model.items()}


# ---- the stage that holds the copies


def test_a_copy_goes_into_a_slice_on_standby_and_the_broker_is_told() -> None:
    stage = Standby()
    restore = restoring(stage.arrives(slot=2, batch=7))
    assert restore.message == SlotCopy(SLICE, 2, 9, 7)
    assert stage.restored(restore.number) == [SendControl(Copied(SLICE, 2, 9, 7), Epoch(0))]
    assert stage.copies == {2: 7}


def test_a_stage_that_serves_one_slice_keeps_copies_in_another() -> None:
    stage = Standby(serves=True)
    restore = restoring(stage.arrives())
    assert stage.restored(restore.number) == [SendControl(Copied(SLICE, 0, 9, 5), Epoch(1))]


def test_of_the_copies_of_a_slot_that_wait_only_the_newest_is_taken_in() -> None:
    stage = Standby()
    first = restoring(stage.arrives(slot=1, batch=5))
    for batch in (6, 9, 7, 5):
        assert stage.arrives(slot=1, batch=batch) == []
    told, then = stage.restored(first.number)
    assert told == SendControl(Copied(SLICE, 1, 9, 5), Epoch(0))
    assert isinstance(then, RestoreCopy)
    assert then.message.batch == 9
    assert len(stage.restored(then.number)) == 1
    assert stage.arrives(slot=1, batch=9) == []


def test_copies_that_wait_are_bounded_in_bytes() -> None:
    stage = Standby()
    first = restoring(stage.arrives(slot=0))
    stage.arrives(slot=1, size=WAITING_BYTES - 200)
    stage.arrives(slot=2, size=1000)
    _, then = stage.restored(first.number)
    assert isinstance(then, RestoreCopy)
    assert then.message.slot == 1
    assert len(stage.restored(then.number)) == 1


def test_copies_wait_while_something_is_loaded_on_their_lane() -> None:
    stage = Standby()
    stage.prepare(2, SLICE, FRONT)
    assert stage.arrives() == []
    assert any(isinstance(effect, RestoreCopy) for effect in stage.loaded(2))


def test_copies_of_what_is_served_or_not_held_are_dropped() -> None:
    stage = Stage()
    arrived = CopyArrived(cause="copy", message=SlotCopy(SLICE, 0, 3, 1), arrays=(b"state", int32(1, 2, 3)))
    assert stage.do(arrived) == []
    front = msgspec.structs.replace(arrived.message, slice=FRONT)
    assert stage.do(CopyArrived(cause="copy", message=front, arrays=(b"state", b""))) == []
    assert not stage.machine.copies.waits


@pytest.mark.parametrize(
    ("slot", "tokens", "state", "seen"),
    [
        (4, 3, b"x", int32(1, 2, 3)),
        (0, 33, b"x", bytes(4 * 33)),
        (0, 0, b"x", b""),
        (0, 3, b"", int32(1, 2, 3)),
    ],
)
def test_a_copy_that_fits_no_slot_is_refused_and_counted(
    slot: int, tokens: int, state: bytes, seen: bytes
) -> None:
    stage = Standby()
    copy = SlotCopy(SLICE, slot, tokens, 1)
    assert quiet(stage.do(CopyArrived(cause="copy", message=copy, arrays=(state, seen)))) == []
    assert stage.machine.state.sums.refused_frames == 1


def test_a_slice_that_is_assigned_while_a_copy_goes_in_is_cleared_after_that() -> None:
    stage = Standby()
    restore = restoring(stage.arrives())
    keep = (Keep(0, 9),)
    effects = quiet(stage.assign(1, assignment(keep=keep)))
    assert not any(isinstance(effect, ClearCaches | StartLoad) for effect in effects)
    assert stage.status is StageStatus.LOADING
    (clear,) = stage.restored(restore.number)
    assert isinstance(clear, ClearCaches)
    assert (clear.slice, clear.keep) == (SLICE, keep)
    ready = stage.do(LoadFinished(cause="load", number=clear.number, loaded=LOADED, load_s=0.1, kept=True))
    assert sent(ready) == [Ready(0.1, 100, 20, 3, kept=True)]
    assert stage.copies == {}


def test_what_an_assignment_keeps_is_copied_on_once_something_is_computed() -> None:
    stage = Stage()
    (*_, clear) = stage.assign(2, assignment(keep=(Keep(1, 20),)))
    assert isinstance(clear, ClearCaches)
    stage.do(LoadFinished(cause="load", number=clear.number, loaded=LOADED, load_s=0.1, kept=True))
    assert stage.mirror(HERE, epoch=2) == [SetMirrors((HERE,))]
    assert taking(stage.compute(MicroBatch(1, (Span(1, 20, 1, 1),)), epoch=2)).slot == 1


def test_a_copy_that_ends_in_a_slice_that_was_closed_is_told_to_nobody() -> None:
    stage = Standby()
    restore = restoring(stage.arrives())
    stage.arrives(slot=1)
    assert stage.prepare(2) == [CloseSlices((SLICE,))]
    assert stage.prepare(3, SLICE) == [StartLoad(2, SLICE)]
    assert stage.restored(restore.number) == []
    stage.loaded(2)
    assert stage.copies == {}


def test_a_copy_that_can_not_be_taken_in_is_reported_once_in_a_while() -> None:
    stage = Standby()
    lines = 0
    for batch in (1, 2, 3):
        (restore,) = stage.arrives(batch=batch)
        assert isinstance(restore, RestoreCopy)
        event = CopyNotRestored(cause="copy", number=restore.number, error=EngineError("no room"))
        effects = stage.do(event)
        assert quiet(effects) == []
        lines += len(effects)
    assert lines == 1
    assert stage.copies == {}


def test_another_broker_knows_no_copies() -> None:
    stage = Standby()
    stage.restored(restoring(stage.arrives(slot=0, batch=50)).number)
    late = restoring(stage.arrives(slot=1, batch=51))
    stage.arrives(slot=2, batch=52)
    stage.machine.membership.broker.asked = 1
    stage.welcome()
    assert stage.restored(late.number) == []
    assert stage.copies == {}
    assert not stage.machine.copies.waits
    assert restoring(stage.arrives(slot=0, batch=1)).message.batch == 1


# ---- both at once


class Everything(Standby):
    """A stage to which anything happens; what may never be done is checked after every event."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = self.batch = 0
        self.take: TakeCopy | None = None
        self.sending: int | None = None
        self.restore: RestoreCopy | None = None
        self.clear: ClearCaches | None = None
        self.load: StartLoad | None = None

    def note(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case TakeCopy():
                    assert self.take is None, "one copy is taken at a time"
                    self.take = effect
                case SendCopy(number, epoch):
                    assert epoch == self.epoch, "what is sent is of this epoch"
                    self.sending = number
                case RestoreCopy(message=message):
                    assert self.restore is None, "one copy is taken in at a time"
                    assert self.load is None, "nothing waits behind a load"
                    assert not self.uses(message.slice), "an engine is used by one thread at a time"
                    self.restore = effect
                case ClearCaches(slice=each):
                    assert self.restore is None or self.restore.message.slice != each, (
                        "by one thread at a time"
                    )
                    self.clear = effect
                case StartLoad():
                    self.load = effect
                case CloseSlices(slices):
                    assert not any(self.uses(each) for each in slices), "what computes is not closed"

    def uses(self, wished: Slice) -> bool:
        """Whether the compute lane has something to do with it."""
        return wished in {each.slice for each in (self.take, self.clear) if each is not None}

    def happens(self, what: str, slot: int) -> None:
        self.batch += 1
        self.now += 0.01
        match what:
            case "assign" | "keep" | "front":
                self.epoch += 1
                keep = (Keep(slot, 3),) if what == "keep" else ()
                place = (0, 2) if what == "front" else (0, 1)
                self.sending = None
                self.note(self.assign(self.epoch, assignment(*place, keep=keep)))
            case "release":
                self.epoch += 1
                self.sending = None
                self.note(self.do(Released(cause="broker", epoch=Epoch(self.epoch))))
            case "prepare" | "forget":
                self.note(self.prepare(self.batch + 1, *((SLICE, FRONT) if what == "prepare" else ())))
            case "mirror":
                mirror = Mirror((HERE, THERE)[: slot % 3])
                self.note(self.do(MirrorAsked(cause="broker", epoch=Epoch(self.epoch), message=mirror)))
            case "copy":
                self.note(self.arrives(slot, self.batch))
            case "compute" if self.status is StageStatus.SERVING:
                message = prompt_batch(self.batch, 9, slot, wants=0)
                effects = self.arrive(message, int32(*range(9)), epoch=self.epoch)
                for start in effects:
                    assert isinstance(start, StartCompute)
                    done = Computed((b"", b""))
                    event = BatchComputed(
                        cause="batch", job=start.job, computed=done, compute_s=0.1, wait_s=0.0
                    )
                    self.note(self.do(event))
            case "taken" if self.take is not None:
                take, self.take = self.take, None
                copy, arrays = SlotCopy(take.slice, take.slot, 9, self.batch), (b"state", bytes(36))
                event = CopyTaken(cause="copy", number=take.number, message=copy, arrays=arrays, took_s=0.001)
                self.note(self.do(event))
            case "sent" if self.sending is not None:
                number, self.sending = self.sending, None
                self.note(self.do(CopySent(cause="copy", number=number, took_s=0.001)))
            case "restored" if self.restore is not None:
                restore, self.restore = self.restore, None
                self.note(self.do(CopyRestored(cause="copy", number=restore.number)))
            case "cleared" if self.clear is not None:
                clear, self.clear = self.clear, None
                kept = bool(clear.keep)
                self.note(
                    self.do(
                        LoadFinished(cause="load", number=clear.number, loaded=LOADED, load_s=0.1, kept=kept)
                    )
                )
            case "loaded" if self.load is not None:
                load, self.load = self.load, None
                self.note(self.loaded(load.number))


WHAT = (
    "assign", "keep", "front", "release", "prepare", "forget", "mirror", "copy", "copy", "compute", "compute",
    "taken", "sent", "restored", "cleared", "loaded",
)  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(WHAT), st.integers(0, 3)), max_size=60))
def test_whatever_happens_no_engine_is_used_by_two_lanes_and_everything_ends(
    steps: list[tuple[str, int]],
) -> None:
    stage = Everything()
    for what, slot in steps:
        stage.happens(what, slot)
    for _ in range(4):
        for what in ("taken", "sent", "restored", "cleared", "loaded"):
            stage.happens(what, 0)
    assert stage.status is not StageStatus.LOADING
