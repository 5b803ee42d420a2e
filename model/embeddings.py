"""Looks tokens up: rows of a model's token_embd, read from the file as they are needed.

Decides nothing; `architectures` says by what the rows are multiplied. The table stays in the file (mapped, so the
system keeps what is used); only the rows asked for are unpacked.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from potluck.model.container import open_model, read_container
from potluck.model.facts import EMBEDDINGS
from potluck.wire.errors import ModelError, RequestError


class Embeddings:
    """token_embd of the GGUF file `path`, its rows multiplied by `scale` (`Rules.token_scale`).

    `width` is the length of a row, `vocab` the number of rows. Raises ModelError for a file or type it can't read.
    """

    def __init__(self, path: Path, scale: float = 1.0) -> None:
        tensor = read_container(path).tensors.get(EMBEDDINGS)
        if tensor is None or len(tensor.shape) != 2:
            raise ModelError(f"{path} has no tensor {EMBEDDINGS}.", hint="Give the file of the whole model.")
        self.path = path
        self.width, self.vocab = tensor.shape
        self._type = tensor.type
        self._scale = np.float32(scale)
        with open_model(path) as file:
            # A map begins at a page; what comes before the tensor is mapped and never touched.
            start = tensor.offset - tensor.offset % mmap.ALLOCATIONGRANULARITY
            size = tensor.offset + tensor.bytes - start
            self._map: mmap.mmap | None = mmap.mmap(
                file.fileno(), size, access=mmap.ACCESS_READ, offset=start
            )
        table = np.frombuffer(self._map, np.uint8, tensor.bytes, tensor.offset - start)
        self._rows: NDArray[np.uint8] | None = table.reshape(self.vocab, -1)
        try:
            self.look_up(np.zeros(1, np.int32))
        except NotImplementedError:
            self.close()
            raise ModelError(
                f"{path} holds {EMBEDDINGS} as {tensor.type.name}, which Potluck can't look up.",
                hint="Quantize the model with a common type, such as Q8_0 or Q4_K_M.",
            ) from None

    def look_up(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """float32[n, width] for int32[n]: the values llama.cpp's own look-up gives, times the scale.

        Raises RequestError for a token outside the vocabulary.
        """
        if self._rows is None:
            raise ModelError(f"The embeddings of {self.path} are closed.", hint="Load the stage again.")
        if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab):
            outside = next(int(token) for token in tokens if not 0 <= token < self.vocab)
            raise RequestError(
                f"There is no token {outside} in a vocabulary of {self.vocab}.",
                hint=f"Use token ids from 0 to {self.vocab - 1}.",
            )
        rows = _unpack(self._rows[tokens], self._type, self.width)
        return rows if self._scale == 1 else rows * self._scale

    def close(self) -> None:
        """Gives the file back. May be called twice."""
        self._rows = None
        if self._map is not None:
            self._map.close()
            self._map = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _unpack(rows: NDArray[np.uint8], kind: GGMLQuantizationType, width: int) -> NDArray[np.float32]:
    """uint8[n, bytes of a row] as float32[n, width]."""
    if kind is GGMLQuantizationType.F32:
        return rows.view("<f4")
    if kind is GGMLQuantizationType.F16:
        return rows.view("<f2").astype(np.float32)
    if kind is GGMLQuantizationType.BF16:  # the upper half of a float32
        return (rows.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if not len(rows):
        return np.empty((0, width), np.float32)
    values: NDArray[np.float32] = dequantize(rows, kind)
    return values


__all__ = ["Embeddings"]
