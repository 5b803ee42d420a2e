"""What the KV cache takes, by the file's own words."""

from __future__ import annotations

from pathlib import Path

import pytest

from potluck.model.cache_size import cache_token_bytes
from potluck.model.facts import read_facts
from tiny_models import ARCHITECTURES, write_tiny


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_keys_and_values_of_every_head_count_in_two_bytes_a_number(tmp_path: Path, arch: str) -> None:
    facts = read_facts(write_tiny(tmp_path / "m.gguf", arch, layers=4, heads=4, kv_heads=2, head_width=16))
    assert cache_token_bytes(facts) == 4 * 2 * (16 + 16) * 2


def test_a_number_of_heads_for_each_layer_is_the_same(tmp_path: Path) -> None:
    lists = read_facts(write_tiny(tmp_path / "a.gguf", layers=3, per_layer_arrays=True))
    once = read_facts(write_tiny(tmp_path / "b.gguf", layers=3))
    assert cache_token_bytes(lists) == cache_token_bytes(once) > 0


def test_heads_of_a_width_of_their_own_take_what_they_are_wide(tmp_path: Path) -> None:
    usual = read_facts(write_tiny(tmp_path / "a.gguf", "qwen3", head_width=16))
    wide = read_facts(write_tiny(tmp_path / "b.gguf", "qwen3", head_width=32))
    assert cache_token_bytes(wide) == 2 * cache_token_bytes(usual)
