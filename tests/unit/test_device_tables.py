"""What `potluck ps` prints of stages, machines and memory, at two widths."""

from __future__ import annotations

import io

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from potluck.planner.words import size_of
from potluck.tools.device_tables import bar, machine_notes, machine_table, memory_view
from potluck.tools.plan_view import Sentences
from potluck.tools.tables import device_notes, device_table, slowest_of, stage_table
from potluck.wire.measures import Capabilities, Gpu
from potluck.wire.messages import HopSums, StageCounters, StageView, StateView

GB = 1_000_000_000
LAPTOP = StageView(
    "gaming-laptop-in-the-attic/1", "gaming-laptop-in-the-attic", "ready", 0, 0, 0, 20,
    counters=StageCounters(bytes_out=123_456_789), hops=HopSums(120, 1.8, 2.0, 10, 1.1, 1.2, 100),
    weights_bytes=3 * GB, kv_bytes=GB, compute_bytes=200_000_000, version="0.1.0",
    endpoint="tcp://192.168.100.200:54321",
    capabilities=Capabilities(
        cores=8, threads=7, cpu="AMD Ryzen 7 7840HS", features=("AVX", "AVX2", "AVX512"), memory_bytes=32 * GB,
        free_memory_bytes=20 * GB, offered_bytes=18 * GB, gpus=(Gpu("RTX 4060", "CUDA", 8 * GB, 7 * GB),),
        offered_vram_bytes=6 * GB, disk_read_bytes_s=2.1e9, power="mains", system="Linux 6.8", llama="0.3.36",
    ),
)  # fmt: skip
OFFICE = StageView(
    "office/2", "office", "ready", 0, 1, 20, 30,
    counters=StageCounters(bytes_out=400), hops=HopSums(120, 0.8, 2.4, 10, 0.5, 0.52, 100),
    weights_bytes=GB, kv_bytes=900_000, compute_bytes=100_000_000, version="0.1.0", endpoint="tcp://10.0.0.9:4000",
    capabilities=Capabilities(cores=4, threads=3, memory_bytes=8 * GB, free_memory_bytes=2 * GB, offered_bytes=2 * GB),
)  # fmt: skip
BOX = StageView(
    "box/3", "box", "loading", detail="load 35 %", version="0.1.0", endpoint="tcp://10.0.0.1:4321",
    capabilities=Capabilities(
        cores=4, threads=2, cpu="Raspberry Pi 5", cpu_quota=2.0, memory_bytes=2 * GB, free_memory_bytes=GB,
        container_memory_bytes=2 * GB, offered_bytes=900_000_000, power="battery",
    ),
)  # fmt: skip
VIEW = StateView(1, "toy", True, (LAPTOP, OFFICE, BOX))


def printed(width: int, *parts: object) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(*parts, sep="\n")
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def everything(width: int, view: StateView) -> list[str]:
    return [
        printed(width, device_table(view)),
        printed(width, Sentences(device_notes(view))),
        printed(width, stage_table(view)),
        printed(width, machine_table(view)),
        printed(width, *machine_notes(view)),
        printed(width, *memory_view(view)),
    ]


# ---- the whole text


@pytest.mark.parametrize("width", [80, 120])
def test_the_stages_of_a_cluster_stand_in_one_table(width: int):
    assert printed(width, device_table(VIEW), Sentences(device_notes(VIEW))) == (
        "                                                    last\n"
        "device                      state    chain  layers  beat   address\n"
        "gaming-laptop-in-the-attic  ready    0.0    0-19    0.0 s  192.168.100.200:54321\n"
        "office                      ready    0.1    20-29   0.0 s  10.0.0.9:4000\n"
        "box                         loading  -      -       0.0 s  10.0.0.1:4321\n"
        "box: load 35 %"
    )


@pytest.mark.parametrize("width", [80, 120])
def test_what_stages_took_stands_beside_what_was_predicted_and_the_slowest_is_marked(width: int):
    assert printed(width, stage_table(VIEW)) == (
        "                                       micro-  decode  predicted\n"
        "stage                         layers  batches      ms         ms  busy      sent\n"
        "gaming-laptop-in-the-attic *    0-19      120    12.0       11.0  47 %  123.5 MB\n"
        "office                         20-29      120     5.2        5.0  25 %     400 B\n"
        "box                                -        0       -          -     -       0 B\n"
        "* The slowest of its chain: the others wait for it."
    )


@pytest.mark.parametrize("width", [80, 120])
def test_machines_have_a_line_of_figures_and_lines_about_what_they_are(width: int):
    assert printed(width, machine_table(VIEW)) == (
        "device                      threads  memory free      disk      power\n"
        "gaming-laptop-in-the-attic  7 of 8   20.0 of 32.0 GB  2.1 GB/s  mains\n"
        "office                      3 of 4   2.0 of 8.0 GB    -         -\n"
        "box                         2 of 4   1.0 of 2.0 GB    -         battery"
    )
    assert printed(width, *machine_notes(VIEW)) == (
        "gaming-laptop-in-the-attic\n"
        "  AMD Ryzen 7 7840HS with AVX512, AVX2, AVX\n"
        "  GPU: RTX 4060 (CUDA), 7.0 of 8.0 GB free\n"
        "  Linux 6.8, Potluck 0.1.0, llama-cpp-python 0.3.36\n"
        "office\n"
        "  Potluck 0.1.0\n"
        "box\n"
        "  Raspberry Pi 5\n"
        "  In a container of 2.0 GB and 2 cores\n"
        "  Potluck 0.1.0"
    )


@pytest.mark.parametrize(("width", "gap"), [(80, "\n"), (120, " ")])
def test_the_memory_of_the_cluster_is_seen_at_one_glance(width: int, gap: str):
    assert printed(width, *memory_view(VIEW)) == (
        "device                      weights  KV cache   buffers  used of offered\n"
        "gaming-laptop-in-the-attic   3.0 GB    1.0 GB  200.0 MB   4.2 of 24.0 GB\n"
        "WWKB................                                                18 %\n"
        "office                       1.0 GB  900.0 kB  100.0 MB    1.1 of 2.0 GB\n"
        "WWWWWWWWWWKB........                                                55 %\n"
        "box                               -         -         -  0 B of 900.0 MB\n"
        "....................                                                 0 %\n"
        "all 3 devices                4.0 GB    1.0 GB  300.0 MB   5.3 of 26.9 GB\n"
        "WWWKB...............                                                20 %\n"
        "W weights, K KV cache, B compute buffers, . offered and free\n"
        f"gaming-laptop-in-the-attic: 18.0 GB offered in memory and 6.0 GB on GPUs, 32.0{gap}GB in the machine.\n"
        "office: 8.0 GB in the machine.\n"
        "box: limited to 2.0 GB by its container."
    )


# ---- widths


@given(
    st.text(st.characters(codec="utf-8", categories=["L", "N"]), min_size=1, max_size=60),
    st.integers(80, 200),
)
def test_whatever_a_device_is_called_nothing_is_wider_than_the_terminal_and_no_name_is_cut(
    name: str, width: int
):
    stages = tuple(msgspec.structs.replace(stage, device=f"{name}{i}") for i, stage in enumerate(VIEW.stages))
    for text in everything(width, msgspec.structs.replace(VIEW, stages=stages)):
        assert "…" not in text
    for table in (device_table, machine_table, stage_table):
        text = printed(width, table(msgspec.structs.replace(VIEW, stages=stages)))
        left = "".join(text.split())
        assert all(left.count(letter) >= 3 * name.count(letter) for letter in name)


# ---- single rules


def test_without_a_prediction_a_stage_s_mean_is_of_all_micro_batches():
    stages = [
        msgspec.structs.replace(stage, hops=HopSums(120, stage.hops.compute_s, stage.hops.wait_s))
        for stage in (LAPTOP, OFFICE)
    ]
    text = printed(80, stage_table(StateView(1, "toy", True, tuple(stages))))
    assert "predicted" not in text
    assert "gaming-laptop-in-the-attic *    0-19      120     15.0  47 %  123.5 MB" in text


def test_every_chain_of_several_stages_has_a_slowest_one_and_a_chain_of_one_has_none():
    alone = msgspec.structs.replace(LAPTOP, stage="alone", chain=1)
    assert slowest_of(StateView(1, "toy", True, (LAPTOP, OFFICE, BOX, alone))) == {LAPTOP.stage}
    assert slowest_of(StateView(1, "toy", True, (LAPTOP, BOX))) == frozenset()


def test_prompts_do_not_make_a_stage_the_slowest_where_tokens_are_counted_apart():
    busy_with_prompts = msgspec.structs.replace(OFFICE, hops=HopSums(120, 9.0, 2.0, 10, 0.5, 0.52, 100))
    assert slowest_of(StateView(1, "toy", True, (LAPTOP, busy_with_prompts))) == {LAPTOP.stage}


def test_a_device_that_has_no_gpu_to_spare_says_that_its_processor_will_not_help():
    can = msgspec.structs.replace(LAPTOP.capabilities, allow_cpu_fallback=False)
    view = StateView(1, "toy", True, (msgspec.structs.replace(LAPTOP, capabilities=can),))
    assert "allow_cpu_fallback is false" in printed(120, *machine_notes(view))


def test_a_device_of_which_nothing_is_known_has_dashes_and_no_bar():
    view = StateView(1, "toy", False, (StageView("a/1", "a", "spare"),))
    assert printed(80, machine_table(view)).splitlines()[1] == "a       1 of 1   -            -     -"
    assert (
        printed(80, *memory_view(view)).splitlines()[1]
        == "a             -         -        -              0 B"
    )


def test_a_device_that_has_nothing_to_spare_says_that_and_no_share_of_it():
    view = StateView(
        1, "toy", False, (StageView("a/1", "a", "spare", capabilities=Capabilities(offered_bytes=1)),)
    )
    assert printed(80, *memory_view(view)).splitlines()[1].endswith("  0 B of none")


def test_what_is_offered_in_all_is_not_said_where_one_device_does_not_say():
    view = StateView(1, "toy", False, (LAPTOP, StageView("a/1", "a", "spare")))
    total = [
        line for line in printed(80, *memory_view(view)).splitlines() if line.startswith("all 2 devices")
    ]
    assert total[0].endswith(" 4.2 GB")


def test_a_share_has_a_unit_for_both_where_they_differ():
    assert size_of(4.2e9, 24e9) == "4.2 of 24.0 GB"
    assert size_of(8.9e6, 24e9) == "8.9 MB of 24.0 GB"
    assert size_of(0, 500) == "0 of 500 B"


def test_a_bar_shows_what_is_there_and_is_never_longer_than_its_room():
    assert bar((5, 0, 0), 10) == "W" * 10 + "." * 10
    assert bar((50, 30, 20), 200) == "WWWWWKKKBB.........."
    assert bar((1, 1, 1), 1_000_000) == "WKB" + "." * 17
    assert bar((99, 1, 1), 10) == "W" * 20
    assert bar((1, 1, 1), 0) == ""


@given(st.tuples(*[st.integers(0, 1 << 40)] * 3), st.integers(1, 1 << 40))
def test_a_bar_is_always_as_long_as_its_room(held: tuple[int, int, int], offered: int):
    assert len(bar(held, offered)) == 20
    assert bar(held, offered).lstrip("W").lstrip("K").lstrip("B").strip(".") == ""
