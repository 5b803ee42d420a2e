"""What happens to requests when their chain breaks, and who is to blame. Pure.

Requests go back to the queue with every token they have, ahead of those that never ran; the next chain computes those
tokens again and goes on with the next one. Nothing of the old chain can reach them: its epoch is over.
"""

from __future__ import annotations

from potluck.broker.requests import release_slot
from potluck.broker.state import BrokerState, Chain, Request
from potluck.wire.ids import RequestId

MAX_REPLAYS = 2
"""A request whose own micro-batches broke this often is not tried again: it may be what breaks them."""


def requeue(state: BrokerState, chain: Chain, now: float) -> list[RequestId]:
    """Takes every request off the chain and puts it back to wait, oldest first. Returns them in that order."""
    names = [name for name in chain.slots if name is not None]
    moved = sorted((state.requests[name] for name in names), key=lambda request: request.accepted_s)
    chain.in_flight.clear()
    for request in moved:
        release_slot(state, request)
        request.waiting_since_s = now
        request.replaying = request.generated > 0
    for request in reversed(moved):
        state.waiting[request.request] = None
        state.waiting.move_to_end(request.request, last=False)
    return [request.request for request in moved]


def restart_waits(state: BrokerState, now: float) -> None:
    """The last chain is gone: only from now on do requests wait for a chain, and no longer for a slot."""
    for name in state.waiting:
        state.requests[name].waiting_since_s = now


def overdue(state: BrokerState, now: float, wait_limit_s: float) -> list[Request]:
    """Waiting requests that no chain has taken for too long."""
    return [
        state.requests[name]
        for name in state.waiting
        if now >= state.requests[name].waiting_since_s + wait_limit_s
    ]
