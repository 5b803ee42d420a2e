"""What slices hold, and that they appear whole or not at all, once each."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from potluck.model import slices
from potluck.model.architectures import rules_for
from potluck.model.container import Container, Tensor, read_container
from potluck.model.facts import ModelFacts, read_facts
from potluck.model.slices import ensure_slice, write_slice
from potluck.wire.errors import ForbiddenCutError, ModelError, TruncatedModelError
from tiny_models import write_tiny


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny.gguf", "llama", layers=4)


@pytest.fixture
def facts(source: Path) -> ModelFacts:
    return read_facts(source)


def data(path: Path, tensor: Tensor) -> bytes:
    return path.read_bytes()[tensor.offset : tensor.offset + tensor.bytes]


def sliced(source: Path, first: int, end: int) -> Container:
    target = source.with_name("slice.gguf")
    write_slice(source, first, end, target)
    return read_container(target)


def test_blocks_are_counted_from_zero_and_have_the_same_bytes(source: Path, facts: ModelFacts) -> None:
    part = sliced(source, 1, 3)
    assert part.entries["llama.block_count"].value == 2
    for name, tensor in part.tensors.items():
        if name.startswith("blk."):
            block = int(name.split(".")[1])
            whole = facts.tensors[name.replace(f"blk.{block}.", f"blk.{block + 1}.", 1)]
            assert data(part.path, tensor) == data(source, whole)
    assert {name.split(".")[1] for name in part.tensors if name.startswith("blk.")} == {"0", "1"}


def test_slice_that_is_not_last_has_one_row_per_token_and_no_tokenizer(source: Path) -> None:
    part = sliced(source, 0, 2)
    assert part.tensors["token_embd.weight"].shape == (64, 1)
    assert part.tensors["output.weight"].shape == (64, 1)
    assert part.entries["llama.vocab_size"].value == 1
    assert [key for key in part.entries if key.startswith("tokenizer.")] == ["tokenizer.ggml.model"]
    assert part.entries["tokenizer.ggml.model"].value == "none"


def test_last_slice_of_an_untied_model_holds_its_head_once_under_the_name_of_the_embeddings(
    source: Path, facts: ModelFacts
) -> None:
    part = sliced(source, 2, 4)
    assert "output.weight" not in part.tensors
    assert data(part.path, part.tensors["token_embd.weight"]) == data(source, facts.tensors["output.weight"])
    tokens = facts.container.entries["tokenizer.ggml.tokens"]
    copied = part.entries["tokenizer.ggml.tokens"]
    assert part.path.read_bytes()[copied.start : copied.end] == source.read_bytes()[tokens.start : tokens.end]


def test_last_slice_of_a_tied_model_keeps_the_embeddings_for_its_head(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "tied.gguf", "llama", tied=True)
    part = sliced(source, 2, 4)
    tensor = read_facts(source).tensors["token_embd.weight"]
    assert data(part.path, part.tensors["token_embd.weight"]) == data(source, tensor)


def test_last_slice_of_qwen2moe_keeps_both_because_llama_cpp_insists(tmp_path: Path) -> None:
    part = sliced(write_tiny(tmp_path / "m.gguf", "qwen2moe"), 2, 4)
    assert part.tensors["token_embd.weight"].shape == part.tensors["output.weight"].shape


def test_one_row_keeps_a_quantized_type(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "m.gguf", "llama", tied=True, embedding_type="Q8_0")
    tensor = sliced(source, 0, 1).tensors["token_embd.weight"]
    assert (tensor.type.name, tensor.bytes) == ("Q8_0", 2 * 34)


def test_arrays_with_a_number_per_layer_are_cut_too(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "m.gguf", "llama", layers=5, per_layer_arrays=True)
    part = sliced(source, 1, 4)
    assert part.entries["llama.attention.head_count"].value == (4, 4, 4)
    assert part.entries["llama.feed_forward_length"].value == (128, 128, 128)
    assert part.entries["llama.attention.key_length"].value == 16


def test_tensors_outside_blocks_that_every_block_needs_are_kept(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "m.gguf", "phi3")
    for first, end in ((0, 2), (1, 3), (2, 4)):
        names = sliced(source, first, end).tensors
        assert {"rope_factors_long.weight", "rope_factors_short.weight", "output_norm.weight"} <= set(names)


def test_gemma3_of_62_layers_stores_query_norms_multiplied(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "m.gguf", "gemma3", layers=62, head_width=32)
    part = sliced(source, 60, 62)
    ours = np.frombuffer(data(part.path, part.tensors["blk.1.attn_q_norm.weight"]), "<f4")
    whole = np.frombuffer(data(source, read_facts(source).tensors["blk.61.attn_q_norm.weight"]), "<f4")
    np.testing.assert_array_equal(ours, (whole.astype(np.float64) * 2**0.5).astype(np.float32))


def test_slice_says_where_it_comes_from(source: Path, facts: ModelFacts) -> None:
    entries = sliced(source, 1, 3).entries
    assert entries["potluck.slice.fingerprint"].value == facts.fingerprint
    assert (entries["potluck.slice.first"].value, entries["potluck.slice.end"].value) == (1, 3)


def test_slice_has_the_size_that_was_announced(source: Path, facts: ModelFacts) -> None:
    layout = slices.lay_out(facts, rules_for(facts), 0, 3)
    assert sliced(source, 0, 3).file_bytes == layout.file_bytes


def test_all_of_the_model_is_the_source_itself(source: Path, facts: ModelFacts, tmp_path: Path) -> None:
    files = ensure_slice(source, facts, 0, 4, tmp_path / "cache")
    assert (files.slice_path, files.embeddings_path) == (source, source)
    assert not (tmp_path / "cache").exists()


def test_only_the_first_stage_gets_embeddings(source: Path, facts: ModelFacts, tmp_path: Path) -> None:
    assert ensure_slice(source, facts, 0, 2, tmp_path).embeddings_path == source
    assert ensure_slice(source, facts, 2, 4, tmp_path).embeddings_path is None


def test_slice_in_the_cache_is_used_again(source: Path, facts: ModelFacts, tmp_path: Path) -> None:
    first = ensure_slice(source, facts, 0, 2, tmp_path).slice_path
    before = first.stat()
    again = ensure_slice(source, facts, 0, 2, tmp_path).slice_path
    assert (again, again.stat().st_ino) == (first, before.st_ino)
    assert first.parent.name == facts.fingerprint


@pytest.mark.parametrize("kept", [0, 100, 5_000])
def test_damaged_slice_in_the_cache_is_written_anew(
    source: Path, facts: ModelFacts, tmp_path: Path, kept: int
) -> None:
    path = ensure_slice(source, facts, 0, 2, tmp_path).slice_path
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    assert ensure_slice(source, facts, 0, 2, tmp_path).slice_path.read_bytes() == whole


def test_what_dead_writers_left_is_removed_and_what_a_living_one_writes_is_not(
    source: Path, facts: ModelFacts, tmp_path: Path
) -> None:
    folder = ensure_slice(source, facts, 0, 2, tmp_path).slice_path.parent
    dead, living = folder / "0-1.v1.gguf.part", folder / "1-2.v1.gguf.part"
    dead.write_bytes(b"half a slice")
    with living.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ensure_slice(source, facts, 2, 4, tmp_path)
        assert living.exists()
    assert not dead.exists()
    assert sorted(path.name for path in folder.glob("*.part")) == [living.name]


def test_half_a_slice_of_a_dead_writer_is_taken_over(source: Path, facts: ModelFacts, tmp_path: Path) -> None:
    folder = tmp_path / "slices" / facts.fingerprint
    folder.mkdir(parents=True)
    (folder / "0-2.v1.gguf.part").write_bytes(b"x" * 10_000_000)
    path = ensure_slice(source, facts, 0, 2, tmp_path).slice_path
    assert read_container(path).file_bytes < 10_000_000
    assert list(folder.iterdir()) == [path]


def test_full_disk_is_refused_before_anything_is_written(
    source: Path, facts: ModelFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(1 << 40, 1 << 40, 1 << 20))
    with pytest.raises(ModelError, match="1 MiB free") as caught:
        ensure_slice(source, facts, 0, 2, tmp_path)
    assert caught.value.facts["needed_bytes"] > caught.value.facts["free_bytes"]
    assert not list((tmp_path / "slices").rglob("*.gguf*"))


def test_disk_that_fills_up_meanwhile_leaves_nothing_behind(
    source: Path, facts: ModelFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_handle: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ModelError, match="No space left") as caught:
        ensure_slice(source, facts, 0, 2, tmp_path)
    assert "Free some space" in caught.value.hint
    assert not list((tmp_path / "slices").rglob("*.gguf*"))


def test_source_that_becomes_shorter_is_noticed(source: Path, facts: ModelFacts, tmp_path: Path) -> None:
    with source.open("r+b") as file:
        file.truncate(facts.tensors["blk.1.attn_q.weight"].offset)
    with pytest.raises(TruncatedModelError, match="shorter"):
        ensure_slice(source, facts, 0, 2, tmp_path)
    assert not list((tmp_path / "slices").rglob("*.gguf*"))


def test_source_that_was_replaced_by_a_larger_file_is_noticed(
    source: Path, facts: ModelFacts, tmp_path: Path
) -> None:
    source.write_bytes(source.read_bytes() + b"more")
    with pytest.raises(ModelError, match="has changed"):
        ensure_slice(source, facts, 0, 2, tmp_path)


def test_systems_without_copy_file_range_write_the_same(
    source: Path, facts: ModelFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = ensure_slice(source, facts, 0, 2, tmp_path / "a").slice_path.read_bytes()
    monkeypatch.delattr(os, "copy_file_range")
    slow = ensure_slice(source, facts, 0, 2, tmp_path / "b").slice_path.read_bytes()
    assert slow == fast


def test_cut_that_the_rules_forbid_writes_nothing(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "m.gguf", "smollm3", layers=8)
    with pytest.raises(ForbiddenCutError):
        ensure_slice(source, read_facts(source), 0, 3, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
