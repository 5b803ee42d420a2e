"""A broker that is told to end: what it still does, what it refuses, and when it is done."""

from __future__ import annotations

from tests.sim.core_world import CoreWorld, continuation
from tests.sim.test_broker_core import ask, ends_well

from potluck.broker.config import BrokerConfig
from potluck.broker.effects import RequestFailed
from potluck.broker.events import CloseAsked, RequestCancelled
from potluck.wire.errors import ClosingError
from potluck.wire.ids import RequestId

ONE_SLOT = BrokerConfig(slots=1, context_tokens=64, chunk_tokens=8, settle_s=0.5, drain_timeout_s=20.0)


def serving(config: BrokerConfig = ONE_SLOT) -> CoreWorld:
    world = CoreWorld(config)
    world.start("a", "b")
    return world


def close(world: CoreWorld) -> None:
    world.feed(CloseAsked(cause="SIGINT"))


def closing_error(world: CoreWorld, request: RequestId) -> ClosingError:
    end = world.ends[request]
    assert isinstance(end, RequestFailed)
    assert isinstance(end.error, ClosingError)
    return end.error


def test_an_idle_broker_is_closed_at_once() -> None:
    world = serving()
    close(world)
    assert world.closed == 1
    assert world.core.next_deadline() is None or world.core.next_deadline() != world.now


def test_what_runs_and_what_waits_is_finished_before_the_broker_is_closed() -> None:
    world = serving()
    runs, waits = ask(world, "runs", limit=5), ask(world, "waits", limit=5)
    close(world)
    assert world.closed == 0
    assert "1 request is running, 1 waits; Ctrl-C again ends them" in world.reports[-1].text
    world.settle()
    for request in (runs, waits):
        ends_well(world, request)
        assert tuple(world.tokens[request]) == continuation((1, 2, 3), 5)
    assert world.closed == 1


def test_a_request_that_comes_while_it_closes_is_refused_and_told_when_to_come_back() -> None:
    world = serving()
    ask(world, "runs")
    close(world)
    error = closing_error(world, ask(world, "late"))
    assert error.http_status == 503
    assert "closing" in error.what
    assert error.facts["retry_after_s"] == 25
    world.wait(15.0)
    assert closing_error(world, ask(world, "later")).facts["retry_after_s"] == 10


def test_asked_again_it_ends_everything_at_once() -> None:
    world = serving()
    runs, waits = ask(world, "runs"), ask(world, "waits")
    close(world)
    close(world)
    for request in (runs, waits):
        assert "ended the request before it was done" in closing_error(world, request).what
    assert world.closed == 1
    close(world)
    assert world.closed == 1
    world.settle()  # what is still on its way through the chain harms nothing


def test_what_is_not_done_in_time_ends_with_an_error() -> None:
    world = serving()
    runs = ask(world, "runs")
    close(world)
    world.wait(19.0)
    assert not world.ends
    world.wait(2.0)
    closing_error(world, runs)
    assert world.closed == 1


def test_a_drain_time_of_nothing_ends_everything_as_soon_as_time_passes() -> None:
    world = serving(BrokerConfig(slots=1, context_tokens=64, settle_s=0.5, drain_timeout_s=0.0))
    runs = ask(world, "runs")
    close(world)
    world.wait(0.0)
    closing_error(world, runs)
    assert world.closed == 1


def test_a_stage_lost_while_it_closes_is_replaced_and_the_request_goes_on() -> None:
    world = serving()
    runs = ask(world, "runs", limit=6)
    for _ in range(3):
        world.move_one()
    close(world)
    world.alive.discard(min(world.alive))
    world.wait(world.config.lost_after_s + 1.5)
    world.settle()
    assert tuple(world.tokens[runs]) == continuation((1, 2, 3), 6)
    assert world.closed == 1


def test_the_last_client_that_leaves_closes_it() -> None:
    world = serving()
    ask(world, "runs")
    close(world)
    world.feed(RequestCancelled(cause="client", request=RequestId("runs")))
    assert world.closed == 1
