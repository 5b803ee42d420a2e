"""What can happen to a broker: one class per thing that happened, one per outcome. Pure.

The shell builds these from frames and timers. `cause` names what made it happen (a stage, a client, a timer), so that
`story` can follow one request or stage through everything that touched it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from potluck.planner.plan import Plan
from potluck.wire.errors import PotluckError
from potluck.wire.ids import BatchId, DeviceName, Epoch, RequestId, SlotId, StageId
from potluck.wire.measures import Capabilities, LinkTiming, Profile
from potluck.wire.messages import Holds, Hop, Slice, StageCounters
from potluck.wire.sampling import Sampling, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened."""

    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRegistered(Event):
    """A stage worker asks to join."""

    stage: StageId
    device: DeviceName
    endpoint: str
    models: tuple[str, ...] = ()
    capabilities: Capabilities = Capabilities()
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBeat(Event):
    """A frame came from a stage; with a heartbeat also its counters and what it holds."""

    stage: StageId
    epoch: Epoch
    counters: StageCounters | None = None
    holds: Holds = field(default_factory=Holds)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgressed(Event):
    """A stage is part of the way through getting ready."""

    stage: StageId
    epoch: Epoch
    detail: str
    phase: str = ""
    share: float = 0.0
    """Of that phase, what is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoaded(Event):
    """A stage holds what was assigned to it."""

    stage: StageId
    epoch: Epoch
    load_s: float
    weights_bytes: int
    kv_bytes: int = 0
    compute_bytes: int = 0
    kept: bool = False
    """Whether its slots hold what it was told to keep; otherwise they are empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBroke(Event):
    """A stage could not load or compute what was assigned to it."""

    stage: StageId
    epoch: Epoch
    error: PotluckError


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMeasured(Event):
    """A stage has timed layers of the model."""

    stage: StageId
    profile: Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNotMeasured(Event):
    """A stage could not time layers of the model."""

    stage: StageId
    error: PotluckError


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProbed(Event):
    """A stage has measured a link."""

    stage: StageId
    number: int
    link: LinkTiming


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSilent(Event):
    """Nobody answered a stage at the other end of a link."""

    stage: StageId
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanComputed(Event):
    """The planner has found a plan."""

    number: int
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanNotFound(Event):
    """The planner says that there is none."""

    number: int
    error: PotluckError


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrepared(Event):
    """A stage holds a slice that it was told to hold besides."""

    stage: StageId
    number: int
    index: int
    load_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNotPrepared(Event):
    """A stage could not load a slice that it was told to hold besides."""

    stage: StageId
    number: int
    index: int
    error: PotluckError


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotCopied(Event):
    """A stage holds a copy of a slot of a stage that serves."""

    stage: StageId
    slice: Slice
    slot: SlotId
    tokens: int
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLeaves(Event):
    """A stage wants to leave once others have its work."""

    stage: StageId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainAsked(Event):
    """Somebody wants a device to have no work."""

    device: DeviceName


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainEnded(Event):
    """A device that was drained may have work again."""

    device: DeviceName


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLeft(Event):
    """A stage said goodbye, or its connection closed."""

    stage: StageId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDied(Event):
    """The witness of a stage says what it died of."""

    stage: StageId
    error: PotluckError


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSubmitted(Event):
    """A client wants an answer to these prompt tokens."""

    request: RequestId
    tokens: tuple[int, ...]
    max_tokens: int | None
    stops: tuple[str, ...] = ()
    sampling: Sampling = Sampling()
    ignore_eos: bool = False
    timeout_s: float | None = None
    """It has to be finished within this time; None: as the broker's default says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCancelled(Event):
    """Whoever asked no longer wants the answer."""

    request: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReturned(Event):
    """A micro-batch came out of the chain with its sampled tokens, one per wanted result in order."""

    epoch: Epoch
    batch: BatchId
    tokens: tuple[int, ...]
    hops: tuple[Hop, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchBroke(Event):
    """A stage could not compute a micro-batch."""

    epoch: Epoch
    batch: BatchId
    error: PotluckError


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseAsked(Event):
    """Whoever runs the broker wants it to end: at first when its requests are done, asked again at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed(Event):
    """`next_deadline` has come."""


BrokerEvent: TypeAlias = (
    StageRegistered | StageBeat | StageProgressed | StageLoaded | StageBroke | StageLeft | StageDied
    | StageMeasured | StageNotMeasured | LinkProbed | LinkSilent
    | PlanComputed | PlanNotFound | StagePrepared | StageNotPrepared | SlotCopied
    | StageLeaves | DrainAsked | DrainEnded
    | RequestSubmitted | RequestCancelled | BatchReturned | BatchBroke | CloseAsked | TimePassed
)  # fmt: skip
