"""Measuring with llama.cpp: the profile is whole, and its memory is what llama.cpp takes. Never how long it takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from potluck.model.facts import read_facts
from potluck.model.reference import reference
from potluck.stage.bench import Bench, BenchSettings
from potluck.stage.engine import Loaded, LoadSpec
from potluck.stage.engines.llama import LlamaEngine
from potluck.stage.engines.llama_lib import copied_bytes
from potluck.stage.holder import Models
from potluck.stage.kept_profiles import profile_path
from potluck.tools.cli import main as potluck
from potluck.wire.errors import OutOfMemoryError, Phase
from potluck.wire.measures import Capabilities, Profile
from potluck.wire.messages import Measure
from tiny_models import write_tiny

SLOTS, CONTEXT, BATCH = 4, 512, 32
K_TYPES = {"width": 256, "feed_forward": 256}


class Measured:
    """A tiny model, and how it is measured."""

    def __init__(self, folder: Path, arch: str = "llama", **options: object) -> None:
        self.source = write_tiny(folder / "whole.gguf", arch, **options)  # type: ignore[arg-type]
        self.facts = read_facts(self.source)
        self.cache = folder / "cache"
        self.told: list[tuple[Phase, int, int]] = []
        models = Models({self.facts.fingerprint: self.source}, self.cache)
        self.bench = Bench(LlamaEngine, models, BenchSettings("tiny"))

    def message(self, slots: int = SLOTS, context: int = CONTEXT) -> Measure:
        return Measure(reference(self.facts, "tiny"), slots, context, BATCH)

    def profile(self, **more: bool) -> Profile:
        found = self.bench(self.message(), lambda: True, lambda *said: self.told.append(said), **more)
        assert found is not None
        return found

    def loaded(self, first: int, end: int, path: Path) -> Loaded:
        spec = LoadSpec(path, path, first, end, self.facts.layers, SLOTS, CONTEXT, BATCH)
        engine = LlamaEngine()
        try:
            return engine.load(spec)
        finally:
            engine.close()


@pytest.mark.parametrize(
    "options",
    [
        {"layers": 8},
        {"layers": 8, "tied": True, "types": ("Q8_0", "Q4_0")},
        {"layers": 3},
        {"layers": 2},
        {"layers": 1},
        {"arch": "gemma3", "layers": 8},
        {"arch": "qwen3moe", "layers": 6, "experts": 4},
    ],
    ids=str,
)
def test_a_profile_is_whole_however_the_model_is_cut(tmp_path: Path, options: dict[str, object]) -> None:
    measured = Measured(tmp_path, **options)  # type: ignore[arg-type]
    profile = measured.profile()
    speed = profile.cpu
    assert speed is not None
    assert profile.gpu is None
    assert profile.fingerprint == measured.facts.fingerprint
    assert (profile.slots, profile.context_tokens, profile.kept) == (SLOTS, CONTEXT, False)
    assert sorted({timing.rows for timing in speed.decode}) == [1, 2, 4]
    assert sorted({timing.rows for timing in speed.prefill}) == [4, 16, 32]
    assert {timing.context_tokens for timing in speed.decode} == {0, CONTEXT // 2}
    assert {timing.context_tokens for timing in speed.prefill} == {0, CONTEXT // 2}
    can_be_cut = measured.facts.layers > 1
    assert [timing.rows for timing in speed.head] == ([1, 2, 4] if can_be_cut else [])
    assert min(speed.decode[0].seconds, speed.prefill[0].seconds, speed.embedding_s) >= 0
    assert speed.layer_bytes in range(min(measured.facts.block_bytes), max(measured.facts.block_bytes) + 1)
    assert profile.took_s > 0


def test_memory_is_what_llama_takes_at_these_settings(tmp_path: Path) -> None:
    measured = Measured(tmp_path, layers=8)
    profile = measured.profile()
    whole = measured.loaded(0, 8, measured.source)
    assert profile.kv_bytes * 8 == whole.kv_bytes > 0
    assert profile.compute_bytes > 0
    assert profile.head_compute_bytes >= profile.compute_bytes
    assert profile.extra_weight_share == 0


def test_weights_that_are_laid_out_anew_are_counted(tmp_path: Path) -> None:
    measured = Measured(tmp_path, layers=6, types=("Q4_0",), **K_TYPES)
    whole = measured.loaded(0, 6, measured.source)
    share = measured.profile().extra_weight_share
    assert (share > 0.5) == (whole.copied_bytes > 0)
    assert share <= 1.1


def test_a_profile_is_measured_once_and_kept(tmp_path: Path) -> None:
    measured = Measured(tmp_path)
    first = measured.profile()
    measured.told.clear()
    again = measured.profile()
    assert again.kept
    assert again.cpu == first.cpu
    assert measured.told == []
    assert not measured.profile(fresh=True).kept
    profile_path(measured.cache, measured.bench.setting(measured.message())).write_bytes(b"damaged")
    assert not measured.profile().kept


def test_the_bar_only_grows_and_ends_full(tmp_path: Path) -> None:
    measured = Measured(tmp_path)
    measured.profile()
    phases, done, totals = zip(*measured.told, strict=True)
    assert set(phases) == {Phase.MEASURE}
    assert list(done) == sorted(done)
    assert len(set(totals)) == 1
    assert done[-1] == totals[-1]


def test_measuring_leaves_only_the_profile(tmp_path: Path) -> None:
    measured = Measured(tmp_path)
    measured.profile()
    assert sorted(path.name for path in measured.cache.iterdir()) == ["measuring.lock", "profiles"]


@pytest.mark.parametrize("steps", [0, 1, 3, 6, 30])
def test_measuring_that_is_not_wanted_any_more_ends_and_keeps_nothing(tmp_path: Path, steps: int) -> None:
    measured = Measured(tmp_path)
    asked: list[None] = []

    def wanted() -> bool:
        asked.append(None)
        return len(asked) <= steps

    assert measured.bench(measured.message(), wanted, lambda *_: None) is None
    assert not (measured.cache / "profiles").exists()
    assert list(measured.cache.glob("bench-*")) == []


def test_a_context_that_no_layer_has_room_for_is_an_error_of_measuring(tmp_path: Path) -> None:
    measured = Measured(tmp_path)
    with pytest.raises(OutOfMemoryError, match="KV cache") as caught:
        measured.bench(measured.message(256, 1 << 20), lambda: True, lambda *_: None)
    assert caught.value.phase is Phase.MEASURE


def test_a_device_that_offers_no_room_for_one_layer_is_not_brought_to_a_standstill(tmp_path: Path) -> None:
    measured = Measured(tmp_path)
    models = Models({measured.facts.fingerprint: measured.source}, measured.cache)
    full = Bench(LlamaEngine, models, BenchSettings("full", capabilities=Capabilities(offered_bytes=1)))
    with pytest.raises(OutOfMemoryError, match="0 MB are offered here") as caught:
        full(measured.message(), lambda: True, lambda *_: None)
    assert caught.value.phase is Phase.MEASURE
    assert list(measured.cache.glob("bench-*")) == []


def test_the_command_prints_the_profile_and_where_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POTLUCK_CACHE_DIR", str(tmp_path / "cache"))
    source = write_tiny(tmp_path / "whole.gguf")
    arguments = [
        "bench",
        "device",
        "--model",
        str(source),
        "--threads",
        "1",
        "--slots",
        "2",
        "--context",
        "64",
    ]
    said = CliRunner().invoke(potluck, [*arguments, "--json"])
    assert said.exit_code == 0
    found = json.loads(said.stdout)
    assert Path(found["kept"]).is_file()
    assert found["profile"]["fingerprint"] == read_facts(source).fingerprint
    table = CliRunner().invoke(potluck, arguments)
    assert table.exit_code == 0
    assert "measured before" in table.stdout
    assert table.stdout.strip().splitlines()[-1] == f"Kept in {found['kept']}."


def test_buffers_besides_the_mapped_file_are_copies_unless_a_gpu_holds_them() -> None:
    lines = [
        "load_tensors:   CPU_Mapped model buffer size =    47.24 MiB",
        "load_tensors:   CPU_REPACK model buffer size =    18.50 MiB",
        "load_tensors:          AMX model buffer size =     1.00 MiB",
        "load_tensors:        CUDA0 model buffer size =   900.00 MiB",
        "llama_kv_cache:        CPU KV buffer size =   120.00 MiB",
    ]
    assert copied_bytes(lines) == round(19.5 * (1 << 20))
