"""Tables that several commands print. Pure: a snapshot in, something rich can print out."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from potluck.wire.messages import StageView, StateView


def bytes_text(count: float) -> str:
    """A size for people, in powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def layers_text(first: int | None, end: int | None) -> str:
    """Layers as people count them, both included."""
    if first is None or end is None:
        return "-"
    return f"{first}-{end - 1}" if end - first > 1 else f"{first}"


def stage_table(view: StateView) -> Table:
    """What each stage of the chains has done: per micro-batch, and in all."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title, justify in (
        ("stage", "left"),
        ("layers", "right"),
        ("micro-batches", "right"),
        ("compute ms", "right"),
        ("predicted", "right"),
        ("wait ms", "right"),
        ("busy", "right"),
        ("sent", "right"),
    ):
        table.add_column(title, justify="right" if justify == "right" else "left", no_wrap=True)
    for stage in view.stages:
        hops = stage.hops
        count = max(1, hops.batches)
        lane = hops.compute_s + hops.wait_s
        table.add_row(
            escape(stage.device),
            layers_text(stage.first, stage.end),
            str(hops.batches),
            f"{1000 * hops.compute_s / count:.1f}",
            _predicted(stage),
            f"{1000 * hops.wait_s / count:.1f}",
            f"{100 * hops.compute_s / lane:.0f} %" if lane > 0 else "-",
            bytes_text(stage.counters.bytes_out),
        )
    return table


def _predicted(stage: StageView) -> str:
    """How the plan's forecast of decode micro-batches compares with what they took."""
    hops = stage.hops
    if hops.expected_s <= 0:
        return "-"
    return (
        f"{100 * (hops.expected_s / hops.expected_compute_s - 1):+.0f} %"
        if hops.expected_compute_s > 0
        else "-"
    )


def device_table(view: StateView) -> Table:
    """Every stage worker that the broker knows."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("device", "state", "chain", "layers", "weights", "last beat", "address"):
        table.add_column(title, no_wrap=True)
    for stage in view.stages:
        place = "-" if stage.chain is None else f"{stage.chain}.{stage.index}"
        table.add_row(
            escape(stage.device),
            escape(f"{stage.state} ({stage.detail})") if stage.detail else stage.state,
            place,
            layers_text(stage.first, stage.end),
            bytes_text(stage.weights_bytes) if stage.weights_bytes else "-",
            f"{stage.last_beat_age_s:.1f} s",
            escape(stage.endpoint.removeprefix("tcp://")),
        )
    return table
