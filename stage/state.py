"""What a stage's core remembers between two events. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from potluck.stage.engine import Loaded
from potluck.stage.events import Job
from potluck.wire.errors import Phase, PotluckError
from potluck.wire.ids import Epoch
from potluck.wire.messages import (
    Assign,
    Capabilities,
    Holds,
    Prepared,
    PrepareFailed,
    Ready,
    Slice,
    SlotCopy,
    StageCounters,
    StageFailed,
)

RELOAD_AFTER_BREAKS = 2
"""After this many failed micro-batches in a row an engine is not trusted any more: the next epoch loads it anew."""


LOOK = "Look at the log of that device; restart potluck-stage there if it goes on."
"""What to do about an error that does not know itself."""


def words_of(layers: Slice) -> str:
    """A slice for people, its last layer included."""
    return f"layers {layers.first}-{layers.end - 1} of {layers.model.name}"


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
        """The error with this device and stage, and the phase and what to do unless it knows better."""
        return type(error)(
            error.what,
            hint=error.hint or LOOK,
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
    held: dict[int, int] = field(default_factory=dict)
    """Tokens by slot, after the micro-batches that are computed."""
    fresh: dict[int, int] = field(default_factory=dict)
    """Tokens computed since the slot was copied, by slot; more than it holds if some were forgotten again."""

    @property
    def slice(self) -> Slice:
        """What has to be held for it."""
        return self.assign.slice

    @property
    def is_open(self) -> bool:
        """Whether the broker still waits for an answer."""
        return self.outcome is None


@dataclass(slots=True)
class Load:
    """The one load that is under way."""

    number: int
    slice: Slice
    cancelled: bool = False


@dataclass(slots=True)
class Clearing:
    """The caches of a slice are emptied, on the compute lane, after what was queued there before."""

    number: int
    slice: Slice
    due_s: float | None = None
    """See Running."""


@dataclass(slots=True)
class Held:
    """A slice that is loaded."""

    loaded: Loaded
    breaks: int = 0
    """Micro-batches in a row that its engine could not compute."""
    copies: dict[int, int] = field(default_factory=dict)
    """By slot, the micro-batch after which the copy in it was taken; what is in other slots is known to nobody."""

    @property
    def is_trusted(self) -> bool:
        """Whether the engine may serve another epoch."""
        return self.breaks < RELOAD_AFTER_BREAKS


@dataclass(slots=True)
class Restoring:
    """The one copy that goes into a slice on standby."""

    number: int
    message: SlotCopy
    held: Held
    """Where it goes. If that is closed meanwhile, the copy is gone with it."""
    void: bool = False
    """Whether it means nothing any more."""


@dataclass(slots=True)
class Running:
    """A micro-batch that the compute lane was given."""

    job: Job
    due_s: float | None = None
    """When it counts as hanging, once its epoch is over."""


@dataclass(slots=True)
class Preparation:
    """The latest Prepare, and what came of it."""

    number: int | None = None
    """None if nobody waits for answers: none came yet, or a broker that began anew does not know of it."""
    slices: tuple[Slice, ...] = ()
    outcomes: dict[int, Prepared | PrepareFailed] = field(default_factory=dict)
    """By the index of the slice."""
    untold: set[int] = field(default_factory=set)
    """Those outcomes that could not be sent."""

    def open(self) -> list[tuple[int, Slice]]:
        """What has no answer yet, in order."""
        if self.number is None:
            return []
        return [each for each in enumerate(self.slices) if each[0] not in self.outcomes]


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
    cut: bool = False
    """Whether the connection is known to be broken."""


@dataclass(slots=True)
class StageState:
    """All of it."""

    broker: Broker = field(default_factory=Broker)
    epoch: Epoch = Epoch(0)
    """The newest epoch the broker spoke of since it welcomed the stage."""
    spoken: bool = False
    """Whether this epoch's Assign or Release has come."""
    wanted: Assignment | None = None
    prepare: Preparation = field(default_factory=Preparation)
    spared: frozenset[Slice] = frozenset()
    """What was held when the assignment ended: it stays until the next Prepare or Assign."""
    held: dict[Slice, Held] = field(default_factory=dict)
    load: Load | None = None
    clearing: Clearing | None = None
    copying: tuple[int, Slice] | None = None
    """The number and the slice of the copy that the compute lane takes."""
    restoring: Restoring | None = None
    running: list[Running] = field(default_factory=list)
    """In the order the compute lane got them."""
    slowest_token_s: float = 0.0
    """Seconds per token of the slowest micro-batch so far."""
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

    @property
    def holds(self) -> Holds:
        """What is loaded, for the broker."""
        took = (held.loaded for held in self.held.values())
        return Holds(len(self.held), sum(one.kv_bytes + one.compute_bytes + one.copied_bytes for one in took))

    @property
    def keep(self) -> frozenset[Slice]:
        """What is to stay held, and may be loaded."""
        active = frozenset() if self.wanted is None else frozenset({self.wanted.slice})
        return active | self.spared | frozenset(self.prepare.slices)

    @property
    def busy(self) -> frozenset[Slice]:
        """What the compute lane is using, or will be: its engine is nobody else's."""
        used = {running.job.assign.slice for running in self.running}
        if self.clearing is not None:
            used.add(self.clearing.slice)
        if self.copying is not None:
            used.add(self.copying[1])
        return frozenset(used)

    @property
    def hang_due_s(self) -> float | None:
        """When what the compute lane still does for an older epoch counts as hanging."""
        dues = [running.due_s for running in self.running]
        if self.clearing is not None:
            dues.append(self.clearing.due_s)
        return min((due for due in dues if due is not None), default=None)

    def serves(self, held: Slice) -> bool:
        """Whether micro-batches are let in for it."""
        return (
            self.wanted is not None and self.wanted.slice == held and isinstance(self.wanted.outcome, Ready)
        )

    def is_current(self, epoch: Epoch) -> bool:
        """Whether this is the epoch of what is assigned now."""
        return self.wanted is not None and epoch == self.wanted.epoch

    def validate(self) -> None:
        """Raises AssertionError if the state contradicts itself."""
        broker, wanted = self.broker, self.wanted
        assert self.load is None or self.load.slice not in self.held, "what is held is not loaded again"
        assert self.clearing is None or self.clearing.slice in self.held, "only what is held is cleared"
        assert self.busy <= self.held.keys(), "an engine that computes is not closed"
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
        assert self.held.keys() - self.keep <= self.busy, "what is not wanted is closed once it is free"
        if self.status is StageStatus.SERVING:
            assert wanted is not None, "a stage that serves was assigned something"
            assert wanted.slice in self.held, "a stage serves what it holds"
            assert self.clearing is None or self.clearing.slice != wanted.slice, (
                "caches are empty before it serves"
            )
        if self.status is StageStatus.LOADING:
            assert self.load or self.clearing or self.busy or self.restoring, (
                "something is done for what is wanted"
            )
