"""Tokenizers are llama.cpp's own; damaged ones are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from potluck.model.slices import write_slice
from potluck.model.tokenizer import Tokenizer
from potluck.model.vocabulary import Vocabulary
from potluck.wire.errors import ModelError, RequestError, TruncatedModelError
from tiny_models import write_tiny


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tokenizer]:
    path = write_tiny(tmp_path_factory.mktemp("models") / "m.gguf", layers=1, tokenizer=request.param)
    with Tokenizer(path) as opened:
        yield opened


@given(text=st.text(max_size=50))
def test_every_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    back = tokenizer.decode(tokenizer.encode(text, add_special=False)).decode()
    assert back in (text, f" {text}")  # some tokenizers put a space before every text


def test_bos_is_added_only_where_asked_and_only_once(tmp_path: Path) -> None:
    with Tokenizer(write_tiny(tmp_path / "m.gguf", layers=1)) as tokenizer:
        assert tokenizer.bos == 1
        assert tokenizer.encode("the", add_special=True)[0] == 1
        assert tokenizer.encode("the", add_special=False)[0] != 1
        assert tokenizer.encode_chat("<s>the").count(1) == 1
        assert tokenizer.encode_chat("the").count(1) == 1


def test_control_tokens_in_a_text_are_text_unless_asked(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("<|im_end|>", add_special=False, parse_special=False)
    parsed = tokenizer.encode("<|im_end|>", add_special=False, parse_special=True)
    assert len(plain) > len(parsed)
    end = parsed[-1]
    assert tokenizer.text(end) == "<|im_end|>"
    assert tokenizer.is_end(end)
    assert tokenizer.piece(end) == b""
    assert not any(tokenizer.is_end(token) for token in plain)


def test_pieces_may_be_parts_of_characters(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("😀", add_special=False)
    assert tokenizer.decode(tokens).strip() == "😀".encode()
    assert len(tokens) >= 4


def test_tokenizer_is_a_vocabulary(tokenizer: Tokenizer) -> None:
    vocabulary: Vocabulary = tokenizer
    assert vocabulary.size > 256


@pytest.mark.parametrize("token", [-1, 1 << 20, 1 << 40])
def test_token_that_is_not_there_is_refused_and_ends_no_process(tokenizer: Tokenizer, token: int) -> None:
    for ask in (tokenizer.piece, tokenizer.is_end, tokenizer.text):
        with pytest.raises(RequestError, match="no token"):
            ask(token)


def test_surrogates_and_zero_bytes_end_no_process(tokenizer: Tokenizer) -> None:
    assert b"\0" in tokenizer.decode(tokenizer.encode("a\0b", add_special=False))
    assert tokenizer.encode("\ud800", add_special=False)


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", layers=1)
    raw = path.read_bytes()
    for size in (len(raw) - 1, 3_000, 40):
        path.write_bytes(raw[:size])
        with pytest.raises(TruncatedModelError):
            Tokenizer(path)


def test_slice_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", layers=2)
    write_slice(path, 0, 1, tmp_path / "slice.gguf")
    with pytest.raises(ModelError, match="no tokenizer"):
        Tokenizer(tmp_path / "slice.gguf")


def test_tokens_of_another_type_are_refused_before_llama_cpp_aborts_on_them(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_array("tokenizer.ggml.tokens", [1, 2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="ARRAY of INT32"):
        Tokenizer(tmp_path / "m.gguf")


def test_what_llama_cpp_says_against_a_tokenizer_is_passed_on_and_not_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("nonsense")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="nonsense"):
        Tokenizer(tmp_path / "m.gguf")
    assert capfd.readouterr() == ("", "")


def test_closed_tokenizer_says_so(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tiny(tmp_path / "m.gguf", layers=1))
    tokenizer.close()
    tokenizer.close()
    with pytest.raises(ModelError, match="closed"):
        tokenizer.encode("a")


@pytest.mark.real_model
def test_tokenizer_of_the_real_model(smollm2_path: Path) -> None:
    with Tokenizer(smollm2_path) as tokenizer:
        tokens = tokenizer.encode("Hello, world! 你好 😀")
        assert tokenizer.decode(tokens).decode() == "Hello, world! 你好 😀"
        assert tokenizer.size == 49_152
        assert tokenizer.eos is not None
        assert tokenizer.is_end(tokenizer.eos)
