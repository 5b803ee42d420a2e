"""The stage's core told to hold slices besides the one that serves: what is loaded, kept, closed, answered."""

from __future__ import annotations

import msgspec
import pytest

from potluck.stage.effects import (
    CancelLoad,
    ClearCaches,
    CloseSlices,
    ConnectNext,
    Disconnect,
    Effect,
    StartLoad,
)
from potluck.stage.events import (
    BatchComputed,
    BatchComputeFailed,
    BatchSkipped,
    Computed,
    ControlNotSent,
    LoadCancelled,
    LoadFailed,
    LoadProgressed,
    PrepareAsked,
    RefusedBy,
    Released,
)
from potluck.stage.machine import StageStatus
from potluck.wire.errors import EngineError, OutOfMemoryError, Phase, StageError
from potluck.wire.ids import Epoch
from potluck.wire.messages import (
    ErrorInfo,
    Heartbeat,
    Holds,
    Prepare,
    Prepared,
    PrepareFailed,
    Ready,
    Slice,
    StageFailed,
)
from stage_core import LOADED, SLICE, Core, quiet, sent
from stage_world import RESULTS, assignment, int32, prompt_batch

WHOLE, FRONT, BACK = SLICE, assignment(0, 2).slice, assignment(1, 2).slice
UNKNOWN = ErrorInfo.of(StageError("This broker does not know the stage."))


class Stage(Core):
    """A core that serves the whole model in epoch 1."""

    def __init__(self) -> None:
        super().__init__()
        self.serve()

    def prepare(self, number: int, *slices: Slice) -> list[Effect]:
        return quiet(self.do(PrepareAsked(cause="broker", message=Prepare(number, slices))))

    def load(self, number: int) -> list[Effect]:
        return quiet(self.loaded(number))

    def fail(self, number: int) -> list[Effect]:
        return quiet(self.do(LoadFailed(cause="load", number=number, error=OutOfMemoryError("3 GB short"))))

    @property
    def held(self) -> set[Slice]:
        return set(self.machine.state.held)


def prepared(number: int, index: int, load_s: float = 2.0) -> Prepared:
    return Prepared(number, index, load_s, 100, 20, 3)


def test_slices_are_loaded_one_after_the_other_in_their_order_beside_the_one_that_serves() -> None:
    stage = Stage()
    assert stage.prepare(1, BACK, FRONT) == [StartLoad(2, BACK)]
    first, then = stage.load(2)
    assert sent([first]) == [prepared(1, 0)]
    assert then == StartLoad(3, FRONT)
    assert sent(stage.load(3)) == [prepared(1, 1)]
    assert stage.status is StageStatus.SERVING
    assert stage.held == {WHOLE, FRONT, BACK}
    assert stage.job(prompt_batch(1), int32(1, 2, 3)).assign.slice == WHOLE


def test_each_beat_says_how_many_slices_are_held_and_what_they_take_besides_the_file() -> None:
    stage = Stage()
    stage.prepare(1, FRONT)
    stage.load(2)
    (beat,) = sent(stage.wait())
    assert isinstance(beat, Heartbeat)
    one = LOADED.kv_bytes + LOADED.compute_bytes + LOADED.copied_bytes
    assert beat.holds == Holds(slices=2, memory_bytes=2 * one)


def test_what_is_held_already_is_answered_at_once_and_took_no_time() -> None:
    stage = Stage()
    effects = stage.prepare(1, FRONT, WHOLE)
    assert sent(effects) == [prepared(1, 1, load_s=0.0)]
    assert effects[-1] == StartLoad(2, FRONT)


def test_a_slice_that_is_listed_twice_is_loaded_once_and_answered_for_both() -> None:
    stage = Stage()
    stage.prepare(1, FRONT, FRONT)
    assert sent(stage.load(2)) == [prepared(1, 0), prepared(1, 1)]


def test_a_slice_that_can_not_be_loaded_is_told_with_device_and_phase_and_the_next_one_is_loaded() -> None:
    stage = Stage()
    stage.prepare(1, FRONT, BACK)
    effects = stage.fail(2)
    (failed,) = sent(effects)
    assert isinstance(failed, PrepareFailed)
    assert (failed.number, failed.index, failed.error.code) == (1, 0, "out_of_memory")
    assert (failed.error.device, failed.error.stage, failed.error.phase) == ("dev", "dev/1", Phase.LOAD)
    assert effects[-1] == StartLoad(3, BACK)
    assert stage.status is StageStatus.SERVING


def test_layers_that_are_no_slice_are_refused_without_a_load() -> None:
    stage = Stage()
    bad = msgspec.structs.replace(FRONT, first=3, end=3)
    effects = stage.prepare(1, bad, BACK)
    assert [type(message) for message in sent(effects)] == [PrepareFailed]
    assert effects[-1] == StartLoad(2, BACK)


def test_what_is_no_longer_listed_is_closed_before_anything_is_loaded() -> None:
    stage = Stage()
    stage.prepare(1, FRONT)
    stage.load(2)
    assert stage.prepare(2, BACK) == [CloseSlices((FRONT,)), StartLoad(3, BACK)]
    assert stage.prepare(3) == [CancelLoad(3)]
    assert stage.held == {WHOLE}


def test_a_newer_wish_cancels_a_load_that_is_no_longer_listed_and_lets_one_that_is_go_on() -> None:
    stage = Stage()
    stage.prepare(1, FRONT)
    assert stage.prepare(2, BACK, FRONT) == []
    assert sent(stage.load(2)) == [prepared(2, 1)]
    assert CancelLoad(3) in stage.prepare(3, FRONT)
    assert stage.do(LoadCancelled(cause="load", number=3)) == []
    assert stage.held == {WHOLE, FRONT}


def test_an_older_wish_is_ignored_and_the_same_one_is_answered_again() -> None:
    stage = Stage()
    stage.prepare(5, FRONT, BACK)
    stage.load(2)
    assert stage.prepare(4) == []
    assert sent(stage.prepare(5, FRONT, BACK)) == [prepared(5, 0)]
    assert sent(stage.load(3)) == [prepared(5, 1)]
    assert sent(stage.prepare(5, FRONT, BACK)) == [prepared(5, 0), prepared(5, 1)]


def test_a_second_wish_of_the_same_number_does_not_replace_the_first() -> None:
    stage = Stage()
    stage.prepare(1, FRONT)
    assert stage.prepare(1, BACK) == []
    assert sent(stage.load(2)) == [prepared(1, 0)]


def test_wishes_before_the_welcome_are_ignored() -> None:
    core = Core()
    core.start()
    assert core.do(PrepareAsked(cause="broker", message=Prepare(1, (FRONT,)))) == []


def test_a_spare_prepares_without_any_epoch() -> None:
    core = Core()
    core.start()
    core.welcome()
    assert quiet(core.do(PrepareAsked(cause="broker", message=Prepare(1, (FRONT,))))) == [StartLoad(1, FRONT)]
    assert core.status is StageStatus.IDLE
    assert sent(core.loaded(1)) == [prepared(1, 0)]


def test_no_progress_is_told_of_a_load_that_nobody_assigned() -> None:
    stage = Stage()
    stage.prepare(1, FRONT)
    assert stage.do(LoadProgressed(cause="load", number=2, phase=Phase.LOAD, done=1, total=1)) == []


def test_an_answer_that_could_not_be_sent_goes_out_with_the_next_beat() -> None:
    stage = Stage()
    stage.prepare(1, FRONT)
    stage.load(2)
    stage.do(ControlNotSent(cause="socket", epoch=Epoch(1), message=prepared(1, 0)))
    assert [type(message) for message in sent(stage.wait())] == [Heartbeat, Prepared]
    assert [type(message) for message in sent(stage.wait())] == [Heartbeat]


def test_an_answer_to_an_older_wish_that_could_not_be_sent_is_forgotten() -> None:
    stage = Stage()
    stage.prepare(1, FRONT)
    stage.load(2)
    stage.prepare(2, FRONT)
    stage.do(ControlNotSent(cause="socket", epoch=Epoch(1), message=prepared(1, 0)))
    assert [type(message) for message in sent(stage.wait())] == [Heartbeat]


# ---- and then it is assigned


def test_a_slice_that_is_held_serves_as_soon_as_its_caches_are_empty_and_the_old_one_stays_if_it_is_listed() -> (
    None
):
    stage = Stage()
    stage.prepare(1, WHOLE, BACK)
    stage.load(2)
    effects = quiet(stage.assign(2, assignment(1, 2)))
    assert effects == [Disconnect(), ConnectNext(Epoch(2), RESULTS, RESULTS), ClearCaches(3, BACK)]
    assert [type(message) for message in sent(stage.loaded(3))] == [Ready]
    assert stage.held == {WHOLE, BACK}


def test_an_old_slice_that_nobody_lists_is_closed_once_its_last_micro_batch_is_computed() -> None:
    stage = Stage()
    stage.prepare(1, BACK)
    stage.load(2)
    job = stage.job(prompt_batch(1), int32(1, 2, 3))
    effects = quiet(stage.assign(2, assignment(1, 2)))
    assert ClearCaches(3, BACK) in effects
    assert not any(isinstance(effect, CloseSlices) for effect in effects)
    done = BatchComputed(cause="batch", job=job, computed=Computed((b"",)), compute_s=1.0, wait_s=0.0)
    assert stage.do(done) == [CloseSlices((WHOLE,))]


@pytest.mark.parametrize("end", [BatchSkipped, BatchComputeFailed])
def test_a_load_that_needs_the_room_of_what_still_computes_waits_for_its_end(end: type) -> None:
    stage = Stage()
    job = stage.job(prompt_batch(1), int32(1, 2, 3))
    assert not any(isinstance(effect, StartLoad) for effect in stage.assign(2, assignment(1, 2)))
    more = {"error": EngineError()} if end is BatchComputeFailed else {}
    assert stage.do(end(cause="batch", job=job, **more)) == [CloseSlices((WHOLE,)), StartLoad(2, BACK)]
    assert [type(message) for message in sent(stage.loaded(2))] == [Ready]


def test_a_slice_that_is_being_prepared_and_then_assigned_is_loaded_once_and_answered_twice() -> None:
    stage = Stage()
    stage.prepare(1, BACK)
    effects = quiet(stage.assign(2, assignment(1, 2)))
    assert effects == [Disconnect(), ConnectNext(Epoch(2), RESULTS, RESULTS), CloseSlices((WHOLE,))]
    assert sent(stage.load(2)) == [Ready(2.0, 100, 20, 3), prepared(1, 0)]
    assert stage.status is StageStatus.SERVING


def test_a_failed_load_that_was_prepared_and_assigned_is_told_as_both() -> None:
    stage = Stage()
    stage.prepare(1, BACK)
    stage.assign(2, assignment(1, 2))
    assert {type(message) for message in sent(stage.fail(2))} == {StageFailed, PrepareFailed}


def test_another_slice_is_assigned_before_everything_that_is_only_prepared() -> None:
    stage = Stage()
    stage.prepare(1, FRONT, BACK)
    stage.load(2)
    other = assignment(slots=2)
    effects = quiet(stage.assign(2, other))
    assert CancelLoad(3) in effects
    assert CloseSlices((WHOLE,)) in effects
    assert stage.do(LoadCancelled(cause="load", number=3)) == [StartLoad(4, other.slice)]
    assert quiet(stage.loaded(4))[-1] == StartLoad(5, BACK)
    assert sent(stage.load(5)) == [prepared(1, 1)]
    assert stage.held == {other.slice, FRONT, BACK}


def test_a_held_slice_is_assigned_without_waiting_for_a_load_beside_it() -> None:
    stage = Stage()
    stage.prepare(1, FRONT, BACK, WHOLE)
    stage.load(2)
    effects = quiet(stage.assign(2, assignment(0, 2)))
    assert ClearCaches(4, FRONT) in effects
    assert CancelLoad(3) not in effects
    assert [type(message) for message in sent(stage.loaded(4))] == [Ready]
    assert sent(stage.load(3)) == [prepared(1, 1)]


@pytest.mark.parametrize("how", ["assigned", "listed"])
def test_an_engine_that_broke_stays_until_it_is_asked_for_and_is_then_loaded_anew(how: str) -> None:
    stage = Stage()
    stage.prepare(1, WHOLE, BACK)
    stage.load(2)
    for number in (1, 2):
        job = stage.job(prompt_batch(number), int32(1, 2, 3))
        stage.do(BatchComputeFailed(cause="batch", job=job, error=EngineError()))
    stage.assign(2, assignment(1, 2))
    stage.loaded(3)
    assert stage.held == {WHOLE, BACK}
    effects = stage.assign(3) if how == "assigned" else stage.prepare(2, WHOLE)
    assert effects[-2:] == [CloseSlices((WHOLE,)), StartLoad(4, WHOLE)]


def test_a_released_stage_keeps_its_slice_until_a_wish_leaves_it_out() -> None:
    stage = Stage()
    stage.do(Released(cause="broker", epoch=Epoch(2)))
    assert stage.held == {WHOLE}
    assert stage.prepare(1, BACK) == [CloseSlices((WHOLE,)), StartLoad(2, BACK)]


def test_a_release_ends_the_load_of_what_was_assigned_but_not_of_what_is_prepared() -> None:
    stage = Stage()
    stage.prepare(1, BACK)
    assert CancelLoad(2) not in stage.do(Released(cause="broker", epoch=Epoch(2)))
    stage.assign(3, assignment(slots=2))
    stage.do(LoadCancelled(cause="load", number=2))
    assert CancelLoad(3) in stage.do(Released(cause="broker", epoch=Epoch(4)))


def test_a_broker_that_began_anew_finds_everything_still_held_and_may_count_from_one_again() -> None:
    stage = Stage()
    stage.prepare(7, FRONT)
    stage.load(2)
    stage.do(RefusedBy(cause="broker", error=UNKNOWN))
    stage.welcome()
    assert stage.held == {WHOLE, FRONT}
    assert ClearCaches(3, WHOLE) in stage.assign(1)
    stage.loaded(3)
    assert stage.held == {WHOLE, FRONT}
    assert sent(stage.prepare(1, FRONT)) == [prepared(1, 0, load_s=0.0)]


def test_a_load_goes_on_while_the_stage_joins_again_and_nobody_is_told() -> None:
    stage = Stage()
    stage.prepare(7, FRONT, BACK)
    effects = stage.do(RefusedBy(cause="broker", error=UNKNOWN))
    assert not any(isinstance(effect, CancelLoad) for effect in effects)
    stage.welcome()
    assert stage.load(2) == []
    assert stage.held == {WHOLE, FRONT}
