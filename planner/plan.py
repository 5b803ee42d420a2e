"""What a plan is, and the interface every way of planning has.

A plan is one or more chains; a chain is stages in order that cover layers [0, layers). How the cuts are chosen is left
to the planners (`even` splits by bytes). Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from potluck.wire.ids import DeviceName, StageId


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
    """A stage worker that could take layers."""

    stage: StageId
    device: DeviceName
    memory_bytes: int = 0
    """What it offers; 0 where it is not known."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Layers [first, end) on one stage worker."""

    stage: StageId
    device: DeviceName
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """Stages in order. Raises ValueError unless they cover [0, layers) without gap or overlap."""

    stages: tuple[StagePlan, ...]
    layers: int

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


class Planner(Protocol):
    """Turns what is known of devices and model into a plan."""

    def __call__(self, model: ModelShape, candidates: Sequence[Candidate]) -> Plan:
        """The best plan this planner finds. Raises PlanError when there is none, naming what is missing."""
