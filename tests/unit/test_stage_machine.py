"""The stage's core by plain calls: which epoch counts, when it registers, what it loads, what it lets in."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from potluck.stage.effects import (
    CancelLoad,
    ClearCaches,
    CloseSlices,
    ConnectNext,
    Disconnect,
    Exit,
    ForwardBatch,
    Reconnect,
    Report,
    SendControl,
    SendResult,
    StartCompute,
    StartLoad,
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
    Computed,
    ControlNotSent,
    ControlRefused,
    DataRefused,
    Job,
    LeaveAsked,
    LoadCancelled,
    LoadFailed,
    LoadFinished,
    LoadProgressed,
    PrepareAsked,
    RefusedBy,
    Released,
    SendTimedOut,
    StageEvent,
    Started,
    StopAsked,
    TimePassed,
    Welcomed,
)
from potluck.stage.machine import StageStatus
from potluck.stage.membership import REFUSED_RETRY_S, REGISTER_MOST_S
from potluck.wire.errors import (
    EngineError,
    MalformedError,
    ModelError,
    OutOfMemoryError,
    Phase,
    StageError,
    VersionMismatchError,
)
from potluck.wire.ids import Epoch
from potluck.wire.messages import (
    Assign,
    BatchDone,
    BatchFailed,
    ErrorInfo,
    Goodbye,
    Heartbeat,
    Hop,
    MicroBatch,
    Prepare,
    Prepared,
    PrepareFailed,
    Progress,
    Ready,
    Register,
    Slice,
    SlotSampling,
    Span,
    StageCounters,
    StageFailed,
    Trim,
)
from potluck.wire.sampling import GREEDY
from stage_core import LOADED, SLICE, Core, quiet, sent
from stage_world import NEXT, RESULTS, assignment, int32, prompt_batch, rows

UNKNOWN = ErrorInfo.of(StageError("This broker does not know the stage."))


# ---- joining


def test_a_started_stage_registers_with_its_data_endpoint_and_models() -> None:
    (register,) = sent(Core().start())
    assert isinstance(register, Register)
    assert (register.stage, register.data_endpoint, register.models) == ("dev/1", "tcp://dev:5", ("fp-toy",))


def test_an_unanswered_registration_is_repeated_at_growing_intervals_over_new_connections() -> None:
    core = Core()
    core.start()
    gaps = []
    for _ in range(8):
        before = core.now
        effects = quiet(core.wait())
        assert isinstance(effects[0], Reconnect)
        assert isinstance(sent(effects)[0], Register)
        gaps.append(core.now - before)
    assert gaps == sorted(gaps)
    assert gaps[0] < 1.0
    assert gaps[-1] == REGISTER_MOST_S


def test_a_broker_that_never_answers_is_reported_once_in_a_while() -> None:
    core = Core()
    effects = core.start()
    for _ in range(30):
        effects += core.wait()
    reports = [effect for effect in effects if isinstance(effect, Report)]
    assert 1 <= len(reports) <= 3
    assert "broker:7946" in reports[0].text


def test_a_welcomed_stage_beats_at_the_brokers_interval_and_registers_no_more() -> None:
    core = Core()
    core.start()
    core.welcome()
    assert core.status is StageStatus.IDLE
    for second in (1.0, 2.0, 3.0):
        assert [type(message) for message in sent(core.wait())] == [Heartbeat]
        assert core.now == second


def test_after_a_freeze_one_beat_is_sent_and_not_those_that_were_missed() -> None:
    core = Core()
    core.start()
    core.welcome()
    core.now = 100.0
    assert len(sent(core.do(TimePassed(cause="timer")))) == 1
    assert core.machine.next_deadline() == 101.0


def test_a_broker_that_does_not_know_the_stage_makes_it_register_again_and_keep_its_weights() -> None:
    core = Core()
    core.serve()
    effects = quiet(core.do(RefusedBy(cause="broker", error=UNKNOWN)))
    assert isinstance(effects[0], Disconnect)
    assert isinstance(sent(effects)[0], Register)
    assert core.status is StageStatus.JOINING
    core.welcome(epoch=0)  # a broker that was started anew counts from zero
    assert ClearCaches(2, SLICE) in core.assign(epoch=1)


def test_more_words_of_not_knowing_while_it_registers_change_nothing() -> None:
    core = Core()
    core.serve()
    core.do(RefusedBy(cause="broker", error=UNKNOWN))
    assert core.do(RefusedBy(cause="broker", error=UNKNOWN)) == []


def test_a_doubled_welcome_does_not_end_the_assignment() -> None:
    core = Core()
    core.serve()
    assert core.welcome() == []
    assert core.status is StageStatus.SERVING


@pytest.mark.parametrize(
    "refusal",
    [
        RefusedBy(cause="broker", error=ErrorInfo("internal_error", "dev has no copy of toy.", "Copy it.")),
        ControlRefused(cause="broker", error=VersionMismatchError("2 here, 1 there.", hint="Upgrade.")),
    ],
)
def test_a_stage_that_is_turned_away_exits_with_the_reason(refusal: StageEvent) -> None:
    core = Core()
    core.start()
    (last,) = [effect for effect in core.do(refusal) if isinstance(effect, Exit)]
    assert last.code == 1
    assert last.error is not None
    assert core.status is StageStatus.STOPPED
    assert core.machine.next_deadline() is None


def test_a_stage_told_to_keep_trying_asks_again_slowly_after_it_was_turned_away() -> None:
    core = Core(keep_trying=True)
    core.start()
    effects = core.do(RefusedBy(cause="broker", error=ErrorInfo("internal_error", "no copy of toy")))
    assert [type(effect) for effect in effects] == [Report]
    assert isinstance(sent(core.wait())[0], Register)
    assert core.now == REFUSED_RETRY_S


def test_a_refused_message_of_a_joined_stage_is_reported_and_no_more() -> None:
    core = Core()
    core.serve()
    effects = core.do(RefusedBy(cause="broker", error=ErrorInfo("malformed", "what was that?")))
    assert [type(effect) for effect in effects] == [Report]
    assert core.status is StageStatus.SERVING


def test_a_stopped_stage_says_goodbye_exits_with_zero_and_does_nothing_more() -> None:
    core = Core()
    core.serve()
    effects = core.do(StopAsked(cause="signal", reason="SIGTERM came"))
    assert effects == [Disconnect(), SendControl(Goodbye("SIGTERM came"), Epoch(1)), Exit(0)]
    assert core.assign(epoch=2) == []


# ---- assignments and loading


def test_an_assignment_opens_the_way_out_loads_the_slice_and_then_the_stage_is_ready() -> None:
    core = Core()
    core.start()
    core.welcome()
    assign = assignment(0, 2)
    assert quiet(core.assign(1, assign)) == [ConnectNext(Epoch(1), NEXT, RESULTS), StartLoad(1, assign.slice)]
    assert core.status is StageStatus.LOADING
    assert quiet(core.loaded(1)) == [SendControl(Ready(2.0, 100, 20, 3), Epoch(1))]
    assert core.status is StageStatus.SERVING


def test_the_same_assignment_again_is_answered_again_and_loads_nothing() -> None:
    core = Core()
    core.start()
    core.welcome()
    core.assign()
    assert core.assign() == []
    (ready,) = core.loaded(1)[1:]
    assert core.assign() == [ready]


def test_an_older_epoch_is_ignored_whatever_it_says() -> None:
    core = Core()
    core.serve(epoch=5)
    assert core.assign(epoch=4) == []
    assert core.do(Released(cause="broker", epoch=Epoch(4))) == []
    assert core.status is StageStatus.SERVING


def test_a_second_assignment_within_one_epoch_does_not_replace_the_first() -> None:
    core = Core()
    core.serve()
    assert quiet(core.assign(1, assignment(0, 2))) == []
    assert core.status is StageStatus.SERVING


def test_an_assignment_after_the_release_of_its_epoch_is_ignored() -> None:
    core = Core()
    core.serve()
    core.do(Released(cause="broker", epoch=Epoch(2)))
    assert core.assign(epoch=2) == []
    assert core.status is StageStatus.IDLE


def test_assignments_before_the_welcome_are_ignored() -> None:
    core = Core()
    core.start()
    assert core.assign() == []


def test_the_same_slice_in_a_new_epoch_only_clears_its_caches() -> None:
    core = Core()
    core.serve()
    effects = quiet(core.assign(epoch=2))
    assert effects == [Disconnect(), ConnectNext(Epoch(2), RESULTS, RESULTS), ClearCaches(2, SLICE)]
    assert sent(core.loaded(2)) == [Ready(2.0, 100, 20, 3)]


@pytest.mark.parametrize("change", ["slots", "context_tokens", "batch_tokens", "exact"])
def test_anything_that_changes_the_engines_memory_or_numbers_loads_anew(change: str) -> None:
    core = Core()
    core.serve()
    other = assignment(0, 1, **{change: True if change == "exact" else 2})
    assert core.assign(2, other)[-2:] == [CloseSlices((SLICE,)), StartLoad(2, other.slice)]


def test_a_released_stage_keeps_its_weights() -> None:
    core = Core()
    core.serve()
    assert quiet(core.do(Released(cause="broker", epoch=Epoch(2)))) == [Disconnect()]
    assert core.status is StageStatus.IDLE
    assert ClearCaches(2, SLICE) in core.assign(epoch=3)


def test_a_new_slice_during_a_load_cancels_it_and_loads_once_the_lane_is_free() -> None:
    core = Core()
    core.start()
    core.welcome()
    core.assign(1, assignment(0, 2))
    other = assignment(1, 2)
    assert CancelLoad(1) in core.assign(2, other)
    assert core.do(LoadCancelled(cause="load", number=1)) == [StartLoad(2, other.slice)]
    assert sent(core.loaded(2)) == [Ready(2.0, 100, 20, 3)]


def test_the_same_slice_in_a_new_epoch_during_its_load_lets_the_load_go_on() -> None:
    core = Core()
    core.start()
    core.welcome()
    core.assign(1)
    assert not [e for e in core.assign(2) if isinstance(e, StartLoad | CancelLoad)]
    assert quiet(core.loaded(1)) == [SendControl(Ready(2.0, 100, 20, 3), Epoch(2))]


def test_a_cancelled_load_that_ended_well_after_all_is_used_if_it_is_wanted_again() -> None:
    core = Core()
    core.start()
    core.welcome()
    core.assign(1)
    core.assign(2, assignment(0, 2))
    core.assign(3)
    assert quiet(core.loaded(1)) == [SendControl(Ready(2.0, 100, 20, 3), Epoch(3))]


def test_a_failed_load_names_device_stage_and_phase_and_the_stage_stays_joined() -> None:
    core = Core()
    core.start()
    core.welcome()
    core.assign()
    (failed,) = sent(core.do(LoadFailed(cause="load", number=1, error=OutOfMemoryError("3 GB short"))))
    assert isinstance(failed, StageFailed)
    assert (failed.error.device, failed.error.stage, failed.error.phase) == ("dev", "dev/1", Phase.LOAD)
    assert failed.error.code == "out_of_memory"
    assert core.status is StageStatus.FAILED
    assert isinstance(sent(core.wait())[0], Heartbeat)
    assert StartLoad(2, SLICE) in core.assign(epoch=2)


def test_a_failure_to_cut_keeps_its_own_phase() -> None:
    core = Core()
    core.start()
    core.welcome()
    core.assign()
    error = ModelError("the disk is full", phase=Phase.SLICE)
    (failed,) = sent(core.do(LoadFailed(cause="load", number=1, error=error)))
    assert isinstance(failed, StageFailed)
    assert failed.error.phase is Phase.SLICE


def test_caches_that_can_not_be_cleared_mean_that_the_slice_is_loaded_anew() -> None:
    core = Core()
    core.serve()
    core.assign(epoch=2)
    effects = core.do(LoadFailed(cause="load", number=2, error=EngineError()))
    assert effects == [CloseSlices((SLICE,)), StartLoad(3, SLICE)]


def test_an_engine_that_failed_twice_in_a_row_is_not_kept() -> None:
    core = Core()
    core.serve()
    job = core.job(prompt_batch(1), int32(1, 2, 3))
    for _ in range(2):
        core.do(BatchComputeFailed(cause="batch", job=job, error=EngineError()))
    assert StartLoad(2, SLICE) in core.assign(epoch=2)


@pytest.mark.parametrize(
    "bad",
    [
        assignment(first=2, end=2),
        assignment(end=9),
        assignment(0, 2, end=4),
        assignment(0, 2, first=1),
        assignment(index=3),
    ],
)
def test_an_assignment_that_makes_no_sense_fails_without_a_load(bad: Assign) -> None:
    core = Core()
    core.start()
    core.welcome()
    effects = core.assign(1, bad)
    assert [type(message) for message in sent(effects)] == [StageFailed]
    assert not any(isinstance(effect, StartLoad) for effect in effects)


def test_progress_is_told_at_every_phase_and_otherwise_twice_a_second_at_most() -> None:
    core = Core()
    core.start()
    core.welcome()
    core.assign()

    def progress(phase: Phase, done: int) -> list[object]:
        return sent(core.do(LoadProgressed(cause="load", number=1, phase=phase, done=done, total=10)))

    assert progress(Phase.SLICE, 0) == [Progress(Phase.SLICE, 0, 10)]
    assert progress(Phase.SLICE, 1) == []
    core.now += 0.5
    assert progress(Phase.SLICE, 2) == [Progress(Phase.SLICE, 2, 10)]
    assert progress(Phase.LOAD, 0) == [Progress(Phase.LOAD, 0, 10)]
    assert progress(Phase.LOAD, 10) == [Progress(Phase.LOAD, 10, 10)]


def test_a_ready_that_could_not_be_sent_goes_out_with_the_next_beat() -> None:
    core = Core()
    core.serve()
    outcome = core.machine.state.wanted
    assert outcome is not None
    assert isinstance(outcome.outcome, Ready)
    core.do(ControlNotSent(cause="socket", epoch=Epoch(1), message=outcome.outcome))
    assert [type(message) for message in sent(core.wait())] == [Heartbeat, Ready]
    assert [type(message) for message in sent(core.wait())] == [Heartbeat]


# ---- micro-batches


def test_a_fitting_micro_batch_goes_to_the_lane_and_its_result_onward_with_a_hop() -> None:
    core = Core()
    core.serve(assign=assignment(0, 2, activation="f16"))
    message = prompt_batch(7)
    job = core.job(message, int32(1, 2, 3))
    out = Computed((b"tokens", b"rows"))
    effects = core.do(BatchComputed(cause="batch", job=job, computed=out, compute_s=0.5, wait_s=0.1))
    hops = (Hop(0, 0.5, 0.1, 12),)
    onward = msgspec.structs.replace(message, hops=hops, activation="f16")
    assert effects == [ForwardBatch(Epoch(1), onward, (b"tokens", b"rows"))]


def test_the_last_stage_sends_the_tokens_to_the_broker() -> None:
    core = Core()
    core.serve(assign=assignment(1, 2))
    message = msgspec.structs.replace(prompt_batch(7), hops=(Hop(0, 1.0, 0.0, 12),))
    job = core.job(message, int32(1, 2, 3), rows(3))
    effects = core.do(
        BatchComputed(cause="batch", job=job, computed=Computed((b"\0\0\0\0",)), compute_s=0.5, wait_s=0.1)
    )
    done = BatchDone(7, (Hop(0, 1.0, 0.0, 12), Hop(1, 0.5, 0.1, 12 + len(rows(3)))))
    assert effects == [SendResult(Epoch(1), done, (b"\0\0\0\0",))]


@pytest.mark.parametrize("epoch", [0, 2])
def test_micro_batches_of_another_epoch_are_dropped_and_counted(epoch: int) -> None:
    core = Core()
    core.serve()
    assert core.arrive(prompt_batch(1), int32(1, 2, 3), epoch=epoch) == []
    assert core.beat().dropped_frames == 1


def test_results_of_an_epoch_that_has_ended_are_dropped() -> None:
    core = Core()
    core.serve()
    job = core.job(prompt_batch(1), int32(1, 2, 3))
    core.assign(epoch=2)
    out = Computed((b"",))
    assert core.do(BatchComputed(cause="batch", job=job, computed=out, compute_s=0.5, wait_s=0.0)) == []
    assert core.do(BatchComputeFailed(cause="batch", job=job, error=EngineError())) == []
    assert core.do(BatchSkipped(cause="batch", job=job)) == []


HOP = (Hop(0, 0.0, 0.0, 0),)


@pytest.mark.parametrize(
    ("message", "arrays"),
    [
        (prompt_batch(1, slot=4), (int32(1, 2, 3), rows(3))),
        (prompt_batch(1, tokens=17), (int32(*range(17)), rows(17))),
        (prompt_batch(1, position=30), (int32(1, 2, 3), rows(3))),
        (prompt_batch(1, wants=4), (int32(1, 2, 3), rows(3))),
        (prompt_batch(1), (int32(1, 2), rows(3))),
        (prompt_batch(1), (int32(1, 2, 3), rows(2))),
        (prompt_batch(1), (int32(1, 2, 3),)),
        (MicroBatch(1, (Span(0, 0, 3, 1),), (Trim(9, 0),)), (int32(1, 2, 3), rows(3))),
        (MicroBatch(1, (Span(0, 0, 3, 1),), (), (SlotSampling(9, GREEDY),)), (int32(1, 2, 3), rows(3))),
        (msgspec.structs.replace(prompt_batch(1), activation="f16"), (int32(1, 2, 3), rows(3))),
    ],
)
def test_a_micro_batch_out_of_bounds_is_refused_to_the_broker_with_device_stage_and_phase(
    message: MicroBatch, arrays: tuple[bytes, ...]
) -> None:
    core = Core()
    core.serve(assign=assignment(1, 2))
    effects = quiet(core.arrive(msgspec.structs.replace(message, hops=HOP), *arrays))
    (effect,) = effects
    assert isinstance(effect, SendResult)
    assert isinstance(effect.message, BatchFailed)
    error = effect.message.error
    assert (error.device, error.stage, error.phase) == ("dev", "dev/1", Phase.PREFILL)
    assert core.beat().refused_frames == 1


def test_a_micro_batch_that_came_by_another_way_is_refused() -> None:
    core = Core()
    core.serve(assign=assignment(1, 2))
    (effect,) = quiet(core.arrive(prompt_batch(1), int32(1, 2, 3), rows(3)))
    assert isinstance(effect, SendResult)


def test_an_engines_error_becomes_a_failed_batch_that_names_device_stage_and_phase() -> None:
    core = Core()
    core.serve(assign=assignment(0, 2))
    decode = core.job(prompt_batch(3, tokens=1, position=3), int32(1))
    (effect,) = quiet(core.do(BatchComputeFailed(cause="batch", job=decode, error=EngineError("NaN"))))
    assert isinstance(effect, SendResult)
    assert isinstance(effect.message, BatchFailed)
    error = effect.message.error
    assert (error.code, error.device, error.stage, error.phase) == (
        "engine_failed",
        "dev",
        "dev/1",
        Phase.DECODE,
    )
    assert core.status is StageStatus.SERVING


def test_counters_are_growing_sums_that_begin_anew_with_every_assignment() -> None:
    core = Core()
    core.serve()
    for number in (1, 2):
        job = core.job(prompt_batch(number), int32(1, 2, 3))
        core.do(BatchComputed(cause="batch", job=job, computed=Computed((b"",)), compute_s=0.5, wait_s=0.25))
        core.do(BatchSent(cause="batch", epoch=Epoch(1), send_s=0.1, bytes_out=50))
    core.do(SendTimedOut(cause="batch", epoch=Epoch(1), batch=2, endpoint=RESULTS, after_s=5.0))
    core.do(DataRefused(cause="frame", error=MalformedError()))
    expected = StageCounters(2, 6, 1.0, 0.5, 0.2, 24, 100, 1, 1)
    assert core.beat() == expected
    core.assign(epoch=2)
    assert core.beat() == StageCounters()


def test_bad_frames_are_all_counted_and_reported_once_in_ten_seconds() -> None:
    core = Core()
    core.serve()
    reports = []
    for _ in range(100):
        core.now += 0.15
        reports += core.do(DataRefused(cause="frame", error=MalformedError("not ours")))
    assert len(reports) == 2
    assert core.beat().refused_frames == 100


def test_the_story_of_a_micro_batch_says_why_it_was_dropped() -> None:
    core = Core()
    core.serve()
    core.arrive(prompt_batch(9), int32(1, 2, 3), epoch=0)
    assert "epoch 0" in str(core.machine.story.of("batch 9")[0])


# ---- any order of events


SLICES = st.sampled_from([assignment().slice, assignment(0, 2).slice, assignment(1, 2).slice])
LEAVE = LeaveAsked(cause="signal", reason="SIGTERM came")
LATER = st.sampled_from([1, 1, 1, 0, -1])
"""Than the newest number: the broker's words are mostly news."""


class AnyOrder(RuleBasedStateMachine):
    """The core under every order of the broker's words, loads and micro-batches; its invariants hold after each."""

    @initialize()
    def begin(self) -> None:
        self.core = Core(keep_trying=True)
        self.lane: list[Job | ClearCaches] = []
        self.loads: list[StartLoad] = []
        self.held: set[Slice] = set()
        self.ready_in: set[int] = set()
        self.batches = 0
        self.leaves = False
        self.listed: tuple[Slice, ...] = ()
        self.number: int | None = None
        self.answered: list[int] = []
        self.do(Started(cause="start"))

    def do(self, event: StageEvent) -> None:
        for effect in self.core.do(event):
            match effect:
                case StartLoad(_, wished):
                    assert not self.loads, "one load at a time"
                    assert wished not in self.held, "nothing is loaded twice"
                    assert self.held <= self.core.machine.state.keep, "room is made first"
                    self.loads.append(effect)
                case CloseSlices(slices):
                    assert not self.in_use & set(slices), "nothing is closed that the compute lane uses"
                    assert self.held >= set(slices)
                    self.held -= set(slices)
                case ClearCaches(_, held):
                    assert held in self.held
                    self.lane.append(effect)
                case StartCompute(job):
                    assert job.epoch in self.ready_in
                    assert job.assign.slice in self.held
                    self.lane.append(job)
                case SendControl(Ready(), epoch):
                    assert epoch == self.core.machine.state.epoch
                    self.ready_in.add(epoch)
                case SendControl(Prepared(number, index) | PrepareFailed(number, index)):
                    assert number == self.number, "only the latest Prepare is answered"
                    self.answered.append(index)
                case ForwardBatch(epoch) | SendResult(epoch):
                    assert epoch == self.core.machine.state.epoch, "nothing of an old epoch leaves"
                case Exit(restart=True):
                    assert self.lane, "only what is on the lane can hang"
                case Exit():
                    assert self.leaves, "a stage that nobody asked to leave stays"
                case _:
                    pass
        if not self.core.machine.state.broker.joined:
            self.number, self.answered = None, []

    def epoch(self, later: int) -> Epoch:
        return Epoch(max(0, self.core.machine.state.epoch + later))

    @property
    def in_use(self) -> set[Slice]:
        return {each.slice if isinstance(each, ClearCaches) else each.assign.slice for each in self.lane}

    @rule(epoch=st.integers(0, 6))
    def welcomed(self, epoch: int) -> None:
        awaited = self.core.machine.membership.is_awaited()
        self.do(Welcomed(cause="broker", epoch=Epoch(epoch), heartbeat_s=1.0, misses=3, broker_version="1"))
        if awaited:
            self.ready_in.clear()
            self.number, self.answered = None, []

    @rule(error=st.sampled_from([UNKNOWN, ErrorInfo("internal_error", "no")]))
    def refused(self, error: ErrorInfo) -> None:
        self.do(RefusedBy(cause="broker", error=error))

    @rule(later=LATER, index=st.integers(0, 1), stages=st.integers(1, 2))
    def assigned(self, later: int, index: int, stages: int) -> None:
        assign = assignment(min(index, stages - 1), stages)
        self.do(Assigned(cause="broker", epoch=self.epoch(later), assign=assign))

    @rule(later=LATER)
    def released(self, later: int) -> None:
        self.do(Released(cause="broker", epoch=self.epoch(later)))

    @precondition(lambda self: self.batches > 2)
    @rule(event=st.sampled_from([BrokerCut(cause="link"), BrokerReached(cause="link"), LEAVE]))
    def leaves_or_is_cut_off(self, event: StageEvent) -> None:
        self.leaves = self.leaves or event == LEAVE
        self.do(event)

    @rule(later=LATER, slices=st.lists(SLICES, max_size=4))
    def prepare(self, later: int, slices: list[Slice]) -> None:
        number = max(0, (self.number or 0) + later)
        if self.core.machine.state.broker.joined:
            if self.number is None or number > self.number:
                self.number, self.listed, self.answered = number, tuple(slices), []
            elif number == self.number and tuple(slices) == self.listed:
                self.answered = []
        self.do(PrepareAsked(cause="broker", message=Prepare(number, tuple(slices))))

    @precondition(lambda self: self.loads)
    @rule(how=st.sampled_from(["finished", "failed", "cancelled"]))
    def load_ends(self, how: str) -> None:
        started = self.loads.pop()
        load = self.core.machine.state.load
        assert load is not None
        match how:
            case "finished":
                self.held.add(started.slice)
                self.do(LoadFinished(cause="load", number=started.number, loaded=LOADED, load_s=1.0))
            case "failed":
                self.do(LoadFailed(cause="load", number=started.number, error=EngineError()))
            case _ if load.cancelled:
                self.do(LoadCancelled(cause="load", number=started.number))
            case _:
                self.loads.append(started)

    @precondition(lambda self: self.core.status is StageStatus.SERVING)
    @rule(late=st.integers(0, 4), slot=st.integers(0, 3), first=st.booleans())
    def batch(self, late: int, slot: int, first: bool) -> None:
        epoch = self.core.machine.state.epoch - late // 4
        self.batches += 1
        message = msgspec.structs.replace(prompt_batch(self.batches, slot=slot), hops=() if first else HOP)
        arrays = (int32(1, 2, 3),) if first else (int32(1, 2, 3), rows(3))
        self.do(BatchArrived(cause="batch", epoch=Epoch(epoch), message=message, arrays=arrays))

    @precondition(lambda self: self.lane)
    @rule(how=st.sampled_from(["done", "failed", "skipped"]))
    def lane_goes_on(self, how: str) -> None:
        match self.lane.pop(0):
            case ClearCaches(number) if how == "failed":
                self.do(LoadFailed(cause="load", number=number, error=EngineError()))
            case ClearCaches(number):
                self.do(LoadFinished(cause="load", number=number, loaded=LOADED, load_s=0.0))
            case Job() as job if how == "done":
                out = Computed((b"", b""))
                self.do(BatchComputed(cause="batch", job=job, computed=out, compute_s=0.1, wait_s=0.0))
            case Job() as job if how == "failed":
                self.do(BatchComputeFailed(cause="batch", job=job, error=EngineError()))
            case Job() as job:
                self.do(BatchSkipped(cause="batch", job=job))

    @rule(seconds=st.floats(0.0, 40.0))
    def time(self, seconds: float) -> None:
        self.core.now += seconds
        self.do(TimePassed(cause="timer"))

    @invariant()
    def waits_for_something(self) -> None:
        if hasattr(self, "core"):
            waits = self.core.machine.next_deadline() is not None
            assert waits != self.core.machine.state.stopped, "a stage that runs registers or beats"

    @invariant()
    def knows_what_it_holds(self) -> None:
        if hasattr(self, "core") and not self.core.machine.state.stopped:
            assert self.core.machine.state.held.keys() == self.held

    @invariant()
    def answers_nothing_twice(self) -> None:
        if hasattr(self, "core"):
            assert len(self.answered) == len(set(self.answered))

    @invariant()
    def comes_to_rest(self) -> None:
        if not hasattr(self, "core") or self.loads or self.lane or self.core.machine.state.stopped:
            return
        state = self.core.machine.state
        if self.number is not None:
            assert sorted(self.answered) == list(range(len(self.listed))), "every slice has its answer"
        if state.wanted is not None:
            assert state.wanted.outcome is not None, "every assignment has its answer"
            assert self.held <= {state.wanted.slice, *self.listed}, "nothing is held for nobody"


TestAnyOrder = AnyOrder.TestCase
