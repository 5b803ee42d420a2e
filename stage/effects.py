"""What a stage's core wants done. The shell carries each out in order and decides nothing. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from potluck.stage.events import Job
from potluck.wire.errors import PotluckError
from potluck.wire.frames import Buffer
from potluck.wire.ids import Epoch
from potluck.wire.messages import (
    BatchDone,
    BatchFailed,
    Copied,
    Goodbye,
    Heartbeat,
    Keep,
    Leave,
    Measure,
    Measured,
    MeasureFailed,
    MicroBatch,
    Prepared,
    PrepareFailed,
    Probe,
    Probed,
    Progress,
    Ready,
    Register,
    Slice,
    SlotCopy,
    StageFailed,
)


@dataclass(frozen=True, slots=True)
class SendControl:
    """Send a control message to the broker."""

    message: (
        Register | Heartbeat | Progress | Ready | StageFailed | Goodbye | Measured | MeasureFailed | Probed
        | Prepared | PrepareFailed | Leave | Copied
    )  # fmt: skip
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Reconnect:
    """Connect to the broker anew; what is still queued for it is dropped."""


@dataclass(frozen=True, slots=True)
class StartMeasure:
    """Time layers of this model, on the lane for loading."""

    number: int
    message: Measure


@dataclass(frozen=True, slots=True)
class CancelMeasure:
    """Measuring is not wanted any more: give it up as soon as it can be."""

    number: int


@dataclass(frozen=True, slots=True)
class StartProbe:
    """Measure a link, beside everything else."""

    message: Probe


@dataclass(frozen=True, slots=True)
class StartLoad:
    """Make an engine and load this slice, on the lane for loading. One load runs at a time."""

    number: int
    slice: Slice


@dataclass(frozen=True, slots=True)
class CloseSlices:
    """Close these slices' engines, on the lane for loading, before any load that is started later."""

    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class ClearCaches:
    """This slice is held and wanted: empty every slot but for the beginnings to `keep`, on the compute lane. Ends like
    a load.
    """

    number: int
    slice: Slice
    keep: tuple[Keep, ...] = ()


@dataclass(frozen=True, slots=True)
class CancelLoad:
    """The running load is not wanted any more: give it up as soon as it can be."""

    number: int


@dataclass(frozen=True, slots=True)
class ConnectNext:
    """The chain goes on at `next_endpoint`; failures go to `results_endpoint`."""

    epoch: Epoch
    next_endpoint: str
    results_endpoint: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    """The epoch is over: drop what is queued for the compute lane, for the next stage and for the mirrors, and close
    the ways there.
    """


@dataclass(frozen=True, slots=True)
class StartCompute:
    """Queue a micro-batch for the compute lane."""

    job: Job


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Push a micro-batch to the next stage."""

    epoch: Epoch
    message: MicroBatch
    arrays: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class SendResult:
    """Push the end of a micro-batch to the broker."""

    epoch: Epoch
    message: BatchDone | BatchFailed
    arrays: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class SetMirrors:
    """Copies go to these data sockets from now on, and nowhere else."""

    endpoints: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TakeCopy:
    """Copy this slot, on the compute lane."""

    number: int
    slice: Slice
    slot: int


@dataclass(frozen=True, slots=True)
class SendCopy:
    """Send the copy to every mirror, beside everything else."""

    number: int
    epoch: Epoch
    message: SlotCopy
    arrays: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class RestoreCopy:
    """Put a copy that came in into the slot of its slice, on the lane for loading."""

    number: int
    message: SlotCopy
    arrays: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class Exit:
    """The worker ends with this code, because of this error if there is one."""

    code: int
    error: PotluckError | None = None
    restart: bool = False
    """Whether a new process may do better."""


@dataclass(frozen=True, slots=True)
class Report:
    """One line for the log, in words."""

    level: str
    text: str


Effect: TypeAlias = (
    SendControl | Reconnect | StartMeasure | CancelMeasure | StartProbe
    | StartLoad | CloseSlices | ClearCaches | CancelLoad | ConnectNext | Disconnect
    | StartCompute | ForwardBatch | SendResult | SetMirrors | TakeCopy | SendCopy | RestoreCopy | Exit | Report
)  # fmt: skip
