"""What the broker's core does when stages are lost, join, leave or are drained while requests run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tests.sim.core_world import CoreWorld, continuation
from tests.sim.test_broker_core import ask, ends_well

from potluck.broker.config import BrokerConfig
from potluck.broker.draining import draining
from potluck.broker.effects import RequestFailed
from potluck.broker.events import (
    BatchBroke,
    DrainAsked,
    DrainEnded,
    LinkProbed,
    LinkSilent,
    StageBeat,
    StageLeaves,
    StageLeft,
    StageNotPrepared,
)
from potluck.broker.view import snapshot
from potluck.planner.even import plan_even
from potluck.planner.manual import ManualPlanner
from potluck.planner.plan import NO_NETWORK, Candidate, ModelShape, Network, Plan
from potluck.wire.errors import EngineError, OutOfMemoryError, UnavailableError
from potluck.wire.ids import ChainId, DeviceName, Epoch, StageId
from potluck.wire.measures import LinkTiming
from potluck.wire.messages import Holds, StageCounters

PROMPT = (1, 2, 3)
STANDBY = BrokerConfig(slots=4, context_tokens=64, chunk_tokens=8, settle_s=0.5, reserve=("spare",))


def ready(world: CoreWorld) -> None:
    """Whatever is planned, loaded or prepared is done."""
    for _ in range(5):
        while world.load_one() or world.prepare_one():
            pass
        world.wait(1.0)


def layers(world: CoreWorld, stage: StageId) -> tuple[int, int] | None:
    """What the stage serves now."""
    at = world.core.state.stages[stage].place
    return None if at is None else (at.first, at.end)


def run(world: CoreWorld, count: int) -> None:
    """So many micro-batches come out of the first chain."""
    for _ in range(count):
        assert any(world.move_one(chain) for chain in list(world.chains))


def in_pairs(model: ModelShape, candidates: Sequence[Candidate], network: Network = NO_NETWORK) -> Plan:
    """A chain of every two devices, in the order of their names; a device left over is a spare."""
    named = sorted(candidates, key=lambda candidate: candidate.device)
    pairs = [named[at : at + 2] for at in range(0, len(named) - 1, 2)] or [named]
    return Plan(tuple(plan_even(model, pair).chains[0] for pair in pairs))


def one_each(model: ModelShape, candidates: Sequence[Candidate], network: Network = NO_NETWORK) -> Plan:
    """Every device serves alone."""
    named = sorted(candidates, key=lambda candidate: candidate.device)
    return Plan(tuple(plan_even(model, [one]).chains[0] for one in named))


def test_spare_that_holds_the_layers_takes_over_and_the_others_keep_theirs() -> None:
    world = CoreWorld(STANDBY)
    a, b, spare = world.start("a", "b", "spare")
    ready(world)
    assert layers(world, spare) is None
    request = ask(world, "r", PROMPT, limit=9)
    run(world, 4)
    kept = layers(world, a)
    world.lose(b)
    assert (layers(world, a), layers(world, spare)) == (kept, (6, 12))
    world.settle()
    assert tuple(world.tokens[request]) == continuation(PROMPT, 9)


def test_spare_is_told_to_hold_what_each_stage_serves() -> None:
    world = CoreWorld(STANDBY)
    _, _, spare = world.start("a", "b", "spare")
    ready(world)
    assert [(s.first, s.end) for s in world.prepares[spare].slices] == [(0, 6), (6, 12)]
    view = next(s for s in snapshot(world.core, world.now, 0.0).stages if s.stage == spare)
    assert view.detail == "standby: layers 0-5, 6-11"
    losses = {s.device: s.if_lost for s in snapshot(world.core, world.now, 0.0).stages}
    assert losses["a"] == "If a is lost, spare takes over at once."


def test_what_a_stage_holds_is_shown_as_its_last_beat_said_in_whatever_epoch() -> None:
    world = CoreWorld(STANDBY)
    _, _, spare = world.start("a", "b", "spare")
    ready(world)
    said = Holds(slices=2, memory_bytes=60)
    world.feed(StageBeat(cause=spare, stage=spare, epoch=Epoch(0), counters=StageCounters(), holds=said))
    world.feed(StageBeat(cause=spare, stage=spare, epoch=Epoch(0)))
    (view,) = (s for s in snapshot(world.core, world.now, 0.0).stages if s.stage == spare)
    assert view.holds == said


def test_what_is_kept_for_the_next_loss_is_loaded_only_after_streams_have_gone_on() -> None:
    world = CoreWorld()
    _, b, _ = world.start("a", "b", "c")
    ready(world)
    request = ask(world, "r", PROMPT, limit=30)
    run(world, 12)
    said = len(world.tokens[request])
    world.lose(b)
    while world.load_one():
        pass
    world.prepares.clear()
    world.wait(2.0)
    assert not world.prepares
    while len(world.tokens[request]) == said:
        run(world, 1)
    world.wait(2.0)
    assert world.prepares


def test_layers_given_by_hand_are_taken_over_by_nobody() -> None:
    config = BrokerConfig(slots=4, context_tokens=64, chunk_tokens=8, settle_s=0.5, by_hand=True)
    planner = ManualPlanner({"a": (0, 5), "b": (6, 11)}, config.demand)
    world = CoreWorld(config, planner=planner)
    a, b, spare = world.start("a", "b", "spare")
    ready(world)
    assert not world.prepares
    request = ask(world, "r", PROMPT, limit=9)
    run(world, 3)
    world.lose(b)
    ready(world)
    assert (layers(world, a), layers(world, spare)) == (None, None)
    world.join("b", start=2)
    ready(world)
    world.settle()
    assert tuple(world.tokens[request]) == continuation(PROMPT, 9)


def test_spare_that_joins_later_is_told_to_hold_what_neighbours_held_before() -> None:
    world = CoreWorld(STANDBY)
    a, b = world.start("a", "b")
    ready(world)
    assert [(s.first, s.end) for s in world.prepares[a].slices] == [(0, 12)]
    spare = world.join("spare")
    ready(world)
    assert [(s.first, s.end) for s in world.prepares[spare].slices] == [(0, 6), (6, 12)]
    assert not world.prepares[a].slices
    assert not world.prepares[b].slices


def test_without_a_spare_a_neighbour_holds_the_layers_of_both_and_takes_over() -> None:
    world = CoreWorld()
    a, b, c = world.start("a", "b", "c")
    ready(world)
    request = ask(world, "r", PROMPT, limit=9)
    run(world, 3)
    world.lose(b)
    served = {layers(world, a), layers(world, c)}
    assert served in ({(0, 8), (8, 12)}, {(0, 4), (4, 12)})
    before = len(world.loading)
    assert before == 2
    world.settle()
    assert tuple(world.tokens[request]) == continuation(PROMPT, 9)


def test_standby_that_is_off_keeps_nothing_loaded_and_says_what_a_loss_costs() -> None:
    world = CoreWorld(BrokerConfig(slots=4, context_tokens=64, chunk_tokens=8, settle_s=0.5, standby=False))
    a, b = world.start("a", "b")
    ready(world)
    assert not world.prepares
    assert "after loading" in world.core.core.losses[a]
    request = ask(world, "r", PROMPT, limit=4)
    run(world, 1)
    world.lose(b)
    world.settle()
    assert layers(world, a) == (0, 12)
    assert tuple(world.tokens[request]) == continuation(PROMPT, 4)


def test_a_spare_with_room_for_one_slice_holds_one() -> None:
    config = BrokerConfig(slots=4, context_tokens=64, chunk_tokens=8, settle_s=0.5, reserve=("spare",))
    world = CoreWorld(config)
    world.join("a", offers=700)
    world.join("b", offers=700)
    spare = world.join("spare", offers=700)
    world.wait(1)
    ready(world)
    assert len(world.prepares[spare].slices) == 1


def test_chain_that_lost_nobody_goes_on_undisturbed() -> None:
    world = CoreWorld(planner=in_pairs)
    a, b, c, d = world.start("a", "b", "c", "d")
    ready(world)
    first, second = (world.core.state.chains[ChainId(n)] for n in (0, 1))
    requests = [ask(world, f"r{n}", (n, 2, 3), limit=9) for n in range(4)]
    run(world, 4)
    flights, epoch = dict(first.in_flight), first.epoch
    assert flights
    world.lose(d)
    assert world.core.state.chains[first.chain] is first
    assert first.epoch == epoch
    assert flights.items() <= first.in_flight.items()
    assert second not in world.core.state.chains.values()
    assert world.core.state.stages[a].epoch == world.core.state.stages[b].epoch == epoch
    assert world.core.state.stages[c].epoch > epoch
    world.settle()
    for n, request in enumerate(requests):
        assert tuple(world.tokens[request]) == continuation((n, 2, 3), 9)


def test_two_stages_lost_one_right_after_the_other_lose_no_token() -> None:
    world = CoreWorld()
    _, b, c, _ = world.start("a", "b", "c", "d")
    ready(world)
    requests = [ask(world, f"r{n}", (n, 2, 3), limit=9) for n in range(3)]
    run(world, 5)
    world.lose(b)
    world.lose(c)
    world.settle()
    for n, request in enumerate(requests):
        assert tuple(world.tokens[request]) == continuation((n, 2, 3), 9)


def test_stage_that_joins_is_taken_up_while_a_request_runs_once_it_holds_its_layers() -> None:
    world = CoreWorld()
    (a,) = world.start("a")
    ready(world)
    request = ask(world, "r", PROMPT, limit=40)
    late = world.join("late")
    world.wait(2)
    run(world, 3)
    assert layers(world, a) == (0, 12), "what serves goes on while others load"
    said = len(world.tokens[request])
    while world.prepare_one():
        pass
    assert {layers(world, a), layers(world, late)} == {(0, 6), (6, 12)}
    world.settle()
    assert said > 0
    assert tuple(world.tokens[request]) == continuation(PROMPT, 40)


def test_stage_that_joins_waits_for_the_end_of_requests_where_memory_holds_no_second_slice() -> None:
    world = CoreWorld()
    a = world.join("a", offers=1300)
    world.wait(1)
    ready(world)
    request = ask(world, "r", PROMPT, limit=5)
    late = world.join("late", offers=1300)
    world.wait(2)
    world.prepare_one()
    assert layers(world, late) is None
    world.settle()
    ends_well(world, request)
    ready(world)
    assert {layers(world, a), layers(world, late)} == {(0, 6), (6, 12)}


def test_spare_that_joins_without_a_gain_disturbs_nobody() -> None:
    world = CoreWorld(STANDBY)
    a, b = world.start("a", "b")
    ready(world)
    epoch = world.core.state.epoch
    world.join("spare")
    ready(world)
    assert world.core.state.epoch == epoch
    assert {layers(world, a), layers(world, b)} == {(0, 6), (6, 12)}


def test_device_that_is_drained_gives_its_work_away_while_requests_run() -> None:
    world = CoreWorld()
    a, b, c = world.start("a", "b", "c")
    ready(world)
    request = ask(world, "r", PROMPT, limit=40)
    run(world, 3)
    world.feed(DrainAsked(cause="test", device=DeviceName("b")))
    ready(world)
    assert layers(world, b) is None
    assert draining(world.core.core, DeviceName("b")).done
    view = next(s for s in snapshot(world.core, world.now, 0.0).stages if s.stage == b)
    assert view.state == "drained"
    world.settle()
    assert tuple(world.tokens[request]) == continuation(PROMPT, 40)
    assert b in world.core.state.stages
    ready(world)
    assert layers(world, b) is None, "it stays without work"
    world.feed(DrainEnded(cause="test", device=DeviceName("b")))
    ready(world)
    assert layers(world, b) is not None
    assert layers(world, a) is not None
    assert layers(world, c) is not None


def test_stage_that_wants_to_leave_may_go_once_others_serve_its_layers() -> None:
    world = CoreWorld(BrokerConfig(slots=4, context_tokens=64, chunk_tokens=8, settle_s=0.5, standby=False))
    _, b, _ = world.start("a", "b", "c")
    ready(world)
    request = ask(world, "r", PROMPT, limit=30)
    run(world, 3)
    world.feed(StageLeaves(cause="b", stage=b, reason="SIGTERM"))
    assert b not in world.let_go
    ready(world)
    assert b in world.let_go
    assert b not in world.core.state.stages
    world.settle()
    assert tuple(world.tokens[request]) == continuation(PROMPT, 30)


def test_spare_that_wants_to_leave_goes_at_once() -> None:
    world = CoreWorld(STANDBY)
    *_, spare = world.start("a", "b", "spare")
    ready(world)
    world.feed(StageLeaves(cause="spare", stage=spare, reason="SIGTERM"))
    assert world.let_go == [spare]


def test_only_stage_that_wants_to_leave_finishes_what_runs_and_takes_nothing_new() -> None:
    world = CoreWorld()
    (a,) = world.start("a")
    ready(world)
    request = ask(world, "r", PROMPT, limit=9)
    run(world, 2)
    world.feed(StageLeaves(cause="a", stage=a, reason="SIGTERM"))
    late = ask(world, "late", PROMPT, limit=9)
    end = world.ends[late]
    assert isinstance(end, RequestFailed)
    assert isinstance(end.error, UnavailableError)
    assert a not in world.let_go
    world.settle()
    assert tuple(world.tokens[request]) == continuation(PROMPT, 9)
    assert a in world.let_go


def test_nothing_is_planned_with_when_all_devices_are_drained() -> None:
    world = CoreWorld()
    world.start("a", "b")
    ready(world)
    request = ask(world, "r", PROMPT, limit=9)
    for name in "abc":
        world.feed(DrainAsked(cause="test", device=DeviceName(name)))
    world.join("c")
    ready(world)
    world.settle()
    assert tuple(world.tokens[request]) == continuation(PROMPT, 9)
    ready(world)
    assert not world.core.state.ready


def test_stage_lost_while_a_better_plan_is_prepared_ends_that_plan_and_nothing_else() -> None:
    world = CoreWorld()
    (a,) = world.start("a")
    ready(world)
    request = ask(world, "r", PROMPT, limit=20)
    late = world.join("late")
    world.wait(2)
    run(world, 2)
    assert world.core.core.move is not None
    world.lose(late)
    assert world.core.core.move is None or late not in world.core.core.move.slices
    ready(world)
    world.settle()
    assert layers(world, a) == (0, 12)
    assert tuple(world.tokens[request]) == continuation(PROMPT, 20)


def test_better_plan_that_a_stage_can_not_load_is_given_up_and_not_tried_again() -> None:
    world = CoreWorld()
    (a,) = world.start("a")
    ready(world)
    late = world.join("late")
    world.wait(2)
    stage = world.core.state.stages[late]
    error = OutOfMemoryError("2 GB are needed, 1 GB is free.", device="late", stage=late)
    world.feed(StageNotPrepared(cause="late", stage=late, number=stage.prepare, index=0, error=error))
    assert world.core.core.move is None
    ready(world)
    assert layers(world, a) == (0, 12)
    assert world.core.core.move is None


def test_better_plan_whose_stages_make_no_progress_is_given_up_in_the_end() -> None:
    world = CoreWorld(BrokerConfig(slots=4, context_tokens=64, settle_s=0.5, load_timeout_s=20.0))
    (a,) = world.start("a")
    ready(world)
    world.join("late")
    world.wait(5)
    assert world.core.core.move is not None
    world.wait(30)
    assert world.core.core.move is None
    assert layers(world, a) == (0, 12)


def stuck(world: CoreWorld) -> None:
    """Nothing comes out of the chain any more, until the broker gives it up."""
    epoch = world.core.state.epoch
    while world.core.state.epoch == epoch:
        world.wait(1.0)


def test_link_that_is_cut_is_avoided_and_the_stage_behind_it_serves_on() -> None:
    world = CoreWorld(BrokerConfig(slots=4, context_tokens=64, chunk_tokens=8, settle_s=0.5))
    a, b, c = world.start("a", "b", "c")
    ready(world)
    request = ask(world, "r", PROMPT, limit=30)
    run(world, 5)
    world.core.state.stages[a].counters = type(world.core.state.stages[a].counters)(batches=10)
    stuck(world)
    assert world.core.state.stages[b].suspect
    number, (sender, _) = next(iter(world.probing.items()))
    assert sender == a
    world.feed(LinkSilent(cause="a", stage=a, number=number))
    assert not world.core.state.stages[b].suspect
    world.settle()
    ready(world)
    world.settle()
    assert tuple(world.tokens[request]) == continuation(PROMPT, 30)
    for chain in world.core.state.chains.values():
        pairs = list(zip(chain.stages, chain.stages[1:], strict=False))
        assert (a, b) not in pairs
    assert c in world.core.state.stages


def test_link_that_was_cut_is_probed_again_until_it_works() -> None:
    world = CoreWorld(BrokerConfig(slots=4, context_tokens=64, chunk_tokens=8, settle_s=0.5))
    a, b, _ = world.start("a", "b", "c")
    ready(world)
    ask(world, "r", PROMPT, limit=30)
    run(world, 5)
    world.core.state.stages[a].counters = type(world.core.state.stages[a].counters)(batches=10)
    stuck(world)
    (number,) = world.probing
    world.feed(LinkSilent(cause="a", stage=a, number=number))
    world.settle()
    ready(world)
    world.probing.clear()
    world.wait(61.0)
    (number,) = world.probing
    assert number > 1
    assert world.core.state.links[a, b] is None
    world.feed(LinkProbed(cause="a", stage=a, number=number, link=LinkTiming(0.001, 0.001, 1e9, 1e9)))
    assert world.core.state.links[a, b] is not None
    world.wait(61.0)
    assert set(world.probing) == {number}, "what works is not probed again"


def test_stage_that_was_stuck_is_forgiven_after_a_while() -> None:
    world = CoreWorld(BrokerConfig(slots=4, context_tokens=64, chunk_tokens=8, settle_s=0.5, forgive_s=100.0))
    a, b = world.start("a", "b")
    ready(world)
    request = ask(world, "r", PROMPT, limit=30)
    run(world, 5)
    world.core.state.stages[a].counters = type(world.core.state.stages[a].counters)(batches=10)
    stuck(world)
    world.settle()
    ends_well(world, request)
    ready(world)
    assert layers(world, b) is None
    world.wait(100.0)
    ask(world, "later", PROMPT, limit=3)
    world.settle()
    ready(world)
    assert layers(world, b) is not None


def test_stage_that_hangs_stays_suspect_when_the_link_to_it_works() -> None:
    world = CoreWorld(BrokerConfig(slots=4, context_tokens=64, chunk_tokens=8, settle_s=0.5))
    a, b, _ = world.start("a", "b", "c")
    ready(world)
    ask(world, "r", PROMPT, limit=30)
    run(world, 5)
    world.core.state.stages[a].counters = type(world.core.state.stages[a].counters)(batches=10)
    stuck(world)
    number, _ = next(iter(world.probing.items()))
    world.feed(LinkProbed(cause="a", stage=a, number=number, link=LinkTiming(0.001, 0.001, 1e9, 1e9)))
    assert world.core.state.stages[b].suspect
    ready(world)
    assert layers(world, b) is None


def test_replay_repeats_the_chunks_of_the_prompt_and_takes_the_answer_in_small_ones() -> None:
    config = BrokerConfig(slots=4, context_tokens=64, chunk_tokens=8, replay_tokens=3, settle_s=0.5)
    world = CoreWorld(config)
    _, b = world.start("a", "b")
    ready(world)
    short, long = ask(world, "s", (5,) * 5, limit=20), ask(world, "l", (6,) * 20, limit=20)
    bounds = set()
    for _ in range(20):
        bounds |= {(span.position, span.tokens) for span in world.chains[ChainId(0)].coming[0].message.spans}
        run(world, 1)
    assert {(0, 5), (0, 8), (8, 8), (16, 4)} <= bounds
    done = {name: len(world.tokens[name]) for name in (short, long)}
    world.lose(b)
    while world.load_one():
        pass
    seen: list[tuple[int, int, int]] = []
    epoch = world.core.state.epoch
    while any(len(world.tokens[name]) == count for name, count in done.items()):
        chain = world.chains[ChainId(0)]
        seen += [(s.slot, s.position, s.tokens) for s in chain.coming[0].message.spans]
        run(world, 1)
    assert epoch == world.core.state.epoch
    prompts = {5: short, 20: long}
    for size, name in prompts.items():
        slot = world.core.state.requests[name].slot
        mine = sorted((position, tokens) for at, position, tokens in seen if at == slot)
        head = [(position, tokens) for position, tokens in mine if position < size]
        assert head == sorted(set(head)), name
        assert set(head) <= bounds
        assert all(tokens <= 3 for position, tokens in mine if position >= size)
    world.settle()
    for size, name in prompts.items():
        assert tuple(world.tokens[name]) == continuation((5 if size == 5 else 6,) * size, 20)


def test_stage_that_serves_is_told_who_keeps_its_layers() -> None:
    world = CoreWorld(STANDBY)
    a, b, spare = world.start("a", "b", "spare")
    ready(world)
    assert world.mirrors == {a: ("tcp://spare:1",), b: ("tcp://spare:1",)}
    world.lose(spare)
    ready(world)
    assert "tcp://spare:1" not in (*world.mirrors[a], *world.mirrors[b])


def test_takeover_with_copies_computes_only_what_came_after_them() -> None:
    world = CoreWorld(STANDBY)
    _, b, spare = world.start("a", "b", "spare")
    ready(world)
    requests = [ask(world, f"r{n}", (n, 2, 3, 4), limit=30) for n in range(3)]
    run(world, 40)
    held = {slot: world.copy(spare, slot) for slot in range(3)}
    run(world, 6)
    sent = {name: world.core.state.requests[name].sent for name in requests}
    before = world.computed
    world.lose(b)
    while world.load_one():
        pass
    assert world.core.state.ready
    while any(world.core.state.requests[name].replaying for name in requests):
        run(world, 1)
    again = world.computed - before
    assert again <= sum(sent.values()) - sum(held.values()) + 6
    assert sum(held.values()) > 30
    world.settle()
    for n, request in enumerate(requests):
        assert tuple(world.tokens[request]) == continuation((n, 2, 3, 4), 30)


def test_last_tokens_that_are_computed_again_are_shared_out_over_the_stages() -> None:
    world = CoreWorld(dataclasses.replace(STANDBY, chunk_tokens=64, replay_tokens=7))
    _, b, spare = world.start("a", "b", "spare")
    ready(world)
    requests = [ask(world, f"r{n}", (n, 2, 3, 4), limit=30) for n in range(4)]
    run(world, 40)
    held = [world.copy(spare, slot) for slot in range(4)]
    run(world, 8)
    world.lose(b)
    while world.load_one():
        pass
    coming = [step.message.spans for step in world.chains[ChainId(0)].coming]
    assert len(coming) == 2, "each of the two stages has a micro-batch"
    rows = [sum(span.tokens for span in spans) for spans in coming]
    assert abs(rows[0] - rows[1]) <= 7, rows
    assert all(span.position >= held[span.slot] for spans in coming for span in spans)
    world.settle()
    for n, request in enumerate(requests):
        assert tuple(world.tokens[request]) == continuation((n, 2, 3, 4), 30)


def test_stage_that_kept_nothing_has_everything_computed_again() -> None:
    world = CoreWorld(STANDBY)
    a, b, spare = world.start("a", "b", "spare")
    ready(world)
    request = ask(world, "r", PROMPT, limit=30)
    run(world, 20)
    world.copy(spare, 0)
    world.forgets.add(a)
    world.lose(b)
    assert world.assigned[a].keep
    world.settle()
    assert tuple(world.tokens[request]) == continuation(PROMPT, 30)


def test_copy_of_a_slot_that_another_request_had_before_is_not_taken_for_the_new_ones() -> None:
    world = CoreWorld(
        BrokerConfig(slots=1, context_tokens=64, chunk_tokens=8, settle_s=0.5, reserve=("spare",))
    )
    a, b, spare = world.start("a", "b", "spare")
    ready(world)
    first = ask(world, "first", (9,) * 20, limit=3)
    run(world, 4)
    world.copy(spare, 0)
    world.settle()
    ends_well(world, first)
    second = ask(world, "second", (7,) * 20, limit=9)
    run(world, 4)
    world.lose(b)
    assert not world.assigned[a].keep
    world.settle()
    assert tuple(world.tokens[second]) == continuation((7,) * 20, 9)


def test_spare_keeps_copies_of_one_chain_where_two_serve_the_same_layers() -> None:
    config = BrokerConfig(slots=2, context_tokens=64, chunk_tokens=8, settle_s=0.5, reserve=("spare",))
    world = CoreWorld(config, planner=one_each)
    a, b, spare = world.start("a", "b", "spare")
    ready(world)
    assert len(world.core.state.chains) == 2
    assert sorted(world.mirrors.get(stage, ()) for stage in (a, b)) == [(), ("tcp://spare:1",)]
    mirrored, other = (a, b) if world.mirrors.get(a) else (b, a)
    of = {chain.stages[0]: chain.chain for chain in world.core.state.chains.values()}
    requests = [ask(world, f"r{n}", (n, 2, 3), limit=30) for n in range(2)]
    for _ in range(20):
        for chain in list(world.chains):
            world.move_one(chain)
    world.copy(spare, 0, of[mirrored])
    world.lose(other)
    assert not world.assigned[spare].keep, "what it holds is of the chain that goes on"
    world.settle()
    for n, request in enumerate(requests):
        assert tuple(world.tokens[request]) == continuation((n, 2, 3), 30)


def test_after_a_micro_batch_that_broke_nothing_is_kept() -> None:
    world = CoreWorld(STANDBY)
    a, b, spare = world.start("a", "b", "spare")
    ready(world)
    request = ask(world, "r", PROMPT, limit=20)
    run(world, 10)
    world.copy(spare, 0)
    chain = world.core.state.chains[ChainId(0)]
    flight = next(iter(chain.in_flight.values()))
    world.feed(
        BatchBroke(cause="b", epoch=chain.epoch, batch=flight.batch, error=EngineError("It broke.", stage=b))
    )
    assert not world.assigned[a].keep
    world.settle()
    assert tuple(world.tokens[request]) == continuation(PROMPT, 20)


def test_chain_broken_by_a_micro_batch_serves_again_with_the_same_stages() -> None:
    world = CoreWorld()
    a, b = world.start("a", "b")
    ready(world)
    request = ask(world, "r", PROMPT, limit=9)
    run(world, 2)
    chain = world.core.state.chains[ChainId(0)]
    flight = next(iter(chain.in_flight.values()))
    world.feed(
        BatchBroke(cause="a", epoch=chain.epoch, batch=flight.batch, error=EngineError("It broke.", stage=a))
    )
    assert (layers(world, a), layers(world, b)) == ((0, 6), (6, 12))
    world.settle()
    assert tuple(world.tokens[request]) == continuation(PROMPT, 9)


def test_stage_that_left_in_order_is_no_error() -> None:
    world = CoreWorld(STANDBY)
    *_, spare = world.start("a", "b", "spare")
    ready(world)
    world.feed(StageLeaves(cause="spare", stage=spare, reason="SIGTERM"))
    world.feed(StageLeft(cause="spare", stage=spare, reason="its connection closed"))
    assert not [report for report in world.reports if report.level in ("warning", "error")]
