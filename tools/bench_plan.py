"""`potluck bench plan`: the planned split against an even one on unequal devices, and the forecast against the clock.

Stages are real processes on this machine; each may be given a share of its core (`tools/quota`). An even and a planned
cluster run in turn, several times, since machines change their pace from minute to minute: rates compare only within
one run. The forecast is the broker's own, for the plan that served, from what it measured itself.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from potluck.model.facts import read_facts
from potluck.runtime.client import Client
from potluck.tools.bench import Round, random_prompts
from potluck.tools.local import LocalCluster, local_cluster, stage_name
from potluck.tools.quota import cpu_quota
from potluck.wire.errors import UsageError
from potluck.wire.messages import PlanQuery

LOAD_S = 600.0


@dataclass(frozen=True, slots=True)
class Pair:
    """A figure as predicted and as measured."""

    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """How far the prediction is off, as a share of what was measured."""
        return self.predicted / self.measured - 1.0 if self.measured > 0 else 0.0

    def to_dict(self) -> dict[str, float]:
        """As JSON has it."""
        return {
            "predicted": round(self.predicted, 3),
            "measured": round(self.measured, 3),
            "error": round(self.error, 4),
        }


@dataclass(frozen=True, slots=True)
class Run:
    """One cluster's figures."""

    kind: str
    layers: dict[str, str]
    token_ms: Pair | None
    """One sequence alone."""
    tokens_per_s: Pair | None
    """All users at the same time."""
    stages: dict[str, Pair]
    """Milliseconds of computing per decode micro-batch, all users at the same time."""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """All runs."""

    model: str
    shares: tuple[float, ...]
    users: int
    runs: tuple[Run, ...]
    reasons: tuple[str, ...]

    def rate(self, kind: str) -> float:
        """The median of tokens per second over the runs of a kind."""
        return median(run.tokens_per_s.measured for run in self.runs if run.kind == kind and run.tokens_per_s)

    @property
    def gain(self) -> float:
        """The planned split over the even one."""
        return self.rate("planned") / self.rate("even")

    def error(self, pick: Callable[[Run], Pair | None]) -> float:
        """The median error of a forecast over the planned runs."""
        pairs = [pick(run) for run in self.runs if run.kind == "planned"]
        return median([pair.error for pair in pairs if pair is not None] or [0.0])

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(
            {
                "bench": "plan",
                "model": self.model,
                "shares": list(self.shares),
                "users": self.users,
                "planned_over_even": round(self.gain, 3),
                "token_ms_error": round(self.error(lambda run: run.token_ms), 4),
                "tokens_per_s_error": round(self.error(lambda run: run.tokens_per_s), 4),
                "runs": [
                    {
                        "kind": run.kind,
                        "layers": run.layers,
                        "token_ms": run.token_ms and run.token_ms.to_dict(),
                        "tokens_per_s": run.tokens_per_s and run.tokens_per_s.to_dict(),
                        "compute_ms": {name: pair.to_dict() for name, pair in run.stages.items()},
                    }
                    for run in self.runs
                ],
                "reasons": list(self.reasons),
            }
        )

    def to_text(self) -> str:
        """What a person reads."""
        shares = ", ".join(
            f"{stage_name(index)} {100 * share:.0f} %" for index, share in enumerate(self.shares)
        )
        lines = [f"{self.model}, {self.users} users, shares of a core: {shares}"]
        for run in self.runs:
            layers = ", ".join(f"{name} {span}" for name, span in run.layers.items())
            lines.append(f"{run.kind:8} {layers}")
            for title, pair in (("ms/token alone", run.token_ms), ("tokens/s", run.tokens_per_s)):
                if pair is not None:
                    lines.append(
                        f"    {title:15} predicted {pair.predicted:8.1f}   measured {pair.measured:8.1f}"
                        f"   {100 * pair.error:+.0f} %"
                    )
            slowest = max(run.stages, key=lambda name: run.stages[name].measured, default="")
            for name, pair in run.stages.items():
                mark = "   the slowest" if name == slowest else ""
                lines.append(
                    f"    {name + ' ms':15} predicted {pair.predicted:8.1f}   measured {pair.measured:8.1f}{mark}"
                )
        lines.append(f"planned over even: {self.gain:.2f} times the tokens per second")
        lines += self.reasons
        return "\n".join(lines)


async def run_plan(
    model: Path,
    cores: Sequence[int],
    shares: Sequence[float],
    users: int,
    *,
    prompt_tokens: int,
    generate: int,
    rounds: int,
    memory_gb: float | None = None,
) -> PlanReport:
    """Measures an even and a planned cluster in turn, `rounds` times. Raises UsageError.

    No stage takes more than `memory_gb`, so that a plan may need all of them.
    """
    if len(shares) != len(cores) or not cores or min(shares) <= 0 or max(shares) > 1:
        raise UsageError("--share takes one percentage per core, above 0 and up to 100, for example 100,30.")
    runs: list[Run] = []
    reasons: tuple[str, ...] = ()
    for _ in range(rounds):
        for kind in ("even", "planned"):
            run, said = await _one(kind, model, cores, shares, users, prompt_tokens, generate, memory_gb)
            runs.append(run)
            reasons = said if kind == "planned" else reasons
    return PlanReport(model.name, tuple(shares), users, tuple(runs), reasons)


async def _one(
    kind: str,
    model: Path,
    cores: Sequence[int],
    shares: Sequence[float],
    users: int,
    prompt_tokens: int,
    generate: int,
    memory_gb: float | None,
) -> tuple[Run, tuple[str, ...]]:
    facts = read_facts(model)
    options = [
        "--slots", str(max(users, 2)), "--context", str(prompt_tokens + generate + 16), "--http", "off",
        "--misses", "30", "--users", str(users), "--plan", "measured", "--log-level", "warning",
    ]  # fmt: skip
    if kind == "even":
        options += _evenly(facts.layers, len(cores))
    chance = random.Random(7)
    async with (
        _cluster(model, cores, shares, options, memory_gb) as cluster,
        Client(cluster.address) as client,
    ):
        async for _ in cluster.wait_ready(client, LOAD_S):
            pass
        await Round(client, random_prompts(chance, 2, prompt_tokens, facts.vocab), 4).run()
        alone = await Round(client, random_prompts(chance, 1, prompt_tokens, facts.vocab), generate).run()
        before = await client.state()
        all_users = await Round(
            client, random_prompts(chance, users, prompt_tokens, facts.vocab), generate
        ).run()
        after = await client.state()
        held = prompt_tokens + generate // 2
        plan = await client.plan(PlanQuery((1, users), held, prompt_tokens))
    stages = {}
    for was, now in zip(before.stages, after.stages, strict=True):
        batches = max(1, now.hops.batches - was.hops.batches)
        expected = now.hops.expected_s - was.hops.expected_s
        took = now.hops.expected_compute_s - was.hops.expected_compute_s
        if now.first is not None and took > 0:
            stages[now.device] = Pair(1000 * expected / batches, 1000 * took / batches)
    layers = {s.device: f"{s.first}-{(s.end or 1) - 1}" for s in after.stages if s.first is not None}
    one, many = (plan.at[0], plan.at[1]) if len(plan.at) == 2 else (None, None)
    return (
        Run(
            kind,
            layers,
            None if one is None else Pair(1000 * one.token_s, alone.token_ms),
            None if many is None else Pair(many.tokens_per_s, all_users.decode_tokens_per_s),
            stages,
        ),
        plan.reasons,
    )


def _evenly(layers: int, stages: int) -> list[str]:
    """The broker's options for the same number of layers on every stage."""
    bounds = [layers * index // stages for index in range(stages + 1)]
    options: list[str] = []
    for index in range(stages):
        options += ["--layers", f"{stage_name(index)}={bounds[index]}-{bounds[index + 1] - 1}"]
    return options


@contextlib.asynccontextmanager
async def _cluster(
    model: Path,
    cores: Sequence[int],
    shares: Sequence[float],
    options: Sequence[str],
    memory_gb: float | None,
) -> AsyncIterator[LocalCluster]:
    """Stages on their cores, each with its share from its first moment on."""
    with contextlib.ExitStack() as groups:
        quotas = [
            None if share >= 1.0 else groups.enter_context(cpu_quota(stage_name(index), share))
            for index, share in enumerate(shares)
        ]
        limit = () if memory_gb is None else ("--max-memory-gb", str(memory_gb))
        async with local_cluster(model, 0, "--stages", str(len(cores)), *options) as cluster:
            for index, (core, quota) in enumerate(zip(cores, quotas, strict=True)):
                child = await cluster.start_stage(stage_name(index), *limit, cpu=core)
                if quota is not None:
                    quota.add(child.process.pid)
            yield cluster
