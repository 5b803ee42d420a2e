"""What a stage lets in: an assignment that makes sense, and micro-batches that fit the assignment. Pure.

The types in `wire.messages` bound each value by itself; here values are held against one another and against the sizes
of the arrays, so that an engine never sees a row that isn't there.
"""

from __future__ import annotations

from collections.abc import Sequence

from potluck.model.codecs import CODECS, Codec, encoded_bytes
from potluck.wire.errors import MalformedError, Phase
from potluck.wire.frames import Buffer
from potluck.wire.messages import Assign, MicroBatch, Slice, SlotCopy


def codec_of(activation: str) -> Codec:
    """The codec of a message's activations. Raises MalformedError for an unknown one."""
    for codec in CODECS:
        if codec == activation:
            return codec
    raise MalformedError(f"Activations of the unknown codec {activation!r}.")


def phase_of(message: MicroBatch) -> Phase:
    """Decode when every span has one token, else prefill."""
    return Phase.DECODE if all(span.tokens == 1 for span in message.spans) else Phase.PREFILL


def check_slice(wished: Slice) -> None:
    """Raises MalformedError unless the layers are some of the model's."""
    layers = wished.model.layers
    if not 0 <= wished.first < wished.end <= layers:
        raise MalformedError(f"Layers [{wished.first}, {wished.end}) of {layers} are no slice.")


def check_assign(assign: Assign) -> None:
    """Raises MalformedError unless the layers are a slice at the place in the chain that the assignment names."""
    check_slice(assign.slice)
    layers = assign.model.layers
    if assign.index >= assign.stages:
        raise MalformedError(f"There is no stage {assign.index} in a chain of {assign.stages}.")
    if assign.is_first != (assign.first == 0) or assign.is_last != (assign.end == layers):
        raise MalformedError(
            f"Layers [{assign.first}, {assign.end}) of {layers} don't belong at place {assign.index} "
            f"of a chain of {assign.stages}."
        )


def check_batch(assign: Assign, message: MicroBatch, arrays: Sequence[Buffer]) -> None:
    """Raises MalformedError, in words, unless the micro-batch fits the assignment and its arrays fit it."""
    rows = message.tokens
    if rows > assign.batch_tokens:
        raise MalformedError(
            f"{rows} tokens in one micro-batch: this stage takes up to {assign.batch_tokens}."
        )
    if len(message.hops) != assign.index:
        raise MalformedError(
            f"It has {len(message.hops)} hops behind it; this is stage {assign.index} of its chain."
        )
    named = [trim.slot for trim in message.trims]
    named += [setting.slot for setting in message.samplings]
    named += [span.slot for span in message.spans]
    if named and max(named) >= assign.slots:
        raise MalformedError(f"There is no slot {max(named)}: this stage has {assign.slots}.")
    for span in message.spans:
        end = span.position + span.tokens
        if end > assign.context_tokens:
            raise MalformedError(f"Slot {span.slot} holds up to {assign.context_tokens} tokens, not {end}.")
        if span.wants > span.tokens:
            raise MalformedError(f"{span.wants} results are wanted of a span of {span.tokens} tokens.")
    expected = [4 * rows]
    if not assign.is_first:
        expected.append(encoded_bytes(rows, assign.model.width, codec_of(message.activation)))
    sizes = [memoryview(array).nbytes for array in arrays]
    if sizes != expected:
        raise MalformedError(f"Its arrays have {sizes} bytes where {expected} belong to {rows} tokens.")


def check_copy(copy: SlotCopy, arrays: Sequence[Buffer]) -> None:
    """Raises MalformedError unless the copy is one of a slot of its slice. What it holds is the engine's to judge."""
    check_slice(copy.slice)
    wished = copy.slice
    if copy.slot >= wished.slots:
        raise MalformedError(f"There is no slot {copy.slot}: the slice has {wished.slots}.")
    if not 0 < copy.tokens <= wished.context_tokens:
        raise MalformedError(f"A copy of {copy.tokens} tokens: a slot holds 1 to {wished.context_tokens}.")
    seen = 4 * copy.tokens if wished.end == wished.model.layers else 0
    state_bytes, seen_bytes = (memoryview(array).nbytes for array in arrays)
    if not state_bytes or seen_bytes != seen:
        raise MalformedError(
            f"Its arrays have {state_bytes} and {seen_bytes} bytes, the second one needs {seen}."
        )


__all__ = ["check_assign", "check_batch", "check_copy", "check_slice", "codec_of", "phase_of"]
