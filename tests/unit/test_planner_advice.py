"""What is said of a model that does not fit: how much is missing, and only remedies that were tried."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from potluck.planner.advice import need, remedies, rescaled
from potluck.planner.anatomy import ModelEntry, anatomy_of_entry
from potluck.planner.cost import offered
from potluck.planner.described import parse_cluster
from potluck.planner.plan import Demand, ModelShape

GB = 1e9
QWEN_72B = anatomy_of_entry(
    ModelEntry(
        name="72B",
        layers=80,
        width=8192,
        feed_forward=29568,
        heads=64,
        kv_heads=8,
        vocabulary=152064,
        quantization="Q4_K_M",
        file_gb=47.42,
    ),
    "x.yaml",
)
DEMAND = Demand(slots=8, context_tokens=2048)


def weights_and_cache(model: ModelShape, demand: Demand) -> float:
    cache = 4096 * demand.slots * demand.context_tokens * model.layers
    return sum(model.layer_bytes) + model.head_bytes + cache


def advise(gb: float, demand: Demand = DEMAND, quantization: str = "Q4_K_M") -> list[Any]:
    def fits(model: ModelShape, wanted: Demand) -> bool:
        return weights_and_cache(model, wanted) <= gb * GB

    found = remedies(QWEN_72B.shape, demand, QWEN_72B.bits_per_weight, quantization, fits)
    assert all(fits(one.model, one.demand) for one in found)
    return list(found)


def test_the_need_is_the_sum_of_its_parts_and_what_is_missing_the_rest() -> None:
    devices = [{"name": f"d{n}", "memory_gb": n, "memory_gb_s": 20, "gflops": 100} for n in (6, 9, 13)]
    found = need(
        QWEN_72B.shape, parse_cluster({"devices": devices}, "x").candidates(QWEN_72B, DEMAND), DEMAND
    )
    assert found.offered_bytes == 28 * GB
    assert found.weights_bytes + found.kv_bytes == weights_and_cache(QWEN_72B.shape, DEMAND)
    assert 0 < found.compute_bytes < GB
    assert found.missing_bytes == found.bytes - found.offered_bytes
    enough = replace(found, offered_bytes=100 * 10**9)
    assert enough.missing_bytes == 0


def test_memory_of_a_cpu_that_may_not_compute_is_no_offer() -> None:
    gpus = [{"vram_gb": 8, "memory_gb_s": 200, "gflops": 9000}]
    for allowed, gb in ((True, 20), (False, 8)):
        device = {"name": "a", "memory_gb": 12, "memory_gb_s": 20, "gflops": 100, "gpus": gpus}
        cluster = parse_cluster({"devices": [{**device, "allow_cpu_fallback": allowed}]}, "x")
        assert offered(cluster.candidates(QWEN_72B, DEMAND)[0]) == gb * GB


def test_fewer_slots_come_first_and_are_as_many_as_fit() -> None:
    first, *_ = advise(49.5)
    assert "--slots 4 instead of 8" in first.text
    assert (first.demand.slots, first.model, first.quantization) == (4, QWEN_72B.shape, "")


def test_slots_are_never_fewer_than_users() -> None:
    found = advise(48.0, replace(DEMAND, users=4))
    assert all(one.demand.slots >= 4 for one in found)


def test_a_shorter_context_keeps_a_prompt_that_fits_it() -> None:
    found = advise(49.5, replace(DEMAND, prompt_tokens=2048, held_tokens=1024))
    (shorter,) = [one for one in found if one.text.startswith("--context")]
    assert shorter.demand.context_tokens == 1024
    assert shorter.demand.prompt_tokens == 1024


def test_the_quantization_is_the_largest_that_fits_scaled_to_this_models_files() -> None:
    found = advise(35.5, replace(DEMAND, slots=1))
    assert [one.quantization for one in found] == ["Q3_K_S"]
    # 72.7e9 weights at 3.64 bits are 33.1 GB; this model's files are 6.7 % larger than usual.
    assert "Q3_K_S (3.9 bits per weight" in found[0].text
    assert 33.5 * GB < weights_and_cache(found[0].model, found[0].demand) <= 35.5 * GB


def test_where_the_cache_is_in_the_way_a_better_quantization_is_offered_with_fewer_slots() -> None:
    found = advise(35.5)
    assert [(one.quantization, one.demand.slots) for one in found] == [("Q2_K", 8), ("Q3_K_S", 1)]


def test_a_file_of_unknown_quantization_is_compared_by_its_bits() -> None:
    (found,) = advise(35.5, replace(DEMAND, slots=1), quantization="")
    assert found.quantization == "IQ3_M"


def test_where_nothing_helps_there_is_no_advice() -> None:
    assert advise(10.0) == []


def test_a_rescaled_model_differs_in_nothing_but_its_bytes() -> None:
    half = rescaled(QWEN_72B.shape, 0.5)
    assert half.layer_bytes[7] == round(QWEN_72B.shape.layer_bytes[7] / 2)
    assert (
        replace(
            half,
            layer_bytes=QWEN_72B.shape.layer_bytes,
            head_bytes=QWEN_72B.shape.head_bytes,
            embedding_bytes=QWEN_72B.shape.embedding_bytes,
        )
        == QWEN_72B.shape
    )
