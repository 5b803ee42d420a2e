"""What is known of a model, and which files are no whole language model."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFWriter

from potluck.model.facts import read_facts
from potluck.wire.errors import ModelError, UnsupportedArchitectureError
from tiny_models import ARCHITECTURES, write_tiny


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny.gguf", "llama", layers=3)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_facts_of_every_architecture(tmp_path: Path, arch: str) -> None:
    facts = read_facts(write_tiny(tmp_path / "m.gguf", arch, layers=4))
    assert (facts.architecture, facts.layers, facts.width, facts.context_train) == (arch, 4, 64, 512)
    assert len(set(facts.block_bytes)) == 1
    everything = sum(facts.block_bytes) + facts.outside_bytes
    assert everything == sum(tensor.bytes for tensor in facts.tensors.values())
    assert facts.vocab == facts.container.entries["tokenizer.ggml.tokens"].count


def test_tied_head_is_the_embeddings(tmp_path: Path) -> None:
    tied = read_facts(write_tiny(tmp_path / "a.gguf", tied=True))
    assert tied.tied
    assert tied.head_bytes == tied.embedding_bytes
    untied = read_facts(write_tiny(tmp_path / "b.gguf", embedding_type="F16"))
    assert not untied.tied
    assert untied.head_bytes == 2 * untied.embedding_bytes


def test_tokenizer_and_template_are_found(tiny: Path) -> None:
    facts = read_facts(tiny)
    assert (facts.bos, facts.eos, facts.tokenizer_model) == (1, 2, "llama")
    assert facts.chat_template is not None
    assert "<|im_start|>" in facts.chat_template


def test_fingerprint_is_the_same_for_a_copy_and_stays_the_same(tmp_path: Path, tiny: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny.read_bytes())
    assert read_facts(copy).fingerprint == read_facts(tiny).fingerprint
    again = write_tiny(tmp_path / "again.gguf", "llama", layers=3)
    assert read_facts(again).fingerprint == read_facts(tiny).fingerprint


def test_fingerprint_differs_for_other_weights_of_the_same_shape(tmp_path: Path, tiny: Path) -> None:
    other = write_tiny(tmp_path / "other.gguf", "llama", layers=3, seed=1)
    assert other.stat().st_size == tiny.stat().st_size
    assert read_facts(other).fingerprint != read_facts(tiny).fingerprint


def test_fingerprint_differs_when_one_tensor_ends_otherwise(tmp_path: Path, tiny: Path) -> None:
    tensor = read_facts(tiny).tensors["blk.1.ffn_down.weight"]
    raw = bytearray(tiny.read_bytes())
    raw[tensor.offset + tensor.bytes - 1] ^= 1
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(raw)
    assert read_facts(changed).fingerprint != read_facts(tiny).fingerprint


def test_split_model_is_refused_with_the_way_to_join_it(tiny: Path) -> None:
    part = tiny.rename(tiny.with_name("tiny-00001-of-00003.gguf"))
    with pytest.raises(ModelError, match="split model") as caught:
        read_facts(part)
    assert "--merge" in caught.value.hint


def test_adapter_is_refused_as_no_language_model(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "lora.gguf", "llama")
    writer.add_type("adapter")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedArchitectureError, match="adapter"):
        read_facts(tmp_path / "lora.gguf")


def test_metadata_without_a_number_of_layers_is_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"llama\.block_count"):
        read_facts(tmp_path / "m.gguf")


def test_block_that_is_missing_is_named(tmp_path: Path, tiny: Path) -> None:
    raw = tiny.read_bytes().replace(b"blk.1.", b"blk.0x")
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    with pytest.raises(ModelError, match="block 1 is missing"):
        read_facts(path)
