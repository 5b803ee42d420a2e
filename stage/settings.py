"""What a person decides for one stage worker, and the models it offers. Pure but for files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from potluck.model.facts import read_facts
from potluck.wire.messages import Capabilities

DRAIN_TIMEOUT_S = 30.0
HANG_S = 15.0


@dataclass(frozen=True, slots=True)
class StageSettings:
    """What a person decides for one worker.

    `models` has the model files by fingerprint, None for an engine that needs no file. The data socket is bound to
    `listen_address`; others reach it by `advertise_address`, or by what it is bound to. `0.0.0.0` as the advertised
    address stands for the host by which the broker is dialled.
    """

    device: str
    models: Mapping[str, Path | None] = field(default_factory=dict)
    engine: str = "llama"
    cache_dir: Path = Path("potluck-cache")
    listen_address: str = "127.0.0.1"
    data_port: int = 0
    advertise_address: str | None = None
    threads: int = 1
    mlock: bool = False
    capabilities: Capabilities = Capabilities()
    keep_trying: bool = False
    """Whether to go on asking a broker that refuses the stage (another version, no such model)."""
    drain_timeout_s: float = DRAIN_TIMEOUT_S
    """How long a stage that was asked to leave serves on until the broker can do without it; 0: not at all."""
    hang_s: float = HANG_S
    """How long the engine may go on with what is of an older epoch before it counts as hung, more on a slow device."""
    send_timeout_s: float = 5.0
    """How long a result waits for a next stage that takes nothing, before it is dropped."""
    close_timeout_s: float = 5.0
    """How long a computation may go on after the stage was stopped."""
    before_batch: Callable[[], None] = lambda: None
    """Called on the compute lane before each micro-batch: where a fault on purpose comes in (`stage.faults`)."""


def offers(paths: tuple[Path, ...]) -> dict[str, Path | None]:
    """The model files by fingerprint. Raises ModelError for one that is none."""
    return {read_facts(path).fingerprint: path for path in paths}


__all__ = ["DRAIN_TIMEOUT_S", "HANG_S", "StageSettings", "offers"]
