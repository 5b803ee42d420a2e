"""Whether an answer that went through a fault is whole: every token once, in order. Pure.

The tokens that came are held against what the broker says it sent, against the number that was asked for (the requests
of the benchmark ignore the end of a text), against the text, and against the same request without a fault.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

LEAST_ALIGNED = 8
"""Tokens that have to agree after a shift, so that it is one and no accident."""
MOST_SHIFT = 8
"""Tokens that a fault could lose or repeat at one place: as many as travel at once, and some."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What a client got of one answer. `said` is the number of tokens by the broker's own count (Usage)."""

    tokens: Sequence[int]
    text: str
    said: int
    asked: int
    cuts: Sequence[int] = ()
    """How many tokens there were at each fault."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with an answer; tokens."""

    lost: int
    duplicated: int
    equal: bool
    """Whether the tokens are those of the request without a fault."""
    why: str = ""


def judge(heard: Heard, undisturbed: Sequence[int], text_of_tokens: str) -> Verdict:
    """`text_of_tokens` is what the tokens that came read."""
    count = len(heard.tokens)
    lost = max(heard.said, heard.asked) - count
    extra = count - min(heard.said, heard.asked)
    equal = list(heard.tokens) == list(undisturbed)
    if lost > 0 or extra > 0:
        why = f"{count} tokens came, the broker counts {heard.said}, {heard.asked} were asked for"
        return Verdict(max(0, lost), max(0, extra), equal, why)
    if heard.text != text_of_tokens:
        shorter = len(heard.text) < len(text_of_tokens)
        why = f"the text is not that of the tokens: {heard.text!r}, not {text_of_tokens!r}"
        return Verdict(int(shorter), int(not shorter), equal, why)
    shift = 0 if equal else shift_at(heard.tokens, undisturbed, heard.cuts)
    if shift != 0:
        why = (
            f"from a fault on, the tokens are those {abs(shift)} places {'later' if shift > 0 else 'earlier'}"
        )
        return Verdict(max(0, shift), max(0, -shift), equal, why)
    return Verdict(0, 0, equal)


def shift_at(tokens: Sequence[int], undisturbed: Sequence[int], cuts: Sequence[int]) -> int:
    """By how many places the tokens go on wrongly after a fault: above 0 some are missing, below 0 some come again.

    Only where the first difference stands at a fault: elsewhere it is another choice of two close ones, which is no
    loss.
    """
    first = next((i for i, (a, b) in enumerate(zip(tokens, undisturbed, strict=False)) if a != b), None)
    if first is None or not any(cut - 1 <= first <= cut + 1 for cut in cuts):
        return 0
    for places in range(1, MOST_SHIFT + 1):
        if _agree(tokens[first:], undisturbed[first + places :]):
            return places
        if _agree(tokens[first + places :], undisturbed[first:]):
            return -places
    return 0


def _agree(some: Sequence[int], others: Sequence[int]) -> bool:
    length = min(len(some), len(others))
    return length >= LEAST_ALIGNED and list(some[:length]) == list(others[:length])


@dataclass(slots=True)
class Tally:
    """The sums over all disturbed answers, and the times from a fault to the next token, in seconds."""

    kills: int = 0
    lost: int = 0
    duplicated: int = 0
    failed: int = 0
    disturbed: int = 0
    equal: int = 0
    warm_s: list[float] = field(default_factory=list)
    cold_s: list[float] = field(default_factory=list)

    def add(self, verdict: Verdict, *, disturbed: bool) -> None:
        """One more answer that came to its end."""
        self.lost += verdict.lost
        self.duplicated += verdict.duplicated
        self.disturbed += disturbed
        self.equal += disturbed and verdict.equal

    @property
    def whole(self) -> bool:
        """Whether no token was lost or repeated and no request failed."""
        return self.lost == self.duplicated == self.failed == 0

    def to_dict(self) -> dict[str, object]:
        """As JSON has it."""
        return {
            "kills": self.kills,
            "lost_tokens": self.lost,
            "duplicated_tokens": self.duplicated,
            "failed_requests": self.failed,
            "equal_to_undisturbed": round(self.equal / self.disturbed, 4) if self.disturbed else None,
            "time_to_next_token_s": {"warm": spread(self.warm_s), "cold": spread(self.cold_s)},
        }


def spread(seconds: Sequence[float]) -> dict[str, float | int | None]:
    """Median, 95th percentile and number; None where nothing was measured."""
    if not seconds:
        return {"p50": None, "p95": None, "n": 0}
    p50, p95 = percentile(seconds, 0.5), percentile(seconds, 0.95)
    return {"p50": round(p50, 4), "p95": round(p95, 4), "n": len(seconds)}


def percentile(seconds: Sequence[float], share: float) -> float:
    """The least value that at least this share of all does not exceed; of at least one."""
    return sorted(seconds)[max(0, math.ceil(share * len(seconds)) - 1)]


__all__ = ["Heard", "Tally", "Verdict", "judge", "percentile", "shift_at", "spread"]
