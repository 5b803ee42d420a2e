"""Looked-up rows are those of llama.cpp."""

from __future__ import annotations

import ctypes
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import _type_traits
from numpy.typing import NDArray

from potluck.model.container import Tensor, read_container
from potluck.model.embeddings import Embeddings, _unpack
from potluck.wire.errors import ModelError, RequestError
from tiny_models import write_tiny

TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


class TypeTraits(ctypes.Structure):
    """The beginning of ggml's struct ggml_type_traits."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("interleave", ctypes.c_int64),
        ("size", ctypes.c_size_t),
        ("quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


def unpacked(kind: GGMLQuantizationType, raw: bytes, rows: int, width: int) -> NDArray[np.float32]:
    """Rows of a quantized type as ggml's own look-up unpacks them."""
    api: Any = importlib.import_module("llama_cpp.llama_cpp")
    extensions: Any = importlib.import_module("llama_cpp._ctypes_extensions")
    base = extensions.load_shared_library("ggml-base", Path(api.__file__).parent / "lib")
    base.ggml_get_type_traits.restype = ctypes.POINTER(TypeTraits)
    values = np.empty((rows, width), np.float32)
    source = ctypes.create_string_buffer(raw, len(raw))
    traits = base.ggml_get_type_traits(int(kind)).contents
    traits.to_float(ctypes.addressof(source), values.ctypes.data, values.size)
    return values


def by_ggml(path: Path, tensor: Tensor) -> NDArray[np.float32]:
    """The whole table."""
    raw = path.read_bytes()[tensor.offset : tensor.offset + tensor.bytes]
    width, rows = tensor.shape
    if tensor.type is GGMLQuantizationType.F32:
        return np.frombuffer(raw, "<f4").reshape(rows, width)
    return unpacked(tensor.type, raw, rows, width)


@pytest.mark.parametrize("kind", TYPES)
def test_rows_are_bit_for_bit_those_of_ggml(tmp_path: Path, kind: str) -> None:
    path = write_tiny(tmp_path / "m.gguf", layers=1, width=256, heads=4, embedding_type=kind)
    tensor = read_container(path).tensors["token_embd.weight"]
    with Embeddings(path) as embeddings:
        tokens = np.array([0, 5, 5, embeddings.vocab - 1], np.int32)
        rows = embeddings.look_up(tokens)
    expected = by_ggml(path, tensor)[tokens]
    assert rows.dtype == np.float32
    assert rows.std() > 0
    np.testing.assert_array_equal(rows.view(np.uint32), expected.view(np.uint32))


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("kind", sorted(_type_traits))
def test_every_type_that_gguf_unpacks_is_unpacked_as_ggml_does(kind: GGMLQuantizationType) -> None:
    block, size = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (16, 4 * size), dtype=np.uint8)
    expected = unpacked(kind, raw.tobytes(), 16, 4 * block)
    np.testing.assert_array_equal(_unpack(raw, kind, 4 * block), expected)


@pytest.mark.real_model
def test_rows_of_the_real_model_are_those_of_ggml(smollm2_path: Path) -> None:
    tensor = read_container(smollm2_path).tensors["token_embd.weight"]
    tokens = np.arange(0, 49152, 37, dtype=np.int32)
    with Embeddings(smollm2_path) as embeddings:
        rows = embeddings.look_up(tokens)
    np.testing.assert_array_equal(rows, by_ggml(smollm2_path, tensor)[tokens])


def test_scale_multiplies_in_float32(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "gemma3", width=96)
    root = np.sqrt(np.float32(96))
    tokens = np.arange(9, dtype=np.int32)
    with Embeddings(path) as plain, Embeddings(path, float(root)) as scaled:
        np.testing.assert_array_equal(scaled.look_up(tokens), plain.look_up(tokens) * root)
        assert scaled.look_up(tokens).dtype == np.float32


def test_no_tokens_give_no_rows(tmp_path: Path) -> None:
    for kind in ("F32", "Q8_0"):
        with Embeddings(write_tiny(tmp_path / "m.gguf", embedding_type=kind)) as embeddings:
            assert embeddings.look_up(np.zeros(0, np.int32)).shape == (0, 64)


@pytest.mark.parametrize("token", [-1, 10_000, 2**31 - 1])
def test_token_outside_the_vocabulary_is_refused(tmp_path: Path, token: int) -> None:
    with (
        Embeddings(write_tiny(tmp_path / "m.gguf")) as embeddings,
        pytest.raises(RequestError, match=str(token)),
    ):
        embeddings.look_up(np.array([1, token], np.int32))


def test_closed_embeddings_say_so_and_give_the_file_back(tmp_path: Path) -> None:
    embeddings = Embeddings(write_tiny(tmp_path / "m.gguf"))
    rows = embeddings.look_up(np.array([1], np.int32))
    embeddings.close()
    embeddings.close()
    assert rows.shape == (1, 64)
    with pytest.raises(ModelError, match="closed"):
        embeddings.look_up(np.array([1], np.int32))
