"""A chain's life: who is assigned what, and how it ends. Pure.

When to plan, and what, is decided in `planning`, what a break means for requests in `recovery`.
"""

from __future__ import annotations

from collections.abc import Iterator

from potluck.broker import holding, mirroring, recovery
from potluck.broker.core import Broken, Core
from potluck.broker.effects import (
    CloseChain,
    Effect,
    Report,
    SendToStage,
)
from potluck.broker.state import Chain, Stage, StageStatus
from potluck.wire.messages import (
    Assign,
    HopSums,
    Keep,
    StageCounters,
)


def assign(core: Core, chain: Chain, keep: tuple[Keep, ...] = ()) -> Iterator[Effect]:
    """Tells every stage of a chain what it is to hold, and what it is to `keep` of what it holds."""
    places = chain.plan.stages
    for index, place in enumerate(places):
        stage = core.state.stages[place.stage]
        stage.status, stage.chain, stage.place = StageStatus.LOADING, chain.chain, place
        stage.last_progress_s, stage.detail = core.now, ""
        stage.hops, stage.counters = HopSums(), StageCounters()
        last = index == len(places) - 1
        stage.assign = Assign(
            chain=chain.chain,
            index=index,
            stages=len(places),
            model=core.model,
            first=place.first,
            end=place.end,
            next_endpoint=(
                core.results_endpoint(place.stage)
                if last
                else core.state.stages[places[index + 1].stage].endpoint
            ),
            results_endpoint=core.results_endpoint(place.stage),
            slots=core.config.slots,
            context_tokens=core.config.context_tokens,
            batch_tokens=max(core.config.chunk_tokens, core.config.slots),
            activation=core.config.activation,
            exact=core.config.exact,
            gpu_layers=place.gpu_layers,
            keep=keep,
        )
        stage.mirrors = ()
        stage.epoch = chain.epoch
        holding.assigned(stage)
        yield ask_to_load(core, stage)
        yield Report("info", f"{place.device}: layers {place.first}-{place.end - 1} of {core.shape.layers}.")


def ask_to_load(core: Core, stage: Stage) -> SendToStage:
    """What the stage is to hold in this epoch. It answers as often as it is asked."""
    assert stage.assign is not None
    stage.asked_s = core.now
    return SendToStage(stage.stage, stage.assign, stage.epoch)


def close(core: Core, chain: Chain, cause: str, why: str) -> Iterator[Effect]:
    """Ends a chain: its requests wait again, its stages are spares, its slots and frames are void."""
    for name in recovery.requeue(core.state, chain, core.now):
        core.tell(name, cause, f"off chain {chain.chain}: {why}")
    if chain.open:
        yield CloseChain(chain.chain)
    for member in chain.stages:
        stage = core.state.stages[member]
        stage.chain = stage.place = None
        if stage.status is not StageStatus.FAILED:
            stage.status = StageStatus.SPARE
    del core.state.chains[chain.chain]
    if chain.open and not core.state.ready:
        recovery.restart_waits(core.state, core.now)


def break_chain_of(core: Core, stage: Stage, cause: str, why: str) -> Iterator[Effect]:
    """Ends the chain that a stage is part of; a new plan is due at once."""
    if stage.chain is not None:
        chain = core.state.chains[stage.chain]
        yield Report("warning", f"Chain {chain.chain} is broken: {why}.")
        yield from end_broken(core, chain, cause, why)


def end_broken(core: Core, chain: Chain, cause: str, why: str, *, holds: bool = True) -> Iterator[Effect]:
    """Ends a chain that can't go on; what follows it is due at once. Unless it `holds`, its caches are not known."""
    seats = mirroring.seats(core, chain) if holds else ()
    yield from close(core, chain, cause, why)
    core.broken.append(Broken(chain.plan, seats, frozenset(chain.recent)))
    core.moving = False
    core.ask_for_plan(0.0)


def load_deadline(core: Core, chain: Chain) -> float:
    """When a chain that loads has made no progress for too long."""
    waiting = [core.state.stages[name] for name in chain.stages if name not in chain.ready]
    return min(stage.last_progress_s + core.config.load_timeout_s for stage in waiting)
