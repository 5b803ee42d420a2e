"""`potluck bench throughput`: real processes, each stage on a core of its own, several sequences at once.

Prompts are random tokens, answers run to their full length. The decode figures are of the time in which every sequence
decodes: from the last first token to the first last token. Busy is compute / (compute + wait) of a stage's own clock
over that time; rates of different commands compare only within one run on one machine.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from potluck.model.facts import read_facts
from potluck.runtime.client import Client
from potluck.tools.local import local_cluster, stage_name
from potluck.wire.errors import UsageError
from potluck.wire.messages import Delta, PlanQuery, StateView
from potluck.wire.sampling import Sampling

GREEDY = Sampling(temperature=0.0)
LOAD_S = 600.0


@dataclass(frozen=True, slots=True)
class Row:
    """One number of sequences."""

    parallel: int
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    ttft_s: float
    token_ms: float
    """Time per token of one sequence."""
    compute_ms: float
    """What the stages computed for one micro-batch, added up."""
    busy: dict[str, float]
    predicted_tokens_per_s: float | None = None
    """By the plan, where the devices were measured."""

    @property
    def slowest(self) -> str:
        """The stage that was busiest."""
        return max(self.busy, key=lambda name: self.busy[name], default="")

    def to_dict(self) -> dict[str, object]:
        """As JSON has it."""
        return {
            "decode_tokens_per_s": round(self.decode_tokens_per_s, 2),
            "prefill_tokens_per_s": round(self.prefill_tokens_per_s, 2),
            "ttft_s": round(self.ttft_s, 4),
            "token_ms": round(self.token_ms, 3),
            "compute_ms": round(self.compute_ms, 3),
            "busy": {name: round(share, 4) for name, share in self.busy.items()},
            "slowest": self.slowest,
            **(
                {}
                if self.predicted_tokens_per_s is None
                else {"predicted_tokens_per_s": round(self.predicted_tokens_per_s, 2)}
            ),
        }


@dataclass(frozen=True, slots=True)
class ThroughputReport:
    """All rows, and what was measured."""

    model: str
    cores: tuple[int, ...]
    layers: dict[str, tuple[int, int]]
    rows: tuple[Row, ...]

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(
            {
                "bench": "throughput",
                "model": self.model,
                "cores": list(self.cores),
                "layers": {name: list(layers) for name, layers in self.layers.items()},
                "by_parallel": {str(row.parallel): row.to_dict() for row in self.rows},
            }
        )

    def to_text(self) -> str:
        """A table."""
        names = list(self.layers)
        predicted = any(row.predicted_tokens_per_s is not None for row in self.rows)
        head = [
            "parallel",
            "decode t/s",
            "prefill t/s",
            "first token s",
            "ms/token",
            *[f"{n} busy" for n in names],
            *(["predicted t/s"] if predicted else []),
        ]
        lines = [
            f"{self.model}, one thread per stage on cores {', '.join(map(str, self.cores))}",
            "  ".join(head),
        ]
        for row in self.rows:
            cells = [
                str(row.parallel),
                f"{row.decode_tokens_per_s:.1f}",
                f"{row.prefill_tokens_per_s:.1f}",
                f"{row.ttft_s:.2f}",
                f"{row.token_ms:.1f}",
                *[f"{100 * row.busy[name]:.0f} %" for name in names],
                *([f"{row.predicted_tokens_per_s or 0.0:.1f}"] if predicted else []),
            ]
            lines.append("  ".join(cell.rjust(len(title)) for cell, title in zip(cells, head, strict=True)))
        if len(names) > 1:
            lines.append(f"{self.rows[-1].slowest} is the slowest stage.")
        return "\n".join(lines)


async def run_throughput(
    model: Path,
    cores: Sequence[int],
    parallel: Sequence[int],
    *,
    prompt_tokens: int,
    generate: int,
    activation: str,
    layers: Sequence[int] | None = None,
    plan: str = "even",
) -> ThroughputReport:
    """Measures each number of sequences in turn on one cluster. `layers` gives each stage so many, in order; `plan` is
    even or measured (with the most sequences in mind).
    """
    facts = read_facts(model)
    if not cores or not parallel or min(parallel) < 1:
        raise UsageError("Give at least one core and one number of sequences.")
    options = [
        *_assigned(layers, len(cores)),
        "--slots", str(max(parallel)), "--context", str(prompt_tokens + generate + 16), "--activation", activation,
        "--http", "off", "--misses", "30", "--log-level", "warning",
        "--plan", plan, "--users", str(max(parallel)),
    ]  # fmt: skip
    chance = random.Random(7)
    async with (
        local_cluster(model, len(cores), *options, cpus=cores) as cluster,
        Client(cluster.address) as client,
    ):
        view = [view async for view in cluster.wait_ready(client, LOAD_S)][-1]
        held = {stage.device: (stage.first or 0, (stage.end or 1) - 1) for stage in view.stages if stage.end}
        await Round(
            client, random_prompts(chance, 2, prompt_tokens, facts.vocab), 4
        ).run()  # nothing is cold afterwards
        rows = [
            await Round(client, random_prompts(chance, count, prompt_tokens, facts.vocab), generate).run()
            for count in parallel
        ]
        held_tokens = prompt_tokens + generate // 2
        plans = await client.plan(PlanQuery(tuple(parallel), held_tokens, prompt_tokens))
        if plans.at:
            rows = [
                replace(row, predicted_tokens_per_s=forecast.tokens_per_s)
                for row, forecast in zip(rows, plans.at, strict=True)
            ]
    return ThroughputReport(model.name, tuple(cores), held, tuple(rows))


def _assigned(layers: Sequence[int] | None, stages: int) -> list[str]:
    """The broker's options for that many layers per stage."""
    if layers is None:
        return []
    if len(layers) != stages or min(layers) < 1:
        raise UsageError(f"--layers takes one number per core, each at least 1: {stages} numbers.")
    options: list[str] = []
    first = 0
    for index, count in enumerate(layers):
        options += ["--layers", f"{stage_name(index)}={first}-{first + count - 1}"]
        first += count
    return options


def random_prompts(chance: random.Random, count: int, tokens: int, vocab: int) -> list[list[int]]:
    """`count` prompts of so many tokens, drawn at random."""
    return [[chance.randrange(1, vocab) for _ in range(tokens)] for _ in range(count)]


@dataclass(slots=True)
class Round:
    """All sequences of one row, from the first submission to the last token."""

    client: Client
    prompts: list[list[int]]
    generate: int
    first_s: list[float] = field(default_factory=list)
    done: int = 0
    tokens: int = 0
    window: list[tuple[float, int, StateView]] = field(default_factory=list)

    async def run(self) -> Row:
        start = time.perf_counter()
        all_decode, one_done = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for prompt in self.prompts:
                group.create_task(self._one(prompt, all_decode, one_done))
            group.create_task(self._watch(all_decode, one_done))
        (begin, had, before), (end, have, after) = self.window
        count = len(self.prompts)
        seconds = max(end - begin, 1e-9)
        rate = (have - had) / seconds
        batches = max(1, after.stages[0].hops.batches - before.stages[0].hops.batches)
        compute = {
            b.device: (b.hops.compute_s - a.hops.compute_s, b.hops.wait_s - a.hops.wait_s)
            for a, b in zip(before.stages, after.stages, strict=True)
        }
        return Row(
            parallel=count,
            decode_tokens_per_s=rate,
            prefill_tokens_per_s=sum(map(len, self.prompts)) / max(max(self.first_s) - start, 1e-9),
            ttft_s=median(first - start for first in self.first_s),
            token_ms=1000 * count / rate if rate > 0 else 0.0,
            compute_ms=1000 * sum(busy for busy, _ in compute.values()) / batches,
            busy={name: busy / max(busy + wait, 1e-9) for name, (busy, wait) in compute.items()},
        )

    async def _one(self, prompt: list[int], all_decode: asyncio.Event, one_done: asyncio.Event) -> None:
        mine = 0
        stream = self.client.stream(tokens=prompt, max_tokens=self.generate, sampling=GREEDY, ignore_eos=True)
        async with aclosing(stream) as events:
            async for event in events:
                if not isinstance(event, Delta):
                    continue
                if mine == 0:
                    self.first_s.append(time.perf_counter())
                mine += len(event.tokens)
                self.tokens += len(event.tokens)
                if len(self.first_s) == len(self.prompts):
                    all_decode.set()
                if mine >= self.generate - 1:
                    one_done.set()

    async def _watch(self, *moments: asyncio.Event) -> None:
        """The state at each moment, with the time and the tokens there were."""
        for moment in moments:
            await moment.wait()
            now, tokens = time.perf_counter(), self.tokens
            self.window.append((now, tokens, await self.client.state()))
