"""What of a chain is compared with its whole model, and when it passes. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from potluck.model.architectures import Rules
from potluck.model.codecs import Codec
from potluck.model.facts import ModelFacts
from potluck.stage.engine import FloatRows
from potluck.tools.verify_run import Batches
from potluck.wire.messages import Span

_EXACT_LIMITS: Final = (0.0, 1.0)
_ROUNDED_LIMITS: Final = (0.02, 0.95)
_HALF_LIMITS: Final = (1.0, 0.8)
"""The largest difference allowed, as a share of the logits' standard deviation, and the share of positions where the
likeliest token has to be the same: where slices are exact; where their rules round; with an f16 hand-over, which keeps
11 bits of every activation at every cut (a wrong slice agrees nowhere, so this tells the two apart)."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was compared and what came out.

    Differences are between logits, over all positions that have the same tokens before them. `bounds` are the stages'
    first layers and the number of layers. `reason` says why it did not pass.
    """

    model: str
    architecture: str
    listed: bool
    layers: int
    stages: int
    cuts: tuple[int, ...]
    bounds: tuple[int, ...]
    activation: str
    exact: bool
    prompts: int
    longest_prompt: int
    positions_compared: int
    tokens_compared: int
    max_logit_difference: float
    mean_logit_difference: float
    logit_deviation: float
    allowed_difference: float
    top1_agreement: float
    tokens_equal: bool
    same_tokens: tuple[int, ...]
    """For each prompt, how many of its new tokens are the same before the first that differs."""
    passed: bool
    reason: str = ""
    marked_verified: bool = False

    def to_json(self) -> str:
        """One JSON object, a line per field."""
        return json.dumps(asdict(self), indent=2)

    def to_text(self) -> str:
        """A few lines for a person."""
        ranges = ", ".join(f"[{a}, {b})" for a, b in pairwise(self.bounds))
        text = (
            "the same"
            if self.tokens_equal
            else f"the same for {', '.join(map(str, self.same_tokens))} tokens"
        )
        lines = [
            f"{self.model} ({self.architecture}, {self.layers} layers) in {self.stages} stages: layers {ranges}",
            f"  compared    {self.positions_compared} positions, {self.activation} between stages",
            f"  prompts     {self.prompts}, the longest of {self.longest_prompt} tokens",
            f"  logits      largest difference {self.max_logit_difference:.6g}, allowed {self.allowed_difference:.3g}",
            f"              mean difference {self.mean_logit_difference:.3g}, spread {self.logit_deviation:.3g}",
            f"  likeliest   the same at {self.top1_agreement:.2%} of the positions",
            f"  text        {text}, {self.tokens_compared} new tokens",
            f"  {'PASSED' if self.passed else 'FAILED: ' + self.reason}",
        ]
        if self.marked_verified:
            lines.append(
                "  This file is served from now on, although its architecture is not in Potluck's table."
            )
        return "\n".join(lines)


class Differences:
    """The chain's logits against the kept ones, row by row, as far as the texts before them are the same."""

    def __init__(self, plan: Batches, kept: NDArray[np.float32], expected: list[list[int]]) -> None:
        self._kept = kept
        self._texts = [list(p) + list(t) for p, t in zip(plan.prompts, expected, strict=True)]
        self.rows = 0
        self.largest = 0.0
        self.same_top = 0
        self._sum = 0.0
        self._deviation = 0.0

    def take(self, spans: Sequence[Span], texts: list[list[int]], row: int, logits: FloatRows) -> None:
        """The logits of one micro-batch; its first row is the run's `row`."""
        at = 0
        for span in spans:
            end = span.position + span.tokens
            if texts[span.slot][:end] == self._texts[span.slot][:end]:
                self._compare(self._kept[row + at : row + at + span.wants], logits[at : at + span.wants])
            at += span.wants

    def _compare(self, kept: FloatRows, found: FloatRows) -> None:
        difference = np.abs(kept - found)
        self.rows += len(kept)
        largest = float(difference.max())
        # A NaN on either side is the largest difference there is.
        self.largest = max(self.largest, math.inf if math.isnan(largest) else largest)
        self._sum += float(difference.mean(axis=1).sum())
        self._deviation += float(kept.std(axis=1).sum())
        self.same_top += int((kept.argmax(axis=1) == found.argmax(axis=1)).sum())

    @property
    def mean(self) -> float:
        """Mean absolute difference."""
        return self._sum / max(self.rows, 1)

    @property
    def deviation(self) -> float:
        """The kept logits' standard deviation, a mean over the rows."""
        return self._deviation / max(self.rows, 1)


def report_of(
    facts: ModelFacts,
    rules: Rules,
    bounds: tuple[int, ...],
    activation: Codec,
    exact: bool,
    plan: Batches,
    differences: Differences,
    expected: list[list[int]],
    found: list[list[int]],
) -> VerifyReport:
    """What came out, and whether it passes: greedy texts `expected` of the whole model, `found` of the chain."""
    equal = expected == found
    agreement = differences.same_top / max(differences.rows, 1)
    if activation == "f16":
        share, wanted_agreement = _HALF_LIMITS
    else:
        share, wanted_agreement = _EXACT_LIMITS if rules.exact or len(bounds) == 2 else _ROUNDED_LIMITS
    allowed = share * differences.deviation
    reasons = []
    if not differences.largest <= allowed:
        reasons.append(f"the logits differ by {differences.largest:.6g}")
    if not agreement >= wanted_agreement:
        reasons.append(f"the likeliest token is the same at {agreement:.2%} of the positions only")
    if allowed == 0.0 and not equal:
        reasons.append("the texts differ")
    return VerifyReport(
        model=str(facts.path),
        architecture=facts.architecture,
        listed=rules.listed,
        layers=facts.layers,
        stages=len(bounds) - 1,
        cuts=bounds[1:-1],
        bounds=bounds,
        activation=activation,
        exact=exact,
        prompts=len(plan.prompts),
        longest_prompt=plan.longest,
        positions_compared=differences.rows,
        tokens_compared=plan.tokens * len(plan.prompts),
        max_logit_difference=differences.largest,
        mean_logit_difference=differences.mean,
        logit_deviation=differences.deviation,
        allowed_difference=allowed,
        top1_agreement=agreement,
        tokens_equal=equal,
        same_tokens=tuple(_same(a, b) for a, b in zip(expected, found, strict=True)),
        passed=not reasons,
        reason="; ".join(reasons),
    )


def _same(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens are the same from the start."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


__all__ = ["Differences", "VerifyReport", "report_of"]
