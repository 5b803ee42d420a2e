"""What the broker's core does with measurements: when it asks, what it waits for, and what it then plans with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from potluck.broker.config import BrokerConfig
from potluck.broker.events import (
    LinkProbed,
    LinkSilent,
    RequestSubmitted,
    StageBeat,
    StageLeft,
    StageMeasured,
    StageNotMeasured,
    StageProgressed,
)
from potluck.broker.planning_view import plan_view
from potluck.broker.state import StageStatus
from potluck.planner.even import plan_even
from potluck.planner.plan import Candidate, ChainPlan, ModelShape, Network, Plan
from potluck.wire.errors import EngineError
from potluck.wire.ids import RequestId, StageId
from potluck.wire.measures import LinkTiming, Profile, Speed, Timing
from potluck.wire.messages import Hop, PlanQuery, StageCounters
from potluck.wire.sampling import GREEDY
from sim.core_world import MODEL, CoreWorld

CONFIG = BrokerConfig(
    slots=4,
    context_tokens=64,
    chunk_tokens=8,
    settle_s=0.5,
    queue_limit=50,
    measure=True,
    hop_s=0.0,
    drift_window_s=10.0,
)


def profile(layer_s: float = 0.001) -> Profile:
    """A device that takes `layer_s` for a layer, whatever the batch."""
    timings = (Timing(1, 0, layer_s),)
    return Profile(MODEL.fingerprint, cpu=Speed(decode=timings, prefill=timings, layer_bytes=100))


@dataclass
class Listening:
    """Plans evenly, and remembers what it was given."""

    seen: list[tuple[tuple[Candidate, ...], Network]] = field(default_factory=list)

    def __call__(self, model: ModelShape, candidates: Sequence[Candidate], network: Network) -> Plan:
        self.seen.append((tuple(candidates), network))
        return plan_even(model, candidates, network)


class World(CoreWorld):
    def __init__(self, config: BrokerConfig = CONFIG) -> None:
        self.planner = Listening()
        super().__init__(config, self.planner)

    def measure_one(self, layer_s: float = 0.001) -> None:
        stage, _ = self.measuring.popleft()
        self.feed(StageMeasured(cause=stage, stage=stage, profile=profile(layer_s)))

    def answer_probe(self, number: int, rtt_s: float = 0.001) -> None:
        stage, _ = self.probing.pop(number)
        self.feed(
            LinkProbed(cause=stage, stage=stage, number=number, link=LinkTiming(rtt_s, rtt_s, 1e8, 1e8))
        )

    def measure_all(self) -> None:
        while self.measuring or self.probing:
            if self.measuring:
                self.measure_one()
            else:
                self.answer_probe(min(self.probing))

    def ready(self, *names: str) -> list[StageId]:
        stages = [self.join(name) for name in names]
        self.measure_all()
        self.wait(1.0)
        while self.load_one():
            pass
        assert self.core.state.ready
        return stages


def test_a_stage_that_joins_is_measured_before_anything_is_planned():
    world = World()
    world.join("a")
    world.wait(30.0)
    assert not world.planner.seen
    assert world.core.state.stages[StageId("a/1")].status is StageStatus.MEASURING
    assert "Measuring: a" in world.core.missing
    world.measure_all()
    world.wait(1.0)
    candidates, _ = world.planner.seen[0]
    assert candidates[0].profile == profile()


def test_a_question_that_was_lost_is_asked_again():
    world = World()
    a = world.join("a")
    world.measuring.clear()
    world.wait(CONFIG.lost_after_s + CONFIG.heartbeat_s)
    world.feed(StageBeat(cause=a, stage=a, epoch=world.core.state.epoch, counters=StageCounters()))
    assert world.measuring


def test_both_directions_of_every_link_and_the_way_to_the_broker_are_probed_once():
    world = World()
    for name in ("a", "b", "c"):
        world.join(name)
    pairs = []
    while world.measuring:
        world.measure_one()
    while world.probing:
        number = min(world.probing)
        stage, probe = world.probing[number]
        pairs.append((stage, probe.endpoint))
        world.answer_probe(number)
    ends = {"a/1": "tcp://a:1", "b/1": "tcp://b:1", "c/1": "tcp://c:1"}
    wanted = {(stage, end) for stage in ends for other, end in ends.items() if other != stage}
    wanted |= {(stage, "tcp://broker:7947") for stage in ends}
    assert sorted(pairs) == sorted(wanted)


@given(st.data())
def test_two_probes_never_share_a_device(data: st.DataObject):
    world = World()
    for name in "abcde":
        world.join(name)
    while world.measuring or world.probing:
        ends = [
            end
            for stage, probe in world.probing.values()
            for end in (f"tcp://{stage.removesuffix('/1')}:1", probe.endpoint)
        ]
        assert len(ends) == len(set(ends))
        if world.measuring and (not world.probing or data.draw(st.booleans())):
            world.measure_one()
        else:
            world.answer_probe(data.draw(st.sampled_from(sorted(world.probing))))
    assert len(world.core.state.links) == 5 * 5


def test_a_link_without_an_answer_is_cut_for_the_planner():
    world = World()
    world.join("a")
    world.join("b")
    while world.measuring:
        world.measure_one()
    while world.probing:
        number = min(world.probing)
        stage, probe = world.probing.pop(number)
        if (stage, probe.endpoint) == ("a/1", "tcp://b:1"):
            world.feed(LinkSilent(cause=stage, stage=stage, number=number))
        else:
            world.probing[number] = (stage, probe)
            world.answer_probe(number)
    world.wait(1.0)
    _, network = world.planner.seen[-1]
    assert network.link(StageId("a/1"), StageId("b/1")).one_way_s == inf
    assert network.link(StageId("b/1"), StageId("a/1")).one_way_s == 0.0005
    assert any("no answer" in report.text for report in world.reports)


def test_a_stage_that_can_not_be_measured_does_not_hold_up_the_others():
    world = World()
    a, b = world.join("a"), world.join("b")
    world.measuring.clear()
    world.feed(StageMeasured(cause=a, stage=a, profile=profile()))
    world.feed(StageNotMeasured(cause=b, stage=b, error=EngineError("No.")))
    world.measure_all()
    world.wait(1.0)
    candidates, _ = world.planner.seen[-1]
    assert [(c.device, c.profile is None) for c in candidates] == [("a", False), ("b", True)]


def test_measuring_without_progress_ends_and_with_progress_goes_on():
    world = World()
    a = world.join("a")
    world.wait(CONFIG.measure_timeout_s - 1)
    world.feed(StageProgressed(cause=a, stage=a, epoch=world.core.state.epoch, detail="measure 10 %"))
    world.wait(CONFIG.measure_timeout_s - 1)
    assert world.core.state.stages[a].status is StageStatus.MEASURING
    world.wait(2.0)
    assert world.core.state.stages[a].status is not StageStatus.MEASURING
    assert world.planner.seen
    told = next(report.text for report in world.reports if "made no progress" in report.text)
    assert "[device a, stage a/1, phase measure] Look at its log" in told


def test_a_probe_that_never_ends_counts_as_a_cut_link():
    world = World()
    world.join("a")
    world.measure_one()
    assert world.probing
    world.wait(CONFIG.probe_timeout_s + 1.0)
    assert world.core.state.links == {(StageId("a/1"), StageId("")): None}


def test_the_links_of_a_stage_that_left_are_forgotten_and_its_probes_too():
    world = World()
    a, b = world.ready("a", "b")
    world.feed(StageLeft(cause=b, stage=b, reason="it left"))
    assert set(world.core.state.links) == {(a, StageId(""))}
    c = world.join("c")
    world.measure_one()
    assert world.core.state.probes
    world.feed(StageLeft(cause=c, stage=c, reason="it left"))
    assert not world.core.state.probes


def test_a_chain_that_lost_a_stage_does_not_wait_for_one_that_is_measured():
    world = World()
    _, b = world.ready("a", "b")
    world.join("c")
    epoch = world.core.state.epoch
    world.feed(StageLeft(cause=b, stage=b, reason="it left"))
    assert world.core.state.epoch == epoch + 1
    (chain,) = world.core.state.chains.values()
    assert [place.device for place in chain.plan.stages] == ["a"]


def test_a_spare_makes_no_plan_again_and_again_while_nothing_changes():
    world = World(replace(CONFIG, users=1))
    world.planner.__class__ = OneOnly
    world.ready("a", "b")
    plans = len(world.planner.seen)
    for index in range(5):
        name = RequestId(f"r{index}")
        world.feed(RequestSubmitted(cause="c", request=name, tokens=(1, 2), max_tokens=2, sampling=GREEDY))
        world.settle()
        world.wait(2.0)
    assert len(world.planner.seen) <= plans + 1


class OneOnly(Listening):
    """Takes the first candidate alone."""

    def __call__(self, model: ModelShape, candidates: Sequence[Candidate], network: Network) -> Plan:
        super().__call__(model, candidates, network)
        return plan_even(model, sorted(candidates, key=lambda c: c.stage)[:1], network)


class OnePerChain(Listening):
    """Every candidate is a chain of its own, meant for as many users as its name's length."""

    def __call__(self, model: ModelShape, candidates: Sequence[Candidate], network: Network) -> Plan:
        chains = []
        for candidate in candidates:
            chain = plan_even(model, [candidate]).chains[0]
            chains.append(ChainPlan(chain.stages, chain.layers, users=len(candidate.device)))
        return Plan(tuple(chains))


def test_requests_are_shared_out_over_the_chains_as_they_were_planned():
    world = World()
    world.planner.__class__ = OnePerChain
    world.ready("aaa", "b")
    for index in range(4):
        world.feed(
            RequestSubmitted(
                cause="c", request=RequestId(f"r{index}"), tokens=(1, 2), max_tokens=2, sampling=GREEDY
            )
        )
    running = {
        chain.stages[0]: sum(owner is not None for owner in chain.slots)
        for chain in world.core.state.chains.values()
    }
    assert running == {"aaa/1": 3, "b/1": 1}


def test_the_plan_in_force_is_told_with_its_forecast_and_links():
    world = World()
    world.ready("a", "b")
    view = plan_view(world.core.core, PlanQuery(users=(1, 2)))
    assert view.forecast is not None
    assert [forecast.users for forecast in view.at] == [1, 2]
    # 12 layers of 1 ms, a link of 0.5 ms and 8 values of 4 bytes, and the broker's two legs of 0.5 ms
    assert abs(view.at[0].token_s - 0.0135) < 1e-5
    assert {(link.sender, link.receiver) for link in view.links} == {
        ("a", "b"),
        ("b", "a"),
        ("a", ""),
        ("b", ""),
    }


def test_what_a_hand_over_costs_is_learned_from_micro_batches_that_travel_alone():
    world = World(replace(CONFIG, context_tokens=200, hop_s=0.002))
    (a,) = world.ready("a")
    assert world.core.state.stages[a].hop_s is None
    name = RequestId("r")
    world.feed(
        RequestSubmitted(
            cause="c", request=name, tokens=(1, 2), max_tokens=80, sampling=GREEDY, ignore_eos=True
        )
    )
    while name not in world.ends:
        world.now += 0.005  # 3 ms of computing, 1 ms for the broker's link there and back, and the rest
        world.move_one(hops=(Hop(0, 0.003, 0.0, 0),))
    assert abs((world.core.state.stages[a].hop_s or 0.0) - 0.0005) < 1e-6
    view = plan_view(world.core.core, PlanQuery(users=(1,)))
    assert abs(view.at[0].token_s - (12 * 0.001 + 2 * (0.0005 + 0.0005))) < 1e-6
