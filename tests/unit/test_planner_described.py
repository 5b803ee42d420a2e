"""Machines that are only described: what a description may say, and which speeds and memory follow from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.model.architectures import rules_for
from potluck.model.facts import read_facts
from potluck.planner import roofline
from potluck.planner.anatomy import Anatomy, ModelEntry, anatomy_of_entry, anatomy_of_file
from potluck.planner.described import ClusterEntry, parse_cluster
from potluck.planner.plan import Demand
from potluck.planner.quantization import BITS_PER_WEIGHT
from potluck.planner.roofline import Processor
from potluck.wire.errors import SettingsError
from potluck.wire.ids import StageId
from tiny_models import write_tiny

ROOT = Path(__file__).resolve().parents[2]
GB = 1e9

LLAMA_8B = {
    "name": "8B",
    "layers": 32,
    "width": 4096,
    "feed_forward": 14336,
    "heads": 32,
    "kv_heads": 8,
    "vocabulary": 128256,
    "quantization": "Q4_K_M",
}
QWEN_MOE = {
    "name": "30B A3B",
    "layers": 48,
    "width": 2048,
    "feed_forward": 768,
    "heads": 32,
    "kv_heads": 4,
    "head_width": 128,
    "vocabulary": 151936,
    "experts": 128,
    "experts_used": 8,
    "file_gb": 18.56,
}
LAPTOP = {"name": "laptop", "memory_gb": 12, "memory_gb_s": 40, "gflops": 300}


def cluster(**parts: Any) -> dict[str, Any]:
    return {"devices": [LAPTOP], **parts}


def model(**parts: Any) -> Anatomy:
    return anatomy_of_entry(msgspec.convert({**LLAMA_8B, **parts}, ModelEntry), "x.yaml")


def laptop(**parts: Any) -> dict[str, Any]:
    return {**LAPTOP, **parts}


# ---- what a description may say


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (None, ("is empty", "docs/planning.md")),
        ([1], ("the file must be keys and values",)),
        ({"device": [LAPTOP]}, ("there is no setting device", "Did you mean devices?")),
        ({"devices": LAPTOP}, ("devices must be a list",)),
        ({"devices": []}, ("devices",)),
        (
            {"devices": [{**LAPTOP, "memory_gbs": 1}]},
            ("devices[0].memory_gbs", "Did you mean devices[0].memory_gb_s?"),
        ),
        ({"devices": [laptop(gflops="fast")]}, ("devices[0].gflops",)),
        ({"devices": [laptop(gflops=0)]}, ("gflops",)),
        ({"devices": [laptop(memory_gb_s=float("nan"))]}, ("devices[0].memory_gb_s",)),
        ({"devices": [laptop(memory_gb=float("inf"))]}, ("devices[0].memory_gb",)),
        ({"devices": [laptop(name="a\nb")]}, ("devices[0].name",)),
        (
            {"devices": [laptop(gpus=[{"vram": 8, "memory_gb_s": 9, "gflops": 9}])]},
            ("devices[0].gpus[0].vram", "devices[0].gpus[0].vram_gb?"),
        ),
        ({"devices": [laptop(connection={"up": 1})]}, ("devices[0].connection.up", "up_mbit_s")),
        ({"devices": [laptop(), laptop()]}, ("two devices are named laptop", "count")),
        ({"devices": [laptop(total_memory_gb=16)]}, ("laptop needs either memory_gb or total_memory_gb",)),
        (
            {"devices": [{"name": "a", "total_memory_gb": 2, "memory_gb_s": 1, "gflops": 1}]},
            ("a: nothing is left of 2 GB after 2.5 GB",),
        ),
        (
            {
                "devices": [
                    laptop(gpus=[{"vram_gb": 13, "memory_gb_s": 9, "gflops": 9, "shares_memory": True}]),
                ]
            },
            ("laptop: GPUs that share its memory have 13 GB, more than the 12 GB",),
        ),
        (cluster(broker="laptob"), ("there is no device laptob", "Did you mean laptop?")),
        (
            cluster(network={"links": [{"devices": ["laptop", "zzz"], "mbit_s": 1, "rtt_ms": 1}]}),
            ("network.links[0].devices", "there is no device zzz", "The devices are laptop."),
        ),
        (
            cluster(model={**LLAMA_8B, "quantization": None}),
            ("none of quantization, bits_per_weight and file_gb",),
        ),
        (cluster(model={**LLAMA_8B, "quantization": "Q4_K"}), ("'Q4_K' is not in the table", "Q4_K_M")),
        (cluster(model={**LLAMA_8B, "experts": 8}), ("experts is 8 and model.experts_used is 0",)),
        (cluster(model={**LLAMA_8B, "heads": 33}), ("no multiple of model.heads 33", "head_width")),
        (cluster(model={**LLAMA_8B, "kv_heads": 5}), ("no multiple of model.kv_heads 5",)),
        (cluster(model={**LLAMA_8B, "file_gb": 0.2}), ("too small for 8.0 billion weights",)),
        (cluster(model={**LLAMA_8B, "layer": 3}), ("model.layer", "Did you mean model.layers?")),
        (cluster(serve={"user": 2}), ("serve.user", "serve.users?")),
    ],
)
def test_a_wrong_description_is_refused_with_file_key_and_what_is_right(
    raw: Any, words: tuple[str, ...]
) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_cluster(raw, "x.yaml")
    for word in ("x.yaml", *words):
        assert word in str(caught.value)


def test_empty_sections_count_as_left_out() -> None:
    read = parse_cluster(cluster(network=None, model=None, serve=None), "x.yaml")
    assert read.model is None
    assert [device.name for device in read.devices] == ["laptop"]


def test_a_count_stands_for_as_many_devices_with_numbers_behind_their_name() -> None:
    read = parse_cluster({"devices": [laptop(name="pi", count=3)], "broker": "pi-2"}, "x.yaml")
    assert [device.name for device in read.devices] == ["pi-1", "pi-2", "pi-3"]
    assert read.network.from_broker[StageId("pi-2")].one_way_s == 0.0
    assert read.network.from_broker[StageId("pi-1")].one_way_s > 0.0


def keys(kind: type[msgspec.Struct], prefix: str = "") -> list[str]:
    found = []
    for field in msgspec.structs.fields(kind):
        path = f"{prefix}{field.encode_name}"
        text = str(msgspec.inspect.type_info(field.type))
        inner = [one for one in (*type_structs(field.type),) if one.__name__ in text]
        found += keys(inner[0], f"{path}.") if inner else [path]
    return found


def type_structs(kind: Any) -> list[type[msgspec.Struct]]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    return [one for part in getattr(kind, "__args__", ()) for one in type_structs(part)]


def test_the_page_on_planning_has_every_key_and_no_other() -> None:
    page = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    listed = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert listed == keys(ClusterEntry)


# ---- devices and links


def candidate(device: dict[str, Any], **demand: int) -> Any:
    read = parse_cluster({"devices": [device]}, "x.yaml")
    return read.candidates(model(), Demand(**demand))[0]


def test_memory_is_what_potluck_may_take_or_what_the_reserve_leaves() -> None:
    assert candidate(laptop()).memory_bytes == 12 * GB
    whole = {"name": "a", "total_memory_gb": 16, "memory_gb_s": 1, "gflops": 1}
    assert candidate(whole).memory_bytes == 13.5 * GB
    assert candidate({**whole, "reserve_gb": 4}).memory_bytes == 12 * GB


def test_a_gpu_that_shares_the_memory_takes_its_part_of_it() -> None:
    gpu = {"vram_gb": 8, "memory_gb_s": 90, "gflops": 3000}
    own, shared = candidate(laptop(gpus=[gpu])), candidate(laptop(gpus=[{**gpu, "shares_memory": True}]))
    assert (own.memory_bytes, own.vram_bytes) == (12 * GB, 8 * GB)
    assert (shared.memory_bytes, shared.vram_bytes) == (4 * GB, 8 * GB)
    all_of_it = candidate(laptop(gpus=[{**gpu, "vram_gb": 12, "shares_memory": True}]))
    assert all_of_it.memory_bytes == 1, "0 would stand for no limit"


def test_several_gpus_are_one_after_another_each_with_its_share_of_the_layers() -> None:
    fast, slow = Processor(400.0, 1e6), Processor(100.0, 1e6)
    assert roofline.together([(fast, 8.0), (slow, 8.0)]).bytes_per_s == pytest.approx(160.0)
    assert roofline.together([(fast, 8.0)]) == fast


def test_a_link_is_as_slow_as_its_slower_end_and_directed() -> None:
    raw = {
        "devices": [
            laptop(name="a"),
            laptop(name="b"),
            laptop(name="phone", connection={"up_mbit_s": 80, "down_mbit_s": 160, "rtt_ms": 8}),
            laptop(name="tablet", connection={"rtt_ms": 6}),
        ],
        "network": {"mbit_s": 800, "rtt_ms": 1, "links": []},
    }
    links = parse_cluster(raw, "x.yaml").network.links
    a, b, phone, tablet = map(StageId, ("a", "b", "phone", "tablet"))
    assert (links[a, b].bytes_per_s, links[a, b].one_way_s) == (1e8, 0.0005)
    assert (links[phone, a].bytes_per_s, links[phone, a].one_way_s) == (1e7, 0.004)
    assert (links[a, phone].bytes_per_s, links[a, phone].one_way_s) == (2e7, 0.004)
    assert links[tablet, phone].one_way_s == pytest.approx(0.007)
    assert (a, a) not in links


def test_a_link_that_is_written_out_wins_both_ways_or_one_way() -> None:
    raw: dict[str, Any] = {"devices": [laptop(name="a"), laptop(name="b")]}
    link = {"devices": ["a", "b"], "mbit_s": 8, "rtt_ms": 20}
    a, b = StageId("a"), StageId("b")
    for one_way, back in ((False, 1e6), (True, 940e6 / 8)):
        links = parse_cluster(
            {**raw, "network": {"links": [{**link, "one_way": one_way}]}}, "x.yaml"
        ).network.links
        assert (links[a, b].bytes_per_s, links[b, a].bytes_per_s) == (1e6, back)


# ---- models


def test_a_described_model_has_the_weights_and_bytes_of_the_published_file() -> None:
    anatomy = model()
    assert anatomy.weights == pytest.approx(8.03e9, rel=0.001)
    assert anatomy.file_bytes == pytest.approx(4.92e9, rel=0.01)
    outside = anatomy.shape.embedding_bytes + anatomy.shape.head_bytes
    assert sum(anatomy.shape.layer_bytes) + outside == pytest.approx(anatomy.file_bytes, abs=100)
    assert model(file_gb=5.0).file_bytes == pytest.approx(5.0e9, abs=100)
    assert model(bits_per_weight=8.0).file_bytes == anatomy.weights


def test_a_tied_head_is_counted_once_in_the_file_and_still_read() -> None:
    tied, untied = model(tied_head=True), model()
    assert untied.weights - tied.weights == 4096 * 128256
    assert tied.shape.head_bytes == tied.shape.embedding_bytes > 0


def test_of_experts_only_those_are_computed_that_a_token_passes() -> None:
    moe = model(**QWEN_MOE, quantization=None)
    assert moe.weights == pytest.approx(30.5e9, rel=0.01)
    assert moe.layer_work * 48 + moe.shape.head_work == pytest.approx(3.0e9, rel=0.05)


def test_bytes_read_of_experts_grow_with_the_rows_up_to_all_of_them() -> None:
    moe = model(**QWEN_MOE, quantization=None)
    one, few, many = (roofline.bytes_read(moe, rows) for rows in (1, 8, 4096))
    assert one / moe.layer_bytes == pytest.approx(1 - moe.expert_share * (1 - 8 / 128))
    assert 4 * one < few < 8 * one
    assert many == pytest.approx(moe.layer_bytes)
    assert roofline.bytes_read(model(), 1) == model().layer_bytes


@pytest.mark.parametrize(("arch", "experts"), [("llama", 0), ("llama", 4), ("qwen2moe", 4)])
def test_a_file_and_its_description_agree(tmp_path: Path, arch: str, experts: int) -> None:
    path = write_tiny(
        tmp_path / "m.gguf", arch, width=64, heads=4, kv_heads=2, feed_forward=128, experts=experts
    )
    facts = read_facts(path)
    from_file = anatomy_of_file(facts, rules_for(facts), "tiny")
    entry = ModelEntry(
        name="tiny",
        layers=4,
        width=64,
        feed_forward=128,
        heads=4,
        kv_heads=2,
        vocabulary=facts.vocab,
        bits_per_weight=32.0,
        experts=experts,
        experts_used=2 if experts else 0,
        shared_feed_forward=128 if arch == "qwen2moe" else 0,
    )
    described = anatomy_of_entry(entry, "x.yaml")
    assert (from_file.query_values, from_file.kv_values) == (described.query_values, described.kv_values)
    assert from_file.feed_forward == described.feed_forward
    assert from_file.experts == experts
    for ours, theirs in (
        (described.weights, from_file.weights),
        (described.layer_bytes, from_file.layer_bytes),
        (described.layer_work, from_file.layer_work),
    ):
        assert ours == pytest.approx(theirs, rel=0.02)  # norms and biases are not described
    assert described.expert_share == pytest.approx(from_file.expert_share, abs=0.02)
    assert described.shape.cuts == from_file.shape.cuts


# ---- seconds and bytes


def test_one_row_takes_as_long_as_reading_the_weights() -> None:
    anatomy = model()
    cpu = Processor(40e9, 300e9)
    assert roofline.decode_s(cpu, anatomy, 1, 0) == pytest.approx(anatomy.layer_bytes / 40e9)
    whole = 32 * roofline.decode_s(cpu, anatomy, 1, 0) + anatomy.shape.head_bytes / 40e9
    assert 1 / whole == pytest.approx(8.7, rel=0.02), "tokens per second of an 8B Q4_K_M at 40 GB/s"


def test_many_rows_take_as_long_as_computing_them() -> None:
    cpu = Processor(40e9, 300e9)
    anatomy = model()
    assert roofline.prefill_s(cpu, anatomy, 512, 0) >= 2 * anatomy.layer_work * 512 / 300e9
    assert roofline.decode_s(cpu, anatomy, 32, 0) == pytest.approx(2 * anatomy.layer_work * 32 / 300e9)


@given(
    rows=st.integers(1, 512),
    held=st.integers(0, 8192),
    more=st.integers(1, 512),
    bandwidth=st.floats(1e9, 1e12),
    flops=st.floats(1e9, 1e14),
)
def test_more_rows_and_more_context_never_take_less_and_a_faster_processor_never_more(
    rows: int, held: int, more: int, bandwidth: float, flops: float
) -> None:
    anatomy, cpu = model(), Processor(bandwidth, flops)
    for seconds in (roofline.decode_s, roofline.prefill_s):
        base = seconds(cpu, anatomy, rows, held)
        assert base <= seconds(cpu, anatomy, rows + more, held)
        assert base <= seconds(cpu, anatomy, rows, held + more)
        assert seconds(Processor(2 * bandwidth, flops), anatomy, rows, held) <= base
        assert seconds(Processor(bandwidth, 2 * flops), anatomy, rows, held) <= base


# (rows of a call, slots, context, feed_forward), and what llama.cpp's log said for 2 layers of width 576, 9 heads of
# which 3 are for keys and values, vocabulary 49152: bytes of the KV cache per layer, of the buffers of a stage in the
# middle and of the last one. SmolLM2 135M, on a CPU.
REPORTED = [
    (16, 1, 512, 393_216, 461_373, 3_418_357),
    (64, 1, 512, 393_216, 1_835_008, 13_075_742),
    (64, 8, 2048, 12_582_912, 2_034_237, 15_005_123),
    (256, 8, 2048, 12_582_912, 8_136_950, 15_634_268),
    (512, 8, 2048, 12_582_912, 16_263_414, 17_836_278),
    (64, 8, 8192, 50_331_648, 2_820_669, 14_449_377),
    (64, 64, 2048, 100_663_296, 2_034_237, 26_015_171),
]


@pytest.mark.parametrize(("chunk", "slots", "context", "kv", "middle", "last"), REPORTED)
def test_memory_is_within_a_few_percent_of_what_llama_cpp_reports(
    chunk: int, slots: int, context: int, kv: int, middle: int, last: int
) -> None:
    smol = model(width=576, feed_forward=1536, heads=9, kv_heads=3, vocabulary=49152, tied_head=True)
    demand = Demand(slots=slots, context_tokens=context, chunk_tokens=chunk)
    assert roofline.kv_bytes(smol, demand) == kv
    assert roofline.compute_bytes(smol, demand) == pytest.approx(middle, rel=0.01)
    assert roofline.head_compute_bytes(smol, demand) == pytest.approx(last, rel=0.06)


def test_a_described_device_has_a_profile_for_its_gpu_only_if_it_has_one() -> None:
    gpu = {"vram_gb": 8, "memory_gb_s": 200, "gflops": 9000}
    plain, with_gpu = candidate(laptop()), candidate(laptop(gpus=[gpu], allow_cpu_fallback=False))
    assert plain.profile.gpu is None
    assert plain.cpu_fallback
    assert with_gpu.profile.gpu.decode[0].seconds == pytest.approx(plain.profile.cpu.decode[0].seconds / 5)
    assert not with_gpu.cpu_fallback


def test_a_profile_is_one_that_could_have_been_sent() -> None:
    profile = candidate(laptop(), slots=4, context_tokens=4096).profile
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(profile), type=type(profile)) == profile
    assert (profile.slots, profile.context_tokens) == (4, 4096)


def test_quantizations_are_in_order() -> None:
    assert list(BITS_PER_WEIGHT.values()) == sorted(BITS_PER_WEIGHT.values(), reverse=True)
