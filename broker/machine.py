"""The broker's core: events in, effects out. Knows no socket, clock or thread. Pure.

This file says what each event leads to. Who is a member is decided in `members`, epochs and chains in `plans`, requests
in `serving`, how it all ends in `closing`, what happens when nothing else does in `deadlines`; all of them work on one
`Core`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from potluck.broker import (
    closing,
    deadlines,
    draining,
    estimates,
    holding,
    measuring,
    members,
    mirroring,
    obituaries,
    planning,
    serving,
    switching,
    watched,
)
from potluck.broker.config import BrokerConfig
from potluck.broker.core import Core
from potluck.broker.effects import Effect
from potluck.broker.events import (
    BatchBroke,
    BatchReturned,
    BrokerEvent,
    CloseAsked,
    DrainAsked,
    DrainEnded,
    LinkProbed,
    LinkSilent,
    PlanComputed,
    PlanNotFound,
    RequestCancelled,
    RequestSubmitted,
    SlotCopied,
    StageBeat,
    StageBroke,
    StageDied,
    StageLeaves,
    StageLeft,
    StageLoaded,
    StageMeasured,
    StageNotMeasured,
    StageNotPrepared,
    StagePrepared,
    StageProgressed,
    StageRegistered,
    TimePassed,
)
from potluck.broker.state import BrokerState
from potluck.model.vocabulary import Vocabulary
from potluck.planner.plan import ModelShape, Planner
from potluck.wire.ids import Epoch, StageId
from potluck.wire.messages import ModelRef
from potluck.wire.story import Story


class BrokerMachine:
    """One broker's core. `handle` for every event, then `next_deadline` for the time of the next TimePassed."""

    def __init__(
        self,
        config: BrokerConfig,
        model: ModelRef,
        shape: ModelShape,
        vocabulary: Vocabulary,
        planner: Planner,
        results_endpoint: Callable[[StageId], str],
        version: str,
        *,
        first_epoch: Epoch = Epoch(0),
    ) -> None:
        """`first_epoch` is to be higher than any epoch of the brokers before: a stage may have slept since then."""
        state = BrokerState(first_epoch)
        self.core = Core(config, model, shape, vocabulary, planner, results_endpoint, version, state)

    @property
    def config(self) -> BrokerConfig:
        """The numbers it decides by."""
        return self.core.config

    @property
    def model(self) -> ModelRef:
        """What it serves."""
        return self.core.model

    @property
    def state(self) -> BrokerState:
        """What it knows. Owned by the core: others only read it."""
        return self.core.state

    @property
    def story(self) -> Story:
        """What has happened."""
        return self.core.story

    @property
    def missing(self) -> str:
        """Why nothing new is served, in words."""
        closes = self.core.state.closing is not None
        return closing.refusal(self.core).what if closes else self.core.missing

    @property
    def retry_after_s(self) -> float:
        """When a request that is refused now may be taken; 0 while they are taken."""
        if self.core.state.closing is not None:
            return float(closing.refusal(self.core).facts["retry_after_s"])
        return 0.0 if self.core.state.ready else estimates.until_ready_s(self.core)

    def handle(self, event: BrokerEvent, now: float) -> list[Effect]:
        """What is to be done because of `event`, in order. `now` never goes back."""
        self.core.now = now
        effects = list(self._handle(event))
        if self.core.move is not None:
            effects += switching.go_on(self.core, event.cause)
        for chain in [chain for chain in self.core.state.chains.values() if chain.closing]:
            effects += draining.end_if_empty(self.core, chain)
        if self.core.plan_due_s is not None and now >= self.core.plan_due_s:
            effects += planning.make_plan(self.core, event.cause)
        effects += closing.finish(self.core, event.cause)
        batches: list[Effect] = list(serving.fill_chains(self.core))
        watched.note(self.core.watched, self.core.state, event, now)
        # The chain waits for its next micro-batch, so that goes out before anything that people read.
        return batches + effects if isinstance(event, BatchReturned) else effects + batches

    def _handle(self, event: BrokerEvent) -> Iterator[Effect]:
        core = self.core
        match event:
            case BatchReturned():
                return serving.returned(core, event)
            case BatchBroke():
                return serving.batch_broke(core, event)
            case RequestSubmitted():
                return serving.submit(core, event)
            case RequestCancelled():
                return serving.cancel(core, event)
            case StageRegistered():
                return members.register(core, event)
            case StageBeat():
                return members.beat(core, event)
            case StageProgressed():
                return members.progressed(core, event)
            case StageLoaded():
                return members.loaded(core, event)
            case StageBroke():
                return members.broke(core, event)
            case StageMeasured():
                return measuring.measured(core, event)
            case StageNotMeasured():
                return measuring.not_measured(core, event)
            case LinkProbed():
                return measuring.probed(core, event)
            case LinkSilent():
                return measuring.silent(core, event)
            case PlanComputed():
                return planning.computed(core, event)
            case PlanNotFound():
                return planning.not_found(core, event)
            case StagePrepared():
                return itertools.chain(holding.prepared(core, event), mirroring.arrange(core))
            case SlotCopied():
                return mirroring.copied(core, event)
            case StageNotPrepared():
                return holding.not_prepared(core, event)
            case StageLeaves():
                return draining.leaves(core, event)
            case DrainAsked():
                return draining.asked(core, event)
            case DrainEnded():
                return draining.ended(core, event)
            case StageDied():
                return obituaries.died(core, event)
            case StageLeft():
                return members.remove(core, event.stage, event.cause, event.reason)
            case CloseAsked():
                return closing.ask(core, event)
            case TimePassed():
                return deadlines.time_passed(core, event)

    def next_deadline(self) -> float | None:
        """When `handle(TimePassed())` is due, on the clock of `now`; None while nothing is waited for."""
        return deadlines.next_deadline(self.core)

    def validate(self) -> None:
        """Raises AssertionError if the state contradicts itself."""
        self.core.state.validate()
