"""Cut anywhere, a model computes what it computes whole; and verify says so when it does not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from potluck.model.architectures import rules_for
from potluck.model.facts import ModelFacts, read_facts
from potluck.model.verified import is_verified
from potluck.stage.engines.llama import prepare_process
from potluck.tools import verify
from potluck.tools.verify import run_verify
from potluck.wire.errors import ForbiddenCutError, ModelError, PlanError, UsageError
from tiny_models import ARCHITECTURES, write_tiny

# As in test_llama_engine: the choice is made once for a process, so every test here makes the same.
prepare_process(exact=True)

LAYERS = 12

AWKWARD = {
    "one-layer stages, and a cut inside a window group": [1, 2, 9],
    "neighbouring cuts, and a last stage of one layer": [5, 6, 7, 11],
}


@pytest.mark.parametrize("cuts", AWKWARD.values(), ids=AWKWARD)
@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch != "smollm3"])
def test_every_architecture_cut_at_awkward_places_gives_the_same_logits_and_text(
    tmp_path: Path, arch: str, cuts: list[int]
) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", arch, layers=LAYERS, seed=len(arch), window=16)
    report = run_verify(model, cuts=cuts, cache_dir=tmp_path / "cache")
    assert report.passed, report.reason
    assert (report.max_logit_difference, report.top1_agreement, report.tokens_equal) == (0.0, 1.0, True)
    assert report.bounds == (0, *cuts, LAYERS)
    assert report.longest_prompt > 2 * 16
    assert report.positions_compared > 400
    assert report.logit_deviation > 0.1


def test_smollm3_is_cut_at_multiples_of_four_and_nowhere_else(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", "smollm3", layers=LAYERS)
    assert run_verify(model, 3, cache_dir=tmp_path).cuts == (4, 8)
    assert run_verify(model, cuts=[4, 8], cache_dir=tmp_path).max_logit_difference == 0.0
    with pytest.raises(ForbiddenCutError):
        run_verify(model, cuts=[2], cache_dir=tmp_path)
    with pytest.raises(PlanError):
        run_verify(model, 4, cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        ("gemma3", {"pattern": 3}),
        (
            "gemma3",
            {"pattern": [True, False, False, True, True, True, False, True, False, True, True, False]},
        ),
        ("gemma2", {"tied": True}),
        ("llama", {"experts": 4, "rope_factors": True}),
        ("llama", {"tied": True, "biases": True, "per_layer_arrays": True}),
        (
            "qwen2",
            {"tokenizer": "gpt2", "types": ("Q8_0", "F16"), "head_type": "Q8_0", "embedding_type": "F16"},
        ),
        ("qwen3", {"width": 256, "feed_forward": 256, "types": ("Q4_K", "Q6_K"), "embedding_type": "Q6_K"}),
    ],
    ids=["period 3", "listed windows", "tied", "mixtral", "biases", "Q8_0 and F16", "K-quants"],
)
def test_variants_of_the_architectures_are_the_same_too(
    tmp_path: Path, arch: str, settings: dict[str, Any]
) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", arch, layers=LAYERS, window=12, **settings)
    report = run_verify(model, cuts=[1, 4, 11], cache_dir=tmp_path / "cache")
    assert report.passed, report.reason
    assert report.max_logit_difference == 0.0


@pytest.mark.parametrize("threads", [1, 2])
def test_an_exact_run_is_the_same_as_well(tmp_path: Path, threads: int) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", "llama", layers=LAYERS, types=("F16",))
    report = run_verify(model, 4, cache_dir=tmp_path / "cache", exact=True, threads=threads)
    assert report.passed, report.reason
    assert (report.exact, report.max_logit_difference) == (True, 0.0)


@pytest.mark.parametrize("arch", ["gemma", "gemma2"])
def test_a_width_whose_root_is_no_power_of_two_is_the_same_up_to_rounding(tmp_path: Path, arch: str) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", arch, layers=LAYERS, width=96)
    report = run_verify(model, cuts=[1, 2, 9], cache_dir=tmp_path / "cache")
    assert report.passed, report.reason
    assert report.max_logit_difference <= report.allowed_difference < 0.1


def test_slices_that_compute_something_else_do_not_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", "smollm3", layers=LAYERS)

    def careless(facts: ModelFacts, *, allow_unlisted: bool = False) -> Any:
        return replace(rules_for(facts, allow_unlisted=allow_unlisted), cut_every=1)

    monkeypatch.setattr(verify, "rules_for", careless)
    monkeypatch.setattr("potluck.model.slices.rules_for", careless)
    report = run_verify(model, cuts=[3], cache_dir=tmp_path / "cache")
    assert not report.passed
    assert report.max_logit_difference > 0.1
    assert "differ" in report.reason
    assert "FAILED" in report.to_text()


def test_slices_with_a_wrong_scale_do_not_pass_even_where_rounding_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", "gemma", layers=LAYERS, width=96)

    def careless(facts: ModelFacts, *, allow_unlisted: bool = False) -> Any:
        return replace(rules_for(facts, allow_unlisted=allow_unlisted), handover_divisor=9.0)

    monkeypatch.setattr("potluck.stage.engines.llama.rules_for", careless)
    assert not run_verify(model, cuts=[3], cache_dir=tmp_path / "cache").passed


def test_an_f16_hand_over_passes_within_its_own_limits(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", "llama", layers=LAYERS)
    report = run_verify(model, cuts=[4, 8], activation="f16", cache_dir=tmp_path / "cache")
    assert report.passed, report.reason
    assert 0.0 < report.max_logit_difference < report.allowed_difference
    assert report.activation == "f16"


def test_a_pass_of_an_unlisted_architecture_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_models, "ARCHITECTURES", (*ARCHITECTURES, "internlm2"))
    model = write_tiny(tmp_path / "tiny.gguf", "internlm2", layers=LAYERS)
    facts = read_facts(model)
    assert not is_verified(tmp_path / "cache", facts)
    half = run_verify(model, 2, activation="f16", cache_dir=tmp_path / "cache")
    assert (half.passed, half.marked_verified) == (True, False)
    report = run_verify(model, 2, cache_dir=tmp_path / "cache")
    assert (report.passed, report.marked_verified, report.listed) == (True, True, False)
    assert is_verified(tmp_path / "cache", facts)


def test_the_report_is_json_with_every_figure_and_text_for_a_person(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", "llama", layers=LAYERS)
    report = run_verify(model, cuts=[5], tokens=8, cache_dir=tmp_path / "cache")
    found = json.loads(report.to_json())
    assert found["model"] == str(model)
    assert found["architecture"] == "llama"
    assert (found["stages"], found["cuts"], found["bounds"]) == (2, [5], [0, 5, 12])
    assert (found["activation"], found["max_logit_difference"]) == ("f32", 0.0)
    assert (found["passed"], found["tokens_equal"]) == (True, True)
    assert found["tokens_compared"] == 8 * found["prompts"]
    assert "[0, 5), [5, 12)" in report.to_text()
    assert "PASSED" in report.to_text()


def test_one_stage_is_the_model_itself(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", "llama", layers=LAYERS)
    report = run_verify(model, 1, tokens=4, cache_dir=tmp_path / "cache")
    assert (report.passed, report.bounds) == (True, (0, LAYERS))


def test_what_can_not_be_run_is_refused_with_a_reason(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", "llama", layers=LAYERS)
    with pytest.raises(UsageError, match="int3"):
        run_verify(model, 2, activation="int3", cache_dir=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="0 stages"):
        run_verify(model, 0, cache_dir=tmp_path)
    with pytest.raises(UsageError, match="new tokens"):
        run_verify(model, 2, tokens=100_000, cache_dir=tmp_path)
    with pytest.raises(ForbiddenCutError):
        run_verify(model, cuts=[40], cache_dir=tmp_path)
    with pytest.raises(ModelError):
        run_verify(tmp_path / "missing.gguf", 2, cache_dir=tmp_path)


@pytest.mark.real_model
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_a_real_model_in_stages_gives_the_same_logits_and_text(
    tmp_path: Path, smollm2_path: Path, stages: int
) -> None:
    report = run_verify(smollm2_path, stages, cache_dir=tmp_path)
    assert report.passed, report.reason
    assert (report.stages, report.max_logit_difference, report.tokens_equal) == (stages, 0.0, True)
    assert report.tokens_compared >= 32 * 5


@pytest.mark.real_model
def test_a_real_model_passes_with_an_f16_hand_over(tmp_path: Path, smollm2_path: Path) -> None:
    report = run_verify(smollm2_path, 3, activation="f16", cache_dir=tmp_path)
    assert report.passed, report.reason
    assert report.max_logit_difference > 0.0
