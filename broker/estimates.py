"""When it is worth asking again: how long a request that was refused would have to wait. Pure.

How fast requests end while others wait for their slots says when a full queue has moved on; what loads have taken, and
how far those are that are under way, says when a chain serves. Both are guesses, kept between `LEAST_S` and `MOST_S`:
too short costs one refused request more, too long lets a cluster stand idle.
"""

from __future__ import annotations

import math

from potluck.broker.core import Core
from potluck.broker.state import Stage, StageStatus
from potluck.wire.errors import Phase

LEAST_S, MOST_S = 1, 600
UNSEEN_LOAD_S = 10.0
"""What a load is taken to take before any was seen."""
UNSEEN_END_S = 5.0
"""What a request is taken to hold its slot for before any was seen."""
NOBODY_S = 30.0
"""Somebody has to start or mend a stage: nothing to reckon with."""


def until_room_s(core: Core) -> int:
    """Seconds until those that wait now will have got their slots."""
    state = core.state
    gap_s = core.watched.turnover.gap_s(core.now)
    if gap_s is None:
        running = [request for request in state.requests.values() if request.slot is not None]
        held_s = max((core.now - (request.started_s or core.now) for request in running), default=0.0)
        gap_s = max(UNSEEN_END_S, held_s) / max(1, len(running))
    room_s = max(1, len(state.waiting)) * gap_s
    return clamped(room_s if state.ready else room_s + ready_s(core))


def until_ready_s(core: Core) -> int:
    """Seconds until a chain serves."""
    return clamped(ready_s(core))


def clamped(seconds: float) -> int:
    """Whole seconds that a client can be told."""
    return max(LEAST_S, math.ceil(min(MOST_S, seconds)))  # a share next to nothing makes it infinite


def ready_s(core: Core) -> float:
    """Seconds until a chain serves, as far as that can be told."""
    if core.state.ready:
        return 0.0
    stages = core.state.stages.values()
    measuring = [stage for stage in stages if stage.status is StageStatus.MEASURING]
    if measuring:
        left = [_phase_left_s(core, stage) or UNSEEN_LOAD_S for stage in measuring]
        return max(left) + usual_load_s(core)
    if core.state.probes:
        return core.config.settle_s + usual_load_s(core)
    loading = [load_left_s(core, stage) for stage in stages if stage.status is StageStatus.LOADING]
    if loading:
        return max(loading)
    if core.plan_due_s is not None and len(core.usable()) >= core.wanted:
        return max(0.0, core.plan_due_s - core.now) + usual_load_s(core)
    return NOBODY_S


def load_left_s(core: Core, stage: Stage) -> float:
    """What the load of a stage still takes: by its progress, otherwise by what loads took before."""
    seen = core.watched.progress.get(stage.stage)
    left_s = _phase_left_s(core, stage)
    if left_s is not None and seen is not None:
        return left_s + (usual_load_s(core, stage) if seen.phase == Phase.SLICE else 0.0)
    spent_s = core.now - (stage.asked_s if seen is None else seen.began_s)
    usual_s = usual_load_s(core, stage)
    return usual_s - spent_s if spent_s < usual_s else spent_s  # overdue: as long again as it has taken


def _phase_left_s(core: Core, stage: Stage) -> float | None:
    seen = core.watched.progress.get(stage.stage)
    return None if seen is None else seen.left_s(core.now)


def usual_load_s(core: Core, stage: Stage | None = None) -> float:
    """What a load takes: on this device if it was seen there, otherwise on the slowest one that was seen."""
    seen = core.watched.layer_s
    layers = (
        core.shape.layers if stage is None or stage.place is None else stage.place.end - stage.place.first
    )
    if stage is None:
        layers = -(-core.shape.layers // max(1, len(core.usable())))
    if stage is not None and stage.device in seen:
        return seen[stage.device] * layers
    return max(seen.values()) * layers if seen else UNSEEN_LOAD_S
