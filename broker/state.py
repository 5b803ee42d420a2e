"""What a broker knows: stages, chains, slots, requests and micro-batches in flight. Pure data, owned by the machine.

`validate` states every invariant between them; tests call it after each event.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import StrEnum

from potluck.broker.drift import Pace
from potluck.model.text import TextStream
from potluck.planner.cost import Place
from potluck.planner.plan import ChainPlan, StagePlan
from potluck.wire.errors import Phase, PotluckError
from potluck.wire.ids import BatchId, ChainId, DeviceName, Epoch, RequestId, SlotId, StageId
from potluck.wire.measures import Capabilities, LinkTiming, Profile
from potluck.wire.messages import Assign, Holds, HopSums, Slice, StageCounters
from potluck.wire.sampling import Sampling


class StageStatus(StrEnum):
    """Where a stage stands with the broker."""

    MEASURING = "measuring"
    SPARE = "spare"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


RECENT_BATCHES = 1_024

BROKER = StageId("")
"""The broker, as an end of a link."""


@dataclass(frozen=True, slots=True)
class Probing:
    """A link that is being measured, by its sender."""

    sender: StageId
    receiver: StageId
    began_s: float


@dataclass(slots=True)
class Mean:
    """A running mean in seconds."""

    value_s: float = 0.0
    count: int = 0


@dataclass(frozen=True, slots=True)
class Copy:
    """What a stage holds of another one's slot."""

    tokens: int
    batch: int
    """The micro-batch after which it was taken."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A request in a slot of a chain that has ended."""

    slot: SlotId
    request: RequestId
    tokens: int
    """That all the chain's stages hold of it."""
    since_batch: int
    """Micro-batches before this one were another request's."""


@dataclass(slots=True)
class Stage:
    """One registered stage worker. Times are seconds on the core's clock."""

    stage: StageId
    device: DeviceName
    endpoint: str
    capabilities: Capabilities
    last_heard_s: float
    status: StageStatus = StageStatus.SPARE
    chain: ChainId | None = None
    place: StagePlan | None = None
    assign: Assign | None = None
    asked_s: float = 0.0
    """When it was last told what to hold."""
    counters: StageCounters = field(default_factory=StageCounters)
    hops: HopSums = field(default_factory=HopSums)
    holds: Holds = field(default_factory=Holds)
    weights_bytes: int = 0
    kv_bytes: int = 0
    compute_bytes: int = 0
    version: str = ""
    """Of Potluck, there."""
    last_progress_s: float = 0.0
    detail: str = ""
    error: PotluckError | None = None
    breaks: int = 0
    """Micro-batches in a row that broke on it."""
    broke_with: set[RequestId] = field(default_factory=set)
    """The requests that were in every one of those."""
    suspect: bool = False
    """Whether a micro-batch got stuck at it: others are preferred until it joins anew, or is forgiven."""
    suspect_since_s: float = 0.0
    profile: Profile | None = None
    """How fast it is at this model; None until it was measured."""
    pace: Pace = field(default_factory=Pace)
    hop_seen: Mean = field(default_factory=Mean)
    """What a hand-over at it has cost besides the link."""
    hop_s: float | None = None
    """What plans count for that; None before it was seen."""
    load_s: float = 0.0
    """What its last load took."""
    epoch: Epoch = Epoch(0)
    """Of the last Assign or Release that it was sent."""
    held: set[Slice] = field(default_factory=set)
    """What it has loaded, as far as it said."""
    listed: tuple[Slice, ...] = ()
    """What it was last told to hold besides what it serves."""
    prepare: int = 0
    """The number of that Prepare."""
    owed: set[int] = field(default_factory=set)
    """Its slices that were not answered for yet."""
    copies: dict[tuple[Slice, SlotId], Copy] = field(default_factory=dict)
    """Of slots of stages that serve what it holds for a loss."""
    sources: dict[Slice, StageId] = field(default_factory=dict)
    """Whose slots it has copies of: of one stage for each slice, or they would end up in the same slots."""
    mirrors: tuple[str, ...] = ()
    """Where it was told to copy its slots to."""
    unfit: set[Slice] = field(default_factory=set)
    """What it could not load."""
    leaving: bool = False
    """Whether it has asked to leave."""


@dataclass(slots=True)
class Request:
    """One prompt and what has become of it. `tokens` is the prompt and everything sampled so far."""

    request: RequestId
    tokens: list[int]
    prompt_tokens: int
    max_new: int
    sampling: Sampling
    ignore_eos: bool
    text: TextStream
    accepted_s: float
    due_s: float | None = None
    """When it has to be finished."""
    chain: ChainId | None = None
    slot: SlotId | None = None
    sent: int = 0
    """How many of `tokens` have been sent down the chain; the rest is still to be sent."""
    done: int = 0
    """How many of them have come out of it."""
    since_batch: int = 0
    """The first micro-batch that can be its own in this slot."""
    settled: bool = False
    """Whether the slot knows how its tokens are chosen, and holds nothing else."""
    started_s: float | None = None
    first_token_s: float | None = None
    bounds: list[int] = field(default_factory=list)
    """Where the chunks of its prompt ended when they were first computed: a replay repeats them, for the same sums."""
    waiting_since_s: float = 0.0
    born: int = 0
    """The first micro-batch that can be its own: a name may be used again while old tokens are on their way."""
    replaying: bool = False
    """Whether its tokens are computed again, and the next one has not come yet."""
    failures: int = 0
    """How often a micro-batch with this request broke since its last token."""

    def sit(self, chain: ChainId, slot: SlotId, held: int, next_batch: int) -> None:
        """Gets a slot, of which the chain holds its first `held` tokens already."""
        self.chain, self.slot, self.sent, self.done = chain, slot, held, held
        self.since_batch, self.settled = next_batch, False

    @property
    def generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def rest(self) -> int:
        """Tokens not yet sent."""
        return len(self.tokens) - self.sent

    @property
    def decoding(self) -> bool:
        """Whether all but at most the newest sampled token are in the chain's KV caches."""
        return self.generated > 0 and self.rest <= 1 and self.sent > 0


@dataclass(frozen=True, slots=True)
class Entry:
    """One span of a micro-batch in flight."""

    slot: SlotId
    request: RequestId
    wants: int
    until: int
    """Tokens of the request that are computed with it."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A micro-batch somewhere in a chain."""

    batch: BatchId
    sent_s: float
    entries: tuple[Entry, ...]
    prefill: bool
    tokens: int
    alone: bool = False
    """Whether nothing else was in the chain when it was sent."""


@dataclass(slots=True)
class Chain:
    """One chain of the current plan. `slots[k]` is the request that owns slot k; dirty slots hold stale tokens."""

    chain: ChainId
    epoch: Epoch
    plan: ChainPlan
    slots: list[RequestId | None]
    dirty: set[SlotId] = field(default_factory=set)
    places: tuple[Place, ...] = ()
    """What its stages cost, where they were measured."""
    ready: set[StageId] = field(default_factory=set)
    kept: bool = True
    """Whether all stages so far hold what they were to keep."""
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT_BATCHES))
    """The numbers of its newest micro-batches: copies of its slots carry one of them."""
    open: bool = False
    closing: bool = False
    """Whether it takes no further request: a stage of it leaves, and nobody can take over."""
    in_flight: OrderedDict[BatchId, InFlight] = field(default_factory=OrderedDict)
    moved_s: float = 0.0
    """When the micro-batch that was oldest last came out."""
    returned: int = 0
    """Micro-batches that came out of it."""
    slowest_token_s: float | None = None
    """The longest that a micro-batch took lately, per token, after the one before it; None before the first."""

    @property
    def stages(self) -> tuple[StageId, ...]:
        """Who the chain is made of, in order."""
        return tuple(place.stage for place in self.plan.stages)


@dataclass(slots=True)
class Loss:
    """A stage that is gone, and why."""

    device: DeviceName
    phase: Phase
    """What it was doing."""
    at_s: float
    error: PotluckError
    explained: bool = False
    """Whether its witness has said what it died of."""


@dataclass(slots=True)
class Closing:
    """How a broker that was asked to end stands with that."""

    until_s: float
    """When requests that are not done are ended."""
    over: bool = False
    """Whether the last one is done, and the shell was told so."""


@dataclass(slots=True)
class BrokerState:
    """Everything. Requests leave `requests` when they end."""

    epoch: Epoch = Epoch(0)
    stages: dict[StageId, Stage] = field(default_factory=dict)
    chains: dict[ChainId, Chain] = field(default_factory=dict)
    requests: dict[RequestId, Request] = field(default_factory=dict)
    waiting: OrderedDict[RequestId, None] = field(default_factory=OrderedDict)
    """Requests without a slot, in the order in which they get one."""
    links: dict[tuple[StageId, StageId], LinkTiming | None] = field(default_factory=dict)
    """By sender and receiver; None where nobody answered."""
    probes: dict[int, Probing] = field(default_factory=dict)
    next_probe: int = 0
    next_prepare: int = 0
    next_batch: int = 1
    tokens_out: int = 0
    ended: int = 0
    freed: int = 0
    """Of these, those that gave a slot back."""
    lost: OrderedDict[StageId, Loss] = field(default_factory=OrderedDict)
    """The last stages that were lost, oldest first."""
    due: list[tuple[float, RequestId]] = field(default_factory=list)
    """Owned by `timeouts`: a heap of when requests have to be finished, with some that have ended."""
    closing: Closing | None = None
    """None while requests are taken."""

    @property
    def ready(self) -> bool:
        """Whether a whole chain takes requests."""
        return any(chain.open and not chain.closing for chain in self.chains.values())

    def validate(self) -> None:
        """Raises AssertionError naming the first invariant that does not hold."""
        owners: dict[RequestId, tuple[ChainId, SlotId]] = {}
        for chain in self.chains.values():
            assert chain.epoch <= self.epoch, f"chain {chain.chain} is of a future epoch"
            assert not chain.open or chain.ready == set(chain.stages), (
                f"chain {chain.chain} is open but not ready"
            )
            assert chain.open or not chain.in_flight, (
                f"chain {chain.chain} is closed with micro-batches in flight"
            )
            for index, owner in enumerate(chain.slots):
                if owner is None:
                    continue
                assert owner not in owners, f"{owner} owns two slots"
                owners[owner] = (chain.chain, SlotId(index))
            for stage in chain.stages:
                assert stage in self.stages, f"chain {chain.chain} counts on the lost stage {stage}"
                assert self.stages[stage].chain == chain.chain, f"{stage} is not in chain {chain.chain} only"
                assert self.stages[stage].epoch == chain.epoch, f"{stage} is of another epoch than its chain"
            decoding: set[RequestId] = set()
            for flight in chain.in_flight.values():
                for entry in flight.entries:
                    owner_now = self.requests.get(entry.request)
                    if not flight.prefill and owner_now is not None and flight.batch >= owner_now.born:
                        assert entry.request not in decoding, (
                            f"{entry.request} has two tokens in flight at once"
                        )
                        decoding.add(entry.request)
        for request in self.requests.values():
            place = None if request.chain is None or request.slot is None else (request.chain, request.slot)
            assert place == owners.get(request.request), f"{request.request} and its slot disagree"
            assert (request.request in self.waiting) == (place is None), (
                f"{request.request} neither waits nor runs"
            )
            assert 0 <= request.sent <= len(request.tokens), f"{request.request} sent tokens it does not have"
            assert request.done <= request.sent, f"{request.request} has more done than sent"
            assert request.generated <= request.max_new, (
                f"{request.request} has more tokens than it asked for"
            )
            if place is not None and request.rest == 0:
                flights = self.chains[place[0]].in_flight.values()
                owed = sum(
                    e.wants
                    for f in flights
                    if f.batch >= request.born
                    for e in f.entries
                    if e.request == request.request
                )
                assert owed == 1, f"{request.request} waits for {owed} results instead of one"
        for owner in owners:
            assert owner in self.requests, f"ended request {owner} still owns a slot"
        for name in self.waiting:
            assert name in self.requests, f"ended request {name} still waits"
        for request in self.requests.values():
            assert request.due_s is None or (request.due_s, request.request) in self.due, (
                f"nobody looks at the clock for {request.request}"
            )
