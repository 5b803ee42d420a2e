"""What devices have and hold, as `potluck ps` prints it. Pure: a snapshot in, something rich can print out.

Everything fits 80 columns; a device's name is folded, never cut.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from potluck.tools.tables import bytes_text, layers_text
from potluck.wire.messages import StageView, StateView

BAR_CHARS = 20


def machine_table(view: StateView) -> Table:
    """Each device's hardware: what it computes with, what it runs on."""
    table = _table(("device", "processor", "cores", "memory free", "GPU", "disk", "power"))
    for stage in view.stages:
        can = stage.capabilities
        quota = f", {can.cpu_quota:g} allowed" if can.cpu_quota else ""
        table.add_row(
            Text(stage.device),
            Text(can.cpu or "-"),
            f"{can.threads} of {can.cores}{quota}",
            _free_text(stage),
            Text(_gpu_text(stage)),
            f"{can.disk_read_bytes_s / 1e6:.0f} MB/s" if can.disk_read_bytes_s else "-",
            can.power or "-",
        )
    return table


def machine_notes(view: StateView) -> Iterator[Text]:
    """One line per device: system, versions, instruction sets."""
    for stage in view.stages:
        can = stage.capabilities
        parts = [part for part in (can.system, _version_text(stage), _features_text(can.features)) if part]
        if parts:
            yield Text(f"{stage.device}: {'; '.join(parts)}")


def memory_view(view: StateView) -> Iterator[RenderableType]:
    """All memory of the cluster at one glance: what layers take of what each device offers."""
    table = _table(("device", "layers", "weights", "KV cache", "buffers", "used of offered", ""))
    used_sum = offered_sum = 0
    for stage in view.stages:
        used, offered = _used(stage), _offered(stage)
        used_sum, offered_sum = used_sum + used, offered_sum + offered
        holds = stage.first is not None
        table.add_row(
            Text(stage.device),
            layers_text(stage.first, stage.end),
            *(
                bytes_text(count) if holds else "-"
                for count in (stage.weights_bytes, stage.kv_bytes, stage.compute_bytes)
            ),
            f"{bytes_text(used)} of {bytes_text(offered)}" if offered else bytes_text(used),
            bar(used, offered),
        )
    yield table
    if offered_sum:
        yield Text(
            f"In all {bytes_text(used_sum)} of {bytes_text(offered_sum)} that {len(view.stages)} devices offer "
            f"({100 * used_sum / offered_sum:.0f} %)."
        )
    for stage in view.stages:
        limit = stage.capabilities.container_memory_bytes
        if limit:
            yield Text(f"{stage.device} runs in a container of {bytes_text(limit)}.")


def bar(used: int, offered: int) -> str:
    """A share as text, readable without colour."""
    if offered <= 0:
        return ""
    full = min(BAR_CHARS, round(BAR_CHARS * used / offered))
    return "#" * full + "." * (BAR_CHARS - full)


def _table(titles: tuple[str, ...]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def _used(stage: StageView) -> int:
    if stage.first is None:
        return 0
    return stage.weights_bytes + stage.kv_bytes + stage.compute_bytes


def _offered(stage: StageView) -> int:
    return stage.capabilities.offered_bytes + stage.capabilities.offered_vram_bytes


def _free_text(stage: StageView) -> str:
    can = stage.capabilities
    if not can.memory_bytes:
        return "-"
    box = " (container)" if can.container_memory_bytes else ""
    return f"{bytes_text(can.free_memory_bytes)} of {bytes_text(can.memory_bytes)}{box}"


def _gpu_text(stage: StageView) -> str:
    gpus = stage.capabilities.gpus
    return ", ".join(f"{gpu.name} ({gpu.backend}, {bytes_text(gpu.memory_bytes)})" for gpu in gpus) or "-"


def _version_text(stage: StageView) -> str:
    llama = stage.capabilities.llama
    parts = [f"Potluck {stage.version}"] if stage.version else []
    parts += [f"llama-cpp-python {llama}"] if llama else []
    return ", ".join(parts)


def _features_text(features: tuple[str, ...]) -> str:
    """The widest vectors and what else is telling; all of them are in --json."""
    order = (
        "AMX_INT8",
        "AVX512_VNNI",
        "AVX512",
        "AVX_VNNI",
        "AVX2",
        "AVX",
        "SVE",
        "MATMUL_INT8",
        "DOTPROD",
        "NEON",
    )
    return ", ".join([name for name in order if name in features][:3])
