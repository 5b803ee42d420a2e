"""A broker's core with chains of perfect stages around it: no loop, no sockets, no threads, just events in an order.

Frames wait in queues until the test lets one move, so every interleaving can be scripted. A chain computes the next
token as a function of all tokens that its slot holds, so that a token that is lost, doubled or left over shows.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field

from potluck.broker.config import BrokerConfig
from potluck.broker.effects import (
    CloseChain,
    Closed,
    ComputePlan,
    Effect,
    OpenChain,
    Report,
    RequestAccepted,
    RequestFailed,
    RequestFinished,
    RequestText,
    SendBatch,
    SendToStage,
)
from potluck.broker.events import (
    BatchReturned,
    BrokerEvent,
    PlanComputed,
    PlanNotFound,
    SlotCopied,
    StageBeat,
    StageLeft,
    StageLoaded,
    StagePrepared,
    StageRegistered,
    TimePassed,
)
from potluck.broker.machine import BrokerMachine
from potluck.broker.planning import choose
from potluck.planner.even import plan_even
from potluck.planner.plan import ModelShape, Planner
from potluck.wire.errors import PlanError
from potluck.wire.ids import BatchId, ChainId, DeviceName, Epoch, RequestId, SlotId, StageId
from potluck.wire.measures import Capabilities
from potluck.wire.messages import (
    Assign,
    Farewell,
    Hop,
    Measure,
    MicroBatch,
    Mirror,
    ModelRef,
    Prepare,
    Probe,
    Refused,
    Release,
    Welcome,
)

LAYERS = 12
VOCAB = 300
END = 299
MODEL = ModelRef("tiny", "f" * 64, LAYERS, 8, "llama")
SHAPE = ModelShape("tiny", LAYERS, 8, (100,) * LAYERS, 50, 50, frozenset(range(1, LAYERS)))


class LetterVocabulary:
    """Tokens are bytes; 256-298 are silent, 299 ends the text."""

    size = VOCAB

    def piece(self, token: int) -> bytes:
        return bytes((token,)) if token < 256 else b""

    def is_end(self, token: int) -> bool:
        return token == END


def next_token(tokens: tuple[int, ...]) -> int:
    """What the world's model says after these tokens."""
    digest = hashlib.blake2b(repr(tokens).encode(), digest_size=4).digest()
    return 97 + int.from_bytes(digest, "little") % 26


def continuation(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The undisturbed answer."""
    tokens = prompt
    for _ in range(count):
        tokens += (next_token(tokens),)
    return tokens[len(prompt) :]


@dataclass
class ChainWorld:
    """One open chain: its slots' caches and the micro-batches on their way."""

    epoch: Epoch
    slots: dict[int, tuple[int, ...]] = field(default_factory=dict)
    coming: deque[SendBatch] = field(default_factory=deque)
    batch: int = 0
    """The micro-batch that came out last."""

    def compute(self, sent: SendBatch) -> tuple[int, ...]:
        """The results of one micro-batch. Asserts that every span continues its slot."""
        message: MicroBatch = sent.message
        for trim in message.trims:
            held = self.slots.get(trim.slot, ())
            assert trim.keep <= len(held), f"trim of slot {trim.slot} to {trim.keep}, it holds {len(held)}"
            self.slots[trim.slot] = held[: trim.keep]
        results: list[int] = []
        at = 0
        for span in message.spans:
            held = self.slots.get(span.slot, ())
            assert span.position == len(held), (
                f"slot {span.slot} holds {len(held)}, span starts at {span.position}"
            )
            for offset in range(span.tokens):
                held += (sent.tokens[at + offset],)
                if offset >= span.tokens - span.wants:
                    results.append(next_token(held))
            self.slots[span.slot] = held
            at += span.tokens
        assert at == len(sent.tokens)
        return tuple(results)


class CoreWorld:
    """The core, its clock, its stages, and what clients have heard."""

    def __init__(self, config: BrokerConfig | None = None, planner: Planner = plan_even) -> None:
        self.now = 0.0
        self.config = config or BrokerConfig(
            slots=4, context_tokens=64, chunk_tokens=8, settle_s=0.5, queue_limit=50
        )
        self.core = BrokerMachine(
            self.config,
            MODEL,
            SHAPE,
            LetterVocabulary(),
            planner,
            lambda stage: "tcp://broker:7947",
            "test",
        )
        self.alive: set[StageId] = set()
        self.measuring: deque[tuple[StageId, Measure]] = deque()
        self.probing: dict[int, tuple[StageId, Probe]] = {}
        self.loading: deque[tuple[StageId, Epoch]] = deque()
        self.preparing: deque[tuple[StageId, int, int]] = deque()
        """Stage, number and index of what is still to be loaded besides."""
        self.prepares: dict[StageId, Prepare] = {}
        self.let_go: list[StageId] = []
        self.mirrors: dict[StageId, tuple[str, ...]] = {}
        self.forgets: set[StageId] = set()
        """Stages that keep nothing when they are told to."""
        self.last_batch = 0
        self.computed = 0
        """Tokens that went through chains."""
        self._was: dict[int, tuple[int, ...]] = {}
        self.plans: deque[ComputePlan] = deque()
        self.epochs: dict[StageId, Epoch] = {}
        self.chains: dict[ChainId, ChainWorld] = {}
        self.refused: list[StageId] = []
        self.released: list[StageId] = []
        self.assigned: dict[StageId, Assign] = {}
        self.tokens: dict[RequestId, list[int]] = {}
        self.text: dict[RequestId, str] = {}
        self.ends: dict[RequestId, RequestFinished | RequestFailed] = {}
        self.reports: list[Report] = []
        self.closed = 0
        """How often the core has said that its broker may end."""
        self.beats_due = 0.0

    # -- what the test does

    def feed(self, event: BrokerEvent) -> list[Effect]:
        effects = self.core.handle(event, self.now)
        for effect in effects:
            self._perform(effect)
        self.core.validate()
        while self.plans:
            self.feed(self._plan(self.plans.popleft()))
        return effects

    def _plan(self, ask: ComputePlan) -> BrokerEvent:
        try:
            plan = choose(self.core.core.planner, SHAPE, ask.choices, ask.network)
        except PlanError as error:
            return PlanNotFound(cause="planner", number=ask.number, error=error)
        return PlanComputed(cause="planner", number=ask.number, plan=plan)

    def join(
        self, name: str, models: tuple[str, ...] = (MODEL.fingerprint,), *, start: int = 1, offers: int = 0
    ) -> StageId:
        """A stage worker of a device registers; `offers` bytes for layers, 0: it does not say."""
        stage = StageId(f"{name}/{start}")
        self.alive.add(stage)
        self.feed(
            StageRegistered(
                cause=stage,
                stage=stage,
                device=DeviceName(name),
                endpoint=f"tcp://{name}:1",
                models=models,
                capabilities=Capabilities(offered_bytes=offers),
            )
        )
        return stage

    def lose(self, stage: StageId) -> None:
        """It is killed, and its connection closes."""
        self.alive.discard(stage)
        self.feed(StageLeft(cause=stage, stage=stage, reason="its connection closed"))

    def load_one(self) -> bool:
        """One stage that loads gets ready."""
        while self.loading:
            stage, epoch = self.loading.popleft()
            if stage in self.alive:
                self.feed(
                    StageLoaded(
                        cause=stage,
                        stage=stage,
                        epoch=epoch,
                        load_s=0.1,
                        weights_bytes=1,
                        kept=bool(self.assigned[stage].keep) and stage not in self.forgets,
                    )
                )
                return True
        return False

    def prepare_one(self) -> bool:
        """One stage holds one more slice."""
        while self.preparing:
            stage, number, index = self.preparing.popleft()
            if stage in self.alive and number == self.prepares[stage].number:
                self.feed(StagePrepared(cause=stage, stage=stage, number=number, index=index, load_s=0.1))
                return True
        return False

    def copy(self, keeper: StageId, slot: int, chain: ChainId = ChainId(0)) -> int:
        """A stage has got copies of a slot, in all the slices that it keeps. Returns how many tokens they hold."""
        held = len(self.chains[chain].slots.get(slot, ()))
        for slice_ in self.prepares[keeper].slices:
            self.feed(
                SlotCopied(
                    cause=keeper,
                    stage=keeper,
                    slice=slice_,
                    slot=SlotId(slot),
                    tokens=held,
                    batch=self.chains[chain].batch,
                )
            )
        return held

    def move_one(self, chain: ChainId = ChainId(0), hops: tuple[Hop, ...] = ()) -> bool:
        """The oldest micro-batch of a chain comes out of it."""
        world = self.chains.get(chain)
        if world is None or not world.coming:
            return False
        sent = world.coming.popleft()
        results = world.compute(sent)
        self.computed += sent.message.tokens
        world.batch = self.last_batch = sent.message.batch
        self.feed(
            BatchReturned(
                cause="result",
                epoch=sent.epoch,
                batch=BatchId(sent.message.batch),
                tokens=results,
                hops=hops,
            )
        )
        return True

    def wait(self, seconds: float) -> None:
        """Time passes; living stages beat, and the core's deadlines come when they are due."""
        until = self.now + seconds
        while True:
            due = self.core.next_deadline()
            step = min(until, self.beats_due, due if due is not None else until)
            self.now = max(self.now, step)
            if self.now >= self.beats_due:
                self.beats_due = self.now + self.config.heartbeat_s
                for stage in sorted(self.alive):
                    epoch = self.epochs.get(stage, self.core.state.epoch)
                    self.feed(StageBeat(cause=stage, stage=stage, epoch=epoch))
            if due is not None and self.now >= due:
                self.feed(TimePassed(cause="timer"))
            elif self.now >= until:
                return

    def settle(self) -> None:
        """Everything that can move does, until nothing is left to do."""
        while (
            self.load_one() or self.prepare_one() or any(self.move_one(chain) for chain in list(self.chains))
        ):
            pass

    def start(self, *names: str) -> list[StageId]:
        """Stages join and a chain serves."""
        stages = [self.join(name) for name in names]
        self.wait(self.config.settle_s * 1.5)
        while self.load_one():
            pass
        assert self.core.state.ready
        return stages

    # -- what the core wants

    def _perform(self, effect: Effect) -> None:
        match effect:
            case SendToStage(stage, Assign() as message, epoch):
                self.assigned[stage], self.epochs[stage] = message, epoch
                self.loading.append((stage, epoch))
            case SendToStage(stage, Prepare() as message, _):
                self.prepares[stage] = message
                self.preparing += [(stage, message.number, index) for index in range(len(message.slices))]
            case SendToStage(stage, Mirror(endpoints), _):
                self.mirrors[stage] = endpoints
            case SendToStage(stage, Farewell(), _):
                self.let_go.append(stage)
                self.alive.discard(stage)
            case SendToStage(stage, Refused(), _):
                self.refused.append(stage)
            case SendToStage(stage, Release(), epoch):
                self.released.append(stage)
                self.epochs[stage] = epoch
            case SendToStage(stage, Measure() as message, _):
                self.measuring.append((stage, message))
            case SendToStage(stage, Probe() as message, _):
                self.probing[message.number] = (stage, message)
            case SendToStage(_, Welcome(), _):
                pass
            case ComputePlan():
                self.plans.append(effect)
            case OpenChain(chain, epoch, _):
                assert chain not in self.chains
                mine = self.core.state.chains[chain].stages
                keep = self.assigned[mine[0]].keep
                if any(stage in self.forgets for stage in mine):
                    keep = ()
                kept = {one.slot: self._was[one.slot][: one.tokens] for one in keep}
                assert all(len(kept[one.slot]) == one.tokens for one in keep)
                self.chains[chain] = ChainWorld(epoch, kept)
            case CloseChain(chain):
                self._was = self.chains.pop(chain).slots
            case SendBatch(chain):
                assert effect.epoch == self.chains[chain].epoch
                self.chains[chain].coming.append(effect)
            case RequestAccepted(request):
                self.tokens[request] = []
                self.text[request] = ""
            case RequestText(request, text, tokens, _):
                assert request not in self.ends, f"{request} speaks after its end"
                self.tokens[request].extend(tokens)
                self.text[request] += text
            case RequestFinished(request) | RequestFailed(request):
                assert request not in self.ends, f"{request} ended twice"
                self.ends[request] = effect
            case Closed():
                self.closed += 1
            case Report():
                self.reports.append(effect)
