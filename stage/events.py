"""What can happen to a stage: one class per thing that happened, one per outcome. Pure.

The shell builds these from frames, timers and the compute lane. `cause` names what made it happen (the broker, a
micro-batch, a timer), so that `story` can follow one epoch or micro-batch through everything that touched it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from potluck.stage.engine import Loaded
from potluck.wire.errors import PotluckError, WireError
from potluck.wire.frames import Buffer
from potluck.wire.ids import Epoch
from potluck.wire.measures import LinkTiming, Profile
from potluck.wire.messages import (
    Assign,
    ErrorInfo,
    Leave,
    Measure,
    MicroBatch,
    Mirror,
    Prepare,
    Prepared,
    PrepareFailed,
    Probe,
    Ready,
    SlotCopy,
    StageFailed,
)
from potluck.wire.sampling import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Job:
    """One micro-batch that was let in: what the compute lane gets, and what comes back with its outcome."""

    epoch: Epoch
    assign: Assign
    message: MicroBatch
    arrays: tuple[Buffer, ...]
    bytes_in: int


@dataclass(frozen=True, slots=True)
class Computed:
    """What the layers made of a micro-batch: for the next stage its tokens and activations, at the last stage the
    chosen tokens (int32, one per wanted result) and their log-probabilities. The arrays are nobody else's.
    """

    arrays: tuple[Buffer, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened."""

    cause: str


# ---- the broker's words


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Event):
    """The worker runs and its data socket is bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcomed(Event):
    """The broker took the stage in; it knows nothing yet of what the stage holds."""

    epoch: Epoch
    heartbeat_s: float
    misses: int
    broker_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedBy(Event):
    """The broker does not serve the stage, or not the last frame it sent."""

    error: ErrorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned(Event):
    """Layers of a model are this stage's in this epoch."""

    epoch: Epoch
    assign: Assign


@dataclass(frozen=True, slots=True, kw_only=True)
class Released(Event):
    """The stage is not part of this epoch."""

    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareAsked(Event):
    """The broker wants slices held besides what is assigned."""

    message: Prepare


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorAsked(Event):
    """The broker wants the slots of this epoch copied to others."""

    epoch: Epoch
    message: Mirror


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismissed(Event):
    """The stage may leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerReached(Event):
    """The connection to the broker stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerCut(Event):
    """The connection to the broker broke. It comes back by itself if the broker does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRefused(Event):
    """A frame on the control socket is not one the broker may send, or of another protocol version."""

    error: WireError


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlNotSent(Event):
    """A control message could not even be queued."""

    epoch: Epoch
    message: Ready | StageFailed | Prepared | PrepareFailed | Leave


# ---- measuring, numbered by the effect that began it


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureAsked(Event):
    """The broker wants to know how fast this device is."""

    message: Measure


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureProgressed(Event):
    """Some of the timings are done."""

    number: int
    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureFinished(Event):
    """The device is measured."""

    number: int
    profile: Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureBroke(Event):
    """The device can't be measured."""

    number: int
    error: PotluckError


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureCancelled(Event):
    """Measuring was given up because it was no longer wanted."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAsked(Event):
    """The broker wants to know how fast a link is."""

    message: Probe


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeEnded(Event):
    """A link is measured; None if nobody answered."""

    number: int
    link: LinkTiming | None


# ---- loading, numbered by the effect that began it


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgressed(Event):
    """Part of a slice is written or read."""

    number: int
    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFinished(Event):
    """An engine holds the slice, all its slots empty but for those that were `kept`."""

    number: int
    loaded: Loaded
    load_s: float
    kept: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailed(Event):
    """The slice could not be loaded, or its caches not be emptied."""

    number: int
    error: PotluckError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCancelled(Event):
    """The load was given up because it was no longer wanted: nothing was loaded."""

    number: int


# ---- micro-batches


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchArrived(Event):
    """A well-formed data frame came in, its arrays still raw."""

    epoch: Epoch
    message: MicroBatch
    arrays: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRefused(Event):
    """A data frame could not be decoded."""

    error: WireError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchComputed(Event):
    """The compute lane is done with a micro-batch."""

    job: Job
    computed: Computed
    compute_s: float
    wait_s: float
    """How long the lane had nothing to do before this job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchComputeFailed(Event):
    """The engine could not compute a micro-batch."""

    job: Job
    error: PotluckError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSkipped(Event):
    """A micro-batch was still queued when its epoch ended."""

    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSent(Event):
    """A result is in the next one's hands, or at least in its socket's queue."""

    epoch: Epoch
    send_s: float
    bytes_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendTimedOut(Event):
    """Nobody took a result in time; it is gone."""

    epoch: Epoch
    batch: int
    endpoint: str
    after_s: float


# ---- copies of slots, numbered by the effect that began them


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTaken(Event):
    """The compute lane has copied a slot, in so many seconds."""

    number: int
    message: SlotCopy
    arrays: tuple[Buffer, ...]
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyNotTaken(Event):
    """The slot was not copied: the engine could not, or the epoch had ended (None)."""

    number: int
    error: PotluckError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySent(Event):
    """Every mirror has the copy or is lost."""

    number: int
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorLost(Event):
    """A mirror did not take a copy in time; nothing more is sent to it."""

    endpoint: str
    after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyArrived(Event):
    """A copy of a slot of another stage came in, its arrays still raw."""

    message: SlotCopy
    arrays: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRestored(Event):
    """An engine holds the copy that came in."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyNotRestored(Event):
    """An engine could not take a copy in: its slot is empty."""

    number: int
    error: PotluckError


# ---- the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed(Event):
    """`next_deadline` has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveAsked(Event):
    """Somebody wants the stage to leave, once it is not needed any more."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked(Event):
    """Somebody wants the stage to leave at once."""

    reason: str


StageEvent: TypeAlias = (
    Started | Welcomed | RefusedBy | Assigned | Released | PrepareAsked | MirrorAsked | Dismissed
    | BrokerReached | BrokerCut | ControlRefused | ControlNotSent
    | MeasureAsked | MeasureProgressed | MeasureFinished | MeasureBroke | MeasureCancelled | ProbeAsked | ProbeEnded
    | LoadProgressed | LoadFinished | LoadFailed | LoadCancelled
    | BatchArrived | DataRefused | BatchComputed | BatchComputeFailed | BatchSkipped | BatchSent | SendTimedOut
    | CopyTaken | CopyNotTaken | CopySent | MirrorLost | CopyArrived | CopyRestored | CopyNotRestored
    | TimePassed | LeaveAsked | StopAsked
)  # fmt: skip
