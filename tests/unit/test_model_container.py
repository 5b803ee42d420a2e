"""What is read of a GGUF file, and how damaged and hostile ones are refused."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.model.container import ENTRIES, ITEMS, TENSORS, read_container
from potluck.model.facts import read_facts
from potluck.wire.errors import ModelError, NotGgufError, TruncatedModelError
from tiny_models import write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf", "llama", layers=2)


def written(folder: Path, raw: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(raw)
    return path


def header(version: int = 3, tensors: int = 0, entries: int = 0, rest: bytes = b"") -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, tensors, entries) + rest


def text(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def tensor(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + struct.pack("<IQ", kind, offset)


def test_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="There is no file") as caught:
        read_container(tmp_path / "nothing.gguf")
    assert "nothing.gguf" in str(caught.value)
    assert caught.value.hint


def test_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is a directory"):
        read_container(tmp_path)


def test_device_is_refused() -> None:
    with pytest.raises(ModelError, match="not a regular file"):
        read_container(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("raw", "hint"),
    [
        (b"", "again"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"PK\x03\x04" + bytes(60), "zip"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"\n  <html>", "web page"),
        (struct.pack("<Q", 40) + b'{"__metadata__":{}}' + bytes(100), "safetensors"),
        (b"tjgg" + bytes(60), "before GGUF"),
        (b"whatever this may be", "GGUF"),
    ],
)
def test_what_is_no_gguf_is_named_for_what_it_is(tmp_path: Path, raw: bytes, hint: str) -> None:
    with pytest.raises(NotGgufError) as caught:
        read_container(written(tmp_path, raw))
    assert hint in f"{caught.value.what} {caught.value.hint}"


@pytest.mark.parametrize(
    ("version", "words"),
    [(1, "version 1"), (99, "version 99"), (struct.unpack(">I", b"\x03\0\0\0")[0], "big-endian")],
)
def test_other_versions_and_byte_orders_are_refused(tmp_path: Path, version: int, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read_container(written(tmp_path, header(version)))


def test_truncated_file_is_refused_naming_the_first_missing_tensor(tmp_path: Path, tiny: Path) -> None:
    whole = read_container(tiny)
    missing = whole.tensors["blk.1.ffn_up.weight"]
    path = written(tmp_path, tiny.read_bytes()[: missing.offset + missing.bytes - 1])
    with pytest.raises(TruncatedModelError, match=r"blk\.1\.ffn_up\.weight") as caught:
        read_container(path)
    assert caught.value.facts["needed_bytes"] == missing.offset + missing.bytes
    assert caught.value.facts["file_bytes"] == path.stat().st_size


def test_file_cut_anywhere_in_its_header_is_refused_as_truncated(tmp_path: Path, tiny: Path) -> None:
    raw = tiny.read_bytes()
    start = read_container(tiny).data_start
    for size in [*range(4, 200), *range(200, start, 997)]:
        with pytest.raises(TruncatedModelError):
            read_container(written(tmp_path, raw[:size]))


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(header(tensors=TENSORS + 1), id="too many tensors"),
        pytest.param(header(entries=ENTRIES + 1), id="too many entries"),
        pytest.param(header(tensors=1 << 63, entries=1 << 63), id="counts near the end of the numbers"),
        pytest.param(header(entries=1, rest=struct.pack("<Q", 1 << 62)), id="a huge key"),
        pytest.param(header(entries=1, rest=text(b"k") + struct.pack("<I", 13)), id="an unknown type"),
        pytest.param(header(entries=1, rest=text(b"k") + struct.pack("<IQ", 8, 1 << 40)), id="a huge text"),
        pytest.param(
            header(entries=1, rest=text(b"k") + struct.pack("<IIQ", 9, 4, ITEMS + 1)), id="a huge array"
        ),
        pytest.param(
            header(entries=1, rest=text(b"k") + struct.pack("<IIQ", 9, 9, 1)), id="an array of arrays"
        ),
        pytest.param(
            header(entries=1, rest=text(b"k") + struct.pack("<IIQ", 9, 8, ITEMS)), id="many texts, none there"
        ),
        pytest.param(header(entries=2, rest=(text(b"k") + struct.pack("<IB", 0, 1)) * 2), id="a key twice"),
        pytest.param(header(tensors=1, rest=text(b"n" * 64)), id="a long tensor name"),
        pytest.param(header(tensors=1, rest=text(b"n") + struct.pack("<I", 5)), id="five dimensions"),
        pytest.param(header(tensors=1, rest=tensor(b"n", (32,), kind=9_999)), id="an unknown tensor type"),
        pytest.param(header(tensors=1, rest=tensor(b"n", (33,), kind=2)), id="a broken block"),
        pytest.param(header(tensors=1, rest=tensor(b"n", (1 << 62, 1 << 62))), id="an impossible shape"),
        pytest.param(header(tensors=1, rest=tensor(b"n", (0,))), id="an empty tensor"),
        pytest.param(
            header(tensors=1, rest=tensor(b"n", (8,), offset=32) + bytes(99)), id="a gap before a tensor"
        ),
        pytest.param(header(tensors=2, rest=tensor(b"n", (8,)) * 2 + bytes(200)), id="a tensor twice"),
        pytest.param(
            header(entries=1, rest=text(b"general.alignment") + struct.pack("<II", 4, 24)),
            id="an odd alignment",
        ),
        pytest.param(
            header(entries=1, rest=text(b"general.alignment") + struct.pack("<II", 4, 0)),
            id="no alignment at all",
        ),
    ],
)
def test_hostile_header_is_refused(tmp_path: Path, raw: bytes) -> None:
    with pytest.raises(ModelError):
        read_container(written(tmp_path, raw))


@given(place=st.integers(0, 3_000), change=st.binary(min_size=1, max_size=16))
def test_header_with_any_bytes_changed_is_read_or_refused(
    place: int, change: bytes, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = bytearray(tiny.read_bytes())
    raw[place : place + len(change)] = change
    path = written(tmp_path_factory.getbasetemp(), bytes(raw))
    try:
        named = str(read_facts(path).path)
    except ModelError as error:
        named = error.what
    assert str(path) in named


def test_values_are_those_that_were_written(tiny: Path) -> None:
    entries = read_container(tiny).entries
    assert entries["general.architecture"].value == "llama"
    assert entries["llama.block_count"].value == 2
    assert entries["tokenizer.ggml.add_bos_token"].value is True
    assert entries["tokenizer.ggml.tokens"].value is None
    assert entries["tokenizer.ggml.tokens"].count > 256
    raw = tiny.read_bytes()
    for entry in entries.values():
        assert raw[entry.start : entry.end].startswith(text(entry.key.encode()))


def test_tensors_lie_where_gguf_says(tiny: Path) -> None:
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(tiny)
    tensors = read_container(tiny).tensors
    assert [t.name for t in reader.tensors] == list(tensors)
    for theirs in reader.tensors:
        ours = tensors[theirs.name]
        assert (ours.offset, ours.bytes, ours.type) == (
            theirs.data_offset,
            theirs.n_bytes,
            theirs.tensor_type,
        )
        assert ours.shape == tuple(int(length) for length in theirs.shape)
