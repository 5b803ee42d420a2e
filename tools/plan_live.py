"""`potluck plan` of a running broker: the plan in force, and what was measured in service beside what was predicted."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from rich.console import Console

from potluck.broker.config import BrokerConfig
from potluck.planner.plan import Demand
from potluck.planner.words import ms_cell
from potluck.runtime.client import Client
from potluck.tools.plan_view import Column, demand_parts, render
from potluck.wire.forecast import StageForecast
from potluck.wire.messages import HopSums, PlanQuery, PlanView, StateView

MEASURED = "Measured on these devices and links. Figures in service are of the decode micro-batches so far."
UNMEASURED = "Nothing is predicted: the broker does not measure (--plan even), or no device could be."


async def ask(client: Client, users: int | None, prompt: int | None) -> tuple[PlanView, StateView]:
    """The plan in force and the cluster's state; the forecast is for `users` where that is said."""
    view = await client.plan(PlanQuery(() if users is None else (users,), 0, prompt or 0))
    if users is not None and view.at:
        view = msgspec.structs.replace(view, users=users, forecast=view.at[0])
    return view, await client.state()


def show(console: Console, view: PlanView, state: StateView) -> None:
    """Prints it for people."""
    note = UNMEASURED if view.forecast is None and not view.detail else MEASURED
    hops = {stage.stage: stage.hops for stage in state.stages}
    for part in render(view, demand_of(view, state), note, (in_service(hops),)):
        console.print(part)


def to_json(view: PlanView, state: StateView) -> str:
    """One JSON object."""
    served = {stage.stage: ratio(stage.hops) for stage in state.stages}
    parts = demand_parts(demand_of(view, state))
    return msgspec.json.encode({"source": "measured", **parts, "plan": view, "in_service": served}).decode()


def demand_of(view: PlanView, state: StateView) -> Demand:
    """What the broker plans for."""
    config = BrokerConfig(users=view.users, slots=state.slots, context_tokens=state.context_tokens)
    return config.demand


def ratio(hops: HopSums) -> float | None:
    """How many times as long as predicted a stage has computed; None before it has served."""
    return hops.expected_compute_s / hops.expected_s if hops.expected_s > 0 else None


def in_service(hops: Mapping[str, HopSums]) -> Column:
    """The measured time beside `compute ms`, at the same number of rows."""

    def cell(stage: StageForecast) -> str:
        found = ratio(hops.get(stage.stage, HopSums()))
        return "-" if found is None else ms_cell(found * stage.decode_s)

    return Column("in service", cell)
