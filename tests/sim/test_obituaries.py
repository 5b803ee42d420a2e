"""What a witness says of a stage that died takes the place of what was seen of it."""

from __future__ import annotations

from tests.sim.core_world import CoreWorld
from tests.sim.test_broker_core import ask, ends_well

from potluck.broker.config import BrokerConfig
from potluck.broker.core import LOST_KEPT
from potluck.broker.effects import RequestFailed
from potluck.broker.events import StageDied, StageLeft
from potluck.wire.errors import InvalidValueError, OutOfMemoryError, Phase, PotluckError, StageLostError
from potluck.wire.ids import StageId

KILLED = "b was killed by the kernel for lack of memory."
HINT = "Start potluck-stage there again with a lower --max-memory-gb."


def serving(*names: str, **more: object) -> CoreWorld:
    world = CoreWorld(BrokerConfig(slots=2, context_tokens=64, settle_s=0.5, **more))  # type: ignore[arg-type]
    world.start(*names)
    return world


def close(world: CoreWorld, stage: StageId) -> None:
    world.alive.discard(stage)
    world.feed(StageLeft(cause="socket", stage=stage, reason="its connection closed"))


def obituary(world: CoreWorld, stage: StageId, error: PotluckError | None = None) -> None:
    error = error or OutOfMemoryError(KILLED, hint=HINT)
    world.feed(StageDied(cause="witness", stage=stage, error=error))


def refusal(world: CoreWorld) -> str:
    world.ends.clear()
    end = world.ends[ask(world, "refused")]
    assert isinstance(end, RequestFailed)
    return str(end.error)


def test_it_comes_after_the_connection_closed_and_amends_what_is_told() -> None:
    world = serving("b")
    b = StageId("b/1")
    close(world, b)
    assert "b is gone: its connection closed" in refusal(world)
    obituary(world, b)
    told = refusal(world)
    assert KILLED in told
    assert "--max-memory-gb" in told
    assert "its connection closed" not in told
    assert "[device b, stage b/1, phase serve]" in told
    assert (world.reports[-1].level, KILLED in world.reports[-1].text) == ("error", True)
    assert any(KILLED in line.text for line in world.core.story.of(b))


def test_a_request_that_waited_for_the_stage_in_vain_is_told_what_it_died_of() -> None:
    world = serving("b", wait_limit_s=20.0)
    waits = ask(world, "waits")
    close(world, StageId("b/1"))
    obituary(world, StageId("b/1"))
    world.wait(25.0)
    end = world.ends[waits]
    assert isinstance(end, RequestFailed)
    assert KILLED in str(end.error)


def test_it_comes_before_anything_was_noticed_and_the_others_take_over_at_once() -> None:
    world = serving("a", "b")
    runs = ask(world, "runs", limit=4)
    world.move_one()
    world.alive.discard(StageId("b/1"))
    obituary(world, StageId("b/1"))
    assert "b/1" not in world.core.state.stages
    assert "b is gone: it was killed by the kernel for lack of memory." in [r.text for r in world.reports]
    world.settle()
    ends_well(world, runs)


def test_of_two_that_died_both_are_named() -> None:
    world = serving("a", "b")
    for name in ("b/1", "a/1"):
        close(world, StageId(name))
    obituary(world, StageId("b/1"))
    obituary(world, StageId("a/1"), StageLostError("a was killed by SIGKILL."))
    told = refusal(world)
    assert KILLED in told
    assert "a was killed by SIGKILL." in told


def test_a_device_that_is_back_is_not_mourned_any_more() -> None:
    world = serving("a", "b")
    for name in ("b/1", "a/1"):
        close(world, StageId(name))
    obituary(world, StageId("b/1"))
    obituary(world, StageId("a/1"), StageLostError("a was killed by SIGKILL."))
    world.join("b")
    assert KILLED not in world.core.core.deaths()


def test_nobody_is_believed_about_a_stage_that_never_was_or_twice_about_one() -> None:
    world = serving("b")
    obituary(world, StageId("never/1"))
    assert world.core.state.ready
    close(world, StageId("b/1"))
    obituary(world, StageId("b/1"))
    obituary(world, StageId("b/1"), StageLostError("b was killed by SIGKILL."))
    assert KILLED in refusal(world)


def test_an_error_that_no_stage_dies_of_is_taken_for_a_loss() -> None:
    world = serving("b")
    close(world, StageId("b/1"))
    obituary(world, StageId("b/1"), InvalidValueError("Something odd."))
    error = world.core.core.last_error
    assert isinstance(error, StageLostError)
    assert error.phase is Phase.SERVE


def test_a_stage_lost_while_it_loads_says_so() -> None:
    world = CoreWorld(BrokerConfig(slots=2, context_tokens=64, settle_s=0.5))
    world.join("b")
    world.wait(1.0)
    close(world, StageId("b/1"))
    obituary(world, StageId("b/1"))
    assert "phase load" in refusal(world)


def test_only_the_last_losses_are_remembered() -> None:
    world = serving("a")
    for number in range(2 * LOST_KEPT):
        world.join(f"x{number}")
        close(world, StageId(f"x{number}/1"))
    assert len(world.core.state.lost) == LOST_KEPT
