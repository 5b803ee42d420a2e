"""What a device is measured on and with: its settings, its clocks, and what makes an engine. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from potluck.stage.bench_rounds import Clock
from potluck.stage.engine import Engine
from potluck.wire.measures import Capabilities

Wanted = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What is measured on: the device, and how a stage computes there."""

    device: str
    engine: str = "llama"
    threads: int = 1
    gpu: bool = False
    """Whether the GPU is timed, too."""
    capabilities: Capabilities = Capabilities()


@dataclass(frozen=True, slots=True)
class Rig:
    """What a run measures on and with."""

    make_engine: Callable[[], Engine]
    settings: BenchSettings
    cache_dir: Path
    """Where it is noted which models were verified."""
    clock: Clock
    """Seconds."""
    busy_clock: Clock
    """Seconds that all threads of this process have computed."""
