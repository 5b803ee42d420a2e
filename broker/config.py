"""The numbers a broker's core decides by. Filled from settings by the shell. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """Seconds, tokens and counts."""

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
    load_timeout_s: float = 1800.0
    """A stage that reports no progress for this long while loading has failed."""
    batch_timeout_s: float = 600.0
    """A chain whose first micro-batch is not back after this long is broken; afterwards its own pace is the measure.
    An old laptop with a large model takes minutes for its first chunk of a prompt, weights read from the disk."""
    least_batch_timeout_s: float = 30.0
    """However fast a chain is, a micro-batch is waited for this long."""
    patience: float = 10.0
    """A micro-batch may take this many times what the slowest so far took per token."""
    wait_limit_s: float = 600.0
    """How long running requests wait for a new chain before they fail."""
    activation: str = "f32"
    exact: bool = False

    @property
    def lost_after_s(self) -> float:
        """Silence after which a stage is lost."""
        return self.heartbeat_s * self.misses
