"""How a broker ends: it takes nothing new, lets its requests come to their end, and then is closed. Pure.

Asked once, it waits for them as long as `drain_timeout_s`; asked again, it ends them at once. A request that is ended
for it fails with ClosingError. Stages are told nothing: to them the broker is gone, and they ask for a new one.
"""

from __future__ import annotations

from collections.abc import Iterator

from potluck.broker import estimates, requests
from potluck.broker.core import Core
from potluck.broker.effects import Closed, Effect, Report
from potluck.broker.events import CloseAsked
from potluck.broker.state import Closing
from potluck.wire.errors import ClosingError, Phase
from potluck.wire.ids import RequestId

RESTART_S = 5.0
"""What another broker, or this one started anew, is taken to need before it can be asked."""


def ask(core: Core, event: CloseAsked) -> Iterator[Effect]:
    """Begins to close; when that has begun before, ends what still runs."""
    if core.state.closing is not None:
        yield from end_requests(core, event.cause, "it was told to end at once")
        return
    core.state.closing = Closing(core.now + core.config.drain_timeout_s)
    core.tell("broker", event.cause, f"closes: {counted(core)}")
    if core.state.requests:
        yield Report(
            "info",
            f"Closing: {counted(core)}; Ctrl-C again ends them. "
            f"They have {core.config.drain_timeout_s:g} s, and nothing new is taken.",
        )


def finish(core: Core, cause: str) -> Iterator[Effect]:
    """Says once that a broker which closes has nothing left to do. To be asked after every event."""
    closing = core.state.closing
    if closing is not None and not closing.over and not core.state.requests:
        closing.over = True
        core.tell("broker", cause, "closed")
        yield Closed()


def time_passed(core: Core, cause: str) -> Iterator[Effect]:
    """Ends what was not done in time."""
    due_s = next_s(core)
    if due_s is not None and core.now >= due_s:
        yield from end_requests(
            core, cause, f"they were not done within {core.config.drain_timeout_s:g} s (--drain-timeout)"
        )


def next_s(core: Core) -> float | None:
    """When requests are ended; None while none has to be."""
    closing = core.state.closing
    return None if closing is None or not core.state.requests else closing.until_s


def end_requests(core: Core, cause: str, why: str) -> Iterator[Effect]:
    """Every request fails."""
    if core.state.requests:
        yield Report("warning", f"Requests end with an error, {counted(core)}: {why}.")
    for name in list(core.state.requests):
        core.tell(name, cause, "ended: the broker closes")
        yield requests.fail(core.state, core.state.requests[name], refusal(core, name))


def refusal(core: Core, request: RequestId | None = None) -> ClosingError:
    """What a request is told that is not taken any more, or that is ended before it is done."""
    closing = core.state.closing
    left_s = 0.0 if closing is None else max(0.0, closing.until_s - core.now)
    if request is not None:
        return ClosingError(
            "The broker is closing, and ended the request before it was done.",
            hint="Send it again once a broker is there.",
            phase=Phase.SERVE,
            retry_after_s=estimates.clamped(RESTART_S),
        )
    return ClosingError(
        f"The broker is closing and takes no new requests; {counted(core)}.",
        hint="Try again once a broker is there.",
        phase=Phase.SUBMIT,
        retry_after_s=estimates.clamped(left_s + RESTART_S),
    )


def counted(core: Core) -> str:
    """How many requests run and wait, in words."""
    waiting = len(core.state.waiting)
    running = len(core.state.requests) - waiting
    runs = "1 request is running" if running == 1 else f"{running or 'no'} requests are running"
    return f"{runs}, {waiting or 'none'} wait{'s' if waiting == 1 else ''}"
