"""A stage's core by plain calls, with a clock; its invariants are checked after every event."""

from __future__ import annotations

from potluck.stage.effects import Effect, Report, SendControl, StartCompute
from potluck.stage.engine import Loaded
from potluck.stage.events import (
    Assigned,
    BatchArrived,
    Job,
    LoadFinished,
    StageEvent,
    Started,
    TimePassed,
    Welcomed,
)
from potluck.stage.machine import StageIdentity, StageMachine, StageStatus
from potluck.wire.ids import Epoch
from potluck.wire.messages import Assign, Heartbeat, MicroBatch, StageCounters
from stage_world import MODEL, assignment

LOADED = Loaded(width=MODEL.width, vocab=512, weights_bytes=93, kv_bytes=20, compute_bytes=3, copied_bytes=7)
SLICE = assignment().slice


class Core:
    """A machine with a clock, checked after every event."""

    def __init__(self, *, keep_trying: bool = False, drain_timeout_s: float = 30.0) -> None:
        me = StageIdentity("dev/1", "dev", "1.0", "fake", "tcp://dev:5", (MODEL.fingerprint,))
        self.machine = StageMachine(
            me, "broker:7946", drain_timeout_s=drain_timeout_s, hang_s=15.0, keep_trying=keep_trying
        )
        self.now = 0.0

    def do(self, event: StageEvent) -> list[Effect]:
        effects = self.machine.handle(event, self.now)
        self.machine.validate()
        return effects

    def wait(self) -> list[Effect]:
        """Lets the next deadline come."""
        due = self.machine.next_deadline()
        assert due is not None
        self.now = max(self.now, due)
        return self.do(TimePassed(cause="timer"))

    def start(self) -> list[Effect]:
        return self.do(Started(cause="start"))

    def welcome(self, epoch: int = 0) -> list[Effect]:
        return self.do(
            Welcomed(cause="broker", epoch=Epoch(epoch), heartbeat_s=1.0, misses=3, broker_version="1.0")
        )

    def assign(self, epoch: int = 1, assign: Assign | None = None) -> list[Effect]:
        return self.do(Assigned(cause="broker", epoch=Epoch(epoch), assign=assign or assignment()))

    def loaded(self, number: int) -> list[Effect]:
        return self.do(LoadFinished(cause="load", number=number, loaded=LOADED, load_s=2.0))

    def serve(self, epoch: int = 1, assign: Assign | None = None) -> None:
        self.start()
        self.welcome()
        self.assign(epoch, assign)
        self.loaded(1)
        assert self.status is StageStatus.SERVING

    def arrive(self, message: MicroBatch, *arrays: bytes, epoch: int = 1) -> list[Effect]:
        return self.do(BatchArrived(cause="batch", epoch=Epoch(epoch), message=message, arrays=arrays))

    def job(self, message: MicroBatch, *arrays: bytes) -> Job:
        (effect,) = self.arrive(message, *arrays)
        assert isinstance(effect, StartCompute)
        return effect.job

    def beat(self) -> StageCounters:
        (effect, *_) = self.wait()
        assert isinstance(effect, SendControl)
        assert isinstance(effect.message, Heartbeat)
        return effect.message.counters

    @property
    def status(self) -> StageStatus:
        return self.machine.state.status


def quiet(effects: list[Effect]) -> list[Effect]:
    return [effect for effect in effects if not isinstance(effect, Report)]


def sent(effects: list[Effect]) -> list[object]:
    return [effect.message for effect in effects if isinstance(effect, SendControl)]
