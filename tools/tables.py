"""Tables that several commands print. Pure: a snapshot in, something rich can print out.

Everything fits 80 columns: a device's name is folded, never cut, and nothing is said by colour alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from potluck.planner.words import size
from potluck.wire.messages import StageView, StateView

SLOWEST = "*"
"""Stands after the name of the stage that the others of its chain wait for."""


def layers_text(first: int | None, end: int | None) -> str:
    """Layers as people count them, both included."""
    if first is None or end is None:
        return "-"
    return f"{first}-{end - 1}" if end - first > 1 else f"{first}"


def device_columns(titles: Sequence[str], *, right: bool = False, folds: Collection[str] = ()) -> Table:
    """A table without rows whose first column is for the devices' names.

    That one and those in `folds` give way where the terminal is narrow. `right`: the others are figures.
    """
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(titles[0], overflow="fold")
    for title in titles[1:]:
        table.add_column(
            title, overflow="fold", no_wrap=title not in folds, justify="right" if right else "left"
        )
    return table


def stage_table(view: StateView) -> RenderableType:
    """What each stage has done, per micro-batch and in all.

    Where the plan predicts: the micro-batches that decode, beside what was predicted for the same ones.
    """
    slowest = slowest_of(view)
    names = [f"{stage.device} {SLOWEST}" if stage.stage in slowest else stage.device for stage in view.stages]
    predicted = any(stage.hops.expected_batches for stage in view.stages)
    pace = ["decode\nms", "predicted\nms"] if predicted else ["compute\nms"]
    table = device_columns(["stage", "layers", "micro-\nbatches", *pace, "busy", "sent"], right=True)
    for name, stage in zip(names, view.stages, strict=True):
        hops = stage.hops
        lane = hops.compute_s + hops.wait_s
        if predicted:
            took = [
                _mean_ms(total, hops.expected_batches) for total in (hops.expected_compute_s, hops.expected_s)
            ]
        else:
            took = [_mean_ms(hops.compute_s, hops.batches)]
        table.add_row(
            Text(name),
            layers_text(stage.first, stage.end),
            str(hops.batches),
            *took,
            f"{100 * hops.compute_s / lane:.0f} %" if lane > 0 else "-",
            size(stage.counters.bytes_out),
        )
    note = [Text(f"{SLOWEST} The slowest of its chain: the others wait for it.")] if slowest else []
    return Group(table, *note)


def slowest_of(view: StateView) -> frozenset[str]:
    """In each chain of several stages, the one that took longest for a micro-batch; of equal ones the first.

    Decode micro-batches decide where they are counted apart, because they are what users wait for again and again.
    """
    chains: dict[int, list[StageView]] = {}
    for stage in view.stages:
        if stage.chain is not None and stage.hops.batches:
            chains.setdefault(stage.chain, []).append(stage)
    pace: Callable[[StageView], float]
    found = set()
    for members in chains.values():
        if len(members) < 2:
            continue
        if all(stage.hops.expected_batches for stage in members):
            pace = _decode_s
        else:
            pace = _compute_s
        found.add(max(members, key=pace).stage)
    return frozenset(found)


def _decode_s(stage: StageView) -> float:
    return stage.hops.expected_compute_s / stage.hops.expected_batches


def _compute_s(stage: StageView) -> float:
    return stage.hops.compute_s / stage.hops.batches


def _mean_ms(seconds: float, count: int) -> str:
    return f"{1000 * seconds / count:.1f}" if count else "-"


def device_table(view: StateView) -> Table:
    """Every stage worker that the broker knows."""
    titles = ("device", "state", "chain", "layers", "last\nbeat", "address")
    table = device_columns(titles, folds=("address",))
    for stage in view.stages:
        place = "-" if stage.chain is None else f"{stage.chain}.{stage.index}"
        table.add_row(
            Text(stage.device),
            Text(stage.state),
            place,
            layers_text(stage.first, stage.end),
            f"{stage.last_beat_age_s:.1f} s",
            Text(stage.endpoint.removeprefix("tcp://")),
        )
    return table


def device_notes(view: StateView) -> list[str]:
    """What there is to say of a state: how far loading is, or what went wrong."""
    return [f"{stage.device}: {stage.detail}" for stage in view.stages if stage.detail]
