"""Layers as the owner says (`layer_assignment`): checked, and then used as they are. Pure.

Gaps, overlaps and forbidden cuts are settings that are wrong. Whether the devices have room for their layers is known
once they are measured; then it is also said what the planner would have chosen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from potluck.planner.cost import StageCost, offered
from potluck.planner.measured import forecast, solve
from potluck.planner.plan import (
    NO_NETWORK,
    Candidate,
    ChainPlan,
    Demand,
    ModelShape,
    Network,
    Plan,
    StagePlan,
)
from potluck.planner.problem import Problem
from potluck.planner.words import gb, ms, ms_figure, per_s
from potluck.wire.errors import Phase, PlanError, SettingsError
from potluck.wire.ids import StageId

_ENTRY = re.compile(r"(?P<device>.+)=(?P<first>\d{1,5})-(?P<last>\d{1,5})")


def parse_layers(entries: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Entries such as `desktop-01=20-31` (first and last layer) by device. Raises SettingsError."""
    found: dict[str, tuple[int, int]] = {}
    for entry in entries:
        match = _ENTRY.fullmatch(entry.strip())
        if match is None:
            raise SettingsError(
                f"{entry!r} is no layer assignment.", hint="Write DEVICE=FIRST-LAST, e.g. laptop=0-19."
            )
        if match["device"] in found:
            raise SettingsError(f"{match['device']} is given layers twice.", hint="Name each device once.")
        found[match["device"]] = (int(match["first"]), int(match["last"]))
    return found


@dataclass(frozen=True, slots=True)
class ManualPlanner:
    """One chain as assigned: first and last layer by device name, both included."""

    assignment: Mapping[str, tuple[int, int]]
    demand: Demand | None = None
    """For which memory is checked and the plan is compared; without it neither is done."""

    def check(self, model: ModelShape) -> None:
        """Raises SettingsError unless the layers cover the model once, with cuts that its architecture allows."""
        at = 0
        for device, (first, last) in self._in_order():
            if first > last:
                raise SettingsError(
                    f"layer_assignment: {device} begins at layer {first} and ends at {last}.",
                    hint="Give the first layer, then the last one.",
                )
            if first != at:
                what = (
                    f"layers {at} to {first - 1} are nobody's"
                    if first > at
                    else f"layer {first} is given twice"
                )
                raise SettingsError(
                    f"layer_assignment: {what} ({device} begins at {first}).",
                    hint=f"Each layer from 0 to {model.layers - 1} belongs to one device.",
                )
            if first and first not in model.cuts:
                near = sorted(model.cuts, key=lambda cut: abs(cut - first))[:2]
                allowed = " or ".join(str(cut) for cut in sorted(near)) or "nowhere"
                raise SettingsError(
                    f"layer_assignment: {model.name} can't be cut at layer {first}.",
                    hint=f"Cut at {allowed}.",
                )
            at = last + 1
        if at != model.layers:
            raise SettingsError(
                f"layer_assignment: it ends at layer {at - 1}, {model.name} has layers 0 to {model.layers - 1}.",
                hint="Give the last device the last layer.",
            )

    def __call__(
        self, model: ModelShape, candidates: Sequence[Candidate], network: Network = NO_NETWORK
    ) -> Plan:
        """The chain as assigned. Raises PlanError naming devices that are missing, there twice, or too small."""
        self.check(model)
        by_name: dict[str, list[Candidate]] = {}
        for candidate in candidates:
            by_name.setdefault(candidate.device, []).append(candidate)
        missing = [device for device, _ in self._in_order() if device not in by_name]
        if missing:
            raise PlanError(
                f"layer_assignment waits for {', '.join(missing)}.",
                hint="Start potluck-stage there under that --name, or change the assignment.",
                phase=Phase.PLAN,
            )
        doubled = [device for device, _ in self._in_order() if len(by_name[device]) > 1]
        if doubled:
            raise PlanError(
                f"Several stages are named {', '.join(doubled)}.",
                hint="Give each potluck-stage its own --name.",
                phase=Phase.PLAN,
            )
        stages = tuple(
            StagePlan(by_name[device][0].stage, by_name[device][0].device, first, last + 1)
            for device, (first, last) in self._in_order()
        )
        used = {stage.stage for stage in stages}
        plan = Plan(
            (ChainPlan(stages, model.layers),),
            ("The layers are as layer_assignment says.",),
            tuple(candidate.stage for candidate in candidates if candidate.stage not in used),
        )
        return plan if self.demand is None else self._judged(plan, model, candidates, network, self.demand)

    def _judged(
        self,
        plan: Plan,
        model: ModelShape,
        candidates: Sequence[Candidate],
        network: Network,
        demand: Demand,
    ) -> Plan:
        """The plan with its forecast, as far as devices were measured. Raises PlanError where memory is short."""
        costs = {c.stage: StageCost(c, model, demand) for c in candidates if c.profile is not None}
        (chain,) = plan.chains
        short = [place for place in chain.stages if place.stage in costs and not _has_room(costs, place)]
        if short:
            raise _too_small(costs, short)
        stages = tuple(
            replace(place, gpu_layers=costs[place.stage].gpu_layers(place.first, place.end))
            if place.stage in costs
            else place
            for place in chain.stages
        )
        chain = replace(chain, stages=stages, users=min(demand.users, demand.slots))
        plan = replace(plan, chains=(chain,))
        found = forecast(model, candidates, network, demand, plan)
        if found is None:
            return plan
        said = "The layers are as layer_assignment says"
        if found.tokens_per_s == 0:
            said = f"{said}, although nobody answered on one of the links between them"
            return replace(plan, forecast=found, reasons=(f"{said}.",))
        problem = Problem(model, [cost.candidate for cost in costs.values()], network, demand)
        rounds = [(part.users, problem.round_s(part.chain, part.users)) for part in solve(problem).shared]
        best = sum(users / round_s for users, round_s in rounds)
        mine = (
            f"{ms(found.token_s)} per token" if demand.users == 1 else f"{per_s(found.tokens_per_s)} tokens/s"
        )
        if best <= 1.01 * found.tokens_per_s:
            own = "the planner knows no better choice"
        elif demand.users == 1:
            own = f"the planner's own choice would take {ms_figure(1 / best)}"
        else:
            own = f"the planner's own choice would make {per_s(best)}"
        return replace(plan, forecast=found, reasons=(f"{said}: {mine}; {own}.",))

    def _in_order(self) -> list[tuple[str, tuple[int, int]]]:
        return sorted(self.assignment.items(), key=lambda item: (item[1], item[0]))


def _has_room(costs: Mapping[StageId, StageCost], place: StagePlan) -> bool:
    return bool(costs[place.stage].room[place.first, place.end])


def _too_small(costs: Mapping[StageId, StageCost], short: Sequence[StagePlan]) -> PlanError:
    """Of all devices without the room for their layers."""
    told = []
    for place in short:
        cost = costs[place.stage]
        need, offer = cost.needed_bytes(place.first, place.end), offered(cost.candidate)
        but = "" if need > offer else ", in two parts that these layers do not fill"
        told.append(
            f"{place.device} would need {gb(need)} for layers {place.first}-{place.end - 1}, "
            f"it offers {gb(offer)}{but}"
        )
    first = short[0]
    room = costs[first.stage].room[first.first]
    ends = [end for end in range(first.first + 1, first.end) if room[end]]
    fewer = f" (it has room for {first.first}-{ends[-1] - 1})" if ends else ""
    need = sum(costs[place.stage].needed_bytes(place.first, place.end) for place in short)
    return PlanError(
        f"layer_assignment: {'; '.join(told)}.",
        hint=f"Give {first.device} fewer layers{fewer} or more memory, or use a shorter context or fewer slots.",
        phase=Phase.PLAN,
        device=first.device,
        needed_bytes=need,
        offered_bytes=sum(offered(costs[place.stage].candidate) for place in short),
    )
