"""What is done to stages in the middle of service, by real signals, and how a cluster looks that has got over it.

The faults are those that happen at home: a machine that loses power (kill), one that is put to sleep and wakes up again
(freeze), a computation that never ends (hang), two machines on one plug (two). Streams and their checks are elsewhere.
"""

from __future__ import annotations

import asyncio
import random
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from potluck.tools.local import Child, LocalCluster
from potluck.wire.errors import PotluckError
from potluck.wire.messages import StageView, StateView

STANDBY = re.compile(r"standby: layers ([0-9, -]+)")
"""What a stage says of itself that holds slices besides its own: `standby: layers 0-9, 10-19`."""
TOGETHER_S = 0.1
"""Two stages die within this time."""


class Fault(StrEnum):
    """What happens to a stage."""

    KILL = "kill"
    """SIGKILL."""
    FREEZE = "freeze"
    """SIGSTOP, and SIGCONT once the others have gone on without it."""
    HANG = "hang"
    """It beats, but its next micro-batch never ends."""
    TWO = "two"
    """SIGKILL to two stages of the chain within 100 ms."""

    @property
    def stages(self) -> int:
        """How many stages it hits: so many spares are needed."""
        return 2 if self is Fault.TWO else 1


@dataclass(frozen=True, slots=True)
class Hit:
    """The stages that a fault hit: their ids before it, and their processes."""

    stages: tuple[StageView, ...]
    children: tuple[Child, ...]

    @property
    def names(self) -> str:
        """For messages."""
        return " and ".join(child.name for child in self.children)


def chain_of(view: StateView) -> list[StageView]:
    """The stages that serve, in their order."""
    return [stage for stage in view.stages if stage.chain is not None]


def spares_of(view: StateView) -> list[StageView]:
    """The stages that could take over."""
    return [stage for stage in view.stages if stage.chain is None and stage.state == "spare"]


def standby_of(stage: StageView) -> list[tuple[int, int]]:
    """Layers [first, end) of each slice that a stage holds besides its own."""
    said = STANDBY.search(stage.detail)
    spans = re.findall(r"(\d+)(?:-(\d+))?", said[1]) if said else []
    return [(int(first), int(last or first) + 1) for first, last in spans]


def covered(view: StateView) -> bool:
    """Whether every slice of the chain is held by somebody else, too."""
    return all(
        any((stage.first, stage.end) in standby_of(other) for other in view.stages if other is not stage)
        for stage in chain_of(view)
    )


def given_up(view: StateView, hit: Hit) -> bool:
    """Whether the broker counts on none of the stages any more."""
    serving = {stage.stage for stage in chain_of(view)}
    return not any(stage.stage in serving for stage in hit.stages)


def restored(view: StateView, hit: Hit, fault: Fault, spares: int) -> bool:
    """Whether a whole chain serves again and the stages that were hit are spares, anew or awake."""
    old = {stage.stage for stage in hit.stages} if fault is not Fault.FREEZE else set()
    back = {stage.device for stage in spares_of(view) if stage.stage not in old}
    names = {child.name for child in hit.children}
    return view.ready and names <= back and len(spares_of(view)) >= spares


def hang_options(folder: Path, name: str) -> tuple[str, ...]:
    """Options of a stage that hangs as soon as `hang` says so."""
    return ("--fault", f"hang-when:{_switch(folder, name)}")


async def strike(fault: Fault, cluster: LocalCluster, view: StateView, chance: random.Random) -> Hit:
    """Does it to one stage of the chain, or two, drawn by chance."""
    victims = chance.sample(chain_of(view), fault.stages)
    hit = Hit(tuple(victims), tuple(_child(cluster.stages, stage.device) for stage in victims))
    for number, child in enumerate(hit.children):
        if number > 0:
            await asyncio.sleep(chance.uniform(0.0, TOGETHER_S))
        match fault:
            case Fault.KILL | Fault.TWO:
                child.kill()
            case Fault.FREEZE:
                child.kill(signal.SIGSTOP)
            case Fault.HANG:
                _switch(cluster.folder, child.name).touch()
    return hit


async def repair(fault: Fault, cluster: LocalCluster, hit: Hit) -> None:
    """Wakes the stages that were hit, or starts them anew."""
    for child in hit.children:
        if fault is Fault.FREEZE:
            child.kill(signal.SIGCONT)
            continue
        child.kill()
        options: tuple[str, ...] = ()
        if fault is Fault.HANG:
            _switch(cluster.folder, child.name).unlink()
            options = hang_options(cluster.folder, child.name)
        await cluster.start_anew(child, *options)


def check_alive(cluster: LocalCluster, hit: Hit | None = None) -> None:
    """Raises PotluckError for a process that ended although nobody ended it."""
    ended = hit.children if hit is not None else ()
    for child in (cluster.broker, *cluster.stages):
        if child is not None and not child.alive and child not in ended:
            raise PotluckError(
                f"{child.name} ended with status {child.process.returncode}:\n{child.last_lines(20)}"
            )


def as_text(view: StateView) -> str:
    """The cluster in one line, for errors."""
    stages = [
        f"{stage.device} {stage.state}"
        + ("" if stage.first is None else f" {stage.first}-{(stage.end or 1) - 1}")
        + (f" ({stage.detail})" if stage.detail else "")
        for stage in view.stages
    ]
    return f"{'serving' if view.ready else view.detail} {', '.join(stages)}; {view.running} run, {view.queued} wait"


def _child(children: Sequence[Child], name: str) -> Child:
    return next(child for child in reversed(children) if child.name == name)


def _switch(folder: Path, name: str) -> Path:
    return folder / f"{name}.hang"


__all__ = [
    "Fault", "Hit", "as_text", "chain_of", "check_alive", "covered", "given_up", "hang_options", "repair", "restored",
    "spares_of", "standby_of", "strike",
]  # fmt: skip
