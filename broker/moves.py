"""Whether a better plan is worth that stages which serve are given other layers. Pure.

Where speeds are known, the plan must be better by `least_gain`, and the time that loading takes must be won back within
`repay_s`. After a move because of drift the next one waits, each time twice as long, so a device that changes its speed
again and again does not make the plan do so.
"""

from __future__ import annotations

from dataclasses import dataclass

from potluck.broker import measuring
from potluck.broker.core import Core
from potluck.broker.drift import Pace
from potluck.planner.plan import ChainPlan, Plan
from potluck.wire.forecast import Forecast

USUAL_LOAD_S = 5.0
"""What loading is taken to cost before any load was seen."""
MOST_HOLD_S = 3600.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to move, and what to say about it."""

    move: bool
    text: str = ""
    again_s: float | None = None
    """Seconds after which to ask again."""


def worth_it(core: Core, plan: Plan) -> Verdict:
    """Whether chains that serve are to give way to `plan`."""
    chains = tuple(chain.plan for chain in core.state.chains.values() if not chain.closing)
    if chains == plan.chains:
        return Verdict(False)
    now = measuring.predicted(core, chains, core.config.demand)
    if plan.forecast is None or now is None:
        gain = _largest(chains) / _largest(plan.chains) - 1.0
        return Verdict(gain >= core.config.least_gain, "More stages share the layers." if gain > 0 else "")
    gain = _rate(plan.forecast) / max(_rate(now), 1e-12) - 1.0
    if gain < core.config.least_gain:
        return Verdict(False)
    share = 1.0 - 1.0 / (1.0 + gain)
    load_s = max((stage.load_s for stage in core.usable()), default=0.0) or USUAL_LOAD_S
    cost_s = load_s + _replay_s(core, now)
    if share * core.config.repay_s < cost_s:
        return Verdict(
            False,
            f"A plan that is {100 * gain:.0f} % faster is left aside: changing to it takes about {cost_s:.0f} s.",
        )
    held_until_s = core.moved_s + core.hold_s
    if core.drifted and core.now < held_until_s:
        return Verdict(False, again_s=held_until_s - core.now)
    return Verdict(True, f"A better plan: {_words(now)} become {_words(plan.forecast)}.")


def forgive(core: Core) -> None:
    """A stage that was slow or stuck, and then had nothing to do for long, may have recovered: it counts again."""
    for stage in core.state.stages.values():
        if stage.suspect and core.now >= stage.suspect_since_s + core.config.forgive_s:
            stage.suspect = False
        idle = stage.chain is None and stage.pace.since_s is not None
        if idle and stage.pace.slowdown > 1.0 and core.now > (stage.pace.since_s or 0.0) + MOST_HOLD_S:
            stage.pace = Pace()


def note(core: Core) -> None:
    """Stages are about to be moved."""
    if not core.drifted:
        return
    quiet = core.now > core.moved_s + MOST_HOLD_S
    core.hold_s = core.config.drift_hold_s if quiet else min(2 * core.hold_s, MOST_HOLD_S)
    core.moved_s = core.now


def _largest(chains: tuple[ChainPlan, ...]) -> float:
    """Where no speed is known: the most layers that a stage has, shared between the chains."""
    return max((p.end - p.first for chain in chains for p in chain.stages), default=1) / max(1, len(chains))


def _replay_s(core: Core, now: Forecast) -> float:
    """What it takes to compute again what runs, at the speed at which prompts are computed."""
    tokens = sum(request.sent for request in core.state.requests.values())
    return tokens * now.ttft_s / max(1, now.prompt_tokens)


def _rate(forecast: Forecast) -> float:
    """What a plan is for: with one user tokens per second of one, otherwise of all."""
    if forecast.users <= 1:
        return 1.0 / forecast.token_s if forecast.token_s > 0 else 0.0
    return forecast.tokens_per_s


def _words(forecast: Forecast) -> str:
    if forecast.users <= 1:
        return f"{1000 * forecast.token_s:.1f} ms per token"
    return f"{forecast.tokens_per_s:.1f} tokens/s"
