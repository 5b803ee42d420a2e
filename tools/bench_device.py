"""`potluck bench device`: how fast this machine is at one model, measured without any broker.

The same measurement that a stage makes before a plan, kept in the same place; here for a person to look at.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from potluck.model.facts import read_facts
from potluck.model.paths import cache_dir
from potluck.model.reference import reference
from potluck.planner.words import size
from potluck.stage.bench import Bench, BenchSettings
from potluck.stage.bench_plan import times_gpu
from potluck.stage.capabilities import capabilities
from potluck.stage.engines import make_engine
from potluck.stage.holder import Models
from potluck.stage.kept_profiles import profile_path
from potluck.stage.machine_facts import Owner
from potluck.wire.errors import Phase, PotluckError
from potluck.wire.measures import Profile, Speed, Timing
from potluck.wire.messages import Measure


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What was measured, and the file it is kept in."""

    model: str
    layers: int
    threads: int
    profile: Profile
    path: Path

    def to_json(self) -> str:
        """One JSON object."""
        found = {
            "bench": "device",
            "model": self.model,
            "layers": self.layers,
            "threads": self.threads,
            "profile": self.profile,
            "kept": str(self.path),
        }
        return msgspec.json.encode(found).decode()


def measure_device(
    console: Console,
    model: Path,
    *,
    threads: int,
    slots: int,
    context_tokens: int,
    batch_tokens: int,
    fresh: bool,
) -> DeviceReport:
    """Measures, or reads what was measured before unless `fresh`. Raises PotluckError."""
    facts = read_facts(model)
    can = capabilities(threads, Owner(), [model])
    settings = BenchSettings(
        device=platform.node() or "device", threads=threads, gpu=times_gpu(can), capabilities=can
    )
    models = Models({facts.fingerprint: model}, cache_dir())
    bench = Bench(lambda: make_engine("llama"), models, settings)
    message = Measure(reference(facts, facts.name), slots, context_tokens, batch_tokens)
    with Progress(
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("measuring", total=None)

        def progressed(_: Phase, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        profile = bench(message, lambda: True, progressed, fresh=fresh)
    if profile is None:
        raise PotluckError("Measuring was given up.", phase=Phase.MEASURE)
    path = profile_path(models.cache_dir, bench.setting(message))
    return DeviceReport(facts.name, facts.layers, threads, profile, path)


def print_report(console: Console, report: DeviceReport) -> None:
    """For people: a table per processor, what memory it takes, and where it is kept."""
    profile = report.profile
    when = "measured before" if profile.kept else "measured now"
    console.print(
        f"{report.model}: {report.layers} layers, {report.threads} threads, {profile.slots} slots of "
        f"{profile.context_tokens} tokens; {when} in {profile.took_s:.1f} s.",
        markup=False,
    )
    for name, speed in (("CPU", profile.cpu), ("GPU", profile.gpu)):
        if speed is not None:
            console.print(_speed_table(name, speed))
            console.print(
                f"Besides its layers a micro-batch costs {1e3 * speed.call_s:.2f} ms; looking a token up "
                f"{1e6 * speed.embedding_s:.0f} us.",
                markup=False,
            )
    console.print(
        f"Memory: KV cache {size(profile.kv_bytes)} per layer, buffers {size(profile.compute_bytes)} "
        f"(last stage {size(profile.head_compute_bytes)}), copies of weights "
        f"{100 * profile.extra_weight_share:.0f} % of them.",
        markup=False,
    )
    console.print(f"Kept in {report.path}.", markup=False, soft_wrap=True)


def _speed_table(name: str, speed: Speed) -> Table:
    table = Table(title=name, title_justify="left", box=None, header_style="bold", pad_edge=False)
    table.add_column("what", no_wrap=True)
    for title in ("rows", "tokens held", "ms", "spread", "layer-tokens/s"):
        table.add_column(title, justify="right", no_wrap=True)
    for what, timings in (
        ("decode, one layer", speed.decode),
        ("prefill, one layer", speed.prefill),
        ("head and sampling", speed.head),
    ):
        for timing in timings:
            table.add_row(what, *_cells(timing))
    return table


def _cells(timing: Timing) -> tuple[str, ...]:
    seconds = timing.seconds
    return (
        str(timing.rows),
        str(timing.context_tokens),
        f"{1e3 * seconds:.3f}",
        f"{100 * timing.spread_s / seconds:.0f} %" if seconds > 0 else "-",
        f"{timing.rows / seconds:,.0f}" if seconds > 0 else "-",
    )


__all__ = ["DeviceReport", "measure_device", "print_report"]
