"""Layers as the owner says (`layer_assignment`): checked, and then used as they are. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from potluck.planner.plan import NO_NETWORK, Candidate, ChainPlan, ModelShape, Network, Plan, StagePlan
from potluck.wire.errors import Phase, PlanError, SettingsError

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
        """The chain as assigned. Raises PlanError naming the devices that are missing or there twice."""
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
        return Plan(
            (ChainPlan(stages, model.layers),),
            ("Layers are as layer_assignment says.",),
            tuple(candidate.stage for candidate in candidates if candidate.stage not in used),
        )

    def _in_order(self) -> list[tuple[str, tuple[int, int]]]:
        return sorted(self.assignment.items(), key=lambda item: (item[1], item[0]))
