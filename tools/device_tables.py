"""What devices have and hold, as `potluck ps` prints it. Pure: a snapshot in, something rich can print out.

Everything fits 80 columns; a device's name is folded, never cut. What is long stands below the table, in lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from potluck.planner.words import size, size_of
from potluck.tools.plan_view import Sentences
from potluck.tools.tables import device_columns
from potluck.wire.measures import Capabilities
from potluck.wire.messages import StageView, StateView

BAR_CHARS = 20
WEIGHTS, CACHE, BUFFERS, FREE = "W", "K", "B", "."
"""What a piece of a bar is full of."""
NO_ROOM = 1
"""What a device offers that has nothing to spare: 0 would mean that it does not say."""
LEGEND = f"{WEIGHTS} weights, {CACHE} KV cache, {BUFFERS} compute buffers, {FREE} offered and free"

TELLING = (
    "AMX_INT8", "AVX512_VNNI", "AVX512", "AVX_VNNI", "AVX2", "AVX",
    "SVE", "MATMUL_INT8", "DOTPROD", "NEON",
)  # fmt: skip
"""Instruction sets that say most about the speed of layers, widest first; the rest is in --json."""


# ---- machines


def machine_table(view: StateView) -> Table:
    """Each device's hardware in figures: what it computes with, what it has free."""
    table = device_columns(("device", "threads", "memory free", "disk", "power"))
    for stage in view.stages:
        can = stage.capabilities
        table.add_row(
            Text(stage.device),
            f"{can.threads} of {can.cores}",
            size_of(can.free_memory_bytes, can.memory_bytes) if can.memory_bytes else "-",
            f"{size(can.disk_read_bytes_s)}/s" if can.disk_read_bytes_s else "-",
            can.power or "-",
        )
    return table


def machine_notes(view: StateView) -> Iterator[RenderableType]:
    """Below each device's name what does not fit a column: processor, container, GPUs, system and versions."""
    for stage in view.stages:
        lines = list(_notes(stage))
        if lines:
            yield Text(stage.device)
            yield Sentences(lines, "  ")


def _notes(stage: StageView) -> Iterator[str]:
    can = stage.capabilities
    telling = [name for name in TELLING if name in can.features][:3]
    if can.cpu:
        yield f"{can.cpu} with {', '.join(telling)}" if telling else can.cpu
    room = [size(can.container_memory_bytes)] if can.container_memory_bytes else []
    room += [f"{can.cpu_quota:g} cores"] if can.cpu_quota else []
    if room:
        yield f"In a container of {' and '.join(room)}"
    for gpu in can.gpus:
        yield f"GPU: {gpu.name} ({gpu.backend}), {size_of(gpu.free_memory_bytes, gpu.memory_bytes)} free"
    if can.gpus and not can.allow_cpu_fallback:
        yield "Only layers that the GPU has room for (allow_cpu_fallback is false)"
    versions = [can.system] if can.system else []
    versions += [f"Potluck {stage.version}"] if stage.version else []
    versions += [f"llama-cpp-python {can.llama}"] if can.llama else []
    if versions:
        yield ", ".join(versions)


# ---- memory


def memory_view(view: StateView) -> Iterator[RenderableType]:
    """All memory of the cluster at one glance: what layers take of what each device offers."""
    everything = f"all {len(view.stages)} devices"
    table = device_columns(("device", "weights", "KV cache", "buffers", "used of offered"), right=True)
    parts = [_parts(stage) for stage in view.stages]
    offers = [_offered(stage) for stage in view.stages]
    for stage, held, offered in zip(view.stages, parts, offers, strict=True):
        table.add_row(*_row(stage.device, held, offered))
    if len(view.stages) > 1:
        held_in_all = [sum(column) for column in zip(*parts, strict=True)]
        # Where a device does not say what it offers, no share of all offers can be said.
        table.add_row(*_row(everything, held_in_all, sum(offers) if all(offers) else 0))
    yield table
    yield Text(LEGEND)
    for stage in view.stages:
        limits = list(_limits(stage.capabilities))
        if limits:
            yield Sentences([f"{stage.device}: {', '.join(limits)}."])


def bar(held: Sequence[int], offered: int, chars: int = BAR_CHARS) -> str:
    """Shares of what is offered as text, readable without colour: weights, KV cache, buffers, free.

    What is there at all is seen: the smallest share has one character, if there is room for one.
    """
    if offered <= 0:
        return ""
    pieces, filled, total = "", 0, 0
    for mark, count in zip((WEIGHTS, CACHE, BUFFERS), held, strict=True):
        total += count
        end = max(round(chars * total / offered), filled + 1 if count else 0)
        end = max(filled, min(chars, end))
        pieces, filled = pieces + mark * (end - filled), end
    return pieces + FREE * (chars - filled)


def _row(name: str, held: Sequence[int], offered: int) -> tuple[RenderableType, ...]:
    """A device's figures; its bar is the second line, below the name."""
    used = sum(held)
    figures = [size(count) if used else "-" for count in held]
    if offered > NO_ROOM:
        text = f"{size_of(used, offered)}\n{100 * used / offered:.0f} %"
        return (Text(f"{name}\n{bar(held, offered)}"), *figures, text)
    return (Text(name), *figures, f"{size(used)} of none" if offered else size(used))


def _parts(stage: StageView) -> tuple[int, int, int]:
    """Weights, KV cache and compute buffers of what it holds."""
    if stage.first is None:
        return 0, 0, 0
    return stage.weights_bytes, stage.kv_bytes, stage.compute_bytes


def _offered(stage: StageView) -> int:
    return stage.capabilities.offered_bytes + stage.capabilities.offered_vram_bytes


def _limits(can: Capabilities) -> Iterator[str]:
    """Where the memory is, and what bounds it."""
    if can.offered_vram_bytes:
        yield f"{size(can.offered_bytes)} offered in memory and {size(can.offered_vram_bytes)} on GPUs"
    if can.container_memory_bytes:
        yield f"limited to {size(can.container_memory_bytes)} by its container"
    elif can.memory_bytes:
        yield f"{size(can.memory_bytes)} in the machine"
