"""What is timed to know a device: which blocks of the model, and micro-batches of which sizes. Pure.

Three slices. The `deep` one has so many blocks that it does not stay in the processor's caches, as a stage's layers
don't: decode is timed there. The `short` one has few, so that long chunks and a filled cache cost little; what both say
of the same micro-batch tells layers from the cost of a call. The `last` one has the head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from potluck.model.architectures import Rules
from potluck.wire.errors import ForbiddenCutError
from potluck.wire.measures import Capabilities

DEEP_BYTES = 64 << 20
SHORT_BYTES = 12 << 20
"""Blocks of fewer bytes and their KV cache would be computed from a cache of the second level."""
USUAL_SHARE = 0.03
"""How far the blocks of a slice may be from the model's average, in bytes, before more blocks are taken."""
SPARE_UNITS = 3
"""How many more units of blocks are taken for that."""
MOST_UNITS = 64
"""The longest slice that is considered, in units of blocks between two cuts."""
DECODE_ROWS = (1, 2, 4, 8, 16)
CHUNK_TOKENS = (4, 16, 32, 64, 128, 256, 512)
COMPARED_TOKENS = (16, 64)
"""Chunks that are timed on the deep slice, too."""
FULL_ROWS = (1, 4)
"""Decode micro-batches timed with a filled cache."""
FILL_S = 1.2
"""For filling caches, where that is enough for `GOOD_FILL_TOKENS`."""
LONG_FILL_S = 4.0
"""For filling one cache on a slow device."""
GOOD_FILL_TOKENS = 256
LEAST_FILL_TOKENS = 96
"""Fewer tokens in the cache would tell nothing of thousands."""
ROOM_SHARE = 0.8
"""Of the memory that is offered, what the timed slices may take together."""


def room_for(can: Capabilities) -> int:
    """Bytes that timed slices may take on a device; 0 where it does not say what it offers.

    One processor is timed after the other, so a GPU in the main memory leaves its part to the slices of either.
    """
    if not can.offered_bytes:
        return 0
    shared = any(gpu.shares_memory for gpu in can.gpus)
    main = can.offered_bytes + (can.offered_vram_bytes if shared else 0)
    alone = times_gpu(can) and not shared
    return max(1, round(ROOM_SHARE * (min(main, can.offered_vram_bytes) if alone else main)))


def offered_at_best(can: Capabilities) -> int:
    """What one processor of the device could have for layers at best; 0 where it does not say what it offers."""
    if not can.offered_bytes:
        return 0
    shared = any(gpu.shares_memory for gpu in can.gpus)
    return (
        can.offered_bytes + can.offered_vram_bytes
        if shared
        else max(can.offered_bytes, can.offered_vram_bytes)
    )


def times_gpu(can: Capabilities) -> bool:
    """Whether there is a GPU to be timed: not where its owner gives none of its memory."""
    return bool(can.gpus) and can.offered_vram_bytes > 0


class Part(StrEnum):
    """One of the slices that are timed."""

    DEEP = "deep"
    SHORT = "short"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Window:
    """The blocks [first, end), and how many bytes they have."""

    first: int
    end: int
    bytes: int

    @property
    def layers(self) -> int:
        """How many blocks."""
        return self.end - self.first

    @property
    def layer_bytes(self) -> float:
        """Of an average one."""
        return self.bytes / self.layers


@dataclass(frozen=True, slots=True)
class Windows:
    """The slices. `last` is None for a model that can't be cut: deep and short are then all of it."""

    deep: Window
    short: Window
    last: Window | None

    def of(self, part: Part) -> Window:
        """The slice of this name. Raises KeyError."""
        found = {Part.DEEP: self.deep, Part.SHORT: self.short, Part.LAST: self.last}[part]
        if found is None:
            raise KeyError(part)
        return found


@dataclass(frozen=True, slots=True)
class Point:
    """One micro-batch: a token of each of `rows` sequences, or a chunk of `rows` tokens of one."""

    part: Part
    chunk: bool
    rows: int
    full: bool = False
    """Whether the sequences hold tokens already."""


def windows_of(
    block_bytes: Sequence[int], rules: Rules, head_bytes: int, most_bytes: int = 0, cache_bytes: int = 0
) -> Windows:
    """The slices to time, all of them together at most `most_bytes` if that can be (0: without a limit).

    Each counts with `cache_bytes` per layer, the KV cache of all slots at full context: it is held so once, to see what
    it takes. Where not even the shortest fit, those are the slices.
    """
    layers, total = len(block_bytes), sum(block_bytes)
    before = (0, *accumulate(block_bytes))
    cuts = rules.cuts()

    def windows(firsts: Sequence[int], ends: Sequence[int]) -> list[Window]:
        """Those of them that llama.cpp can hold."""
        return [
            Window(first, end, before[end] - before[first])
            for first in firsts
            for end in ends
            if first < end and _allowed(rules, first, end)
        ]

    lasts = windows(cuts[::-1], [layers])
    if not lasts:
        whole = Window(0, layers, total)
        return Windows(whole, whole, None)
    # A stage that ends in the head has no callback at its nodes, so its layers are a little cheaper: with some of them
    # beside the head, what is said of the head is right for stages of common sizes.
    least = min(head_bytes, total // 2) // 2
    enough = next((index for index, window in enumerate(lasts) if window.bytes >= least), len(lasts) - 1)
    inner = [
        window
        for index, first in enumerate(cuts)
        for window in windows([first], cuts[index + 1 : index + 1 + MOST_UNITS])
    ] or windows([0], cuts)

    def need(window: Window) -> int:
        return window.bytes + window.layers * cache_bytes if most_bytes else window.bytes

    room = most_bytes - head_bytes if most_bytes else 2 * total
    beside = min(map(need, inner), default=0)
    last = next((w for w in lasts[enough::-1] if need(w) + beside <= room), lasts[0])
    if not inner:  # only slices that reach the end are allowed
        return Windows(last, last, last)
    room = room - need(last) if most_bytes else total
    fewest = min(window.layers for window in inner)
    fitting = [w for w in inner if need(w) <= room] or [w for w in inner if w.layers == fewest]
    short = _choose(fitting, total, layers, min(SHORT_BYTES, total // 4))
    deeper = [w for w in inner if w.layers >= 2 * short.layers and need(w) + need(short) <= room]
    deep = _choose(deeper, total, layers, min(DEEP_BYTES, total // 2)) if deeper else short
    return Windows(deep, short, last)


def _allowed(rules: Rules, first: int, end: int) -> bool:
    try:
        rules.check_slice(first, end)
    except ForbiddenCutError:
        return False
    return True


def _choose(windows: Sequence[Window], total_bytes: int, layers: int, least_bytes: int) -> Window:
    """The shortest of at least so many bytes whose blocks are like the model's; the most like it among those of a size.

    Files mix types of numbers, so blocks differ in size, and what two of them say must hold for all.
    """
    usual_bytes = total_bytes / layers

    def unlike(window: Window) -> float:
        return abs(window.layer_bytes - usual_bytes)

    def off_middle(window: Window) -> int:
        return abs(window.first + window.end - layers)

    sizes = sorted({window.layers for window in windows})
    best = [
        min((w for w in windows if w.layers == size), key=lambda w: (unlike(w), off_middle(w)))
        for size in sizes
    ]
    enough = next((index for index, window in enumerate(best) if window.bytes >= least_bytes), len(best) - 1)
    candidates = best[enough : enough + SPARE_UNITS + 1]
    alike = (window for window in candidates if unlike(window) <= USUAL_SHARE * usual_bytes)
    return next(alike, min(candidates, key=unlike))


# ---- micro-batches


def decode_rows(slots: int) -> tuple[int, ...]:
    """Numbers of sequences that decode together, up to the slots there are."""
    most = min(slots, DECODE_ROWS[-1])
    return (*(rows for rows in DECODE_ROWS if rows < most), most)


def chunk_tokens(batch_tokens: int) -> tuple[int, ...]:
    """Lengths of chunks, up to what one micro-batch may hold."""
    most = min(batch_tokens, CHUNK_TOKENS[-1])
    return (*(tokens for tokens in CHUNK_TOKENS if tokens < most), most)


def compared_chunks(batch_tokens: int) -> tuple[int, ...]:
    """The chunks that both the deep and the short slice compute, the largest one last."""
    sizes = chunk_tokens(batch_tokens)
    return tuple(tokens for tokens in sizes if tokens in COMPARED_TOKENS) or sizes[-1:]


def full_rows(slots: int) -> tuple[int, ...]:
    """Numbers of sequences that decode with a filled cache."""
    return tuple(sorted({min(rows, slots) for rows in FULL_ROWS}))


def fill_tokens(context_tokens: int, sequences: int, token_s: float, step: int) -> tuple[int, int]:
    """How many tokens go into how many sequences: half a context, or what there is time for, in steps.

    (0, 0) if it is so slow that nothing would be learnt.
    """
    half = context_tokens // 2
    tokens = 0
    for budget_s, count in ((FILL_S, sequences), (FILL_S, 1), (LONG_FILL_S, 1)):
        tokens = min(half, int(budget_s / max(token_s * count, 1e-12)))
        tokens -= tokens % step if tokens >= step else 0
        if tokens >= min(GOOD_FILL_TOKENS, half - half % step):
            break
    return (tokens, count) if tokens >= max(1, min(LEAST_FILL_TOKENS, half)) else (0, 0)


def points_of(windows: Windows, slots: int, batch_tokens: int, full_slots: int) -> Iterator[Point]:
    """Every micro-batch to time, a slice after the other, small ones first."""
    for rows in decode_rows(slots):
        yield Point(Part.DEEP, False, rows)
    for tokens in compared_chunks(batch_tokens):
        yield Point(Part.DEEP, True, tokens)
    for rows in full_rows(slots):
        yield Point(Part.SHORT, False, rows)
        if rows <= full_slots:
            yield Point(Part.SHORT, False, rows, full=True)
    for tokens in chunk_tokens(batch_tokens):
        yield Point(Part.SHORT, True, tokens)
        if full_slots:
            yield Point(Part.SHORT, True, tokens, full=True)
    if windows.last is not None:
        for rows in decode_rows(slots):
            yield Point(Part.LAST, False, rows)


__all__ = [
    "Part",
    "Point",
    "Window",
    "Windows",
    "chunk_tokens",
    "compared_chunks",
    "decode_rows",
    "fill_tokens",
    "full_rows",
    "offered_at_best",
    "points_of",
    "windows_of",
]
