"""The core's state as one snapshot for people and programs. Pure."""

from __future__ import annotations

from potluck.broker import standby
from potluck.broker.core import Core
from potluck.broker.machine import BrokerMachine
from potluck.broker.state import Stage
from potluck.wire.messages import StageView, StateView


def snapshot(machine: BrokerMachine, now: float, started_s: float) -> StateView:
    """What the broker knows at `now`, stages in the order of their chains, then the spares."""
    state = machine.state
    order = {
        name: (chain.chain, index)
        for chain in state.chains.values()
        for index, name in enumerate(chain.stages)
    }
    stages = sorted(
        state.stages.values(), key=lambda stage: (order.get(stage.stage, (1 << 30, 0)), stage.stage)
    )
    return StateView(
        epoch=state.epoch,
        model=machine.model.name,
        ready=state.ready and state.closing is None,
        stages=tuple(_stage(machine.core, stage, order.get(stage.stage), now) for stage in stages),
        running=len(state.requests) - len(state.waiting),
        queued=len(state.waiting),
        slots=machine.config.slots,
        context_tokens=machine.config.context_tokens,
        uptime_s=max(0.0, now - started_s),
        tokens_out=state.tokens_out,
        detail="" if state.ready and state.closing is None else machine.missing,
        retry_after_s=machine.retry_after_s,
    )


def _stage(core: Core, stage: Stage, place: tuple[int, int] | None, now: float) -> StageView:
    return StageView(
        stage=stage.stage,
        device=stage.device,
        state=_state(core, stage),
        chain=None if place is None else place[0],
        index=None if place is None else place[1],
        first=None if stage.place is None else stage.place.first,
        end=None if stage.place is None else stage.place.end,
        counters=stage.counters,
        hops=stage.hops,
        last_beat_age_s=max(0.0, now - stage.last_heard_s),
        weights_bytes=stage.weights_bytes,
        kv_bytes=stage.kv_bytes,
        compute_bytes=stage.compute_bytes,
        endpoint=stage.endpoint,
        detail=stage.detail or standby.text(stage),
        holds=stage.holds,
        if_lost=core.losses.get(stage.stage, ""),
        capabilities=stage.capabilities,
        version=stage.version,
    )


def _state(core: Core, stage: Stage) -> str:
    if core.goes(stage):
        return "drained" if stage.chain is None else "draining"
    return stage.status.value
