"""The numbers a broker's core decides by. Filled from settings by the shell. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from potluck.planner.plan import Demand


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
    least_batch_timeout_s: float = 5.0
    """However fast a chain is, a micro-batch is waited for this long: a laptop may stall for a while and go on."""
    patience: float = 10.0
    """A micro-batch may take this many times what the slowest so far took per token."""
    replay_tokens: int = 7
    """Answered tokens that are computed again in one chunk: below the sizes from which kernels sum in another order."""
    by_hand: bool = False
    """Whether the owner has said who holds which layers: then nobody takes over those of another."""
    standby: bool = True
    """Whether stages keep further slices loaded, to take over at once when another one is lost."""
    reserve: tuple[str, ...] = ()
    """Devices that serve only when others are lost."""
    wait_limit_s: float = 600.0
    """How long running requests wait for a new chain before they fail."""
    request_timeout_s: float = 0.0
    """A request that is not finished after this long fails, unless its client has named a time. 0: no limit."""
    drain_timeout_s: float = 30.0
    """How long a broker that closes lets its requests go on."""
    activation: str = "f32"
    exact: bool = False
    users: int = 1
    """People that are served at the same time: what a plan is for."""
    measure: bool = False
    """Whether devices and links are measured before a plan is made."""
    hop_s: float = 0.0004
    """What a hand-over is taken to cost besides the link, until it was seen in service (0.3 to 0.6 ms on two cores of a
    server processor, over the loopback)."""
    measure_timeout_s: float = 300.0
    """A stage that reports no progress for this long while it is measured is planned without a profile."""
    probe_timeout_s: float = 30.0
    """A link that was not measured after this long counts as cut."""
    look_again_s: float = 60.0
    """A link that was cut is probed again after this long."""
    forgive_s: float = 600.0
    """A stage at which a micro-batch got stuck is avoided for this long, if it does not join anew before."""
    least_gain: float = 0.1
    """Stages that serve are given other layers only for a plan that is better by this share."""
    repay_s: float = 600.0
    """And only where the time that it takes to load is won back within this time of service."""
    drift_bound: float = 0.25
    """A stage that computes slower or faster than its profile by more than this share for three windows has drifted."""
    drift_window_s: float = 20.0
    """Over how long a stage's pace is averaged."""
    drift_hold_s: float = 60.0
    """After a move because of drift, the next one waits this long, then twice as long, up to an hour."""

    @property
    def lost_after_s(self) -> float:
        """Silence after which a stage is lost."""
        return self.heartbeat_s * self.misses

    @property
    def demand(self) -> Demand:
        """What a plan is for."""
        return Demand(
            users=self.users,
            slots=self.slots,
            context_tokens=self.context_tokens,
            held_tokens=min(512, max(1, self.context_tokens // 4)),
            prompt_tokens=min(256, max(1, self.context_tokens // 4)),
            chunk_tokens=self.chunk_tokens,
            value_bytes=2 if self.activation == "f16" else 4,
        )
