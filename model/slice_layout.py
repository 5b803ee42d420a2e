"""What a slice's file holds: which metadata and tensors of the model, in which order, renamed or cut. Writes nothing.

A slice is an ordinary GGUF that llama.cpp loads as it is: blocks [first, end) counted from 0 and the tensors outside
the blocks. Metadata that stays the same is copied as bytes, so a tokenizer of any size is never parsed. Only a slice
that computes the head has a vocabulary; the others have one row of everything that has a row per token.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from gguf.constants import GGMLQuantizationType, GGUFValueType

from potluck.model.architectures import Rules
from potluck.model.container import MAGIC, SCALARS, Entry, Tensor, Value
from potluck.model.facts import EMBEDDINGS, HEAD, ModelFacts, block_of
from potluck.wire.errors import ModelError

FORMAT: Final = 1
"""Grows when slices of the same model are written differently, so that none written before is used again."""
ALIGNMENT: Final = 32
VERSION: Final = 3

_HEAD_BIAS: Final = "output.bias"
_PER_TOKEN: Final = (EMBEDDINGS, HEAD, _HEAD_BIAS)
_NOT_PER_LAYER: Final = ("rope.dimension_sections",)
"""Arrays that may be as long as the model is deep and have nothing to do with layers."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes [start, end) of the model's file."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of the slice: `bytes` of the model's file from `offset` on; float32 times `factor` if there is one."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    bytes: int
    factor: float | None = None

    @property
    def padded_bytes(self) -> int:
        """Bytes it takes in the slice."""
        return -(-self.bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class SliceLayout:
    """The slice's file from front to back: header parts, padding up to `data_start`, then the pieces, each padded."""

    header: tuple[bytes | FileRange, ...]
    pieces: tuple[Piece, ...]
    data_start: int

    @property
    def file_bytes(self) -> int:
        """The size of the finished file."""
        return self.data_start + sum(piece.padded_bytes for piece in self.pieces)


def lay_out(facts: ModelFacts, rules: Rules, first: int, end: int) -> SliceLayout:
    """The layout of the slice [first, end). Raises ForbiddenCutError, ModelError."""
    rules.check_slice(first, end)
    pieces = tuple(_pieces(facts, rules, first, end))
    entries = _entries(facts, rules, first, end)
    head = struct.pack("<4sIQQ", MAGIC, VERSION, len(pieces), len(entries))
    header = (head, *entries, _table(pieces))
    size = sum(len(part) if isinstance(part, bytes) else part.end - part.start for part in header)
    return SliceLayout(header, pieces, -(-size // ALIGNMENT) * ALIGNMENT)


def marks(facts: ModelFacts, first: int, end: int) -> dict[str, Value]:
    """What a slice's metadata says of its origin; llama.cpp ignores it."""
    return {
        "potluck.slice.format": FORMAT,
        "potluck.slice.fingerprint": facts.fingerprint,
        "potluck.slice.first": first,
        "potluck.slice.end": end,
        "potluck.slice.layers": facts.layers,
    }


# ---- tensors


def _pieces(facts: ModelFacts, rules: Rules, first: int, end: int) -> list[Piece]:
    is_last = end == facts.layers
    scaled_head = any(name in facts.tensors for name in ("output.scale", "output.input_scale"))
    head_as_embeddings = is_last and not facts.tied and rules.head_as_embeddings and not scaled_head
    pieces = []
    for tensor in facts.tensors.values():
        block = block_of(tensor.name)
        if block is None:
            if head_as_embeddings and tensor.name == EMBEDDINGS:
                continue
            # The loader takes token_embd for the head when there is no head: one big tensor instead of two.
            name = EMBEDDINGS if head_as_embeddings and tensor.name == HEAD else tensor.name
            pieces.append(_whole(tensor, name) if is_last or name not in _PER_TOKEN else _one_row(tensor))
        elif first <= block < end:
            name = tensor.name.replace(f"blk.{block}.", f"blk.{block - first}.", 1)
            pieces.append(_whole(tensor, name, _factor(facts, rules, tensor)))
    return pieces


def _whole(tensor: Tensor, name: str, factor: float | None = None) -> Piece:
    return Piece(name, tensor.type, tensor.shape, tensor.offset, tensor.bytes, factor)


def _one_row(tensor: Tensor) -> Piece:
    """The first token's row, or number, of a tensor that has one per token."""
    if len(tensor.shape) == 1:
        return Piece(tensor.name, tensor.type, (1,), tensor.offset, tensor.bytes // tensor.shape[0])
    return Piece(tensor.name, tensor.type, (tensor.shape[0], 1), tensor.offset, tensor.row_bytes)


def _factor(facts: ModelFacts, rules: Rules, tensor: Tensor) -> float | None:
    for ending, factor in rules.weight_factors:
        if tensor.name.endswith(ending):
            if tensor.type is not GGMLQuantizationType.F32:
                raise ModelError(
                    f"{facts.path} holds {tensor.name} as {tensor.type.name}; slices of it need float32.",
                    hint="Convert the model with a current llama.cpp, or use it whole.",
                )
            return factor
    return None


def _table(pieces: tuple[Piece, ...]) -> bytes:
    table, offset = [], 0
    for piece in pieces:
        table.append(
            _string(piece.name)
            + struct.pack(f"<I{len(piece.shape)}Q", len(piece.shape), *piece.shape)
            + struct.pack("<IQ", piece.type, offset)
        )
        offset += piece.padded_bytes
    return b"".join(table)


# ---- metadata


def _entries(facts: ModelFacts, rules: Rules, first: int, end: int) -> list[bytes | FileRange]:
    is_last = end == facts.layers
    written = _rewritten(facts, rules, first, end)
    copied: list[bytes | FileRange] = [
        FileRange(entry.start, entry.end)
        for key, entry in facts.container.entries.items()
        if key not in written
        and key != "general.alignment"
        and not key.startswith(("split.", "potluck."))
        and (is_last or not key.startswith("tokenizer."))
    ]
    return [*copied, *written.values()]


def _rewritten(facts: ModelFacts, rules: Rules, first: int, end: int) -> dict[str, bytes]:
    """The entries a slice says differently, encoded."""
    arch, count = facts.architecture, end - first
    entries: dict[str, bytes] = {}

    def say(key: str, kind: GGUFValueType, value: Value) -> None:
        entries[key] = _scalar(key, kind, value)

    for key, entry in facts.container.entries.items():
        name = key.removeprefix(f"{arch}.")
        if name != key and _is_per_layer(name, entry, facts.layers) and isinstance(entry.value, tuple):
            entries[key] = _array(key, entry.item_type, entry.value[first:end])
    say(f"{arch}.block_count", GGUFValueType.UINT32, count)
    for name, value in rules.window_metadata(first, end).items():
        key = f"{arch}.{name}"
        if isinstance(value, tuple):
            entries[key] = _array(key, GGUFValueType.BOOL, value)
        else:
            say(key, GGUFValueType.UINT32, value)
    dense = facts.of_architecture("leading_dense_block_count")
    if isinstance(dense, int) and not isinstance(dense, bool):
        left = min(max(dense - first, 0), count)
        say(f"{arch}.leading_dense_block_count", GGUFValueType.UINT32, left)
    heads = facts.of_architecture("attention.head_count")
    if isinstance(heads, tuple) and heads and isinstance(heads[0], int) and heads[0] > 0:
        # llama.cpp derives a missing head width from the first layer's heads, which another slice may not have.
        for side in ("key", "value"):
            if facts.of_architecture(f"attention.{side}_length") is None:
                say(f"{arch}.attention.{side}_length", GGUFValueType.UINT32, facts.width // heads[0])
    if end != facts.layers:
        say(f"{arch}.vocab_size", GGUFValueType.UINT32, 1)
        say("tokenizer.ggml.model", GGUFValueType.STRING, "none")
    for key, mark in marks(facts, first, end).items():
        say(key, GGUFValueType.STRING if isinstance(mark, str) else GGUFValueType.UINT32, mark)
    return entries


def _is_per_layer(name: str, entry: Entry, layers: int) -> bool:
    return entry.type is GGUFValueType.ARRAY and entry.count == layers and name not in _NOT_PER_LAYER


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _scalar(key: str, kind: GGUFValueType, value: Value) -> bytes:
    raw = _string(value) if isinstance(value, str) else SCALARS[kind].pack(value)
    return _string(key) + struct.pack("<I", kind) + raw


def _array(key: str, item: GGUFValueType, values: tuple[Value, ...]) -> bytes:
    head = struct.pack("<IIQ", GGUFValueType.ARRAY, item, len(values))
    return _string(key) + head + b"".join(SCALARS[item].pack(value) for value in values)


__all__ = ["FORMAT", "FileRange", "Piece", "SliceLayout", "lay_out", "marks"]
