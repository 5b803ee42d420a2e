"""What a GGUF file says of its model: sizes, blocks, head, tokenizer, and a fingerprint.

Decides whether the file is one whole language model at all. Leaves to `architectures` whether and where it can be cut,
and to `container` how the bytes lie.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from potluck.model.container import Container, Tensor, Value, open_model, read_container
from potluck.wire import limits
from potluck.wire.errors import ModelError, UnsupportedArchitectureError

EMBEDDINGS: Final = "token_embd.weight"
HEAD: Final = "output.weight"
SAMPLE_BYTES: Final = 4_096

_BLOCK = re.compile(r"blk\.(\d{1,6})\.")
_SPLIT_NAME = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One model file. Sizes in bytes are those of the tensors' data, without padding.

    `metadata` holds the scalars and short arrays of the header (see `container.Entry`), `block_bytes[i]` is block i.
    `head_bytes` is what the last stage's head reads: token_embd itself when the head is tied to it.
    """

    path: Path
    container: Container
    architecture: str
    name: str
    layers: int
    width: int
    vocab: int
    context_train: int
    tied: bool
    block_bytes: tuple[int, ...]
    embedding_bytes: int
    head_bytes: int
    outside_bytes: int
    fingerprint: str
    tokenizer_model: str
    chat_template: str | None
    bos: int | None
    eos: int | None
    metadata: Mapping[str, Value | tuple[Value, ...]]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Every tensor by name, in the file's order."""
        return self.container.tensors

    @property
    def file_bytes(self) -> int:
        """The size of the file."""
        return self.container.file_bytes

    def of_architecture(self, key: str) -> Value | tuple[Value, ...] | None:
        """The metadata value of `{architecture}.{key}`, or None."""
        return self.metadata.get(f"{self.architecture}.{key}")


def read_facts(path: Path) -> ModelFacts:
    """Reads a model's header, in well under a second whatever the size of the file.

    Raises NotGgufError, TruncatedModelError, ModelError (missing, unreadable, split, not a language model).
    """
    container = read_container(path)
    _refuse_split(container)
    metadata = {key: entry.value for key, entry in container.entries.items() if entry.value is not None}
    architecture = _text(path, metadata, "general.architecture")
    _refuse_other_kinds(path, metadata, architecture)
    layers = _number(path, metadata, f"{architecture}.block_count", limits.LAYERS)
    width = _number(path, metadata, f"{architecture}.embedding_length", 1 << 20)
    context = _number(path, metadata, f"{architecture}.context_length", 1 << 40)
    embeddings = container.tensors.get(EMBEDDINGS)
    if embeddings is None or len(embeddings.shape) != 2 or embeddings.shape[0] != width:
        raise ModelError(
            f"{path} has no tensor {EMBEDDINGS} of rows of {width}.",
            hint="Give the GGUF file of a whole language model.",
        )
    head = container.tensors.get(HEAD)
    blocks = _block_bytes(container, layers)
    outside = sum(t.bytes for t in container.tensors.values() if block_of(t.name) is None)
    return ModelFacts(
        path=path,
        container=container,
        architecture=architecture,
        name=str(metadata.get("general.name") or path.stem)[: limits.NAME_CHARS],
        layers=layers,
        width=width,
        vocab=embeddings.shape[1],
        context_train=context,
        tied=head is None,
        block_bytes=blocks,
        embedding_bytes=embeddings.bytes,
        head_bytes=(head or embeddings).bytes,
        outside_bytes=outside,
        fingerprint=_fingerprint(container),
        tokenizer_model=str(metadata.get("tokenizer.ggml.model", "")),
        chat_template=_optional_text(metadata, "tokenizer.chat_template"),
        bos=_optional_token(metadata, "tokenizer.ggml.bos_token_id"),
        eos=_optional_token(metadata, "tokenizer.ggml.eos_token_id"),
        metadata=MappingProxyType(metadata),
    )


def block_of(tensor: str) -> int | None:
    """The index of the block a tensor belongs to, None for one outside the blocks."""
    match = _BLOCK.match(tensor)
    return int(match[1]) if match else None


def _fingerprint(container: Container) -> str:
    """sha256 (64 hex digits) over the header, the file's size and the first and last 4 KiB of every tensor.

    Two files of the same fingerprint have the same metadata, tokenizer, tensor table and size, and agree in every
    sample: another model, quantization, conversion, fine-tune or a half-written file differs. It reads a few MiB of a
    40 GB file. It does not find a few bytes changed in the middle of a large tensor: it tells models apart and is no
    proof against tampering or bit rot; the depot hashes whole files for that.
    """
    digest = hashlib.sha256()
    with open_model(container.path) as file:
        left = container.data_start
        while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
        digest.update(container.file_bytes.to_bytes(8, "little"))
        for tensor in container.tensors.values():
            first = min(tensor.bytes, SAMPLE_BYTES)
            file.seek(tensor.offset)
            digest.update(file.read(first))
            last = min(tensor.bytes - first, SAMPLE_BYTES)
            if last:
                file.seek(tensor.offset + tensor.bytes - last)
                digest.update(file.read(last))
    return digest.hexdigest()


def _block_bytes(container: Container, layers: int) -> tuple[int, ...]:
    blocks = [0] * layers
    for tensor in container.tensors.values():
        index = block_of(tensor.name)
        if index is None:
            continue
        if index >= layers:
            raise ModelError(
                f"{container.path} says it has {layers} blocks and has a tensor {tensor.name}.",
                hint="The file is damaged or made by a faulty converter: get another one.",
            )
        blocks[index] += tensor.bytes
    for index, size in enumerate(blocks):
        if size == 0:
            raise ModelError(
                f"{container.path} says it has {layers} blocks, and block {index} is missing.",
                hint="The file is damaged or made by a faulty converter: get another one.",
            )
    return tuple(blocks)


def _refuse_split(container: Container) -> None:
    count = container.entries.get("split.count")
    named = _SPLIT_NAME.search(container.path.name)
    if (count is not None and isinstance(count.value, int) and count.value > 1) or (
        named and int(named[1]) > 1
    ):
        raise ModelError(
            f"{container.path} is one part of a split model; split models are not supported yet.",
            hint="Join the parts first: `llama-gguf-split --merge FIRST-PART.gguf WHOLE.gguf`.",
        )


def _refuse_other_kinds(
    path: Path, metadata: Mapping[str, Value | tuple[Value, ...]], architecture: str
) -> None:
    kind = metadata.get("general.type", "model")
    if kind != "model" or architecture == "clip":
        raise UnsupportedArchitectureError(
            f"{path} is not a language model but of the kind {kind!r} (architecture {architecture!r}).",
            hint="Give the GGUF file of the language model itself.",
        )


def _text(path: Path, metadata: Mapping[str, Value | tuple[Value, ...]], key: str) -> str:
    value = metadata.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= limits.NAME_CHARS:
        raise _missing(path, key)
    return value


def _number(path: Path, metadata: Mapping[str, Value | tuple[Value, ...]], key: str, most: int) -> int:
    value = metadata.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _missing(path, key)
    if not 1 <= value <= most:
        raise ModelError(
            f"{path} has {key} = {value}, outside 1 to {most}.",
            hint="The file is damaged: download or copy it again.",
        )
    return value


def _missing(path: Path, key: str) -> ModelError:
    return ModelError(
        f"{path} has no usable {key} in its metadata.", hint="Give the GGUF file of a language model."
    )


def _optional_text(metadata: Mapping[str, Value | tuple[Value, ...]], key: str) -> str | None:
    value = metadata.get(key)
    return value if isinstance(value, str) and value else None


def _optional_token(metadata: Mapping[str, Value | tuple[Value, ...]], key: str) -> int | None:
    value = metadata.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31 else None
