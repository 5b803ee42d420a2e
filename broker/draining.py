"""Devices that are to have no work: drained by a person, or about to leave by themselves. Pure.

Their chains are planned without them, prepared and switched to like any better plan. If nobody can take over, what
runs is finished there, and nothing new is taken in.
"""

from __future__ import annotations

from collections.abc import Iterator

from potluck.broker import members, plans
from potluck.broker.core import Core
from potluck.broker.effects import Effect, Report, SendToStage
from potluck.broker.events import DrainAsked, DrainEnded, StageLeaves
from potluck.broker.state import Chain, Stage
from potluck.wire.ids import DeviceName
from potluck.wire.messages import Draining, Farewell


def leaves(core: Core, event: StageLeaves) -> Iterator[Effect]:
    """A stage wants to leave."""
    stage = core.state.stages.get(event.stage)
    if stage is None or stage.leaving:
        return
    stage.leaving = True
    core.tell(event.stage, event.cause, f"wants to leave: {event.reason}")
    yield Report("info", f"{stage.device} wants to leave ({event.reason}).")
    yield from _begin(core)


def asked(core: Core, event: DrainAsked) -> Iterator[Effect]:
    """A person wants a device to have no work. Asked again and again to see how far it is."""
    if event.device in core.drained:
        return
    core.drained.add(event.device)
    core.tell(f"device {event.device}", event.cause, "is drained")
    yield Report("info", f"{event.device} is drained: its work goes to others.")
    yield from _begin(core)


def ended(core: Core, event: DrainEnded) -> Iterator[Effect]:
    """A drained device counts again."""
    if event.device in core.drained:
        core.drained.discard(event.device)
        core.tell(f"device {event.device}", event.cause, "counts again")
        for chain in core.state.chains.values():
            chain.closing = chain.closing and bool(going(core, chain))
        core.planned_for = None
        yield Report("info", f"{event.device} may have work again.")
        core.ask_for_plan(0.0)


def _begin(core: Core) -> Iterator[Effect]:
    yield from let_go(core)
    core.planned_for = None
    core.ask_for_plan(0.0)


def going(core: Core, chain: Chain) -> list[Stage]:
    """Stages of a chain that are to get rid of their work."""
    return [stage for name in chain.stages if core.goes(stage := core.state.stages[name])]


def keep_until_empty(core: Core, chain: Chain) -> Iterator[Effect]:
    """Nobody can take the chain's work: what runs on it is finished, and nothing new is taken in."""
    if not chain.closing:
        chain.closing = True
        names = ", ".join(stage.device for stage in going(core, chain))
        yield Report(
            "warning",
            f"Nobody can take over from {names}: what runs there is finished, nothing new is taken.",
        )
    yield from end_if_empty(core, chain)


def end_if_empty(core: Core, chain: Chain) -> Iterator[Effect]:
    """A chain that was kept for what ran on it ends with that."""
    if chain.closing and not any(chain.slots):
        yield from plans.close(core, chain, "drain", "its stages are to have no work")
        yield from let_go(core)
        core.ask_for_plan(0.0)


def let_go(core: Core) -> Iterator[Effect]:
    """Those who asked to leave and have no work may go."""
    for stage in list(core.state.stages.values()):
        if stage.leaving and stage.chain is None:
            yield SendToStage(stage.stage, Farewell("Nothing is left to do here."), stage.epoch)
            yield from members.remove(core, stage.stage, "drain", "it left in order", lost=False)


def draining(core: Core, device: DeviceName) -> Draining:
    """How far a device is."""
    mine = [stage for stage in core.state.stages.values() if stage.device == device]
    busy = [stage for stage in mine if stage.chain is not None]
    if not mine:
        return Draining(device, True, "No stage of this name has joined; it gets no work if it does.")
    if not busy:
        return Draining(device, True, "It has no work.")
    chains = [core.state.chains[stage.chain] for stage in busy if stage.chain is not None]
    running = sum(owner is not None for chain in chains for owner in chain.slots)
    if any(chain.closing for chain in chains):
        return Draining(device, False, f"Nobody can take over; {running} requests are finished there first.")
    if core.move is not None:
        return Draining(device, False, "Others load its layers.")
    return Draining(device, False, "A plan without it is being made.")
