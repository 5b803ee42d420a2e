"""Requests on their way through the chains: in, out, and when a micro-batch fails. Pure.

Which micro-batches are made is left to `scheduler`, what a token becomes to `requests`.
"""

from __future__ import annotations

from collections.abc import Iterator

from potluck.broker import closing, estimates, hop_costs, plans, recovery, requests, scheduler, timeouts
from potluck.broker.core import Core
from potluck.broker.effects import (
    Effect,
    Report,
    RequestAccepted,
    RequestFailed,
    SendBatch,
)
from potluck.broker.events import (
    BatchBroke,
    BatchReturned,
    RequestCancelled,
    RequestSubmitted,
)
from potluck.broker.state import Chain, InFlight, Stage, StageStatus
from potluck.wire.errors import (
    CancelledError,
    Phase,
    QueueFullError,
    RequestError,
    StageError,
    UnavailableError,
)
from potluck.wire.ids import StageId
from potluck.wire.messages import (
    Hop,
    HopSums,
)

MAX_BREAKS = 3
"""A stage on which this many micro-batches in a row broke is left out until it joins anew."""
FORGETS = 0.98
"""What is left of a chain's slowest pace after a further micro-batch: a spell in which the devices were busy with other
things must not make a hang that comes much later cost as long."""


def submit(core: Core, event: RequestSubmitted) -> Iterator[Effect]:
    """Takes a request in, or says why not."""
    try:
        if core.state.closing is not None:
            raise closing.refusal(core)
        requests.check_submission(event, core.state, core.config, core.vocabulary.size)
        if not core.state.ready and not core.moving:
            after_s = estimates.until_ready_s(core)
            raise UnavailableError(
                f"No whole chain is ready. {core.missing}",
                hint=f"Try again in {after_s} s; potluck ps shows the stages.",
                phase=Phase.SUBMIT,
                retry_after_s=after_s,
            )
        waiting = len(core.state.waiting)
        free, _ = scheduler.room(core.state)
        if waiting >= core.config.queue_limit + free:
            after_s = estimates.until_room_s(core)
            raise QueueFullError(
                f"{waiting} requests wait already, as many as may."
                if waiting
                else "No slot is free, and no request may wait for one.",
                hint=f"Try again in {after_s} s.",
                phase=Phase.SUBMIT,
                retry_after_s=after_s,
            )
    except (RequestError, UnavailableError) as error:
        core.tell(event.request, event.cause, f"rejected: {error.what}")
        yield RequestFailed(event.request, error)
        return
    request = requests.new_request(event, core.config, core.now)
    request.born = core.state.next_batch
    core.state.requests[request.request] = request
    core.state.waiting[request.request] = None
    timeouts.watch(core.state, request)
    core.tell(request.request, event.cause, f"accepted with {request.prompt_tokens} prompt tokens")
    yield RequestAccepted(request.request, request.prompt_tokens)


def cancel(core: Core, event: RequestCancelled) -> Iterator[Effect]:
    """Nobody wants the answer any more."""
    request = core.state.requests.get(event.request)
    if request is None:
        return
    core.tell(event.request, event.cause, f"cancelled after {request.generated} tokens")
    yield requests.fail(core.state, request, CancelledError())
    if core.may_change():
        core.ask_for_plan(core.settle_s)


def returned(core: Core, event: BatchReturned) -> Iterator[Effect]:
    """The results of a micro-batch: a token for each request that was owed one."""
    chain = core.chain_of(event.epoch, event.batch)
    if chain is None:
        return
    flight = chain.in_flight[event.batch]
    owed = sum(entry.wants for entry in flight.entries)
    last = chain.plan.stages[-1]
    if len(event.tokens) != owed or any(not 0 <= token < core.vocabulary.size for token in event.tokens):
        error = StageError(
            f"{last.device} returned {len(event.tokens)} tokens where {owed} were due, or unknown ones.",
            hint="Check that all devices run the same version of Potluck and hold the same model.",
            device=last.device, stage=last.stage, phase=Phase.SERVE,
        )  # fmt: skip
        yield from batch_broke(
            core, BatchBroke(cause=event.cause, epoch=event.epoch, batch=event.batch, error=error)
        )
        return
    token_s = (core.now - max(flight.sent_s, chain.moved_s)) / max(1, flight.tokens)
    chain.slowest_token_s = max(FORGETS * (chain.slowest_token_s or 0.0), token_s)
    if event.batch == next(iter(chain.in_flight)):
        chain.moved_s = core.now
    del chain.in_flight[event.batch]
    chain.returned += 1
    count(core, chain, flight, event.hops)
    if chain.places and not chain.in_flight:
        hop_costs.note(core, chain, flight, event.hops)
    at = 0
    for entry in flight.entries:
        owner = core.state.requests.get(entry.request)
        if owner is not None and event.batch >= owner.since_batch:
            owner.done = entry.until
        if entry.wants == 0:
            continue
        token = event.tokens[at]
        logprobs = event.logprobs[at] if at < len(event.logprobs) else None
        at += 1
        request = core.state.requests.get(entry.request)
        if request is None or event.batch < request.born:
            continue  # cancelled while the micro-batch was on its way
        core.state.tokens_out += 1
        request.failures = 0  # it went on, so what broke before was not its fault
        effects, last_token = requests.take_token(request, token, logprobs, core.vocabulary, core.now)
        yield from effects
        if last_token:
            core.tell(entry.request, event.cause, f"finished after {request.generated} tokens")
            requests.end(core.state, request)
            if not core.state.requests and core.may_change():
                core.ask_for_plan(core.settle_s)


def batch_broke(core: Core, event: BatchBroke) -> Iterator[Effect]:
    """A micro-batch failed, and its chain with it: the caches of its stages are not known any more."""
    chain = core.chain_of(event.epoch, event.batch)
    if chain is None:
        return
    flight = chain.in_flight[event.batch]
    blamed = StageId(event.error.stage or "")
    core.tell(f"batch {event.batch}", event.cause, f"broke: {event.error}")
    yield Report("error", str(event.error))
    core.last_error = event.error
    stage = core.state.stages.get(blamed)
    hit = {entry.request for entry in flight.entries}
    if stage is not None:
        stage.breaks += 1
        stage.broke_with = hit if stage.breaks == 1 else stage.broke_with & hit
        if stage.breaks >= MAX_BREAKS and not stage.broke_with:  # else it may be that one request's fault
            stage.status, stage.error, stage.detail = StageStatus.FAILED, event.error, event.error.what
    yield Report("warning", f"Chain {chain.chain} is broken: {event.error.what}")
    yield from plans.end_broken(core, chain, event.cause, event.error.what, holds=False)
    for name in sorted(hit):
        request = core.state.requests.get(name)
        if request is not None and event.batch >= request.born:
            request.failures += 1
            if request.failures > recovery.MAX_REPLAYS:
                yield requests.fail(core.state, request, event.error)


def count(core: Core, chain: Chain, flight: InFlight, hops: tuple[Hop, ...]) -> None:
    """Adds what the stages spent on a micro-batch to their sums, and compares it with what was predicted."""
    for name in chain.stages:
        core.state.stages[name].breaks = 0
    for hop in hops:
        if hop.index >= len(chain.stages):
            continue
        stage = core.state.stages[chain.stages[hop.index]]
        was = stage.hops
        expected_s = 0.0
        if chain.places and not flight.prefill:
            place = chain.places[hop.index]
            expected_s = place.cost.decode_s(flight.tokens, place.first, place.end)
            if note_pace(core, stage, expected_s, hop.compute_s):
                core.drifted = True
        stage.hops = HopSums(
            was.batches + 1,
            min(was.compute_s + hop.compute_s, 1e9),
            min(was.wait_s + hop.wait_s, 1e9),
            min(was.bytes_in + hop.bytes_in, 1 << 62),
            min(was.expected_s + expected_s, 1e9),
            min(was.expected_compute_s + (hop.compute_s if expected_s > 0 else 0.0), 1e9),
            was.expected_batches + (expected_s > 0),
        )


def note_pace(core: Core, stage: Stage, expected_s: float, computed_s: float) -> bool:
    """Whether the stage has turned out to be slower or faster than it was taken to be."""
    config = core.config
    drifted = stage.pace.note(expected_s, computed_s, core.now, config.drift_window_s, config.drift_bound)
    if drifted:
        core.tell(
            stage.stage, "service", f"computes {stage.pace.slowdown:.2f} times as long as its profile says"
        )
    return drifted


def fill_chains(core: Core) -> Iterator[Effect]:
    """Everything that may enter the chains now."""
    for chain, name in scheduler.admit(core.state, core.now):
        request = core.state.requests[name]
        core.tell(name, f"chain {chain.chain}", f"slot {request.slot}, {request.rest} tokens to compute")
    for chain in core.state.chains.values():
        if chain.open:
            for message, tokens in scheduler.fill(core.state, chain, core.config, core.now):
                yield SendBatch(chain.chain, chain.epoch, message, tokens)
