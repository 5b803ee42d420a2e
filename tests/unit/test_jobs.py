"""The core of jobs over a real journal: what is written before what is told, what runs when, and what is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs_world import AT_S, DAY_S, JobsWorld, new_job
from potluck.broker import jobs
from potluck.broker.job_events import AskerLeft, JobAsked, JobSubmitted, RunFailed, Seq, StoreEnd, StoreJob
from potluck.broker.jobs import AT_HAND_MOST, MOVES, Step
from potluck.broker.scheduler import room
from potluck.broker.state import BrokerState, Chain, Closing
from potluck.planner.plan import ChainPlan, StagePlan
from potluck.wire.errors import (
    ContextExceededError,
    InvalidValueError,
    JobConflictError,
    JournalError,
    PotluckError,
    QueueFullError,
    UnavailableError,
    UnknownJobError,
)
from potluck.wire.ids import ChainId, DeviceName, Epoch, RequestId, StageId
from potluck.wire.messages import JobView


@pytest.fixture
def world(tmp_path: Path) -> Iterator[JobsWorld]:
    made = JobsWorld(tmp_path)
    made.settle()
    yield made
    made.close()


def view(found: JobView | PotluckError) -> JobView:
    assert isinstance(found, JobView), found
    return found


def test_a_job_is_acknowledged_only_after_it_is_written(world: JobsWorld) -> None:
    ask = world.ask(lambda ask: JobSubmitted(ask, new_job("a")))
    assert isinstance(world.to_disk[0], StoreJob)
    assert world.answers == {}
    world.write()
    assert world.answers == {}
    world.tell()
    assert world.answers[ask].state == "queued"


def test_an_end_is_told_only_after_it_is_written(world: JobsWorld) -> None:
    world.submit("a")
    world.room(1)
    ask = world.ask(lambda ask: JobAsked(ask, "a", 60.0))
    world.settle()
    world.finish(Seq(1))
    assert isinstance(world.to_disk[0], StoreEnd)
    world.write()
    assert ask not in world.answers
    world.tell()
    assert (world.answers[ask].state, world.answers[ask].text) == ("finished", "an answer")


def test_the_same_key_and_body_is_the_same_job_at_every_step(world: JobsWorld) -> None:
    first = view(world.submit("a"))
    assert view(world.submit("a")) == first
    world.room(1)
    assert view(world.submit("a")).state == "running"
    world.finish(Seq(1))
    world.settle()
    again = view(world.submit("a"))
    assert (again.state, again.text, again.created_s) == ("finished", "an answer", first.created_s)
    assert len(world.list()) == 1
    world.room(9)
    assert world.running == {}


def test_the_same_key_with_another_body_is_refused_by_name(world: JobsWorld) -> None:
    world.submit("a", "one")
    error = world.submit("a", "another")
    assert isinstance(error, JobConflictError)
    assert "key a " in error.what
    world.room(9)
    assert list(world.running.values()) == [b"request of one"]


@pytest.mark.parametrize("key", ["", "a b", "a/b", "../a", "-a", "ä", "a\n", "a" * 129])
def test_a_key_that_does_not_fit_a_path_is_refused(key: str, world: JobsWorld) -> None:
    assert isinstance(world.submit(key), InvalidValueError)
    assert isinstance(world.look(key), UnknownJobError)
    assert isinstance(world.forget(key), UnknownJobError)
    assert not world.to_disk


def test_jobs_run_in_the_order_in_which_they_were_accepted_also_after_a_crash(world: JobsWorld) -> None:
    for number in range(12):
        world.submit(f"job-{number}", str(number))
    world.room(2)
    assert list(world.running.values()) == [b"request of 0", b"request of 1"]
    world.finish(world.seq_of("1"))
    world.settle()
    world.crash()
    world.settle()
    world.room(3)
    assert list(world.running.values()) == [b"request of 0", b"request of 2", b"request of 3"]


def test_one_slot_is_left_to_people_where_there_are_several(world: JobsWorld) -> None:
    for number in range(6):
        world.submit(f"job-{number}")
    world.room(free=4, slots=4)
    assert len(world.running) == 3
    world.room(free=1, slots=4)
    assert len(world.running) == 3


def test_a_single_slot_is_used_all_the_same(world: JobsWorld) -> None:
    world.submit("a")
    world.room(free=1, slots=1)
    assert len(world.running) == 1


def test_thousands_of_jobs_wait_in_the_journal_and_not_in_memory(world: JobsWorld) -> None:
    for number in range(3_000):
        world.ask(lambda ask, key=f"job-{number}": JobSubmitted(ask, new_job(key)))  # type: ignore[misc]
        if number % 100 == 0:
            world.settle()
    world.settle()
    assert world.core.state.unfinished == 3_000
    assert len(world.core.state.held) == AT_HAND_MOST
    world.room(8)
    assert len(world.core.state.held) == 8 + AT_HAND_MOST


def test_a_job_that_no_chain_could_serve_waits_and_runs_again(world: JobsWorld) -> None:
    world.submit("a")
    world.room(1)
    request = world.running.pop(Seq(1))
    world.feed(RunFailed(Seq(1), UnavailableError(), AT_S))
    assert view(world.look("a")).state == "queued"
    world.wants_room = False
    world.pass_time(jobs.RETRY_S)
    assert world.wants_room
    world.room(1)
    assert world.running == {Seq(1): request}


def test_room_is_looked_for_while_jobs_are_at_hand_also_if_nobody_speaks_of_any(world: JobsWorld) -> None:
    world.submit("a")
    world.room(0)
    for _ in range(3):
        world.wants_room = False
        world.pass_time(jobs.RETRY_S)
        assert world.wants_room
        world.room(0)
    world.room(1)
    assert len(world.running) == 1
    world.wants_room = False
    world.pass_time(jobs.RETRY_S)
    assert not world.wants_room


def test_slots_of_a_chain_that_takes_nothing_more_are_no_room() -> None:
    plan = ChainPlan((StagePlan(StageId("s"), DeviceName("d"), 0, 2),), 2)
    chain = Chain(ChainId(0), Epoch(1), plan, [None, RequestId("r"), None])
    state = BrokerState(chains={chain.chain: chain})
    assert room(state) == (0, 0)
    chain.open = True
    assert room(state) == (2, 3)
    chain.closing = True
    assert room(state) == (0, 0)
    chain.closing, state.closing = False, Closing(1.0)
    assert room(state) == (0, 0)


def test_a_job_that_is_itself_at_fault_fails_for_good(world: JobsWorld) -> None:
    world.submit("a")
    world.room(1)
    del world.running[Seq(1)]
    error = ContextExceededError("Too long.", param="prompt", n_prompt_tokens=9, n_ctx=8)
    world.feed(RunFailed(Seq(1), error, AT_S))
    found = view(world.look("a"))
    assert found.state == "failed"
    assert found.error is not None
    assert isinstance(found.error.restore(), ContextExceededError)
    world.crash()
    world.room(1)
    assert world.running == {}


@pytest.mark.parametrize("step", ["queued", "at hand", "running", "ended"])
def test_a_forgotten_job_is_gone_at_every_step(step: str, world: JobsWorld) -> None:
    world.submit("a")
    if step == "queued":
        world.core.state.held.clear()
    if step in ("running", "ended"):
        world.room(1)
    if step == "ended":
        world.finish(Seq(1))
        world.settle()
    assert view(world.forget("a")).state == ("finished" if step == "ended" else "cancelled")
    assert world.running == {}
    assert world.core.state.held == {}
    assert (world.core.state.unfinished, world.core.state.ended) == (0, 0)
    assert isinstance(world.look("a"), UnknownJobError)
    assert isinstance(world.forget("a"), UnknownJobError)
    assert view(world.submit("a", "another body")).state == "queued"


def test_an_end_that_comes_too_late_for_a_forgotten_job_is_not_the_end_of_the_next_one(
    world: JobsWorld,
) -> None:
    world.submit("a", "old")
    world.room(1)
    forgotten = world.ask(lambda ask: jobs.JobUnwanted(ask, "a"))
    world.ask(lambda ask: JobSubmitted(ask, new_job("a", "new")))
    world.finish(Seq(1), "old answer")
    world.settle()
    assert world.answers[forgotten].state == "cancelled"
    assert view(world.look("a")).state == "queued"
    world.room(1)
    assert list(world.running.values()) == [b"request of new"]


def test_whoever_waits_for_a_job_that_is_forgotten_is_told(world: JobsWorld) -> None:
    world.submit("a")
    ask = world.ask(lambda ask: JobAsked(ask, "a", 60.0))
    world.settle()
    world.forget("a")
    assert world.answers[ask].state == "cancelled"


def test_whoever_waits_is_told_how_it_stands_when_the_time_is_up(world: JobsWorld) -> None:
    world.submit("a")
    ask = world.ask(lambda ask: JobAsked(ask, "a", 30.0))
    world.settle()
    world.pass_time(29.9)
    assert ask not in world.answers
    world.pass_time(0.1)
    assert world.answers[ask].state == "queued"


def test_whoever_leaves_is_not_answered(world: JobsWorld) -> None:
    world.submit("a")
    ask = world.ask(lambda ask: JobAsked(ask, "a", 30.0))
    world.settle()
    world.feed(AskerLeft(ask))
    world.room(1)
    world.finish(Seq(1))
    world.settle()
    assert ask not in world.answers
    assert world.core.state.asks == {}
    assert world.core.state.waiters == {}


def test_a_full_disk_refuses_the_job_and_goes_on_when_there_is_room(world: JobsWorld) -> None:
    world.submit("a")
    world.fill_disk()
    error = world.submit("b", "x" * 100_000)
    assert isinstance(error, JournalError)
    assert error.http_status == 503
    assert "disk is full" in error.what
    assert str(world.journal.path) in error.what
    assert isinstance(world.look("b"), UnknownJobError)
    assert view(world.look("a")).state == "queued"
    world.make_room_on_disk()
    assert view(world.submit("b", "x" * 100_000)).state == "queued"


def test_a_large_job_that_does_not_fit_does_not_take_its_neighbours_down(world: JobsWorld) -> None:
    world.fill_disk()
    small = world.ask(lambda ask: JobSubmitted(ask, new_job("small")))
    large = world.ask(lambda ask: JobSubmitted(ask, new_job("large", "x" * 100_000)))
    world.settle()
    assert small in world.answers
    assert isinstance(world.refusals[large], JournalError)


def test_an_end_that_can_not_be_written_is_kept_untold_until_it_can(world: JobsWorld) -> None:
    world.submit("a")
    world.room(1)
    ask = world.ask(lambda ask: JobAsked(ask, "a", 60.0))
    world.settle()
    world.fill_disk()
    world.finish(Seq(1), "long " * 20_000)
    world.settle()
    assert ask not in world.answers
    assert [note.level for note in world.notes] == ["error"]
    assert view(world.look("a")).state == "running"
    world.make_room_on_disk()
    world.pass_time(jobs.RETRY_S)
    world.settle()
    assert world.answers[ask].text == "long " * 20_000


def test_no_more_jobs_are_started_while_many_ends_can_not_be_written(world: JobsWorld) -> None:
    for number in range(jobs.ENDING_MOST + 3):
        world.submit(f"job-{number}", str(number))
    world.fill_disk()
    for _ in range(jobs.ENDING_MOST):
        world.room(1)
        world.finish(next(iter(world.running)), "long " * 20_000)
        world.settle()
    world.room(1)
    assert world.running == {}


def test_old_ends_are_purged_and_unfinished_jobs_are_not(world: JobsWorld) -> None:
    world.submit("old", "1")
    world.submit("waits", "2")
    world.room(1)
    world.finish(Seq(1))
    world.settle()
    world.pass_time(DAY_S - 1)
    world.settle()
    assert world.list() == ["waits", "old"]
    world.pass_time(jobs.PURGE_EVERY_S)
    world.settle()
    assert world.list() == ["waits"]
    assert (world.core.state.unfinished, world.core.state.ended) == (1, 0)


def test_the_oldest_ends_go_first_when_there_are_too_many(
    world: JobsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "KEEP_MOST", 3)
    for number in range(5):
        world.submit(f"job-{number}", str(number))
    world.room(8)
    for number in (4, 0, 1, 2, 3):
        world.pass_time(1)
        world.finish(world.seq_of(str(number)))
        world.settle()
    world.pass_time(1)
    world.settle()
    assert world.list() == ["job-3", "job-2", "job-1"]


def test_what_is_handed_in_faster_than_it_can_be_written_is_refused(
    world: JobsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "STORING_BYTES", 1_000)
    first = world.ask(lambda ask: JobSubmitted(ask, new_job("a", "x" * 2_000)))  # alone it may be larger
    second = world.ask(lambda ask: JobSubmitted(ask, new_job("b")))
    assert isinstance(world.refusals[second], QueueFullError)
    world.settle()
    assert first in world.answers
    assert view(world.submit("b")).state == "queued"


def test_too_many_jobs_are_refused(world: JobsWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "UNFINISHED_MOST", 2)
    world.submit("a")
    world.submit("b")
    assert isinstance(world.submit("c"), QueueFullError)


def test_too_many_questions_are_refused(world: JobsWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "ASKS_MOST", 1)
    world.submit("a")
    world.ask(lambda ask: JobAsked(ask, "a", 60.0))
    assert isinstance(world.look("a"), QueueFullError)
    assert isinstance(world.submit("b"), QueueFullError)
    assert world.core.state.storing_bytes == 0


def test_the_newest_jobs_are_listed_first_without_their_texts(world: JobsWorld) -> None:
    for number in range(5):
        world.submit(f"job-{number}", str(number))
    world.room(1)
    world.finish(Seq(1))
    world.settle()
    assert world.list(3) == ["job-4", "job-3", "job-2"]
    assert all(view.text == "" for views in world.lists.values() for view in views)


def test_every_step_can_be_reached_and_left() -> None:
    reached = {step for steps in MOVES.values() for step in steps}
    assert reached == {*Step, None}
    assert set(MOVES) == {*Step, None}
