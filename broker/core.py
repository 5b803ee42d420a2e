"""What the parts of the broker's core share: its state, what it was given, and what it waits for. Pure data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from potluck.broker.config import BrokerConfig
from potluck.broker.state import BrokerState, Chain, Loss, Seat, Stage, StageStatus
from potluck.broker.watched import Watched
from potluck.model.vocabulary import Vocabulary
from potluck.planner.plan import ChainPlan, ModelShape, Network, Plan, Planner
from potluck.wire.errors import Phase, PotluckError, StageLostError
from potluck.wire.ids import DeviceName, Epoch, StageId
from potluck.wire.messages import ModelRef, Slice
from potluck.wire.story import Story

PHASE_OF = {StageStatus.MEASURING: Phase.MEASURE, StageStatus.LOADING: Phase.LOAD}
"""What a stage is at; any other one serves, or could."""
LOST_KEPT = 32
"""Stages that were lost and are remembered."""
LATELY_S = 3600.0
"""A death that is longer ago is no news any more."""


@dataclass(slots=True)
class Move:
    """A plan that its stages prepare for, beside what they serve. It comes into force once all hold their slices."""

    plan: Plan
    slices: dict[StageId, Slice]
    """What has to be held by whom."""
    since_s: float
    why: str


@dataclass(frozen=True, slots=True)
class Broken:
    """A chain that has ended because of a loss, and what its stages still hold."""

    plan: ChainPlan
    seats: tuple[Seat, ...] = ()
    batches: frozenset[int] = frozenset()
    """Its newest micro-batches."""


@dataclass(frozen=True, slots=True)
class Question:
    """What the planner was asked. Its answer counts only as long as nothing else was asked since."""

    number: int
    asked: object
    network: Network


@dataclass(slots=True)
class Core:
    """One broker's core. `now` is the time of the event being handled; due times are on the same clock."""

    config: BrokerConfig
    model: ModelRef
    shape: ModelShape
    vocabulary: Vocabulary
    planner: Planner
    results_endpoint: Callable[[StageId], str]
    version: str
    state: BrokerState = field(default_factory=BrokerState)
    story: Story = field(default_factory=Story)
    watched: Watched = field(default_factory=Watched)
    """For what clients are told about when to come back."""
    now: float = 0.0
    plan_due_s: float | None = None
    check_due_s: float | None = None
    """When somebody could next be lost."""
    measure_check_s: float | None = None
    """When something that is measured could next have taken too long."""
    look_again_s: float | None = None
    """When links that are cut are to be probed again."""
    planned_once: bool = False
    plan: Plan | None = None
    """The one in force."""
    planned_for: object = None
    """What the planner was last asked, and gave nothing better for."""
    questions: int = 0
    """That the planner was asked."""
    moving: bool = False
    """Whether the chains that are to serve next will do so soon: new requests wait for them."""
    broken: list[Broken] = field(default_factory=list)
    """Chains that have ended because of a loss and are still to be replaced."""
    question: Question | None = None
    """What the planner is busy with."""
    move: Move | None = None
    """What is prepared for."""
    drained: set[DeviceName] = field(default_factory=set)
    """Devices that are to get no work."""
    losses: dict[StageId, str] = field(default_factory=dict)
    """For each stage that serves, what its loss would cost, in words."""
    drifted: bool = False
    """Whether a stage's pace has changed since the last plan."""
    hold_s: float = 0.0
    """How long the next move because of drift waits after the last one."""
    moved_s: float = float("-inf")
    """When stages were last given other layers because of drift."""
    last_error: PotluckError | None = None
    plan_error: PotluckError | None = None
    """Why the last plan could not be made."""

    @property
    def wanted(self) -> int:
        """Stages needed before planning: as many as asked for at first, afterwards whatever is left."""
        return 1 if self.planned_once else max(1, self.config.min_stages)

    def usable(self) -> list[Stage]:
        """Stages that could be assigned something."""
        out = (StageStatus.FAILED, StageStatus.MEASURING)
        return [
            stage for stage in self.state.stages.values() if stage.status not in out and not self.goes(stage)
        ]

    def goes(self, stage: Stage) -> bool:
        """Whether the stage is to get rid of its work: it wants to leave, or its device is drained."""
        return stage.leaving or stage.device in self.drained

    def free(self) -> list[Stage]:
        """Usable stages that belong to no chain."""
        return [stage for stage in self.usable() if stage.chain is None]

    def enough_joined(self) -> bool:
        """Whether as many stages as were asked for can be planned with."""
        return len(self.usable()) >= self.config.min_stages > 1

    def has_spares(self) -> bool:
        """Whether a stage has nothing to do."""
        return any(stage.status is StageStatus.SPARE for stage in self.state.stages.values())

    @property
    def settle_s(self) -> float:
        """How long to wait for what else may change. Where requests follow each other closely, a drift can't wait."""
        return 0.0 if self.drifted else self.config.settle_s

    def may_change(self) -> bool:
        """Whether a plan for chains that serve could come out otherwise: somebody has nothing to do, or has drifted."""
        return self.has_spares() or self.drifted

    def ask_for_plan(self, after_s: float) -> None:
        """A plan is due after `after_s`, counted anew from the last stage that joined."""
        self.plan_due_s = self.now + after_s

    def chain_of(self, epoch: Epoch, batch: int) -> Chain | None:
        """The open chain that has this micro-batch in flight; None for anything late, old or unknown."""
        for chain in self.state.chains.values():
            if chain.epoch == epoch and batch in chain.in_flight:
                return chain
        return None

    def note_loss(self, stage: Stage, reason: str) -> None:
        """Remembers that a stage is gone. Its witness may say more."""
        phase = PHASE_OF.get(stage.status, Phase.SERVE)
        self.last_error = StageLostError(
            f"{stage.device} is gone: {reason}.",
            hint="Start potluck-stage there again.",
            device=stage.device,
            stage=stage.stage,
            phase=phase,
        )
        lost = self.state.lost
        lost[stage.stage] = Loss(stage.device, phase, self.now, self.last_error)
        if len(lost) > LOST_KEPT:
            lost.popitem(last=False)

    def deaths(self) -> str:
        """What was lately found out about stages that died and have not come back, in words."""
        here = {stage.device for stage in self.state.stages.values()}
        return "".join(
            f" {loss.error}"
            for loss in self.state.lost.values()
            if loss.explained
            and loss.device not in here
            and loss.error is not self.last_error
            and self.now - loss.at_s < LATELY_S
        )

    def tell(self, subject: str, cause: str, text: str) -> None:
        """Adds a line to the story."""
        self.story.tell(self.now, subject, cause, text)

    @property
    def missing(self) -> str:
        """Why no chain serves, in words, for a person who waits."""
        stages = self.state.stages.values()
        loading = [stage for stage in stages if stage.status is StageStatus.LOADING]
        measuring = [stage for stage in stages if stage.status is StageStatus.MEASURING]
        if measuring:
            names = ", ".join(f"{s.device} ({s.detail or 'starting'})" for s in measuring)
            return f"Measuring: {names}."
        if self.state.probes:
            return f"Measuring the links: {len(self.state.links)} done."
        if loading:
            return "Loading: " + ", ".join(f"{s.device} ({s.detail or 'starting'})" for s in loading) + "."
        usable = len(self.usable())
        if usable < self.wanted:
            broken = [stage.device for stage in stages if stage.status is StageStatus.FAILED]
            there = f"can serve, {', '.join(broken)} failed" if broken else "have joined"
            last = f" Last error: {self.last_error}" if self.last_error else ""
            return f"{usable} of at least {self.wanted} stages {there}.{last}{self.deaths()}"
        if self.question is not None:
            return "The stages have joined, a plan is being computed."
        if self.plan_error is not None:
            return f"{self.plan_error}{self.deaths()}"
        return "The stages have joined, planning is due."
