"""How the stage's core ends: asked politely, told to, let go, left alone, and when its engine hangs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from potluck.stage.effects import Disconnect, Exit, Report, SendControl
from potluck.stage.events import (
    BatchComputed,
    BrokerCut,
    BrokerReached,
    Computed,
    ControlNotSent,
    Dismissed,
    LeaveAsked,
    LoadFailed,
    RefusedBy,
    Released,
    StageEvent,
    StopAsked,
    TimePassed,
)
from potluck.stage.machine import StageStatus
from potluck.wire.errors import EngineError, EngineHangsError, Phase, StageError
from potluck.wire.ids import Epoch
from potluck.wire.messages import ErrorInfo, Goodbye, Heartbeat, Leave, Ready, Register
from stage_core import Core, quiet, sent
from stage_world import assignment, int32, prompt_batch

ASKED = LeaveAsked(cause="signal", reason="SIGTERM came")
WENT = [SendControl(Goodbye("SIGTERM came"), Epoch(1)), Exit(0)]
UNKNOWN = ErrorInfo.of(StageError("This broker does not know the stage."))


def asked() -> Core:
    """Serves in epoch 1 and was asked to leave at 0 s."""
    core = Core()
    core.serve()
    assert sent(core.do(ASKED)) == [Leave("SIGTERM came")]
    return core


def test_a_stage_that_serves_asks_to_leave_says_for_what_it_waits_and_serves_on() -> None:
    core = Core()
    core.serve()
    effects = core.do(ASKED)
    (line,) = [effect for effect in effects if isinstance(effect, Report)]
    assert "30 s" in line.text
    assert "layers 0-3 of toy" in line.text
    assert quiet(effects) == [SendControl(Leave("SIGTERM came"), Epoch(1))]
    core.job(prompt_batch(1), int32(1, 2, 3))
    assert sent(core.assign(2)) == []
    assert [type(message) for message in sent(core.loaded(2))] == [Ready]


def test_it_goes_when_the_broker_says_farewell() -> None:
    assert asked().do(Dismissed(cause="broker"))[-2:] == WENT


def test_a_farewell_that_was_not_asked_for_changes_nothing() -> None:
    core = Core()
    core.serve()
    assert core.do(Dismissed(cause="broker")) == []
    assert core.status is StageStatus.SERVING


def test_it_goes_when_the_time_to_wait_has_passed() -> None:
    core = asked()
    core.now = 29.9
    assert [type(message) for message in sent(core.do(TimePassed(cause="timer")))] == [Heartbeat]
    assert core.machine.next_deadline() == 30.0
    assert core.wait()[-2:] == WENT


def test_it_goes_at_once_when_it_is_told_to() -> None:
    stop = StopAsked(cause="signal", reason="SIGTERM came again")
    assert asked().do(stop) == [
        Disconnect(),
        SendControl(Goodbye("SIGTERM came again"), Epoch(1)),
        Exit(0),
    ]


def test_asked_twice_it_waits_no_longer_than_asked_once() -> None:
    core = asked()
    core.now = 10.0
    assert core.do(ASKED) == []
    assert core.machine.leaving.due_s == 30.0


@pytest.mark.parametrize(
    "event",
    [
        BrokerCut(cause="connection"),
        Released(cause="broker", epoch=Epoch(2)),
        RefusedBy(cause="broker", error=UNKNOWN),
        RefusedBy(cause="broker", error=ErrorInfo("malformed", "what was that?")),
    ],
)
def test_it_goes_as_soon_as_nobody_counts_on_it_any_more(event: StageEvent) -> None:
    effects = asked().do(event)
    assert effects[-1] == Exit(0)
    assert not any(isinstance(message, Register) for message in sent(effects))


def test_it_goes_when_what_it_was_to_load_can_not_be_loaded() -> None:
    core = asked()
    core.assign(2, assignment(0, 2))
    assert core.do(LoadFailed(cause="load", number=2, error=EngineError()))[-1] == Exit(0)


def nobody() -> Core:
    core = Core()
    core.start()
    return core


def idle() -> Core:
    core = nobody()
    core.welcome()
    return core


def cut() -> Core:
    core = Core()
    core.serve()
    core.do(BrokerCut(cause="connection"))
    return core


def hurried() -> Core:
    core = Core(drain_timeout_s=0.0)
    core.serve()
    return core


@pytest.mark.parametrize("begin", [nobody, idle, cut, hurried])
def test_a_stage_that_nobody_would_miss_leaves_at_once(begin: object) -> None:
    assert callable(begin)
    effects = begin().do(ASKED)
    assert [type(message) for message in sent(effects)] == [Goodbye]
    assert effects[-1] == Exit(0)


@pytest.mark.parametrize("back", [BrokerReached(cause="connection"), None])
def test_a_broker_that_is_back_is_told(back: StageEvent | None) -> None:
    core = cut()
    if back is not None:
        core.do(back)
    else:
        core.do(RefusedBy(cause="broker", error=UNKNOWN))
        core.welcome()
        core.assign(1)
    assert sent(core.do(ASKED)) == [Leave("SIGTERM came")]


def test_a_wish_to_leave_that_could_not_be_sent_goes_out_with_the_next_beat() -> None:
    core = asked()
    core.do(ControlNotSent(cause="socket", epoch=Epoch(1), message=Leave("SIGTERM came")))
    assert [type(message) for message in sent(core.wait())] == [Heartbeat, Leave]
    assert [type(message) for message in sent(core.wait())] == [Heartbeat]


# ---- an engine that hangs


def done(core: Core, number: int) -> StageEvent:
    job = core.machine.state.running[number].job
    return BatchComputed(cause="batch", job=job, computed=Computed((b"",)), compute_s=1.0, wait_s=0.0)


@pytest.mark.parametrize("how", ["assigned", "released"])
def test_an_engine_that_is_still_busy_with_an_older_epoch_makes_the_stage_ask_for_a_new_process(
    how: str,
) -> None:
    core = Core()
    core.serve()
    core.job(prompt_batch(1), int32(1, 2, 3))
    core.now = 100.0
    if how == "assigned":
        core.assign(2)
    else:
        core.do(Released(cause="broker", epoch=Epoch(2)))
    core.now = 114.9
    assert not any(isinstance(effect, Exit) for effect in core.do(TimePassed(cause="timer")))
    core.now = 115.0
    effects = core.do(TimePassed(cause="timer"))
    *_, goodbye, last = effects
    assert isinstance(last, Exit)
    assert last.restart
    assert isinstance(last.error, EngineHangsError)
    assert (last.code, last.error.device, last.error.phase) == (1, "dev", Phase.SERVE)
    assert goodbye == SendControl(Goodbye(last.error.what), Epoch(2))
    assert core.machine.next_deadline() is None


def test_a_long_micro_batch_of_the_epoch_that_serves_is_none_of_the_stages_business() -> None:
    core = Core()
    core.serve()
    core.job(prompt_batch(1), int32(1, 2, 3))
    core.now = 1000.0
    assert [type(message) for message in sent(core.do(TimePassed(cause="timer")))] == [Heartbeat]


def slow(core: Core) -> None:
    """The device takes 20 s for a token."""
    core.job(prompt_batch(1, tokens=1), int32(1))
    job = core.machine.state.running[0].job
    core.do(BatchComputed(cause="batch", job=job, computed=Computed((b"",)), compute_s=20.0, wait_s=0.0))


@pytest.mark.parametrize(
    ("tokens", "pace", "allowed_s"), [(1, None, 15.0), (16, None, 15.0), (3, slow, 180.0)]
)
def test_a_slow_device_is_not_taken_for_hung(
    tokens: int, pace: Callable[[Core], None] | None, allowed_s: float
) -> None:
    core = Core()
    core.serve()
    if pace is not None:
        pace(core)
    core.job(prompt_batch(2, tokens=tokens), int32(*range(tokens)))
    core.job(prompt_batch(3, tokens=1, slot=1), int32(1))
    core.assign(2)
    core.now = allowed_s - 1.0
    assert not any(isinstance(effect, Exit) for effect in core.do(TimePassed(cause="timer")))
    core.now = allowed_s
    assert isinstance(core.do(TimePassed(cause="timer"))[-1], Exit)


def test_an_engine_that_comes_back_in_time_is_not_taken_for_hung() -> None:
    core = Core()
    core.serve()
    core.job(prompt_batch(1), int32(1, 2, 3))
    core.job(prompt_batch(2), int32(1, 2, 3))
    core.assign(2)
    core.now = 14.0
    core.do(done(core, 0))
    core.do(done(core, 0))
    core.loaded(2)
    core.now = 100.0
    assert not any(isinstance(effect, Exit) for effect in core.do(TimePassed(cause="timer")))


def test_yet_another_epoch_gives_a_hung_engine_no_more_time() -> None:
    core = Core()
    core.serve()
    core.job(prompt_batch(1), int32(1, 2, 3))
    core.assign(2)
    core.now = 10.0
    core.assign(3)
    core.now = 15.0
    assert isinstance(core.do(TimePassed(cause="timer"))[-1], Exit)


def test_caches_that_are_never_emptied_are_found_too() -> None:
    core = Core()
    core.serve()
    core.assign(2)
    core.do(Released(cause="broker", epoch=Epoch(3)))
    core.now = 15.0
    assert isinstance(core.do(TimePassed(cause="timer"))[-1], Exit)
