"""What a broker's core wants done. The shell carries each out in order and decides nothing. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from potluck.planner.plan import Candidate, Network
from potluck.wire.errors import PotluckError
from potluck.wire.ids import ChainId, Epoch, RequestId, StageId
from potluck.wire.messages import (
    Assign,
    Farewell,
    Measure,
    MicroBatch,
    Mirror,
    Prepare,
    Probe,
    Refused,
    Release,
    Timings,
    Usage,
    Welcome,
)
from potluck.wire.sampling import TokenLogprobs


@dataclass(frozen=True, slots=True)
class SendToStage:
    """Send a control message to a stage."""

    stage: StageId
    message: Welcome | Refused | Assign | Release | Measure | Probe | Prepare | Farewell | Mirror
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class ComputePlan:
    """Ask the planner, beside the event loop: with the first choice of stages, or the next if that gives none.

    The answer is PlanComputed or PlanNotFound of this number.
    """

    number: int
    choices: tuple[tuple[Candidate, ...], ...]
    network: Network


@dataclass(frozen=True, slots=True)
class OpenChain:
    """A chain is whole: micro-batches of `epoch` go to its first stage at `endpoint`."""

    chain: ChainId
    epoch: Epoch
    endpoint: str


@dataclass(frozen=True, slots=True)
class CloseChain:
    """Nothing more goes to this chain; what is still queued for it is dropped."""

    chain: ChainId


@dataclass(frozen=True, slots=True)
class SendBatch:
    """Push a micro-batch and its tokens into a chain."""

    chain: ChainId
    epoch: Epoch
    message: MicroBatch
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestAccepted:
    """The request waits for a slot."""

    request: RequestId
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class RequestText:
    """New tokens of a request, and the text that may go out now."""

    request: RequestId
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The request has its whole answer."""

    request: RequestId
    reason: str
    usage: Usage
    timings: Timings
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The request ended without its whole answer."""

    request: RequestId
    error: PotluckError


@dataclass(frozen=True, slots=True)
class Closed:
    """The broker was to close, and nothing is left to do: its program may end."""


@dataclass(frozen=True, slots=True)
class Report:
    """One line for the log, in words."""

    level: str
    text: str


Effect: TypeAlias = (
    SendToStage | ComputePlan | OpenChain | CloseChain | SendBatch
    | RequestAccepted | RequestText | RequestFinished | RequestFailed | Closed | Report
)  # fmt: skip
