"""Copies of what runs, kept by those who would take over: so that they compute again only what came after. Pure.

A stage that serves a slice copies its slots to the stages that hold the same slice for a loss (`arrange`). When it is
lost, each request can go on from the last token that all the stages of the new chain hold: the survivors in their own
caches, as far as micro-batches came out of the chain, the others in their copies (`kept`).
"""

from __future__ import annotations

from collections.abc import Iterator

from potluck.broker import holding
from potluck.broker.core import Broken, Core
from potluck.broker.effects import Effect, SendToStage
from potluck.broker.events import SlotCopied
from potluck.broker.state import Chain, Copy, Seat, Stage
from potluck.planner.plan import ChainPlan
from potluck.wire import limits
from potluck.wire.ids import SlotId
from potluck.wire.messages import Keep, Mirror


def arrange(core: Core) -> Iterator[Effect]:
    """Tells stages that serve to whom they are to copy their slots."""
    for chain in core.state.chains.values():
        if not chain.open:
            continue
        for name in chain.stages:
            stage = core.state.stages[name]
            mirrors = tuple(other.endpoint for other in _keepers(core, stage))[: limits.MIRRORS]
            if mirrors != stage.mirrors:
                stage.mirrors = mirrors
                yield SendToStage(name, Mirror(mirrors), stage.epoch)


def _keepers(core: Core, stage: Stage) -> list[Stage]:
    """Stages that hold what a stage serves, do not serve it, and keep no copies of another one that does."""
    active = holding.serves(stage)
    found = []
    for other in core.state.stages.values():
        if active is None or active not in other.held or active not in other.listed:
            continue
        if holding.serves(other) == active:
            continue
        source = core.state.stages.get(other.sources.get(active, stage.stage))
        if source is None or holding.serves(source) != active:
            source = stage  # whose copies it had serves that no more
        if source is stage:
            other.sources[active] = stage.stage
            found.append(other)
    return found


def copied(core: Core, event: SlotCopied) -> Iterator[Effect]:
    """A stage holds a newer copy of a slot."""
    stage = core.state.stages.get(event.stage)
    if stage is not None and event.slice in stage.held and event.slot < core.config.slots:
        stage.last_heard_s = core.now
        stage.copies[event.slice, event.slot] = Copy(event.tokens, event.batch)
    yield from ()


def seats(core: Core, chain: Chain) -> tuple[Seat, ...]:
    """Who holds which slot of a chain that ends, and how many tokens of it all its stages hold."""
    requests = core.state.requests
    return tuple(
        Seat(SlotId(slot), name, requests[name].done, requests[name].since_batch)
        for slot, name in enumerate(chain.slots)
        if name is not None and requests[name].done > 0
    )


def kept(core: Core, broken: Broken, new: ChainPlan) -> dict[Seat, int]:
    """The requests that can go on in their slots on the new chain, and how many tokens of theirs it holds."""
    old = {(place.stage, place.first, place.end) for place in broken.plan.stages}
    fresh = [place for place in new.stages if (place.stage, place.first, place.end) not in old]
    found: dict[Seat, int] = {}
    for seat in broken.seats:
        tokens = seat.tokens
        for place in fresh:
            copy = core.state.stages[place.stage].copies.get((holding.slice_of(core, place), seat.slot))
            tokens = min(tokens, copy.tokens if copy is not None and _is_of(copy, seat, broken) else 0)
        if tokens > 0 and seat.request in core.state.waiting:
            found[seat] = tokens
    return found


def _is_of(copy: Copy, seat: Seat, broken: Broken) -> bool:
    """Whether a copy was taken in this chain, and since the request has had the slot."""
    return copy.batch >= seat.since_batch and copy.batch in broken.batches


def keep_of(seats: dict[Seat, int]) -> tuple[Keep, ...]:
    """As it is told to the stages."""
    return tuple(
        Keep(seat.slot, tokens) for seat, tokens in sorted(seats.items(), key=lambda item: item[0].slot)
    )


def sit(core: Core, chain: Chain, seats: dict[Seat, int]) -> None:
    """Requests that waited go on in the slots they had."""
    for seat, tokens in seats.items():
        request = core.state.requests[seat.request]
        del core.state.waiting[seat.request]
        chain.slots[seat.slot] = seat.request
        request.sit(chain.chain, seat.slot, tokens, core.state.next_batch)


def stand_up(core: Core, chain: Chain) -> None:
    """A stage did not keep what it was to keep: all of the chain's requests begin anew, in their slots."""
    for slot, name in enumerate(chain.slots):
        if name is not None:
            core.state.requests[name].sit(chain.chain, SlotId(slot), 0, core.state.next_batch)
            chain.dirty.add(SlotId(slot))
