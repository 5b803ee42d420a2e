"""Where models may be cut, and which are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from potluck.model.architectures import Rules, rules_for, supported
from potluck.model.facts import read_facts
from potluck.wire.errors import ForbiddenCutError, UnsupportedArchitectureError
from tiny_models import ARCHITECTURES, write_tiny


def rules(path: Path, arch: str, **options: object) -> Rules:
    return rules_for(read_facts(write_tiny(path / f"{arch}.gguf", arch, **options)))  # type: ignore[arg-type]


def strange(path: Path, arch: str, **keys: int) -> Path:
    """A file of an architecture that write_tiny does not know, with one tensor in each block."""
    writer = GGUFWriter(path, arch)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    for key, value in keys.items():
        writer.add_uint32(f"{arch}.{key.replace('__', '.')}", value)
    writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    for block in range(2):
        writer.add_tensor(f"blk.{block}.attn_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_supported_architecture_has_a_tiny_model() -> None:
    assert set(ARCHITECTURES) == set(supported())


def test_llama_may_be_cut_anywhere(tmp_path: Path) -> None:
    found = rules(tmp_path, "llama", layers=5)
    assert found.cuts() == (1, 2, 3, 4)
    assert found.exact
    found.check_slice(0, 5)
    found.check_slice(2, 3)


@pytest.mark.parametrize(("first", "end"), [(-1, 2), (2, 2), (3, 2), (0, 6), (5, 6)])
def test_layers_that_are_not_there_are_no_slice(tmp_path: Path, first: int, end: int) -> None:
    with pytest.raises(ForbiddenCutError, match="model of 5 layers"):
        rules(tmp_path, "llama", layers=5).check_slice(first, end)


def test_smollm3_is_cut_at_multiples_of_four_and_names_the_nearest(tmp_path: Path) -> None:
    found = rules(tmp_path, "smollm3", layers=12)
    assert found.cuts() == (4, 8)
    with pytest.raises(ForbiddenCutError) as caught:
        found.check_cut(6)
    assert caught.value.hint == "Cut at 4 or 8."
    with pytest.raises(ForbiddenCutError) as caught:
        found.check_cut(11)
    assert caught.value.hint == "Cut at 8."


def test_gemma3_scales_tokens_and_gemma2_what_is_handed_over(tmp_path: Path) -> None:
    ones = np.ones((1, 64), np.float32)
    third, second = rules(tmp_path, "gemma3"), rules(tmp_path, "gemma2")
    assert third.scale_tokens(ones)[0, 0] == 8
    assert third.scale_handover(ones)[0, 0] == 1
    assert second.scale_tokens(ones)[0, 0] == 1
    assert second.scale_handover(ones)[0, 0] == np.float32(1 / 8)


def test_gemma2_is_exact_only_where_the_root_of_its_width_is_a_power_of_two(tmp_path: Path) -> None:
    assert rules(tmp_path, "gemma2", width=64).exact
    assert not rules(tmp_path, "gemma2", width=96).exact


@pytest.mark.parametrize(
    ("arch", "options", "expected"),
    [
        ("gemma2", {}, "WFWFWFW"),
        ("gemma3", {}, "WWWWWFW"),
        ("gemma3", {"pattern": 3}, "WWFWWFW"),
        ("gemma3", {"pattern": [True, False, False, True, True, False, True]}, "WFFWWFW"),
    ],
)
def test_window_pattern_is_the_default_the_period_or_the_list(
    tmp_path: Path, arch: str, options: dict[str, object], expected: str
) -> None:
    windowed = rules(tmp_path, arch, layers=7, **options).windowed
    assert windowed is not None
    assert "".join("W" if one else "F" for one in windowed) == expected


def test_slice_of_full_layers_turns_windows_off_or_makes_them_endless(tmp_path: Path) -> None:
    third = rules(tmp_path, "gemma3", layers=7).window_metadata(5, 6)
    assert third["attention.sliding_window"] == 0
    second = rules(tmp_path, "gemma2", layers=7).window_metadata(1, 2)
    assert second["attention.sliding_window_pattern"] == (True,)
    assert second["attention.sliding_window"] == 1 << 20


def test_gemma3_of_62_layers_makes_up_for_the_scale_that_hangs_on_their_number(tmp_path: Path) -> None:
    found = rules(tmp_path, "gemma3", layers=62, head_width=32)
    ((ending, factor),) = found.weight_factors
    assert ending == "attn_q_norm.weight"
    assert factor == pytest.approx((32 / 16) ** 0.5)
    assert not found.exact
    assert rules(tmp_path, "gemma3", layers=62).weight_factors == ()


def test_slice_that_would_pass_for_gemma_27b_is_forbidden(tmp_path: Path) -> None:
    found = rules(tmp_path, "gemma2", layers=48)
    found.check_slice(0, 45)
    with pytest.raises(ForbiddenCutError, match="46 layers"):
        found.check_slice(0, 46)


def test_gemma2_27b_can_only_be_used_whole(tmp_path: Path) -> None:
    found = rules(tmp_path, "gemma2", layers=46, head_width=32)
    assert found.cuts() == ()
    found.check_slice(0, 46)
    with pytest.raises(ForbiddenCutError, match="attention scale"):
        found.check_slice(0, 23)


def test_unlisted_architecture_is_refused_naming_the_listed_ones_and_verify(tmp_path: Path) -> None:
    facts = read_facts(strange(tmp_path / "m.gguf", "brandnew"))
    with pytest.raises(UnsupportedArchitectureError, match="brandnew") as caught:
        rules_for(facts)
    assert "potluck verify" in caught.value.hint
    assert "qwen3" in caught.value.hint
    allowed = rules_for(facts, allow_unlisted=True)
    assert not allowed.listed
    assert allowed.cuts() == (1,)


@pytest.mark.parametrize(
    ("arch", "keys", "reason"),
    [
        ("mamba", {}, "recurrent state"),
        ("brandnew", {"ssm__state_size": 16}, "recurrent state"),
        ("bert", {}, "token by token"),
        ("gemma3n", {}, "more than the output"),
        ("brandnew", {"attention__shared_kv_layers": 2}, "share KV caches"),
        ("brandnew", {"nextn_predict_layers": 1}, "predict further tokens"),
    ],
)
def test_what_no_rule_can_cut_is_refused_even_when_unlisted_is_allowed(
    tmp_path: Path, arch: str, keys: dict[str, int], reason: str
) -> None:
    facts = read_facts(strange(tmp_path / "m.gguf", arch, **keys))
    with pytest.raises(UnsupportedArchitectureError, match=reason):
        rules_for(facts, allow_unlisted=True)
