"""What a stage does when it is asked to measure: once, answered as often as asked, given up for an assignment."""

from __future__ import annotations

import pytest

from potluck.stage.effects import CancelMeasure, Effect, SendControl, StartMeasure, StartProbe
from potluck.stage.events import (
    Assigned,
    MeasureAsked,
    MeasureBroke,
    MeasureCancelled,
    MeasureFinished,
    MeasureProgressed,
    ProbeAsked,
    ProbeEnded,
    StageEvent,
    Started,
    StopAsked,
    Welcomed,
)
from potluck.stage.machine import StageIdentity, StageMachine
from potluck.wire.errors import EngineError, Phase
from potluck.wire.ids import Epoch
from potluck.wire.measures import LinkTiming, Profile
from potluck.wire.messages import Measure, Measured, MeasureFailed, Probe, Probed, Progress
from stage_world import MODEL, assignment

ASK = Measure(MODEL, slots=4, context_tokens=32, batch_tokens=16)
OTHER = Measure(MODEL, slots=8, context_tokens=32, batch_tokens=16)
PROFILE = Profile(MODEL.fingerprint, took_s=2.0)
LINK = LinkTiming(rtt_s=0.001)


class Core:
    def __init__(self, *, joined: bool = True) -> None:
        me = StageIdentity("dev/1", "dev", "1.0", "fake", "tcp://dev:5", (MODEL.fingerprint,))
        self.machine = StageMachine(me, "broker:7946", drain_timeout_s=30.0, hang_s=15.0)
        self.now = 0.0
        self.do(Started(cause="start"))
        if joined:
            self.do(Welcomed(cause="broker", epoch=Epoch(1), heartbeat_s=1.0, misses=3, broker_version="1"))

    def do(self, event: StageEvent) -> list[Effect]:
        effects = self.machine.handle(event, self.now)
        self.machine.validate()
        return effects

    def ask(self, message: Measure = ASK) -> list[Effect]:
        return self.do(MeasureAsked(cause="broker", message=message))


def sent(effects: list[Effect]) -> list[object]:
    return [effect.message for effect in effects if isinstance(effect, SendControl)]


def test_a_question_starts_one_measurement_however_often_it_is_asked():
    core = Core()
    assert StartMeasure(1, ASK) in core.ask()
    assert core.ask() == []
    assert sent(core.do(MeasureFinished(cause="m", number=1, profile=PROFILE))) == [Measured(PROFILE)]
    assert core.ask() == [SendControl(Measured(PROFILE), Epoch(1))]


def test_a_failure_names_device_stage_and_phase_and_is_told_again_too():
    core = Core()
    core.ask()
    (told,) = sent(core.do(MeasureBroke(cause="m", number=1, error=EngineError("No."))))
    assert isinstance(told, MeasureFailed)
    error = told.error.restore()
    assert (error.device, error.stage, error.phase) == ("dev", "dev/1", Phase.MEASURE)
    assert sent(core.ask()) == [told]


def test_another_question_ends_the_first_and_is_taken_up_when_it_is_asked_again():
    core = Core()
    core.ask()
    assert core.ask(OTHER) == [CancelMeasure(1)]
    assert sent(core.do(MeasureCancelled(cause="m", number=1))) == []
    assert StartMeasure(2, OTHER) in core.ask(OTHER)


def test_an_answer_to_an_older_question_is_no_answer():
    core = Core()
    core.ask()
    core.do(MeasureFinished(cause="m", number=1, profile=PROFILE))
    core.ask(OTHER)
    assert core.do(MeasureFinished(cause="m", number=1, profile=PROFILE)) == []


def test_an_assignment_ends_measuring():
    core = Core()
    core.ask()
    assert CancelMeasure(1) in core.do(Assigned(cause="broker", epoch=Epoch(2), assign=assignment()))


def test_a_stage_that_stops_ends_measuring():
    core = Core()
    core.ask()
    assert CancelMeasure(1) in core.do(StopAsked(cause="stop", reason="test"))


def test_progress_is_told_twice_a_second_at_most_and_at_the_end():
    core = Core()
    core.ask()
    told = []
    for done in range(1, 11):
        core.now += 0.1
        told += sent(core.do(MeasureProgressed(cause="m", number=1, phase="measure", done=done, total=10)))
    assert told == [Progress(Phase.MEASURE, done, 10) for done in (1, 6, 10)]


def test_a_probe_is_started_and_what_it_found_is_told():
    core = Core()
    probe = Probe(7, "tcp://other:5", 1000)
    assert core.do(ProbeAsked(cause="broker", message=probe)) == [StartProbe(probe)]
    assert sent(core.do(ProbeEnded(cause="p", number=7, link=LINK))) == [Probed(7, LINK)]
    assert sent(core.do(ProbeEnded(cause="p", number=8, link=None))) == [Probed(8)]


@pytest.mark.parametrize(
    "event", [MeasureAsked(cause="b", message=ASK), ProbeAsked(cause="b", message=Probe(1, "tcp://x:1", 1))]
)
def test_before_the_welcome_nothing_is_measured(event: StageEvent):
    assert Core(joined=False).do(event) == []
