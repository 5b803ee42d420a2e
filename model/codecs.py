"""How activations look between two stages: float32 as it is, or float16 at half the bytes.

Decides nothing about when which is used. float32 crosses bit for bit, so a chain of stages computes what one would.
NaN passes: rows are independent, so it stays with its own sequence, and the last stage can fail that one request; a
refusal here would fail every sequence of the micro-batch. Pure.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from potluck.wire.errors import MalformedError
from potluck.wire.frames import Buffer

Codec: TypeAlias = Literal["f32", "f16"]
CODECS: Final[tuple[Codec, ...]] = get_args(Codec)

F16_MOST: Final = np.float32(65_504)
"""The largest finite float16. What is larger is cut to it: an infinity would make whole rows NaN in the next norm."""

_DTYPES: Final[dict[Codec, np.dtype[np.float32] | np.dtype[np.float16]]] = {
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
}


def encode(rows: NDArray[np.float32], codec: Codec) -> Buffer:
    """float32[n, width] as bytes in C order. f32 is a view of `rows`: leave them alone until the bytes are sent."""
    if codec == "f16":
        return np.clip(rows, -F16_MOST, F16_MOST).astype("<f2").reshape(-1).view(np.uint8).data
    return np.ascontiguousarray(rows, "<f4").reshape(-1).view(np.uint8).data


def decode(raw: Buffer, rows: int, width: int, codec: Codec) -> NDArray[np.float32]:
    """float32[rows, width] from a peer's bytes; f32 is a view of `raw` and may be read-only.

    Raises MalformedError for a size that is not that of `rows` x `width`, or an unknown codec.
    """
    dtype = _DTYPES.get(codec)
    if dtype is None:
        raise MalformedError(
            f"Activations of the unknown codec {codec!r}.", hint=f"Known are {', '.join(CODECS)}."
        )
    view = memoryview(raw)
    need = encoded_bytes(rows, width, codec)
    if rows < 0 or width < 1 or view.nbytes != need:
        raise MalformedError(
            f"{rows} rows of {width} activations in {codec} have {need} bytes, not {view.nbytes}.",
            hint="Both stages must run the same model and the same version of Potluck.",
        )
    return np.frombuffer(view, dtype).reshape(rows, width).astype(np.float32, copy=False)


def encoded_bytes(rows: int, width: int, codec: Codec) -> int:
    """The size of `rows` x `width` activations on the wire."""
    return rows * width * _DTYPES[codec].itemsize


__all__ = ["CODECS", "Codec", "decode", "encode", "encoded_bytes"]
