"""The numbers a broker's core decides by. Filled from settings by the shell. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """Seconds, tokens and counts; every one can be set by the user."""

    heartbeat_s: float = 1.0
    misses: int = 3
    slots: int = 8
    """Sequences that one chain serves at the same time."""
    context_tokens: int = 2048
    """Tokens of one sequence, prompt and answer together."""
    chunk_tokens: int = 64
    """Prompt tokens that travel in one micro-batch."""
    queue_limit: int = 256
    """Requests that wait for a slot."""
    min_stages: int = 1
    """Plan only once this many stages have joined."""
    settle_s: float = 1.0
    """After a stage joined or left, wait this long for others before planning."""
    load_timeout_s: float = 300.0
    """A stage that reports no progress for this long while loading has failed."""
    batch_timeout_s: float = 60.0
    """A micro-batch that is not back after this long means a broken chain."""
    wait_limit_s: float = 120.0
    """How long running requests wait for a new chain before they fail."""
    activation: str = "f32"
    exact: bool = False

    @property
    def lost_after_s(self) -> float:
        """Silence after which a stage is lost."""
        return self.heartbeat_s * self.misses
