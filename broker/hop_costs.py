"""What a hand-over costs besides the link: waking threads whose caches are cold, frames, the broker's own turn. Pure.

Pings can't see it, for they find everything warm. It is seen in service: a decode micro-batch that is alone in its
chain takes what the stages computed, what the links need, and this, once per hop.
"""

from __future__ import annotations

from itertools import pairwise

from potluck.broker.core import Core
from potluck.broker.state import BROKER, Chain, InFlight
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
    if flight.prefill or not flight.alone or len(hops) != len(chain.stages):
        return
    took_s = core.now - flight.sent_s - sum(hop.compute_s for hop in hops)
    spare_s = (took_s - _links_s(core, chain, flight.tokens)) / (len(hops) + 1)
    mean = core.hop_seen
    mean.count += 1
    share = max(WEIGHT, 1.0 / mean.count)
    mean.value_s += share * (min(max(spare_s, 0.0), MOST_S) - mean.value_s)
    if mean.count >= LEAST_SEEN and abs(mean.value_s - core.hop_s) > NEWS * core.hop_s:
        core.hop_s = mean.value_s


def _links_s(core: Core, chain: Chain, rows: int) -> float:
    """What the probes say of the whole way, the broker's legs included."""
    count = send_bytes(core.shape, core.config.demand, rows)
    first, last = chain.stages[0], chain.stages[-1]
    ways = [(first, BROKER), *pairwise(chain.stages), (last, BROKER)]
    return sum(_link_s(core, way, 0 if BROKER in way else count) for way in ways)


def _link_s(core: Core, way: tuple[StageId, StageId], count: int) -> float:
    timing = core.state.links.get(way)
    return 0.0 if timing is None else Link(timing.rtt_s / 2, timing.bytes_per_s).send_s(count)
