"""How many tokens each slot's cache holds, and whether a micro-batch fits there.

Every engine asks this before it computes, so that a span in the wrong place is an error and never a wrong text. What
the caches hold is the engine's business.
"""

from __future__ import annotations

from collections.abc import Sequence

from potluck.stage.engine import LoadSpec, Work
from potluck.wire.errors import EngineError
from potluck.wire.messages import Span


class SlotTable:
    """Tokens cached per slot, 0 <= slot < slots, each at most `context_tokens`."""

    def __init__(self, slots: int, context_tokens: int, batch_tokens: int) -> None:
        self.context_tokens = context_tokens
        self.batch_tokens = batch_tokens
        self.lengths = [0] * slots

    def check(self, spec: LoadSpec, work: Work, width: int) -> None:
        """Raises EngineError unless every span goes on where its slot ends and the arrays have the spans' rows."""
        rows = sum(span.tokens for span in work.spans)
        if not 0 < rows <= self.batch_tokens:
            raise EngineError(
                f"A micro-batch of {rows} tokens: this stage was loaded for 1 to {self.batch_tokens}."
            )
        self._check_spans(work.spans)
        if len(work.tokens) != rows:
            raise EngineError(f"The spans have {rows} tokens, the array has {len(work.tokens)}.")
        if spec.is_first != (work.hidden is None):
            raise EngineError("The first stage takes tokens, every other one takes activations.")
        if work.hidden is not None and work.hidden.shape != (rows, width):
            raise EngineError(
                f"Activations of shape {work.hidden.shape} came in, {(rows, width)} were expected."
            )

    def _check_spans(self, spans: Sequence[Span]) -> None:
        ends: dict[int, int] = {}
        for span in spans:
            held = ends.get(span.slot, self.held(span.slot))
            if span.position != held:
                raise EngineError(
                    f"Slot {span.slot} holds {held} tokens, a span can't start at {span.position}.",
                    slot=span.slot,
                    position=span.position,
                    held=held,
                )
            end = span.position + span.tokens
            if span.tokens < 1 or not 0 <= span.wants <= span.tokens:
                raise EngineError(f"A span of {span.tokens} tokens can't have {span.wants} results.")
            if end > self.context_tokens:
                raise EngineError(
                    f"Slot {span.slot} has room for {self.context_tokens} tokens, {end} are needed.",
                    slot=span.slot,
                    needed=end,
                )
            ends[span.slot] = end

    def advance(self, spans: Sequence[Span]) -> None:
        """The spans are in the cache now."""
        for span in spans:
            self.lengths[span.slot] = span.position + span.tokens

    def held(self, slot: int) -> int:
        """Tokens the slot holds. Raises EngineError for a slot that does not exist."""
        if not 0 <= slot < len(self.lengths):
            raise EngineError(f"There is no slot {slot}: this stage has {len(self.lengths)}.")
        return self.lengths[slot]

    def put(self, slot: int, tokens: int) -> None:
        """The slot holds other tokens now, this many."""
        self.held(slot)
        self.lengths[slot] = tokens

    def check_copy(self, slot: int, tokens: int) -> None:
        """Raises EngineError unless the slot exists and could hold that many tokens."""
        self.held(slot)
        if not 0 < tokens <= self.context_tokens:
            raise EngineError(
                f"A copy of {tokens} tokens: slot {slot} holds 1 to {self.context_tokens}.", slot=slot
            )

    def trim(self, slot: int, keep: int) -> bool:
        """Keeps the first `keep` tokens. Whether anything went away; raises EngineError if the slot has fewer."""
        held = self.held(slot)
        if not 0 <= keep <= held:
            raise EngineError(
                f"Slot {slot} holds {held} tokens, not {keep}.", slot=slot, held=held, keep=keep
            )
        self.lengths[slot] = keep
        return keep < held
