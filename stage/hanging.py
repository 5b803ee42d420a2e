"""When the compute lane counts as hanging: it is still at work for an epoch that is over, longer than it may be. Pure.

A slow device is no hung one: what it was given may take as long as its slowest micro-batch so far says, and more.
"""

from __future__ import annotations

from potluck.stage.events import Job
from potluck.stage.state import StageState

PATIENCE = 3.0
"""A micro-batch may take this many times what its tokens take at the slowest pace so far."""
FIRST_TOKENS = 16
"""As many tokens may take what anything may take, if the stage has computed nothing yet."""
MOST_S = 600.0


def watch(state: StageState, now: float, hang_s: float) -> None:
    """The epoch of everything on the lane is over. `hang_s` is what anything may take from now on."""
    dues = [now + max(hang_s, _may_take_s(state, running.job, hang_s)) for running in state.running]
    due_s = max(dues, default=now + hang_s)  # one waits for the other
    for running in state.running:
        running.due_s = running.due_s or due_s
    if state.clearing is not None:
        state.clearing.due_s = state.clearing.due_s or due_s


def _may_take_s(state: StageState, job: Job, hang_s: float) -> float:
    token_s = PATIENCE * state.slowest_token_s or hang_s / FIRST_TOKENS
    return min(token_s * job.message.tokens, MOST_S)


def note(state: StageState, job: Job, compute_s: float) -> None:
    """A micro-batch is done."""
    if job.message.tokens:
        state.slowest_token_s = max(state.slowest_token_s, compute_s / job.message.tokens)


__all__ = ["FIRST_TOKENS", "MOST_S", "PATIENCE", "note", "watch"]
