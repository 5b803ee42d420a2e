"""Seconds and bytes of a model on a processor that is only described. Pure.

The roofline model: a computation takes as long as the slower of its two needs, memory traffic and arithmetic (Williams,
Waterman and Patterson, "Roofline: an insightful visual performance model for multicore architectures", Communications
of the ACM 52(4), 2009). For `rows` tokens that go through one layer together, each with `held` tokens in its cache:

    seconds = max(bytes read / bandwidth, 2 * multiply-adds * rows / flops)              the weights
            + max(cache bytes read / bandwidth, 4 * query values * held * rows / flops)  the attention

Decoding reads every sequence's cache; a prompt's chunk reads one cache once, and its rows see `rows / 2` of each other
on average. A multiply-add is two operations, and attention has one for the scores and one for the sum per query value
and token. Of a layer with experts, one token reads only those that it is sent to. How many different ones `rows` tokens
need is taken as if each chose `used` of `experts` by chance: experts * (1 - (1 - used / experts) ^ rows). Routers have
favourites, so this is rather too much.

Bytes: the KV cache is f16, in cells of 256 tokens, as llama.cpp reserves it. Its compute buffers were fitted to what it
reports for layers of ten shapes (see `compute_bytes`): exact there for dense layers of the usual proportions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from potluck.planner.anatomy import Anatomy
from potluck.planner.plan import Demand
from potluck.wire.measures import Profile, Speed, Timing

DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
PREFILL_ROWS = (16, 32, 64, 128, 256, 512)
UBATCH_ROWS = 512
"""Rows that llama.cpp computes together at most, as Potluck sets it."""
RESULT_ROWS = 64
"""Results of one call for which Potluck has llama.cpp reserve room, at least."""
CELLS = 256
"""llama.cpp rounds the tokens of a slot up to multiples of this."""


@dataclass(frozen=True, slots=True)
class Processor:
    """What a CPU or GPU reaches, not what it could at best."""

    bytes_per_s: float
    flops: float
    """Operations per second; a multiply-add is two."""
    call_s: float = 0.0
    """What a micro-batch costs besides its layers."""

    def seconds(self, count: float, operations: float) -> float:
        """The slower of reading `count` bytes and computing `operations`."""
        return max(count / self.bytes_per_s, operations / self.flops)


def together(parts: Sequence[tuple[Processor, float]]) -> Processor:
    """Several GPUs that hold layers in proportion to the second number, and compute them one after another."""
    total = sum(share for _, share in parts)
    return Processor(
        bytes_per_s=total / sum(share / one.bytes_per_s for one, share in parts),
        flops=total / sum(share / one.flops for one, share in parts),
        call_s=max(one.call_s for one, _ in parts),
    )


def speed(processor: Processor, model: Anatomy, context_tokens: int) -> Speed:
    """What measuring it would have told, at an empty and at a full context."""
    contexts = (0, context_tokens)
    row_bytes = model.shape.embedding_bytes / model.vocabulary
    return Speed(
        decode=tuple(
            Timing(rows, held, decode_s(processor, model, rows, held))
            for rows in DECODE_ROWS
            for held in contexts
        ),
        prefill=tuple(
            Timing(rows, held, prefill_s(processor, model, rows, held))
            for rows in PREFILL_ROWS
            for held in contexts
        ),
        call_s=processor.call_s,
        head=tuple(
            Timing(rows, 0, processor.seconds(model.shape.head_bytes, 2.0 * model.shape.head_work * rows))
            for rows in DECODE_ROWS
        ),
        embedding_s=row_bytes / processor.bytes_per_s,
        layer_bytes=round(model.layer_bytes),
    )


def decode_s(processor: Processor, model: Anatomy, rows: int, held: int) -> float:
    """One layer, one token of each of `rows` sequences that hold `held` tokens."""
    cache = processor.seconds(2.0 * model.kv_values * held * rows, 4.0 * model.query_values * held * rows)
    return _weights_s(processor, model, rows) + cache


def prefill_s(processor: Processor, model: Anatomy, rows: int, held: int) -> float:
    """One layer, `rows` tokens of one prompt of which `held` are in the cache."""
    seen = held + rows / 2
    cache = processor.seconds(2.0 * model.kv_values * (held + rows), 4.0 * model.query_values * seen * rows)
    return _weights_s(processor, model, rows) + cache


def _weights_s(processor: Processor, model: Anatomy, rows: int) -> float:
    return processor.seconds(bytes_read(model, rows), 2.0 * model.layer_work * rows)


def bytes_read(model: Anatomy, rows: int) -> float:
    """Of an average layer's weights, for `rows` tokens together."""
    if not model.experts:
        return model.layer_bytes
    needed = 1.0 - (1.0 - model.experts_used / model.experts) ** rows
    return model.layer_bytes * (1.0 - model.expert_share + model.expert_share * needed)


def kv_bytes(model: Anatomy, demand: Demand) -> int:
    """The KV cache of one layer, all slots at full context."""
    return 2 * model.kv_values * demand.slots * _cells(demand)


def compute_bytes(model: Anatomy, demand: Demand) -> int:
    """llama.cpp's buffers on a stage that is not the last: results in between in f32, the attention mask in f16."""
    rows = _rows(demand)
    return rows * (4 * (3 * model.feed_forward + 4 * model.shape.width) + 2 * _cells(demand))


def head_compute_bytes(model: Anatomy, demand: Demand) -> int:
    """The same on the last stage: logits are made when the layers are done, and kept for each slot."""
    results = min(_rows(demand), max(RESULT_ROWS, demand.slots))
    logits = 4 * model.vocabulary
    head = results * logits + 8 * _rows(demand) * model.shape.width
    return max(compute_bytes(model, demand), head) + demand.slots * logits


def profile(cpu: Processor, gpu: Processor | None, model: Anatomy, demand: Demand) -> Profile:
    """What measuring the device would have told."""
    return Profile(
        fingerprint="described",
        cpu=speed(cpu, model, demand.context_tokens),
        gpu=None if gpu is None else speed(gpu, model, demand.context_tokens),
        slots=demand.slots,
        context_tokens=demand.context_tokens,
        kv_bytes=kv_bytes(model, demand),
        compute_bytes=compute_bytes(model, demand),
        head_compute_bytes=head_compute_bytes(model, demand),
    )


def _rows(demand: Demand) -> int:
    return min(max(demand.chunk_tokens, demand.slots, 2), UBATCH_ROWS)


def _cells(demand: Demand) -> int:
    return -(-demand.context_tokens // CELLS) * CELLS
