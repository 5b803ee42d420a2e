"""Whatever the order of events, wherever the broker is killed: no acknowledged job is lost, none has two results."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jobs_world import AT_S, JobsWorld, new_job
from potluck.broker.job_events import Ask, AskerLeft, JobAsked, JobSubmitted, JobUnwanted, RoomSeen, RunFailed
from potluck.wire.errors import JobConflictError, StageError, UnavailableError, UnknownJobError
from potluck.wire.messages import JobView

KEYS = st.sampled_from(["a", "b", "c", "d"])
BODIES = st.sampled_from(["one", "two"])
SOME = st.integers(1, 4)


class Crashes(RuleBasedStateMachine):
    """`held` is what clients were promised: the body of each acknowledged job; `ends` what they were told of ends."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="potluck-jobs-"))
        self.world = JobsWorld(self.folder)
        self.submitted: dict[Ask, tuple[str, str]] = {}
        self.asked: dict[Ask, str] = {}
        self.unwanted: dict[Ask, str] = {}
        self.held: dict[str, str] = {}
        self.doubtful: set[str] = set()
        """Keys that somebody wanted forgotten, without having heard yet that they are."""
        self.ends: dict[str, JobView] = {}
        self.runs = 0

    # ---- what clients do

    @rule(key=KEYS, body=BODIES)
    def submit(self, key: str, body: str) -> None:
        self.submitted[self.world.ask(lambda ask: JobSubmitted(ask, new_job(key, body)))] = (key, body)

    @rule(key=KEYS, wait_s=st.sampled_from([0.0, 30.0]))
    def look(self, key: str, wait_s: float) -> None:
        self.asked[self.world.ask(lambda ask: JobAsked(ask, key, wait_s))] = key

    @rule(key=KEYS)
    def forget(self, key: str) -> None:
        self.doubtful.add(key)
        self.unwanted[self.world.ask(lambda ask: JobUnwanted(ask, key))] = key

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ask = data.draw(st.sampled_from(sorted(self.asked)))
        del self.asked[ask]
        self.world.feed(AskerLeft(ask))

    # ---- what disk, chains and clock do

    @rule(most=SOME)
    def write(self, most: int) -> None:
        self.world.write(most)

    @rule(most=SOME)
    def tell(self, most: int) -> None:
        self.world.tell(most)

    @rule(free=st.integers(0, 3))
    def room(self, free: int) -> None:
        self.world.feed(RoomSeen(free, 4))

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def run_ends(self, data: st.DataObject) -> None:
        self.runs += 1  # no two runs have the same answer, so a second result would show
        self.world.finish(data.draw(st.sampled_from(sorted(self.world.running))), f"answer {self.runs}")

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), fault=st.sampled_from([UnavailableError, StageError]))
    def run_fails(self, data: st.DataObject, fault: type[UnavailableError | StageError]) -> None:
        seq = data.draw(st.sampled_from(sorted(self.world.running)))
        self.runs += 1
        del self.world.running[seq]
        self.world.feed(RunFailed(seq, fault(f"run {self.runs}"), AT_S))

    @rule(seconds=st.sampled_from([0.5, 2.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule()
    def disk_is_full(self) -> None:
        self.world.fill_disk()

    @rule()
    def disk_has_room(self) -> None:
        self.world.make_room_on_disk()

    @rule()
    def broker_is_killed(self) -> None:
        self.hear()
        self.submitted, self.asked, self.unwanted = {}, {}, {}
        self.world.crash()

    # ---- what has to hold

    @invariant()
    def hear(self) -> None:
        """Every answer agrees with all before it. Answers come in the order in which the journal did the work."""
        world = self.world
        for ask in sorted({*world.answers, *world.refusals}):
            view, error = world.answers.pop(ask, None), world.refusals.pop(ask, None)
            if ask in self.submitted:
                key, body = self.submitted.pop(ask)
                if view is not None:
                    self.note(key, body, view)
                elif isinstance(error, JobConflictError) and key not in self.doubtful:
                    assert self.held.get(key) != body, f"{key} was acknowledged and now conflicts with itself"
            elif ask in self.asked:
                key = self.asked.pop(ask)
                if view is not None:
                    self.note(key, None, view)
                elif isinstance(error, UnknownJobError) and key not in self.doubtful:
                    assert key not in self.held, f"{key} was acknowledged and is lost"
            elif ask in self.unwanted:
                self.unwanted.pop(ask)

    def note(self, key: str, body: str | None, view: JobView) -> None:
        assert view.key == key
        if key in self.doubtful:
            return
        if body is not None:
            assert self.held.setdefault(key, body) == body, f"{key} is two jobs"
        if view.ended_s is not None:
            assert self.ends.setdefault(key, view) == view, f"{key} has two results"
        else:
            assert key not in self.ends, f"{key} had ended"

    def teardown(self) -> None:
        """Everything that was promised comes true, on a machine that works again and is killed once more."""
        world = self.world
        self.hear()
        world.make_room_on_disk()
        self.broker_is_killed()
        for _ in range(20):
            world.settle()
            world.pass_time(30.0)
            world.feed(RoomSeen(3, 4))
            for seq in sorted(world.running):
                self.runs += 1
                world.finish(seq, f"answer {self.runs}")
        world.settle()
        assert world.core.state.held == {}
        assert world.core.state.unfinished == 0
        for key, body in self.held.items():
            if key not in self.doubtful:
                view = world.submit(key, body)
                assert isinstance(view, JobView), f"{key} was acknowledged and is lost: {view}"
                assert view.ended_s is not None, f"{key} was never run"
                self.note(key, body, view)
                world.answers.clear()
        count = world.database.execute("SELECT count(*) FROM jobs").fetchone()[0]
        assert count == world.core.state.ended
        world.close()
        shutil.rmtree(self.folder)


TestCrashes = Crashes.TestCase
