"""Activations on the wire."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from potluck.model.codecs import CODECS, Codec, decode, encode, encoded_bytes
from potluck.wire.errors import MalformedError

ROWS = arrays(np.float32, st.tuples(st.integers(0, 5), st.integers(1, 9)), elements=st.floats(width=32))


@given(rows=ROWS)
def test_f32_comes_back_bit_for_bit(rows: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> None:
    back = decode(encode(rows, "f32"), *rows.shape, "f32")
    np.testing.assert_array_equal(back.view(np.uint32), rows.view(np.uint32))


def test_f32_is_not_copied() -> None:
    rows = np.ones((3, 4), np.float32)
    raw = encode(rows, "f32")
    back = decode(raw, 3, 4, "f32")
    assert np.shares_memory(back, rows)


def test_rows_that_are_not_contiguous_are_sent_in_order() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    np.testing.assert_array_equal(decode(encode(rows, "f32"), 3, 2, "f32"), rows)
    np.testing.assert_array_equal(decode(encode(rows, "f16"), 3, 2, "f16"), rows)


@given(rows=ROWS)
def test_f16_is_the_nearest_float16_without_infinities(
    rows: np.ndarray[tuple[int, int], np.dtype[np.float32]],
) -> None:
    raw = encode(rows, "f16")
    assert memoryview(raw).nbytes == encoded_bytes(*rows.shape, "f16") == rows.size * 2
    back = decode(raw, *rows.shape, "f16")
    assert back.dtype == np.float32
    assert not np.isinf(back).any()
    np.testing.assert_array_equal(np.isnan(back), np.isnan(rows))
    within = np.abs(rows) <= 65_504
    np.testing.assert_array_equal(back[within], rows[within].astype(np.float16).astype(np.float32))
    beyond = np.abs(rows) > 65_504
    np.testing.assert_array_equal(back[beyond], np.copysign(np.float32(65_504), rows[beyond]))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("rows", "width"), [(2, 4), (3, 3), (0, 4), (-3, -4), (1 << 40, 1 << 40)])
def test_other_size_than_announced_is_refused(codec: Codec, rows: int, width: int) -> None:
    raw = encode(np.ones((3, 4), np.float32), codec)
    with pytest.raises(MalformedError):
        decode(raw, rows, width, codec)


def test_unknown_codec_is_refused() -> None:
    with pytest.raises(MalformedError, match="int9"):
        decode(b"", 0, 4, "int9")  # type: ignore[arg-type]
