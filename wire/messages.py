"""The messages, grouped by who receives them, and the table of their kinds.

A message is a frozen struct. `encode` makes its frames, `decode` checks a peer's frames and rebuilds it; nothing that
fails a bound written here reaches a core. docs/protocol.md is the same table in prose. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from potluck.wire import limits
from potluck.wire.errors import MalformedError, Phase, PotluckError, error_class
from potluck.wire.forecast import Forecast
from potluck.wire.frames import Buffer, Header, pack_body, pack_header, unpack_body, unpack_header
from potluck.wire.ids import BatchId, ChainId, DeviceName, Epoch, RequestId, SlotId, StageId
from potluck.wire.measures import Capabilities, LinkTiming, Profile
from potluck.wire.parts import Body, Count, Endpoint, Layer, Name, Position, Row, Seconds, Slot, Text, Timeout
from potluck.wire.sampling import Sampling, TokenLogprobs

_PARTS = frozenset({"self", "what", "hint", "device", "stage", "phase", "param"})


class ErrorInfo(Body, frozen=True):
    """A PotluckError on its way to another machine."""

    code: Name
    what: Text
    hint: Text = ""
    device: Text | None = None
    stage: Text | None = None
    phase: Phase | None = None
    param: Text | None = None
    facts: Annotated[dict[Name, int | float | Text], Meta(max_length=16)] = msgspec.field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        """msgspec makes a ValidationError of this: a fact by the name of an error's own part can't be restored."""
        if not _PARTS.isdisjoint(self.facts):
            raise ValueError(f"a fact may not be named {min(_PARTS & self.facts.keys())}")

    @classmethod
    def of(cls, error: PotluckError) -> ErrorInfo:
        """The error's facts; what a peer may not know stays here."""
        cut = limits.TEXT_CHARS
        return cls(
            error.code,
            error.what[:cut],
            error.hint[:cut],
            error.device,
            error.stage,
            error.phase,
            error.param,
            error.facts,
        )

    def restore(self) -> PotluckError:
        """The error again, as the class of its code."""
        return error_class(self.code)(
            self.what,
            hint=self.hint,
            device=self.device,
            stage=self.stage,
            phase=self.phase,
            param=self.param,
            **self.facts,
        )


# ---- shared parts


class ModelRef(Body, frozen=True):
    """Which model: a name for people, a fingerprint that two files share only if they are the same model."""

    name: Name
    fingerprint: Name
    layers: Layer
    width: Annotated[int, Meta(ge=1, le=1 << 20)]
    architecture: Name


class StageCounters(Body, frozen=True):
    """What a stage has done since it was assigned: growing sums, so that a lost beat loses nothing."""

    batches: Count = 0
    tokens: Count = 0
    compute_s: Seconds = 0.0
    wait_s: Seconds = 0.0
    send_s: Seconds = 0.0
    bytes_in: Count = 0
    bytes_out: Count = 0
    dropped_frames: Count = 0
    refused_frames: Count = 0


class Slice(Body, frozen=True):
    """What a stage can hold loaded: layers [first, end) of a model, with room for these slots. Equal slices are one."""

    model: ModelRef
    first: Layer
    end: Layer
    slots: Annotated[int, Meta(ge=1, le=limits.SLOTS)]
    context_tokens: Annotated[int, Meta(ge=1, le=limits.PROMPT_TOKENS)]
    """Tokens that one slot can hold."""
    batch_tokens: Annotated[int, Meta(ge=1, le=limits.BATCH_TOKENS)]
    exact: bool = False
    gpu_layers: Layer = 0
    """Of the layers, the last ones, for the GPU."""

    @property
    def is_first(self) -> bool:
        """Whether a stage with it looks tokens up."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Whether a stage with it samples."""
        return self.end == self.model.layers


# ---- to the broker, from a stage (control)


class Register(Body, frozen=True):
    """A stage asks to join. The answer is Welcome or Refused."""

    stage: Name
    device: Name
    version: Name
    engine: Name
    data_endpoint: Endpoint
    models: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()
    """Fingerprints of the model files this device has at hand."""
    capabilities: Capabilities = Capabilities()


class Holds(Body, frozen=True):
    """What a stage has loaded, for now and on standby, whatever the epoch."""

    slices: Count = 0
    memory_bytes: Count = 0
    """KV caches, compute buffers, and weights that were laid out anew; not what is mapped from a file."""


class Heartbeat(Body, frozen=True):
    """Says that the stage is alive, what it has done in this epoch, and what it holds."""

    counters: StageCounters = StageCounters()
    holds: Holds = Holds()


class Progress(Body, frozen=True):
    """How far a stage is with getting ready."""

    phase: Phase
    done: Count
    total: Count


class Ready(Body, frozen=True):
    """The stage has loaded what the epoch in the header assigned to it."""

    load_s: Seconds
    weights_bytes: Count
    kv_bytes: Count = 0
    compute_bytes: Count = 0
    kept: bool = False
    """Whether its slots hold what the Assign's `keep` names; otherwise they are empty."""


class StageFailed(Body, frozen=True):
    """The stage could not load or compute what the epoch in the header assigned to it."""

    error: ErrorInfo


class Measured(Body, frozen=True):
    """How fast the device is at the model that Measure named, and what memory it takes there."""

    profile: Profile


class MeasureFailed(Body, frozen=True):
    """The device could not be measured."""

    error: ErrorInfo


class Probed(Body, frozen=True):
    """What a Probe found; no link if the other end did not answer in time."""

    number: Count
    link: LinkTiming | None = None


class Goodbye(Body, frozen=True):
    """The stage leaves on purpose, now."""

    reason: Text = ""


class Leave(Body, frozen=True):
    """The stage wants to leave, and serves until the answer, Farewell, has come."""

    reason: Text = ""


class Prepared(Body, frozen=True):
    """The stage holds a slice of the Prepare of this number."""

    number: Count
    index: Annotated[int, Meta(ge=0, lt=limits.SLICES)]
    """Of the slice, in that Prepare."""
    load_s: Seconds
    """0 if it was held already."""
    weights_bytes: Count
    kv_bytes: Count = 0
    compute_bytes: Count = 0


class PrepareFailed(Body, frozen=True):
    """The stage could not load a slice of the Prepare of this number; it goes on with the next."""

    number: Count
    index: Annotated[int, Meta(ge=0, lt=limits.SLICES)]
    error: ErrorInfo


class Copied(Body, frozen=True):
    """The stage holds a copy of a slot in a slice that it keeps for others."""

    slice: Slice
    slot: Slot
    tokens: Position
    """How many the copy holds."""
    batch: Count
    """The micro-batch after which it was taken."""


class Obituary(Body, frozen=True):
    """What a stage died of, from the witness that the stage left on its machine for that."""

    stage: Name
    error: ErrorInfo


# ---- to a stage, from the broker (control)


class Welcome(Body, frozen=True):
    """The stage is registered; beats are due every `heartbeat_s` and missed after `misses` of them."""

    broker_version: Name
    heartbeat_s: Annotated[float, Meta(gt=0.0, le=3600.0)]
    misses: Annotated[int, Meta(ge=1, le=1000)]


class Refused(Body, frozen=True):
    """The stage or client is not served; the error says why and what to do."""

    error: ErrorInfo


class Keep(Row, frozen=True):
    """The first `tokens` tokens of a slot are kept."""

    slot: Slot
    tokens: Position


class Assign(Body, frozen=True):
    """Layers [first, end) of a model for the epoch in the header, and where the results go."""

    chain: Annotated[int, Meta(ge=0, lt=limits.STAGES)]
    index: Annotated[int, Meta(ge=0, lt=limits.STAGES)]
    stages: Annotated[int, Meta(ge=1, le=limits.STAGES)]
    model: ModelRef
    first: Layer
    end: Layer
    next_endpoint: Endpoint
    """The next stage's data PULL, or the broker's results PULL for the last stage."""
    results_endpoint: Endpoint
    """The broker's results PULL: where any stage says that it could not compute a micro-batch."""
    slots: Annotated[int, Meta(ge=1, le=limits.SLOTS)]
    context_tokens: Annotated[int, Meta(ge=1, le=limits.PROMPT_TOKENS)]
    """Tokens that one slot can hold."""
    batch_tokens: Annotated[int, Meta(ge=1, le=limits.BATCH_TOKENS)]
    activation: Annotated[str, Meta(pattern="^(f32|f16)$")] = "f32"
    exact: bool = False
    gpu_layers: Layer = 0
    """Of the layers, the last ones, for the GPU."""
    keep: Annotated[tuple[Keep, ...], Meta(max_length=limits.SLOTS)] = ()
    """Slots whose first tokens it holds from an earlier epoch, or as copies. All others are to be empty."""

    @property
    def slice(self) -> Slice:
        """What the stage has to hold for it."""
        return Slice(
            self.model, self.first, self.end, self.slots, self.context_tokens, self.batch_tokens, self.exact,
            self.gpu_layers,
        )  # fmt: skip

    @property
    def is_first(self) -> bool:
        """Whether this stage looks tokens up."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage samples."""
        return self.index == self.stages - 1


class Release(Body, frozen=True):
    """The stage is not part of the epoch in the header: it may keep its weights, but serves nothing."""


class Prepare(Body, frozen=True):
    """Hold these slices loaded besides what is assigned, in this order, and close every other one.

    Each is answered with Prepared or PrepareFailed. A later Prepare replaces this one.
    """

    number: Count
    """Grows with every Prepare of a broker."""
    slices: Annotated[tuple[Slice, ...], Meta(max_length=limits.SLICES)] = ()


class Mirror(Body, frozen=True):
    """Copy the slots of the epoch in the header to these data sockets, as far as that disturbs nobody. None: stop."""

    endpoints: Annotated[tuple[Endpoint, ...], Meta(max_length=limits.MIRRORS)] = ()


class Farewell(Body, frozen=True):
    """The stage may leave: nothing is left for it to do, or nobody can take that over."""

    text: Text = ""


class Measure(Body, frozen=True):
    """Time real layers of this model, with room for these slots, and answer with Measured or MeasureFailed."""

    model: ModelRef
    slots: Annotated[int, Meta(ge=1, le=limits.SLOTS)]
    context_tokens: Annotated[int, Meta(ge=1, le=limits.PROMPT_TOKENS)]
    batch_tokens: Annotated[int, Meta(ge=1, le=limits.BATCH_TOKENS)]
    exact: bool = False


class Probe(Body, frozen=True):
    """Measure the link to another stage's data socket, or to the broker's results socket, and answer with Probed."""

    number: Count
    endpoint: Endpoint
    frame_bytes: Annotated[int, Meta(ge=1, le=limits.PROBE_BYTES)]
    """How large the large frames are: the activations of a chunk of a prompt."""


# ---- to the broker, from a client (control)


class ChatMessage(Body, frozen=True):
    """One turn of a chat."""

    role: Name
    content: Annotated[str, Meta(max_length=limits.PROMPT_CHARS)]


class Submit(Body, frozen=True):
    """One prompt: exactly one of `prompt`, `tokens` and `messages` is given."""

    request: Name
    prompt: Annotated[str, Meta(max_length=limits.PROMPT_CHARS)] | None = None
    tokens: (
        Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 31)], ...], Meta(max_length=limits.PROMPT_TOKENS)]
        | None
    ) = None
    messages: (
        Annotated[tuple[ChatMessage, ...], Meta(min_length=1, max_length=limits.CHAT_MESSAGES)] | None
    ) = None
    model: Text = ""
    max_tokens: Annotated[int, Meta(ge=1, le=limits.PROMPT_TOKENS)] | None = None
    stop: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=limits.STOP_CHARS)], ...],
        Meta(max_length=limits.STOP_STRINGS),
    ] = ()
    sampling: Sampling = Sampling()
    seed_given: bool = False
    """Whether `sampling.seed` is the client's; otherwise the broker draws one."""
    ignore_eos: bool = False
    timeout_s: Timeout | None = None
    """It fails if it is not finished within this time; None: as the broker's default says."""


class Cancel(Body, frozen=True):
    """The client no longer wants this request."""

    request: Name


class SubmitJob(Body, frozen=True):
    """One prompt whose answer is kept until it is fetched, also over a restart of the broker. Answered with JobView.

    The request's name is not looked at: `key` names the job, and a key that is known gives the job it named. Like the
    three below it is answered with Rejected, for `question`, if it can't be done.
    """

    question: Name
    """The client's own name for what it asks; the answer carries it."""
    key: Name
    request: Submit


class JobQuery(Body, frozen=True):
    """Asks for one job. Answered with JobView, as soon as the job has ended, at the latest after `wait_s`."""

    question: Name
    key: Name
    wait_s: Annotated[float, Meta(ge=0.0, le=limits.JOB_WAIT_S)] = 0.0


class JobsQuery(Body, frozen=True):
    """Asks for the newest jobs. Answered with JobsView."""

    question: Name
    most: Annotated[int, Meta(ge=1, le=limits.JOBS)] = 100


class ForgetJob(Body, frozen=True):
    """Cancels a job that waits or runs, and forgets its answer. Answered with JobView."""

    question: Name
    key: Name


class Drain(Body, frozen=True):
    """Move the work of a device off it and give it none, or, with `back`, count on it again. Answered with Draining."""

    device: Name
    back: bool = False


class StateQuery(Body, frozen=True):
    """Asks for the cluster's state as one snapshot."""


class PlanQuery(Body, frozen=True):
    """Asks for the plan in force, and what it would do for other numbers of users."""

    users: Annotated[tuple[Annotated[int, Meta(ge=1, le=limits.USERS)], ...], Meta(max_length=32)] = ()
    held_tokens: Annotated[int, Meta(ge=0, le=limits.PROMPT_TOKENS)] = 0
    """Tokens that a sequence holds on average while it decodes; 0: as the broker plans."""
    prompt_tokens: Annotated[int, Meta(ge=0, le=limits.PROMPT_TOKENS)] = 0
    """Length of the prompt whose first token is predicted; 0: as the broker plans."""


# ---- to a client, from the broker (control)


class Usage(Body, frozen=True):
    """How many tokens went in and came out."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    cached_tokens: Count = 0


class Timings(Body, frozen=True):
    """Seconds, on the broker's clock, from the moment the request was accepted."""

    queued_s: Seconds = 0.0
    first_token_s: Seconds = 0.0
    total_s: Seconds = 0.0


class Accepted(Body, frozen=True):
    """The request is queued; deltas follow."""

    request: Name
    model: Name
    prompt_tokens: Count


class Delta(Body, frozen=True):
    """New text of a request. `text` never ends inside a character or inside what may become a stop string."""

    request: Name
    text: Annotated[str, Meta(max_length=limits.CONTROL_BODY_BYTES)]
    tokens: tuple[int, ...] = ()
    """The tokens that were sampled since the last delta, in order; each gave its text now or gives it later."""
    logprobs: tuple[TokenLogprobs, ...] = ()


class Finished(Body, frozen=True):
    """The request ended well. `reason` is stop (end of text or a stop string) or length."""

    request: Name
    reason: Annotated[str, Meta(pattern="^(stop|length)$")]
    usage: Usage = Usage()
    timings: Timings = Timings()
    stop: Text | None = None
    """The stop string that ended it, if one did."""


class Rejected(Body, frozen=True):
    """The request ended badly, or never began; or why a question about jobs can't be answered."""

    request: Name
    error: ErrorInfo


class JobView(Body, frozen=True):
    """One job as it stands."""

    key: Name
    state: Annotated[str, Meta(pattern="^(queued|running|finished|failed|cancelled)$")]
    created_s: float = 0.0
    """Seconds since 1970."""
    ended_s: float | None = None
    model: Text = ""
    text: Annotated[str, Meta(max_length=limits.CONTROL_BODY_BYTES)] = ""
    """The answer, once it is finished."""
    reason: Text = ""
    usage: Usage = Usage()
    timings: Timings = Timings()
    error: ErrorInfo | None = None
    question: Text = ""
    """What it answers."""


class JobsView(Body, frozen=True):
    """The newest jobs, without their answers."""

    question: Name
    jobs: Annotated[tuple[JobView, ...], Meta(max_length=limits.JOBS)] = ()


class Draining(Body, frozen=True):
    """How far a device is with giving its work away."""

    device: Name
    done: bool
    """Whether it holds no work any more."""
    text: Text = ""
    """What is waited for, or why it can't be."""


class HopSums(Body, frozen=True):
    """What one stage has spent on the micro-batches of this epoch that came out of its chain."""

    batches: Count = 0
    compute_s: Seconds = 0.0
    wait_s: Seconds = 0.0
    bytes_in: Count = 0
    expected_s: Seconds = 0.0
    """What the plan predicted for the decode micro-batches among them, where it predicts."""
    expected_compute_s: Seconds = 0.0
    """What those took."""
    expected_batches: Count = 0
    """How many they were."""


class StageView(Body, frozen=True):
    """One stage in a snapshot."""

    stage: Name
    device: Name
    state: Name
    chain: int | None = None
    index: int | None = None
    first: int | None = None
    end: int | None = None
    counters: StageCounters = StageCounters()
    """As of the stage's last heartbeat."""
    hops: HopSums = HopSums()
    """As of the last result."""
    last_beat_age_s: float = 0.0
    weights_bytes: int = 0
    kv_bytes: int = 0
    compute_bytes: int = 0
    endpoint: Text = ""
    detail: Text = ""
    capabilities: Capabilities = Capabilities()
    version: Text = ""
    if_lost: Text = ""
    """What its loss would cost, in words."""
    holds: Holds = Holds()
    """As of the stage's last heartbeat."""


class StateView(Body, frozen=True):
    """The cluster at one moment, as the broker sees it."""

    epoch: int
    model: Text
    ready: bool
    stages: tuple[StageView, ...] = ()
    running: int = 0
    queued: int = 0
    slots: int = 0
    context_tokens: int = 0
    uptime_s: float = 0.0
    tokens_out: int = 0
    detail: Text = ""
    retry_after_s: Seconds = 0.0
    """When a request that is refused now may be taken, as far as that can be told; 0 while they are taken."""


class LinkView(Body, frozen=True):
    """One direction between two devices; the broker's name is empty."""

    sender: Text
    receiver: Text
    link: LinkTiming | None = None
    """None: no frame got through."""


class PlanView(Body, frozen=True):
    """The plan in force, and why it is so."""

    epoch: int
    model: Text
    users: Count = 1
    reasons: Annotated[tuple[Text, ...], Meta(max_length=1024)] = ()
    left_out: Annotated[tuple[Name, ...], Meta(max_length=limits.STAGES)] = ()
    """Device names."""
    forecast: Forecast | None = None
    """Nothing where no device was measured."""
    at: Annotated[tuple[Forecast, ...], Meta(max_length=32)] = ()
    """For each number of users that was asked for."""
    links: Annotated[tuple[LinkView, ...], Meta(max_length=limits.STAGES * (limits.STAGES + 1))] = ()
    detail: Text = ""
    """Why there is no plan, if there is none."""


# ---- down a chain (data)


class Span(Row, frozen=True):
    """`tokens` consecutive tokens of one slot, the first at `position`; the last `wants` of them each want a result."""

    slot: Slot
    position: Position
    tokens: Annotated[int, Meta(ge=1, le=limits.BATCH_TOKENS)]
    wants: Annotated[int, Meta(ge=0, le=limits.BATCH_TOKENS)]


class Trim(Row, frozen=True):
    """Before the spans are computed, keep only the first `keep` tokens of the slot. 0 empties it."""

    slot: Slot
    keep: Position


class SlotSampling(Row, frozen=True):
    """From this micro-batch on, the slot's tokens are chosen like this."""

    slot: Slot
    sampling: Sampling


class Hop(Row, frozen=True):
    """What one stage spent on this micro-batch."""

    index: Annotated[int, Meta(ge=0, lt=limits.STAGES)]
    compute_s: Seconds
    wait_s: Seconds
    bytes_in: Count


class MicroBatch(Body, frozen=True):
    """One micro-batch. Array 0: its tokens, int32[n]. Array 1, from the second stage on: activations[n, width].

    Trims come first, in order, then samplings, then spans. Spans stand in the order of their rows in the arrays.
    """

    batch: Count
    spans: Annotated[tuple[Span, ...], Meta(max_length=limits.BATCH_SPANS)]
    trims: Annotated[tuple[Trim, ...], Meta(max_length=limits.BATCH_SPANS)] = ()
    samplings: Annotated[tuple[SlotSampling, ...], Meta(max_length=limits.BATCH_SPANS)] = ()
    hops: Annotated[tuple[Hop, ...], Meta(max_length=limits.STAGES)] = ()
    activation: Annotated[str, Meta(pattern="^(f32|f16)$")] = "f32"

    @property
    def tokens(self) -> int:
        """Rows of the arrays."""
        return sum(span.tokens for span in self.spans)

    @property
    def wants(self) -> int:
        """Results that the last stage owes."""
        return sum(span.wants for span in self.spans)


class SlotCopy(Body, frozen=True):
    """What a stage holds of one slot, for another one that keeps the same slice.

    Array 0: the slot's KV cache as the engine writes it. Array 1: the tokens that the sampler has seen, int32[k]; none
    where the slice is not the last.
    """

    slice: Slice
    slot: Slot
    tokens: Position
    """How many the slot holds."""
    batch: Count
    """The micro-batch after which it was taken."""


class Ping(Body, frozen=True):
    """To be answered with Pong at once, at the sender's data socket. Array 0: bytes that nobody reads."""

    number: Count
    """The probe's."""
    index: Annotated[int, Meta(ge=0, le=1 << 20)]
    reply_endpoint: Endpoint


class Pong(Body, frozen=True):
    """The answer to a Ping."""

    number: Count
    index: Annotated[int, Meta(ge=0, le=1 << 20)]


# ---- to the broker, from the last stage (results)


class BatchDone(Body, frozen=True):
    """The micro-batch came out of the chain. Array 0: int32[k], one token per wanted result, in the spans' order."""

    batch: Count
    hops: Annotated[tuple[Hop, ...], Meta(max_length=limits.STAGES)] = ()
    logprobs: Annotated[tuple[TokenLogprobs | None, ...], Meta(max_length=limits.BATCH_TOKENS)] = ()
    """Empty, or one entry per result, None for those that did not ask."""


class BatchFailed(Body, frozen=True):
    """A stage could not compute the micro-batch."""

    batch: Count
    error: ErrorInfo


Message: TypeAlias = (
    Register | Heartbeat | Progress | Ready | StageFailed | Goodbye | Measured | MeasureFailed | Probed
    | Leave | Prepared | PrepareFailed | Obituary | Copied
    | Welcome | Refused | Assign | Release | Measure | Probe | Prepare | Farewell | Mirror
    | Submit | Cancel | StateQuery | PlanQuery | SubmitJob | JobQuery | JobsQuery | ForgetJob | Drain
    | Accepted | Delta | Finished | Rejected | StateView | PlanView | JobView | JobsView | Draining
    | MicroBatch | BatchDone | BatchFailed | Ping | Pong | SlotCopy
)  # fmt: skip

KINDS: dict[int, type[Message]] = {
    1: Register, 2: Heartbeat, 3: Progress, 4: Ready, 5: StageFailed, 6: Goodbye,
    7: Measured, 8: MeasureFailed, 9: Probed, 10: Leave, 11: Prepared, 12: PrepareFailed, 13: Obituary, 14: Copied,
    16: Welcome, 17: Refused, 18: Assign, 19: Release, 20: Measure, 21: Probe, 22: Prepare, 23: Farewell, 24: Mirror,
    32: Submit, 33: Cancel, 34: StateQuery, 35: PlanQuery, 36: SubmitJob, 37: JobQuery, 38: JobsQuery, 39: ForgetJob,
    40: Drain,
    48: Accepted, 49: Delta, 50: Finished, 51: Rejected, 52: StateView, 53: PlanView, 54: JobView, 55: JobsView,
    56: Draining,
    64: MicroBatch, 65: BatchDone, 66: BatchFailed, 67: Ping, 68: Pong, 69: SlotCopy,
}  # fmt: skip
KIND_OF: dict[type, int] = {message: kind for kind, message in KINDS.items()}

_ARRAYS: dict[type, tuple[int, int]] = {MicroBatch: (1, 2), BatchDone: (1, 1), Ping: (1, 1), SlotCopy: (2, 2)}
_BODY_LIMIT: dict[type, int] = {
    MicroBatch: limits.DATA_BODY_BYTES,
    BatchDone: limits.DATA_BODY_BYTES,
    BatchFailed: limits.DATA_BODY_BYTES,
    Ping: limits.DATA_BODY_BYTES,
    Pong: limits.DATA_BODY_BYTES,
    SlotCopy: limits.DATA_BODY_BYTES,
}


class Envelope(NamedTuple):
    """A message with what its header said and the arrays that came with it (raw bytes, not copied)."""

    epoch: Epoch
    message: Message
    arrays: tuple[Buffer, ...] = ()


def encode(message: Message, epoch: Epoch = Epoch(0), arrays: Sequence[Buffer] = ()) -> list[Buffer]:
    """The frames of one message, arrays last and as they are."""
    return [
        pack_header(KIND_OF[type(message)], epoch, len(arrays)),
        pack_body(msgspec.to_builtins(message)),
        *arrays,
    ]


def decode(frames: Sequence[Buffer], accept: frozenset[type] | None = None) -> Envelope:
    """The message that a peer's frames carry; every bound of its type is checked.

    `accept` limits the kinds to those that make sense on this socket. Raises a WireError.
    """
    header: Header = unpack_header(frames)
    wanted = KINDS.get(header.kind)
    if wanted is None or (accept is not None and wanted not in accept):
        raise MalformedError(f"A message of kind {header.kind} is not expected here.")
    low, high = _ARRAYS.get(wanted, (0, 0))
    if not low <= header.arrays <= high:
        raise MalformedError(f"{wanted.__name__} has {low} to {high} arrays, not {header.arrays}.")
    body = unpack_body(frames[1], _BODY_LIMIT.get(wanted, limits.CONTROL_BODY_BYTES))
    try:
        message = msgspec.convert(body, wanted)
    except (msgspec.ValidationError, RecursionError) as error:
        raise MalformedError(f"{wanted.__name__}: {error}") from error
    return Envelope(header.epoch, message, tuple(frames[2:]))


def int32_array(raw: Buffer, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """`raw` as int32[count], without a copy. Raises MalformedError when the size differs."""
    if memoryview(raw).nbytes != 4 * count:
        raise MalformedError(
            f"An array of {count} int32 has {4 * count} bytes, not {memoryview(raw).nbytes}."
        )
    return np.frombuffer(raw, dtype="<i4")


__all__ = [
    "KINDS",
    "KIND_OF",
    "Accepted",
    "Assign",
    "BatchDone",
    "BatchFailed",
    "BatchId",
    "Cancel",
    "Capabilities",
    "ChainId",
    "ChatMessage",
    "Copied",
    "Delta",
    "DeviceName",
    "Drain",
    "Draining",
    "Envelope",
    "ErrorInfo",
    "Farewell",
    "Finished",
    "ForgetJob",
    "Goodbye",
    "Heartbeat",
    "Hop",
    "HopSums",
    "JobQuery",
    "JobView",
    "JobsQuery",
    "JobsView",
    "Keep",
    "Leave",
    "LinkView",
    "Measure",
    "MeasureFailed",
    "Measured",
    "Message",
    "MicroBatch",
    "Mirror",
    "ModelRef",
    "Obituary",
    "Ping",
    "PlanQuery",
    "PlanView",
    "Pong",
    "Prepare",
    "PrepareFailed",
    "Prepared",
    "Probe",
    "Probed",
    "Progress",
    "Ready",
    "Refused",
    "Register",
    "Rejected",
    "Release",
    "RequestId",
    "Slice",
    "SlotCopy",
    "SlotId",
    "SlotSampling",
    "Span",
    "StageCounters",
    "StageFailed",
    "StageId",
    "StageView",
    "StateQuery",
    "StateView",
    "Submit",
    "SubmitJob",
    "Timings",
    "Trim",
    "Usage",
    "Welcome",
    "decode",
    "encode",
    "int32_array",
]  # fmt: skip
