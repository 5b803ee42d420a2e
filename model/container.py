"""The GGUF container: reads a header within bounds and says where everything lies. Never touches tensor data.

It knows nothing of models: `facts` does. A reader of our own, because gguf.GGUFReader makes an array of every token
and merge: 1.6 s for SmolLM2's 49,152 tokens, where this takes 0.03 s and keeps no token at all. The sizes in a header
are a stranger's claims, so each is checked against a bound and against the file before anything is read.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Final, TypeAlias

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from potluck.wire.errors import ModelError, NotGgufError, TruncatedModelError

Value: TypeAlias = bool | int | float | str
"""A scalar of the metadata."""

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
ENTRIES: Final = 65_536
TENSORS: Final = 262_144
KEY_BYTES: Final = 65_535
NAME_BYTES: Final = 63
"""ggml's own limit for a tensor's name."""
STRING_BYTES: Final = 16 << 20
ITEMS: Final = 16 << 20
"""Items of one array. The largest known vocabularies have about 262,000 tokens and as many merges."""
KEPT_ITEMS: Final = 4_096
"""Arrays up to this length are kept as values: per-layer ones are; a tokenizer's are not."""
ALIGNMENT: Final = 32

SCALARS: Final[Mapping[GGUFValueType, struct.Struct]] = MappingProxyType(
    {
        GGUFValueType.UINT8: struct.Struct("<B"),
        GGUFValueType.INT8: struct.Struct("<b"),
        GGUFValueType.UINT16: struct.Struct("<H"),
        GGUFValueType.INT16: struct.Struct("<h"),
        GGUFValueType.UINT32: struct.Struct("<I"),
        GGUFValueType.INT32: struct.Struct("<i"),
        GGUFValueType.FLOAT32: struct.Struct("<f"),
        GGUFValueType.BOOL: struct.Struct("<?"),
        GGUFValueType.UINT64: struct.Struct("<Q"),
        GGUFValueType.INT64: struct.Struct("<q"),
        GGUFValueType.FLOAT64: struct.Struct("<d"),
    }
)
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_LOOKS_LIKE: Final = (
    (
        b"version https://git-lfs",
        "It is a git-lfs pointer, not the model itself: fetch it with `git lfs pull`.",
    ),
    (b"PK\x03\x04", "It is a zip archive (a PyTorch checkpoint, perhaps): Potluck needs a GGUF file."),
    (b"\x1f\x8b", "It is a gzip archive: unpack it first."),
    (b"<", "It is a web page: the download went wrong. Fetch the file again."),
    (b"{", "It is a JSON file: an error message or an index instead of the model, perhaps."),
    (b"lmgg", "It is a GGML file from before GGUF: convert it with a current llama.cpp."),
    (b"fmgg", "It is a GGML file from before GGUF: convert it with a current llama.cpp."),
    (b"tjgg", "It is a GGML file from before GGUF: convert it with a current llama.cpp."),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the metadata. `start` and `end` are its bytes in the file, key and type included.

    `value` is a scalar, a tuple for an array of up to KEPT_ITEMS numbers, or None for what is not kept (arrays of
    strings and longer arrays). `count` is the number of items, 1 for a scalar.
    """

    key: str
    type: GGUFValueType
    item_type: GGUFValueType
    count: int
    start: int
    end: int
    value: Value | tuple[Value, ...] | None


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: `shape` as GGUF has it (the row's length first), `offset` counted from the start of the file."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    bytes: int
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of `shape[0]` elements."""
        block, size = GGML_QUANT_SIZES[self.type]
        return self.shape[0] // block * size if self.shape else size


@dataclass(frozen=True, slots=True)
class Container:
    """A GGUF file's header, checked. Every tensor lies inside the file."""

    path: Path
    version: int
    entries: Mapping[str, Entry]
    tensors: Mapping[str, Tensor]
    alignment: int
    data_start: int
    file_bytes: int


def read_container(path: Path) -> Container:
    """Reads the header of a GGUF file in time and memory bounded by the header's own size.

    Raises NotGgufError, TruncatedModelError (naming what is cut off), ModelError (missing, unreadable, unsupported).
    """
    with open_model(path) as file:
        return _Reader(path, file).container()


@contextmanager
def open_model(path: Path) -> Iterator[BinaryIO]:
    """Opens a model file for reading. Raises ModelError in a person's words where the system can't."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise ModelError(f"There is no file {path}.", hint="Check the path.") from None
    except OSError as error:
        raise ModelError(
            f"{path} can't be opened: {error.strerror}.", hint="Check the path and its rights."
        ) from error
    if stat.S_ISDIR(status.st_mode):
        raise ModelError(f"{path} is a directory.", hint="Give the .gguf file inside it.")
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path} is not a regular file.", hint="Give a .gguf file on a disk.")
    try:
        file = path.open("rb")
    except OSError as error:
        raise ModelError(
            f"{path} can't be opened: {error.strerror}.", hint="Check the file's rights."
        ) from error
    with file:
        try:
            yield file
        except OSError as error:
            raise ModelError(f"{path} can't be read: {error.strerror}.", hint="Check the disk.") from error


class _Reader:
    """A cursor over one file that refuses to go past its end or past a bound."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self.size = os.fstat(file.fileno()).st_size
        self.at = 0
        self.part = "its first bytes"

    def container(self) -> Container:
        version = self._version()
        tensors, entries = self._count("tensors", TENSORS), self._count("metadata entries", ENTRIES)
        metadata: dict[str, Entry] = {}
        for index in range(entries):
            self.part = f"metadata entry {index + 1} of {entries}"
            entry = self._entry()
            if entry.key in metadata:
                raise self._damaged(f"has the key {entry.key!r} twice")
            metadata[entry.key] = entry
        alignment = self._alignment(metadata)
        table = [self._tensor(index, tensors) for index in range(tensors)]
        start = -(-self.at // alignment) * alignment
        return Container(
            path=self.path,
            version=version,
            entries=MappingProxyType(metadata),
            tensors=MappingProxyType(self._placed(table, start, alignment)),
            alignment=alignment,
            data_start=start,
            file_bytes=self.size,
        )

    # ---- parts of the file

    def _version(self) -> int:
        head = self.file.read(64)
        self.file.seek(0)
        if not head.startswith(MAGIC):
            raise self._not_gguf(head)
        self._bytes(4)
        version = self._u32()
        if version in VERSIONS:
            return version
        if version & 0xFFFF == 0:
            raise ModelError(
                f"{self.path} is a big-endian GGUF file.",
                hint="Convert it with `gguf-convert-endian`; Potluck reads little-endian files.",
            )
        raise ModelError(
            f"{self.path} is GGUF version {version}; Potluck reads {' and '.join(map(str, VERSIONS))}.",
            hint="Upgrade Potluck."
            if version > VERSIONS[-1]
            else "Convert the model with a current llama.cpp.",
        )

    def _entry(self) -> Entry:
        start = self.at
        key = self._string(KEY_BYTES)
        self.part = f"the metadata entry {key[:80]!r}"
        kind = item = self._value_type()
        count = 1
        value: Value | tuple[Value, ...] | None
        if kind is GGUFValueType.ARRAY:
            item = self._value_type()
            count = self._u64()
            value = self._array(key, item, count)
        elif kind is GGUFValueType.STRING:
            value = self._string(STRING_BYTES)
        else:
            value = self._scalar(kind)
        return Entry(key, kind, item, count, start, self.at, value)

    def _array(self, key: str, item: GGUFValueType, count: int) -> tuple[Value, ...] | None:
        if count > ITEMS:
            raise self._damaged(f"claims {count} items for {key!r}; at most {ITEMS} are accepted")
        if item is GGUFValueType.ARRAY:
            raise self._damaged(f"has an array of arrays at {key!r}")
        if item is GGUFValueType.STRING:
            for _ in range(count):
                self._skip(self._u64())
            return None
        packing = SCALARS[item]
        if count > KEPT_ITEMS:
            self._skip(count * packing.size)
            return None
        raw = self._bytes(count * packing.size)
        return tuple(values[0] for values in packing.iter_unpack(raw))

    def _alignment(self, metadata: Mapping[str, Entry]) -> int:
        entry = metadata.get("general.alignment")
        if entry is None:
            return ALIGNMENT
        value = entry.value
        if entry.type is not GGUFValueType.UINT32 or not isinstance(value, int) or not 0 < value <= 1 << 20:
            raise self._damaged("has an alignment that is no 32-bit number up to 1 MiB")
        if value & (value - 1):
            raise self._damaged(f"has the alignment {value}, which is no power of two")
        return value

    def _tensor(self, index: int, count: int) -> Tensor:
        """The tensor's entry in the table; its offset still counts from the start of the data."""
        self.part = f"entry {index + 1} of {count} of the tensor table"
        name = self._string(NAME_BYTES)
        dimensions = self._u32()
        if dimensions > 4:
            raise self._damaged(f"has a tensor {name!r} of {dimensions} dimensions")
        shape = tuple(self._u64() for _ in range(dimensions))
        number = self._u32()
        offset = self._u64()
        try:
            kind = GGMLQuantizationType(number)
            block, size = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise ModelError(
                f"{self.path} has a tensor {name!r} of the unknown type {number}.",
                hint="The file may be damaged, or newer than the gguf package: upgrade Potluck.",
            ) from None
        row = shape[0] if shape else 1
        if row % block:
            raise self._damaged(
                f"has a tensor {name!r} whose rows of {row} don't divide into blocks of {block}"
            )
        elements = row
        for length in shape[1:]:
            elements *= length
        if elements <= 0 or elements >= 1 << 62:
            raise self._damaged(f"has a tensor {name!r} of the impossible shape {shape}")
        return Tensor(name, kind, shape, elements // block * size, offset)

    def _placed(self, table: list[Tensor], start: int, alignment: int) -> dict[str, Tensor]:
        """The tensors by name with offsets from the file's start; none outside the file, none over another."""
        placed: dict[str, Tensor] = {}
        expected = 0
        for tensor in table:
            if tensor.name in placed:
                raise self._damaged(f"has the tensor {tensor.name!r} twice")
            if tensor.offset != expected:
                raise self._damaged(
                    f"has the tensor {tensor.name!r} at {tensor.offset} instead of {expected}"
                )
            end = start + tensor.offset + tensor.bytes
            if end > self.size:
                raise TruncatedModelError(
                    f"{self.path} is cut off: the tensor {tensor.name!r} ends at byte {end}, the file at {self.size}.",
                    hint="Download or copy the file again.",
                    tensor=tensor.name,
                    needed_bytes=end,
                    file_bytes=self.size,
                )
            placed[tensor.name] = Tensor(
                tensor.name, tensor.type, tensor.shape, tensor.bytes, start + tensor.offset
            )
            expected += -(-tensor.bytes // alignment) * alignment
        return placed

    # ---- primitives

    def _count(self, what: str, limit: int) -> int:
        self.part = f"the number of {what}"
        count = self._u64()
        if count > limit:
            raise self._damaged(f"claims {count} {what}; at most {limit} are accepted")
        return count

    def _value_type(self) -> GGUFValueType:
        number = self._u32()
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self._damaged(f"has a value of the unknown type {number} in {self.part}") from None

    def _scalar(self, kind: GGUFValueType) -> Value:
        packing = SCALARS[kind]
        value: Value = packing.unpack(self._bytes(packing.size))[0]
        return value

    def _string(self, limit: int) -> str:
        length = self._u64()
        if length > limit:
            raise self._damaged(f"has a text of {length} bytes in {self.part}; at most {limit} are accepted")
        return self._bytes(length).decode("utf-8", errors="replace")

    def _u32(self) -> int:
        number: int = _U32.unpack(self._bytes(4))[0]
        return number

    def _u64(self) -> int:
        number: int = _U64.unpack(self._bytes(8))[0]
        return number

    def _bytes(self, count: int) -> bytes:
        raw = self.file.read(count) if count <= self.size - self.at else b""
        if len(raw) != count:
            raise self._cut_off()
        self.at += count
        return raw

    def _skip(self, count: int) -> None:
        if count > self.size - self.at:
            raise self._cut_off()
        if count < 4096:  # reading from the buffer is cheaper than seeking
            self.file.read(count)
        else:
            self.file.seek(count, os.SEEK_CUR)
        self.at += count

    # ---- refusals

    def _cut_off(self) -> TruncatedModelError:
        return TruncatedModelError(
            f"{self.path} is cut off inside its header, in {self.part}: the file has {self.size} bytes.",
            hint="Download or copy the file again.",
            file_bytes=self.size,
        )

    def _damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.path} {what}.", hint="The file is damaged: download or copy it again.")

    def _not_gguf(self, head: bytes) -> NotGgufError:
        if not head:
            return NotGgufError(f"{self.path} is empty.", hint="Download or copy the file again.")
        hint = "Give a file in llama.cpp's GGUF format (its first four bytes are 'GGUF')."
        if len(head) > 8 and head[8:9] == b"{" and _U64.unpack(head[:8])[0] < self.size:
            hint = "It looks like safetensors: convert it with llama.cpp's convert_hf_to_gguf.py."
        for start, meaning in _LOOKS_LIKE:
            if head.lstrip().startswith(start):
                hint = meaning
        return NotGgufError(f"{self.path} is not a GGUF file.", hint=hint)
