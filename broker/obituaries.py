"""Why stages were lost: what was seen at first, and what their witnesses say a moment later. Pure.

The connection of a stage that dies closes at once; the witness beside it needs a second to find out why and to say so.
What it says then takes the place of what was told before: to those who wait for a chain, in the log, and in the story.
"""

from __future__ import annotations

from collections.abc import Iterator

from potluck.broker import members
from potluck.broker.core import Core
from potluck.broker.effects import Effect, Report
from potluck.broker.events import StageDied
from potluck.wire.errors import StageError, StageLostError


def died(core: Core, event: StageDied) -> Iterator[Effect]:
    """A witness says what a stage has died of. Said of somebody who never was here, it is not listened to."""
    error = event.error if isinstance(event.error, StageError) else StageLostError(event.error.what)
    stage = core.state.stages.get(event.stage)
    if stage is not None:
        why = error.what.removeprefix(f"{stage.device} ").removesuffix(".")
        yield from members.remove(core, event.stage, event.cause, f"it {why}")
    loss = core.state.lost.get(event.stage)
    if loss is None or loss.explained:
        return
    error.device, error.stage, error.phase = loss.device, event.stage, loss.phase
    if core.last_error is loss.error:
        core.last_error = error
    loss.error, loss.explained = error, True
    core.tell(event.stage, event.cause, f"died: {error}")
    yield Report("error", str(error))
