"""More than can be served: who is refused, what they are told about when to come back, and who runs out of time."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import example, given
from tests.sim.core_world import CoreWorld, continuation
from tests.sim.test_broker_core import ask, ends_well

from potluck.broker.config import BrokerConfig
from potluck.broker.effects import RequestFailed
from potluck.broker.events import RequestCancelled, StageLeft, StageLoaded, StageProgressed
from potluck.broker.timeouts import SPARE
from potluck.broker.watched import ENDS, Turnover
from potluck.wire.errors import Phase, PotluckError, QueueFullError, RequestTimeoutError, UnavailableError
from potluck.wire.ids import RequestId, StageId

QUEUE = 8


def small(**more: object) -> BrokerConfig:
    """One slot and a short queue."""
    return BrokerConfig(
        slots=1, context_tokens=64, chunk_tokens=8, settle_s=0.5, queue_limit=QUEUE, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def serving(config: BrokerConfig | None = None) -> CoreWorld:
    world = CoreWorld(config or small())
    world.start("a", "b")
    return world


def error_of(world: CoreWorld, request: RequestId) -> PotluckError:
    end = world.ends[request]
    assert isinstance(end, RequestFailed)
    return end.error


def refused(world: CoreWorld, name: str = "refused") -> PotluckError:
    """How a request that comes now is refused."""
    world.ends.pop(RequestId(name), None)
    return error_of(world, ask(world, name))


def fill_queue(world: CoreWorld, first: int = 0) -> None:
    number = first
    while len(world.core.state.waiting) < QUEUE:
        ask(world, f"r{number}", limit=2)
        number += 1


def finish_one(world: CoreWorld, takes_s: float) -> None:
    """The request that runs gets its two tokens within this time."""
    ended = world.core.state.ended
    world.wait(takes_s)
    while world.core.state.ended == ended:
        assert world.move_one()


# ---- a full queue


def test_a_full_queue_refuses_with_429_and_the_wait_that_its_length_and_pace_make() -> None:
    world = serving()
    fill_queue(world)
    for _ in range(5):
        finish_one(world, takes_s=7.0)
    fill_queue(world, first=100)
    error = refused(world)
    assert isinstance(error, QueueFullError)
    assert error.http_status == 429
    assert error.facts["retry_after_s"] == pytest.approx(7.0 * QUEUE, abs=1)
    assert f"Try again in {error.facts['retry_after_s']} s" in error.hint


def test_time_in_which_nobody_waits_does_not_make_the_pace_look_slow() -> None:
    world = serving()
    for number in range(4):  # one an hour, none of which waits
        world.wait(3600.0)
        ask(world, f"lone{number}", limit=2)
        world.settle()
    fill_queue(world)
    for _ in range(3):
        finish_one(world, takes_s=2.0)
    fill_queue(world, first=100)
    assert refused(world).facts["retry_after_s"] == pytest.approx(2.0 * QUEUE, abs=1)


def test_before_any_end_was_seen_the_age_of_what_runs_counts() -> None:
    world = serving()
    fill_queue(world)
    early = refused(world).facts["retry_after_s"]
    assert early == 5 * QUEUE
    world.wait(20.0)
    assert refused(world).facts["retry_after_s"] == pytest.approx(20 * QUEUE, abs=1)
    world.wait(400.0)
    assert refused(world).facts["retry_after_s"] == 600


@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.floats(0, 100)), max_size=60),
)
def test_a_gap_between_ends_is_never_negative_and_its_memory_is_bounded(
    steps: list[tuple[int, int, float]],
) -> None:
    turnover, freed, now = Turnover(), 0, 0.0
    for ends, waiting, passed in steps:
        freed, now = freed + ends, now + passed
        turnover.note(freed, waiting, now)
        gap = turnover.gap_s(now)
        assert gap is None or gap >= 0.0
        assert len(turnover.gaps_s) <= ENDS


# ---- nothing serves yet


def load(world: CoreWorld, stage: StageId, load_s: float) -> None:
    epoch = next(epoch for name, epoch in world.loading if name == stage)
    world.feed(StageLoaded(cause=stage, stage=stage, epoch=epoch, load_s=load_s, weights_bytes=1))


def progress(world: CoreWorld, stage: StageId, phase: Phase, share: float) -> None:
    epoch = next(epoch for name, epoch in world.loading if name == stage)
    world.feed(StageProgressed(cause=stage, stage=stage, epoch=epoch, detail="", phase=phase, share=share))


def loading(world: CoreWorld, *names: str) -> list[StageId]:
    stages = [world.join(name) for name in names]
    world.wait(1.0)
    assert len(world.loading) == len(names)
    return stages


def retry_after(world: CoreWorld) -> float:
    error = refused(world)
    assert isinstance(error, UnavailableError)
    assert error.http_status == 503
    after = error.facts["retry_after_s"]
    assert isinstance(after, int)
    assert world.core.retry_after_s == after
    return after


def test_a_load_of_which_a_quarter_is_done_takes_three_times_as_long_again() -> None:
    world = CoreWorld(small())
    (a,) = loading(world, "a")
    progress(world, a, Phase.LOAD, 0.0)
    world.wait(10.0)
    progress(world, a, Phase.LOAD, 0.25)
    assert retry_after(world) == 30
    world.wait(12.0)
    assert retry_after(world) == 18


def test_the_slowest_of_two_loads_counts() -> None:
    world = CoreWorld(small())
    a, b = loading(world, "a", "b")
    for stage in (a, b):
        progress(world, stage, Phase.LOAD, 0.0)
    world.wait(10.0)
    progress(world, a, Phase.LOAD, 0.9)
    progress(world, b, Phase.LOAD, 0.1)
    assert retry_after(world) == 90
    load(world, b, 1.0)
    assert retry_after(world) == 2


def test_without_progress_the_loads_before_say_how_long_this_one_takes() -> None:
    world = CoreWorld(small())
    a, b = loading(world, "a", "b")
    for stage in (a, b):
        load(world, stage, 60.0)
    assert world.core.state.ready
    assert world.core.retry_after_s == 0.0
    world.loading.clear()
    world.alive.discard(b)
    world.feed(StageLeft(cause="test", stage=b, reason="its machine was switched off"))
    assert retry_after(world) == 120  # twice the layers on a device that took 60 s for half of them
    world.wait(50.0)
    assert retry_after(world) == 70


def test_a_load_that_takes_longer_than_ever_is_given_as_long_again() -> None:
    world = CoreWorld(small())
    loading(world, "a")
    assert retry_after(world) <= 10
    world.wait(60.0)
    assert 30 <= retry_after(world) <= 61


def test_without_stages_somebody_has_to_act_and_the_answer_is_the_same_every_time() -> None:
    world = CoreWorld(small())
    assert retry_after(world) == 30


@example([(Phase.SLICE, 0.0, 0.0), (Phase.SLICE, 1.1125369292536007e-308, 2.0)])
@given(
    shares=st.lists(
        st.tuples(st.sampled_from([Phase.SLICE, Phase.LOAD]), st.floats(0, 1), st.floats(0, 2000)),
        max_size=12,
    )
)
def test_whatever_progress_says_the_wait_is_between_a_second_and_ten_minutes(
    shares: list[tuple[Phase, float, float]],
) -> None:
    world = CoreWorld(small(load_timeout_s=1e9))
    (a,) = loading(world, "a")
    for phase, share, passed in shares:
        world.now += passed
        progress(world, a, phase, share)
        assert 1 <= retry_after(world) <= 600


# ---- a request's own time


def test_a_request_that_is_not_finished_in_its_time_fails_and_its_slot_serves_the_next() -> None:
    world = serving()
    slow, behind = ask(world, "slow", limit=9, timeout_s=5.0), ask(world, "behind", limit=4)
    for _ in range(4):
        world.move_one()
    world.wait(4.9)
    assert not world.ends
    world.wait(0.2)
    error = error_of(world, slow)
    assert isinstance(error, RequestTimeoutError)
    assert error.http_status == 504
    assert "within 5 s" in error.what
    assert f"{len(world.tokens[slow])} of up to 9 tokens" in error.what
    world.settle()
    ends_well(world, behind)
    assert tuple(world.tokens[behind]) == continuation((1, 2, 3), 4)


def test_a_request_that_waits_for_a_slot_runs_out_of_time_there() -> None:
    world = serving()
    runs, waits = ask(world, "runs", limit=3), ask(world, "waits", timeout_s=1.0)
    world.wait(1.5)
    assert "it waited for a slot" in error_of(world, waits).what
    assert error_of(world, waits).phase is Phase.SUBMIT
    world.settle()
    ends_well(world, runs)


def test_a_request_whose_chain_is_lost_is_told_what_is_missing_when_its_time_is_over() -> None:
    world = serving()
    waits = ask(world, "waits", timeout_s=20.0)
    for stage in sorted(world.alive):
        world.feed(StageLeft(cause="test", stage=stage, reason="it was switched off"))
    world.alive.clear()
    world.wait(30.0)
    assert "no chain serves" in error_of(world, waits).what
    assert "it was switched off" in error_of(world, waits).what


def test_the_brokers_default_holds_for_those_that_name_no_time() -> None:
    world = serving(small(request_timeout_s=10.0))
    patient, other = ask(world, "patient", timeout_s=30.0), ask(world, "other")
    world.wait(11.0)
    assert isinstance(error_of(world, other), RequestTimeoutError)
    assert patient not in world.ends
    world.wait(20.0)
    assert isinstance(error_of(world, patient), RequestTimeoutError)


def test_a_name_that_is_used_again_does_not_inherit_the_time_of_the_request_before() -> None:
    world = serving()
    ask(world, "same", timeout_s=5.0)
    world.feed(RequestCancelled(cause="client", request=RequestId("same")))
    del world.ends[RequestId("same")]
    world.wait(2.0)
    ask(world, "same", timeout_s=5.0)
    world.wait(4.0)
    assert RequestId("same") not in world.ends
    world.wait(2.0)
    assert isinstance(error_of(world, RequestId("same")), RequestTimeoutError)


def test_requests_that_end_in_time_leave_nothing_behind() -> None:
    world = serving()
    for number in range(20 * SPARE):
        ask(world, f"r{number}", limit=1, timeout_s=86_400.0)
        world.feed(RequestCancelled(cause="client", request=RequestId(f"r{number}")))
        assert len(world.core.state.due) <= SPARE + 3


def test_a_queue_of_none_serves_whoever_gets_a_slot_at_once() -> None:
    world = CoreWorld(BrokerConfig(slots=1, context_tokens=64, chunk_tokens=8, settle_s=0.5, queue_limit=0))
    world.start("a", "b")
    first = ask(world, "first", limit=2)
    assert first not in world.ends
    error = refused(world)
    assert isinstance(error, QueueFullError)
    assert "no request may wait" in error.what
    finish_one(world, 1.0)
    assert ends_well(world, first)
    second = ask(world, "second", limit=2)
    finish_one(world, 1.0)
    assert ends_well(world, second)
