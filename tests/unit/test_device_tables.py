"""What `potluck ps` prints of machines and memory, at two widths."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from potluck.tools.device_tables import bar, machine_notes, machine_table, memory_view
from potluck.wire.measures import Capabilities, Gpu
from potluck.wire.messages import StageView, StateView

GB = 1_000_000_000
LAPTOP = StageView(
    "gaming-laptop-in-the-attic/1", "gaming-laptop-in-the-attic", "ready", 0, 0, 0, 20,
    weights_bytes=3 * GB, kv_bytes=GB, compute_bytes=200_000_000, version="0.1.0",
    capabilities=Capabilities(
        cores=8, threads=7, cpu="AMD Ryzen 7 7840HS", features=("AVX", "AVX2", "AVX512"), memory_bytes=32 * GB,
        free_memory_bytes=20 * GB, offered_bytes=18 * GB, gpus=(Gpu("RTX 4060", "CUDA", 8 * GB, 7 * GB),),
        offered_vram_bytes=6 * GB, disk_read_bytes_s=2.1e9, power="mains", system="Linux 6.8", llama="0.3.36",
    ),
)  # fmt: skip
BOX = StageView(
    "box/2", "box", "spare", version="0.1.0",
    capabilities=Capabilities(
        cores=4, threads=2, cpu="Raspberry Pi 5", cpu_quota=2.0, memory_bytes=2 * GB, free_memory_bytes=GB,
        container_memory_bytes=2 * GB, offered_bytes=900_000_000, power="battery",
    ),
)  # fmt: skip
VIEW = StateView(1, "toy", True, (LAPTOP, BOX))


def printed(width: int, *parts: object) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(*parts, sep="\n")
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_wider_than_the_terminal_and_no_name_is_cut(width: int):
    for text in (
        printed(width, machine_table(VIEW)),
        printed(width, *machine_notes(VIEW)),
        printed(width, *memory_view(VIEW)),
    ):
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
    assert "gaming-laptop-in-the-attic" in printed(120, *memory_view(VIEW))


def test_a_machine_is_described_by_what_matters_for_a_plan():
    text = printed(160, machine_table(VIEW))
    for words in (
        "AMD Ryzen 7 7840HS", "7 of 8", "20.0 GB of 32.0 GB", "RTX 4060 (CUDA, 8.0 GB)", "2100 MB/s", "mains",
        "2 of 4, 2 allowed", "1.0 GB of 2.0 GB (container)", "battery",
    ):  # fmt: skip
        assert words in text, words
    notes = printed(160, *machine_notes(VIEW))
    assert "Linux 6.8; Potluck 0.1.0, llama-cpp-python 0.3.36; AVX512, AVX2, AVX" in notes


def test_memory_is_added_up_over_devices_and_those_that_hold_nothing_say_so():
    text = printed(120, *memory_view(VIEW))
    assert "4.2 GB of 24.0 GB" in text
    assert "0 B of 900.0 MB" in text
    assert "In all 4.2 GB of 24.9 GB that 2 devices offer (17 %)." in text
    assert "box runs in a container of 2.0 GB." in text


def test_a_device_of_which_nothing_is_known_has_dashes_and_no_bar():
    view = StateView(1, "toy", False, (StageView("a/1", "a", "spare"),))
    assert "-" in printed(80, machine_table(view))
    assert "#" not in printed(80, *memory_view(view))


def test_a_bar_is_never_longer_than_its_room():
    assert bar(5, 10) == "#" * 10 + "." * 10
    assert bar(99, 10) == "#" * 20
    assert bar(1, 0) == ""
