"""`potluck plan --cluster FILE`: a plan for machines that are only described, or why there is none and what would help.

Reads the files and asks the planner; `planner/described` gives the machines their speeds, `planner/advice` says what to
change, `tools/plan_view` how a plan looks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from potluck.broker.config import BrokerConfig
from potluck.model.architectures import rules_for
from potluck.model.facts import read_facts
from potluck.model.paths import cache_dir
from potluck.model.verified import is_verified
from potluck.planner.advice import Need, Remedy, need, remedies
from potluck.planner.anatomy import Anatomy, anatomy_of_file
from potluck.planner.cost import offered
from potluck.planner.described import PAGE, Described, parse_cluster
from potluck.planner.measured import MeasuredPlanner
from potluck.planner.plan import Candidate, Demand, ModelShape, Plan
from potluck.planner.words import counted, gb_cell
from potluck.runtime.settings import read_yaml
from potluck.tools.plan_view import Sentences, bullets, demand_parts, render, to_json
from potluck.wire import limits
from potluck.wire.errors import PlanError, SettingsError
from potluck.wire.messages import PlanView


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line says; what is None is left to the description, and then to the broker's defaults."""

    users: int | None = None
    slots: int | None = None
    context_tokens: int | None = None
    prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Fitting:
    """There is a plan."""

    view: PlanView
    demand: Demand
    note: str

    def render(self) -> Iterator[RenderableType]:
        """For people."""
        return render(self.view, self.demand, self.note)

    def to_json(self) -> str:
        """For programs."""
        return to_json(self.view, self.demand, "described")


@dataclass(frozen=True, slots=True)
class Unfitting:
    """There is none: why, what would help, and the plan with the first thing that does."""

    error: PlanError
    name: str
    need: Need
    candidates: tuple[Candidate, ...]
    remedies: tuple[Remedy, ...]
    demand: Demand
    instead: Fitting | None

    def render(self) -> Iterator[RenderableType]:
        """For people."""
        yield Text(f"{self.name} does not fit these devices.", style="bold")
        yield bullets(self._sentences())
        yield Text("")
        table = Table(box=None, header_style="bold", pad_edge=False)
        table.add_column("device", overflow="fold")
        table.add_column("offers GB", justify="right", no_wrap=True)
        for candidate in self.candidates:
            table.add_row(Text(candidate.device), Text(gb_cell(offered(candidate))))
        yield table
        yield Text("")
        if self.remedies:
            yield Text("What would help: each was tried alone and gives a plan", style="bold")
            yield bullets([remedy.text + "." for remedy in self.remedies])
        else:
            yield Sentences(
                [
                    "No usual quantization, shorter context or fewer slots help: it takes more or larger devices."
                ]
            )
        if self.instead is not None:
            yield Text("")
            yield Text("With the first of these", style="bold")
            yield from self.instead.render()

    def to_json(self) -> str:
        """For programs."""
        return msgspec.json.encode(
            {
                "source": "described",
                **demand_parts(self.demand),
                "plan": None,
                "error": {"code": self.error.code, "what": self.error.what, "hint": self.error.hint},
                "need": self.need,
                "remedies": [
                    {"what": one.text, "quantization": one.quantization, **demand_parts(one.demand)}
                    for one in self.remedies
                ],
                "instead": None if self.instead is None else self.instead.view,
            }
        ).decode()

    def _sentences(self) -> list[str]:
        wants = self.need
        sum_text = (
            f"Weights {gb_cell(wants.weights_bytes)} GB, KV cache {gb_cell(wants.kv_bytes)} GB "
            f"({counted(self.demand.slots, 'slot')} of {self.demand.context_tokens} tokens) and compute buffers "
            f"{gb_cell(wants.compute_bytes)} GB are {gb_cell(wants.bytes)} GB; the devices offer "
            f"{gb_cell(wants.offered_bytes)} GB."
        )
        if wants.missing_bytes:
            missing = gb_cell(wants.missing_bytes)
            rest = f"{missing} GB are missing, in these devices or in further ones."
        else:
            rest = "The sum would do, but no device has room for its share: layers are moved whole."
        return [sum_text, rest]


def plan_described(path: Path, model: Path | None, wish: Wish) -> Fitting | Unfitting:
    """The best plan for the cluster in the file. Raises SettingsError, ModelError."""
    cluster = parse_cluster(read_yaml(path, "--cluster", PAGE), str(path))
    anatomy = cluster.model if model is None else _anatomy(model)
    if anatomy is None:
        raise SettingsError(
            f"{path} describes no model.",
            hint="Give --model FILE.gguf, or a section model in the description.",
        )
    demand = _demand(cluster, wish)
    candidates = cluster.candidates(anatomy, demand)
    note = f"Described, not measured: all figures follow from those in {path.name}."
    try:
        plan = MeasuredPlanner(demand)(anatomy.shape, candidates, cluster.network)
        return Fitting(_view(plan, anatomy.shape, candidates, demand), demand, note)
    except PlanError as error:
        return _unfitting(error, cluster, anatomy, demand, note)


def show(console: Console, found: Fitting | Unfitting) -> None:
    """Prints it for people."""
    for part in found.render():
        console.print(part)


def _unfitting(
    error: PlanError, cluster: Described, anatomy: Anatomy, demand: Demand, note: str
) -> Unfitting:
    candidates = cluster.candidates(anatomy, demand)

    def fits(model: ModelShape, wanted: Demand) -> bool:
        try:
            MeasuredPlanner(replace(wanted, users=1))(
                model, cluster.candidates(anatomy, wanted), cluster.network
            )
        except PlanError:
            return False
        return True

    found = remedies(anatomy.shape, demand, anatomy.bits_per_weight, anatomy.quantization, fits)
    instead = None
    if found:
        first = found[0]
        shape = first.model
        if first.quantization:
            shape = replace(shape, name=f"{shape.name} as {first.quantization}")
        devices = cluster.candidates(anatomy, first.demand)
        plan = MeasuredPlanner(first.demand)(shape, devices, cluster.network)
        instead = Fitting(_view(plan, shape, devices, first.demand), first.demand, note)
    wants = need(anatomy.shape, candidates, demand)
    return Unfitting(error, anatomy.shape.name, wants, candidates, found, demand, instead)


def _anatomy(path: Path) -> Anatomy:
    facts = read_facts(path)
    rules = rules_for(facts, allow_unlisted=is_verified(cache_dir(), facts))
    return anatomy_of_file(facts, rules, path.stem)


def _demand(cluster: Described, wish: Wish) -> Demand:
    serve, usual = cluster.serve, BrokerConfig()
    users = wish.users or serve.users or usual.users
    config = BrokerConfig(
        users=users,
        slots=wish.slots or max(serve.slots or usual.slots, users),
        context_tokens=wish.context_tokens or serve.context or usual.context_tokens,
    )
    demand = config.demand
    prompt = wish.prompt_tokens or serve.prompt or demand.prompt_tokens
    if prompt > demand.context_tokens:
        raise SettingsError(
            f"A prompt of {prompt} tokens does not fit a context of {demand.context_tokens}.",
            hint="Give a shorter --prompt or a longer --context.",
        )
    return replace(demand, prompt_tokens=prompt)


def _view(plan: Plan, model: ModelShape, candidates: tuple[Candidate, ...], demand: Demand) -> PlanView:
    names = {candidate.stage: candidate.device for candidate in candidates}
    return PlanView(
        epoch=0,
        model=model.name,
        users=demand.users,
        reasons=tuple(reason[: limits.TEXT_CHARS] for reason in plan.reasons),
        left_out=tuple(names[stage] for stage in plan.left_out),
        forecast=plan.forecast,
    )
