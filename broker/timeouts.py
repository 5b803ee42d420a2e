"""Requests that have to be finished by a certain time, and end with an error when they are not. Pure.

The time is the client's (`timeout_s`) or, where it named none, the broker's (`--request-timeout`), counted from the
moment the request was accepted. Entries of requests that have ended stay in the heap until they come up or are half of
it: then they are thrown out, so it never grows with the number of requests that there were.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from potluck.broker import requests
from potluck.broker.core import Core
from potluck.broker.effects import Effect
from potluck.broker.state import BrokerState, Request
from potluck.wire.errors import Phase, RequestTimeoutError
from potluck.wire.ids import RequestId

SPARE = 64
"""Entries of ended requests that are no reason yet to go through the heap."""


def watch(state: BrokerState, request: Request) -> None:
    """Remembers when the request has to be finished, if it has to be."""
    if request.due_s is None:
        return
    heapq.heappush(state.due, (request.due_s, request.request))
    if len(state.due) > SPARE + 2 * len(state.requests):
        state.due = [entry for entry in state.due if _waits(state, entry)]
        heapq.heapify(state.due)


def _waits(state: BrokerState, entry: tuple[float, RequestId]) -> bool:
    """Whether this is the time of a request that has not ended: another one may have the same name by now."""
    due_s, name = entry
    request = state.requests.get(name)
    return request is not None and request.due_s == due_s


def time_passed(core: Core, cause: str) -> Iterator[Effect]:
    """Ends the requests whose time is over."""
    due = core.state.due
    while due and due[0][0] <= core.now:
        entry = heapq.heappop(due)
        if _waits(core.state, entry):
            request = core.state.requests[entry[1]]
            core.tell(request.request, cause, f"not finished in time, after {request.generated} tokens")
            yield requests.fail(core.state, request, timed_out(core, request))
            if core.may_change():
                core.ask_for_plan(core.settle_s)


def next_s(core: Core) -> float | None:
    """When the next one could be over."""
    return core.state.due[0][0] if core.state.due else None


def timed_out(core: Core, request: Request) -> RequestTimeoutError:
    """Says how far the request has come, and what has held it up."""
    allowed_s = (request.due_s or 0.0) - request.accepted_s
    if request.generated > 0:
        so_far = f"{request.generated} of up to {request.max_new} tokens were there"
        phase = Phase.DECODE
    elif request.slot is not None:
        so_far = f"its prompt of {request.prompt_tokens} tokens was being computed"
        phase = Phase.PREFILL
    else:
        so_far = "it waited for a slot" if core.state.ready else f"no chain serves. {core.missing}"
        phase = Phase.SUBMIT
    return RequestTimeoutError(
        f"The request was not finished within {allowed_s:g} s: {so_far.removesuffix('.')}.",
        hint="Give it more time (timeout_s), or ask for fewer tokens.",
        phase=phase,
        timeout_s=allowed_s,
        completion_tokens=request.generated,
    )
