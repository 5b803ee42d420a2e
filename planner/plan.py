"""What a plan is, and the interface every way of planning has.

A plan is one or more chains; a chain is stages in order that cover layers [0, layers). How the cuts are chosen is left
to the planners (`even` splits by bytes). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from potluck.wire.forecast import Forecast
from potluck.wire.ids import DeviceName, StageId
from potluck.wire.measures import Profile


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a planner must know of a model. Bytes are those of the file."""

    name: str
    layers: int
    width: int
    layer_bytes: tuple[int, ...]
    """One entry per layer."""
    head_bytes: int
    """Held by the last stage besides its layers."""
    embedding_bytes: int
    """Read by the first stage, row by row."""
    cuts: frozenset[int]
    """Layers a stage may begin at, besides 0."""
    layer_work: tuple[int, ...] = ()
    """Multiply-adds for one token, one entry per layer; empty where only the bytes are known."""
    head_work: int = 0
    """Multiply-adds of the head for one token."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stage worker that could take layers. What is 0 or None is not known, and then limits nothing."""

    stage: StageId
    device: DeviceName
    memory_bytes: int = 0
    """What layers may take, weights, KV cache and compute buffers together."""
    vram_bytes: int = 0
    """What layers may take of its GPUs."""
    cpu_fallback: bool = True
    """Whether layers that its GPU has no room for may be computed by its CPU."""
    profile: Profile | None = None
    """How fast it is at this model."""
    slowdown: float = 1.0
    """How many times slower than its profile it has been in service."""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two devices. `bytes_per_s` 0: no limit was found."""

    one_way_s: float = 0.0
    bytes_per_s: float = 0.0

    def send_s(self, count: int) -> float:
        """Seconds until `count` bytes are there."""
        return self.one_way_s + self.busy_s(count)

    def busy_s(self, count: int) -> float:
        """Seconds for which the link can't take anything else."""
        return count / self.bytes_per_s if self.bytes_per_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Network:
    """The links between stages, and between stages and the broker. A link that is not there costs nothing."""

    links: Mapping[tuple[StageId, StageId], Link] = field(default_factory=dict)
    from_broker: Mapping[StageId, Link] = field(default_factory=dict)
    to_broker: Mapping[StageId, Link] = field(default_factory=dict)

    def link(self, sender: StageId, receiver: StageId) -> Link:
        """The way from one stage to another."""
        return self.links.get((sender, receiver), FREE)


FREE = Link()
NO_NETWORK = Network()


@dataclass(frozen=True, slots=True)
class Demand:
    """What a plan is for. One user: the least time per token. More: the most tokens per second in all."""

    users: int = 1
    """Sequences that decode at the same time."""
    slots: int = 8
    """Sequences that one chain can hold."""
    context_tokens: int = 2048
    """Tokens of one sequence that there must be room for."""
    held_tokens: int = 512
    """Tokens that a sequence holds on average while it decodes."""
    prompt_tokens: int = 256
    """Length of the prompt for which the time to the first token is predicted."""
    chunk_tokens: int = 64
    """Prompt tokens that travel in one micro-batch."""
    value_bytes: int = 4
    """Bytes of one number of an activation on the wire."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Layers [first, end) on one stage worker, the last `gpu_layers` of them on its GPU."""

    stage: StageId
    device: DeviceName
    first: int
    end: int
    gpu_layers: int = 0


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """Stages in order. Raises ValueError unless they cover [0, layers) without gap or overlap."""

    stages: tuple[StagePlan, ...]
    layers: int
    users: int = 0
    """Of the sequences that decode at the same time, the share that this chain is meant for. 0: not said."""

    def __post_init__(self) -> None:
        at = 0
        for stage in self.stages:
            if stage.first != at or stage.end <= stage.first:
                raise ValueError(
                    f"Layers {stage.first}-{stage.end} of {stage.device} do not continue at layer {at}."
                )
            at = stage.end
        if at != self.layers:
            raise ValueError(f"The chain ends at layer {at} of {self.layers}.")


@dataclass(frozen=True, slots=True)
class Plan:
    """Chains, and in sentences why they are so."""

    chains: tuple[ChainPlan, ...]
    reasons: tuple[str, ...] = ()
    left_out: tuple[StageId, ...] = field(default=())
    forecast: Forecast | None = None
    """What is predicted; None where no speed is known."""

    def __post_init__(self) -> None:
        """A device computes for one chain. Raises ValueError for a stage that is in two."""
        stages = [place.stage for chain in self.chains for place in chain.stages]
        if len(set(stages)) < len(stages):
            raise ValueError(f"Stages are in more than one place: {sorted(stages)}.")


class Planner(Protocol):
    """Turns what is known of devices and model into a plan."""

    def __call__(self, model: ModelShape, candidates: Sequence[Candidate], network: Network) -> Plan:
        """The best plan this planner finds. Raises PlanError when there is none, naming what is missing."""
