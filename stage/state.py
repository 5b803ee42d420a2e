"""What a stage's core remembers between two events. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Self

from potluck.stage.engine import Loaded
from potluck.wire.errors import Phase, PotluckError
from potluck.wire.ids import Epoch
from potluck.wire.messages import Assign, Capabilities, Ready, StageCounters, StageFailed


@dataclass(frozen=True, slots=True)
class StageIdentity:
    """What the stage says of itself when it registers."""

    stage: str
    device: str
    version: str
    engine: str
    data_endpoint: str
    models: tuple[str, ...] = ()
    capabilities: Capabilities = Capabilities()

    def placed(self, error: PotluckError, phase: Phase) -> PotluckError:
        """The error with this device and stage, and the phase unless it knows better."""
        return type(error)(
            error.what,
            hint=error.hint,
            device=self.device,
            stage=self.stage,
            phase=error.phase or phase,
            param=error.param,
            **error.facts,
        )


class StageStatus(StrEnum):
    """Where a stage stands."""

    JOINING = "joining"
    """The broker has not taken it in, or does not know it any more."""
    IDLE = "idle"
    """Taken in, nothing assigned."""
    LOADING = "loading"
    SERVING = "serving"
    FAILED = "failed"
    """What was assigned can't be loaded; waits for something else."""
    STOPPED = "stopped"


class SliceKey(NamedTuple):
    """What an engine was loaded for. Assignments of equal keys differ in caches only."""

    fingerprint: str
    first: int
    end: int
    slots: int
    context_tokens: int
    batch_tokens: int
    exact: bool
    gpu_layers: int

    @classmethod
    def of(cls, assign: Assign) -> Self:
        """The key of an assignment."""
        return cls(
            assign.model.fingerprint,
            assign.first,
            assign.end,
            assign.slots,
            assign.context_tokens,
            assign.batch_tokens,
            assign.exact,
            assign.gpu_layers,
        )


@dataclass(slots=True)
class Assignment:
    """What the broker wants in the current epoch, and what came of it."""

    epoch: Epoch
    assign: Assign
    outcome: Ready | StageFailed | None = None
    """What was told to the broker when loading ended."""
    told: bool = True
    """False while the outcome could not be sent."""
    newest: int = -1
    """The micro-batch that came last. Their numbers grow."""

    @property
    def key(self) -> SliceKey:
        """What the engine has to hold."""
        return SliceKey.of(self.assign)


@dataclass(slots=True)
class Load:
    """The one load that the lane is busy with."""

    number: int
    key: SliceKey
    only_clears: bool = False
    """The engine is kept and only its caches are emptied; should that fail, it is loaded anew."""
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """What the engine holds."""

    key: SliceKey
    loaded: Loaded


@dataclass(slots=True)
class Sums:
    """The counters of the current assignment; `StageCounters` is their snapshot."""

    batches: int = 0
    tokens: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    send_s: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    dropped_frames: int = 0
    refused_frames: int = 0

    def snapshot(self) -> StageCounters:
        """The sums as they travel."""
        return StageCounters(
            self.batches,
            self.tokens,
            self.compute_s,
            self.wait_s,
            self.send_s,
            self.bytes_in,
            self.bytes_out,
            self.dropped_frames,
            self.refused_frames,
        )


@dataclass(slots=True)
class Broker:
    """How things stand with the broker. Times on the core's clock."""

    joined: bool = False
    asked: int = 0
    """Registrations since the last welcome that have no answer yet."""
    register_due_s: float | None = None
    heartbeat_s: float = 1.0
    beat_due_s: float | None = None


@dataclass(slots=True)
class StageState:
    """All of it."""

    broker: Broker = field(default_factory=Broker)
    epoch: Epoch = Epoch(0)
    """The newest epoch the broker spoke of since it welcomed the stage."""
    spoken: bool = False
    """Whether this epoch's Assign or Release has come."""
    wanted: Assignment | None = None
    load: Load | None = None
    held: Held | None = None
    breaks: int = 0
    """Micro-batches in a row that the engine could not compute."""
    sums: Sums = field(default_factory=Sums)
    stopped: bool = False

    @property
    def status(self) -> StageStatus:
        """Where the stage stands."""
        if self.stopped:
            return StageStatus.STOPPED
        if not self.broker.joined:
            return StageStatus.JOINING
        if self.wanted is None:
            return StageStatus.IDLE
        match self.wanted.outcome:
            case None:
                return StageStatus.LOADING
            case Ready():
                return StageStatus.SERVING
            case StageFailed():
                return StageStatus.FAILED

    def is_current(self, epoch: Epoch) -> bool:
        """Whether this is the epoch of what is assigned now."""
        return self.wanted is not None and epoch == self.wanted.epoch

    def validate(self) -> None:
        """Raises AssertionError if the state contradicts itself."""
        broker, wanted = self.broker, self.wanted
        assert self.load is None or self.held is None, "an engine can't hold a slice while another is loaded"
        if self.stopped:
            assert (broker.register_due_s, broker.beat_due_s) == (None, None), (
                "a stopped stage waits for nothing"
            )
            return
        assert broker.joined == (broker.beat_due_s is not None), (
            "beats are due exactly while the stage is joined"
        )
        assert not broker.joined or broker.register_due_s is None, "a joined stage does not register"
        assert wanted is None or broker.joined, "only a broker that knows the stage assigns"
        assert wanted is None or wanted.epoch == self.epoch, "what is wanted is of the current epoch"
        if self.status is StageStatus.SERVING:
            assert self.held is not None, "a stage that serves holds something"
            assert wanted is not None, "a stage that serves was assigned something"
            assert self.held.key == wanted.key, "a stage serves what it holds"
        if self.status is StageStatus.LOADING:
            assert self.load is not None, "something is loaded for what is wanted"
