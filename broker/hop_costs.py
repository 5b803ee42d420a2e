"""What a hand-over costs besides the link: waking threads whose caches are cold, frames, the broker's own turn. Pure.

Pings can't see it, for they find everything warm. It is seen in service: one user's token, alone in its
chain, takes what the stages computed, what the links need, and this, once per hop. It is put down to all stages of the
chain alike: a device that has little processor to spare for anything but layers is slow in this, too.
"""

from __future__ import annotations

from itertools import pairwise

from potluck.broker.core import Core
from potluck.broker.state import BROKER, Chain, InFlight, Stage
from potluck.planner.cost import send_bytes
from potluck.planner.plan import Link
from potluck.wire.ids import StageId
from potluck.wire.messages import Hop

WEIGHT = 0.02
"""Of one micro-batch in the running mean."""
LEAST_SEEN = 50
"""Micro-batches before the mean says anything."""
MOST_S = 0.01
NEWS = 0.25
"""The mean counts once it differs from what plans are made with by this share: else every request would ask for one."""


def note(core: Core, chain: Chain, flight: InFlight, hops: tuple[Hop, ...]) -> None:
    """Learns from a micro-batch that has just come out of the chain."""
    if flight.prefill or flight.tokens != 1 or not flight.alone or len(hops) != len(chain.stages):
        return
    took_s = core.now - flight.sent_s - sum(hop.compute_s for hop in hops)
    spare_s = (took_s - _links_s(core, chain, flight.tokens)) / (len(hops) + 1)
    for name in chain.stages:
        stage = core.state.stages[name]
        mean = stage.hop_seen
        mean.count += 1
        share = max(WEIGHT, 1.0 / mean.count)
        mean.value_s += share * (min(max(spare_s, 0.0), MOST_S) - mean.value_s)
        known_s = hop_s(core, stage)
        if mean.count >= LEAST_SEEN and abs(mean.value_s - known_s) > NEWS * known_s:
            stage.hop_s = mean.value_s


def hop_s(core: Core, stage: Stage) -> float:
    """What plans count for a hand-over at this stage."""
    return core.config.hop_s if stage.hop_s is None else stage.hop_s


def _links_s(core: Core, chain: Chain, rows: int) -> float:
    """What the probes say of the whole way, the broker's legs included."""
    count = send_bytes(core.shape, core.config.demand, rows)
    first, last = chain.stages[0], chain.stages[-1]
    ways = [(first, BROKER), *pairwise(chain.stages), (last, BROKER)]
    return sum(_link_s(core, way, 0 if BROKER in way else count) for way in ways)


def _link_s(core: Core, way: tuple[StageId, StageId], count: int) -> float:
    timing = core.state.links.get(way)
    return 0.0 if timing is None else Link(timing.rtt_s / 2, timing.bytes_per_s).send_s(count)
