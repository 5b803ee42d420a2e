"""Which tokens travel next: fills a chain with micro-batches, continuously. Pure.

A request joins and leaves between micro-batches. Decode micro-batches carry one token of each of a run of neighbouring
slots (one ubatch wants ascending, consecutive sequences); with S stages, the sequences that decode are shared out over
S micro-batches, so that every stage has one. Prompt chunks travel between them: as many as fill the chain when nobody
decodes, one at a time when everybody does. A prompt's chunks do not wait for each other, only its last has a result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from potluck.broker.config import BrokerConfig
from potluck.broker.state import BrokerState, Chain, Entry, InFlight, Request
from potluck.wire.ids import BatchId, RequestId, SlotId
from potluck.wire.messages import MicroBatch, SlotSampling, Span, Trim


@dataclass(slots=True)
class _Draft:
    """A micro-batch being put together."""

    prefill: bool
    spans: list[Span] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    trims: list[Trim] = field(default_factory=list)
    samplings: list[SlotSampling] = field(default_factory=list)

    def add(self, chain: Chain, request: Request, count: int) -> None:
        """Puts the request's next `count` tokens in."""
        assert request.slot is not None
        if not request.settled:
            request.settled = True
            if request.sent == 0 and request.slot in chain.dirty:
                self.trims.append(Trim(request.slot, 0))
                chain.dirty.discard(request.slot)
            self.samplings.append(SlotSampling(request.slot, request.sampling))
        wants = 1 if count == request.rest else 0
        self.spans.append(Span(request.slot, request.sent, count, wants))
        self.tokens.extend(request.tokens[request.sent : request.sent + count])
        request.sent += count
        self.entries.append(Entry(request.slot, request.request, wants, request.sent))


def room(state: BrokerState) -> tuple[int, int]:
    """Slots that the next requests get at once, and all slots there are. While some are free, no request waits."""
    if state.closing is not None:
        return 0, 0
    chains = [chain for chain in state.chains.values() if chain.open and not chain.closing]
    slots = [owner for chain in chains for owner in chain.slots]
    return slots.count(None), len(slots)


def admit(state: BrokerState, now: float) -> list[tuple[Chain, RequestId]]:
    """Gives free slots to the requests that wait longest. Returns who got one, and where.

    Each goes to the chain that is least loaded for what it was planned for, there to the lowest slot.
    """
    admitted: list[tuple[Chain, RequestId]] = []
    if not state.waiting:
        return admitted
    free = {
        chain.chain: sum(owner is None for owner in chain.slots)
        for chain in state.chains.values()
        if chain.open and not chain.closing
    }
    while state.waiting and any(free.values()):
        chain = min(
            (state.chains[name] for name, count in free.items() if count),
            key=lambda chain: (len(chain.slots) - free[chain.chain] + 1) / max(1, chain.plan.users),
        )
        free[chain.chain] -= 1
        name, _ = state.waiting.popitem(last=False)
        request = state.requests[name]
        slot = chain.slots.index(None)
        request.sit(chain.chain, SlotId(slot), 0, state.next_batch)
        if request.started_s is None:
            request.started_s = now
        chain.slots[slot] = name
        admitted.append((chain, name))
    return admitted


def fill(
    state: BrokerState, chain: Chain, config: BrokerConfig, now: float
) -> Iterator[tuple[MicroBatch, tuple[int, ...]]]:
    """The micro-batches that may enter the chain now, with their tokens; each is in flight once it is yielded."""
    stages = len(chain.plan.stages)
    running = [state.requests[name] for name in chain.slots if name is not None]
    while True:
        prefills = sum(flight.prefill for flight in chain.in_flight.values())
        decodes = len(chain.in_flight) - prefills
        draft = None
        if decodes < stages:
            draft = _draft_decode(chain, running, stages)
        if draft is None and prefills < max(1, stages + 1 - decodes):
            draft = _draft_prefill(chain, running, config, max(1, stages - prefills))
        if draft is None:
            return
        batch = BatchId(state.next_batch)
        state.next_batch += 1
        chain.recent.append(batch)
        chain.in_flight[batch] = InFlight(
            batch, now, tuple(draft.entries), draft.prefill, len(draft.tokens), alone=not chain.in_flight
        )
        message = MicroBatch(batch, tuple(draft.spans), tuple(draft.trims), tuple(draft.samplings))
        yield message, tuple(draft.tokens)


def _draft_decode(chain: Chain, running: list[Request], stages: int) -> _Draft | None:
    """One token of each of up to a fair share of the decoding requests, in the order of their slots."""
    decoding = [request for request in running if request.decoding]
    ready = [request for request in decoding if request.rest == 1]
    if not ready:
        return None
    share = -(-len(decoding) // stages)
    draft = _Draft(prefill=False)
    for request in ready[:share]:
        draft.add(chain, request, 1)
    return draft


def _draft_prefill(chain: Chain, running: list[Request], config: BrokerConfig, share: int) -> _Draft | None:
    """Up to `chunk_tokens` tokens of the prompts that came first, rows in the order of their slots.

    What would fit one micro-batch is shared out over `share` of them, whole requests each, so that the stages compute
    at the same time: short prompts, or the last tokens of several answers after a takeover.
    """
    waiting = sorted(
        (request for request in running if request.rest > 0 and not request.decoding),
        key=lambda request: (request.started_s, request.slot),
    )
    room, least = config.chunk_tokens, 0
    rest = sum(request.rest for request in waiting)
    if rest <= room:
        least = room - -(-rest // share)
    takes: list[tuple[Request, int]] = []
    for request in waiting:
        if room <= least:
            break
        count = _chunk(request, room, config)
        if count > 0:
            takes.append((request, count))
            room -= count
    if not takes:
        return None
    draft = _Draft(prefill=True)
    for request, count in sorted(takes, key=lambda take: take[0].slot or 0):
        draft.add(chain, request, count)
    return draft


def _chunk(request: Request, room: int, config: BrokerConfig) -> int:
    """How many tokens of a prompt travel next; 0 if the chunk that is to be repeated has no room."""
    if request.sent >= request.prompt_tokens:
        return min(request.rest, room, config.replay_tokens)
    if request.bounds and request.sent < request.bounds[-1]:
        end = next(bound for bound in request.bounds if bound > request.sent)
        return end - request.sent if end - request.sent <= room else 0
    count = min(request.prompt_tokens - request.sent, room)
    request.bounds.append(request.sent + count)
    return count
