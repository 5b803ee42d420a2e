"""What the waiting times that clients are told are reckoned from: ends of requests, loads, and their progress. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from potluck.broker.events import BrokerEvent, StageLoaded, StageProgressed
from potluck.broker.state import BrokerState, Stage
from potluck.wire.ids import DeviceName, StageId

ENDS = 32
"""Ends of requests over which their rate is measured."""
DEVICES = 1024
"""Devices whose loads are remembered."""
QUICK = 0.5
"""A load that found its slice in memory says little about the next one: what the one before took counts with at least
this share.
"""


@dataclass(slots=True)
class Turnover:
    """How fast slots are freed while somebody waits for one."""

    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=ENDS))
    """Between two ends."""
    since_s: float | None = None
    """The last end, or when the first one began to wait; None while nobody waits."""
    freed: int = 0

    def note(self, freed: int, waiting: int, now: float) -> None:
        """To be told after every event how many requests have ever given a slot back, and how many wait for one."""
        ends = freed - self.freed
        if ends and self.since_s is not None:
            self.gaps_s.extend([(now - self.since_s) / ends] * min(ends, ENDS))
        self.freed = freed
        if not waiting:
            self.since_s = None
        elif ends or self.since_s is None:
            self.since_s = now

    def gap_s(self, now: float) -> float | None:
        """Seconds between two ends, the one under way included; None before any was seen."""
        if not self.gaps_s:
            return None
        under_way = 0.0 if self.since_s is None else now - self.since_s
        mean = sum(self.gaps_s) / len(self.gaps_s)
        return max(mean, (sum(self.gaps_s) + under_way) / (len(self.gaps_s) + 1))


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a stage was with one phase of getting ready."""

    phase: str
    began_s: float
    share: float
    told_s: float

    def left_s(self, now: float) -> float | None:
        """What the rest of the phase takes at the pace so far; None if that can't be told."""
        spent_s = self.told_s - self.began_s
        if self.share <= 0.0 or spent_s <= 0.0:
            return None
        left_s = spent_s * (1.0 - self.share) / self.share - (now - self.told_s)
        return abs(left_s)  # overdue: as much again as it is late


@dataclass(slots=True)
class Watched:
    """What is remembered for it."""

    turnover: Turnover = field(default_factory=Turnover)
    progress: dict[StageId, Progress] = field(default_factory=dict)
    layer_s: dict[DeviceName, float] = field(default_factory=dict)
    """What a device's loads took per layer."""


def note(watched: Watched, state: BrokerState, event: BrokerEvent, now: float) -> None:
    """To be told of every event once it has been handled."""
    watched.turnover.note(state.freed, len(state.waiting), now)
    match event:
        case StageProgressed(stage=name) if name in state.stages:
            before = watched.progress.get(name)
            same = before is not None and before.phase == event.phase and before.share <= event.share
            began_s = before.began_s if same and before is not None else now
            watched.progress[name] = Progress(event.phase, began_s, event.share, now)
        case StageLoaded(stage=name) if name in state.stages:
            watched.progress.pop(name, None)
            _note_load(watched, state.stages[name], event.load_s)
    if len(watched.progress) > len(state.stages):
        watched.progress = {name: seen for name, seen in watched.progress.items() if name in state.stages}


def _note_load(watched: Watched, stage: Stage, load_s: float) -> None:
    if stage.place is None:
        return
    layer_s = load_s / max(1, stage.place.end - stage.place.first)
    before = watched.layer_s.pop(stage.device, 0.0)
    watched.layer_s[stage.device] = max(layer_s, QUICK * before)
    if len(watched.layer_s) > DEVICES:
        del watched.layer_s[next(iter(watched.layer_s))]
