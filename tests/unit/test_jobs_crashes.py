"""Whatever the order of events, wherever the broker is killed: no acknowledged job is lost, none has two results."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jobs_world import AT_S, JobsWorld, new_job
from potluck.broker.job_events import Ask, AskerLeft, JobAsked, JobSubmitted, JobUnwanted, RoomSeen, RunFailed
from potluck.wire.errors import JobConflictError, PotluckError, StageError, UnavailableError, UnknownJobError
from potluck.wire.messages import JobView

KEYS = st.sampled_from(["a", "b"])
CLIENT_WAYS = ["submit", "submit", "look", "wait", "wait", "forget", "leave"]
CHAINS_WAYS = ["room", "room", "end", "end", "no chain", "fault", "time"]
CALM = st.sampled_from([True, True, False])
"""Whether the disk keeps up; otherwise things are on their way when the next one happens."""
MEMORY = Path("/dev/shm")
"""A file system on which syncing costs nothing; what it would save from is not tested here."""
BODIES = st.sampled_from(["one", "one", "two"])


class Crashes(RuleBasedStateMachine):
    """`held` is what clients were promised: the body of each acknowledged job; `ends` what they were told of ends.

    A client that wants a job forgotten gives both up; until it is answered, nothing is promised about that key.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="potluck-jobs-", dir=MEMORY if MEMORY.is_dir() else None))
        self.world = JobsWorld(self.folder)
        self.submitted: dict[Ask, tuple[str, str]] = {}
        self.asked: dict[Ask, str] = {}
        self.unwanted: dict[Ask, str] = {}
        self.held: dict[str, str] = {}
        self.ends: dict[str, JobView] = {}
        self.runs = 0

    # Few rules with many ways each: Hypothesis leaves whole rules out of an example, and most of these need the others.

    @rule(way=st.sampled_from(CLIENT_WAYS), key=KEYS, body=BODIES, calm=CALM)
    def client(self, way: str, key: str, body: str, calm: bool) -> None:
        match way:
            case "submit":
                ask = self.world.ask(lambda ask: JobSubmitted(ask, new_job(key, body)))
                self.submitted[ask] = (key, body)
            case "look" | "wait":
                wait_s = 30.0 if way == "wait" else 0.0
                self.asked[self.world.ask(lambda ask: JobAsked(ask, key, wait_s))] = key
            case "forget":
                self.unwanted[self.world.ask(lambda ask: JobUnwanted(ask, key))] = key
            case _ if self.asked:
                ask = max(self.asked)
                del self.asked[ask]
                self.world.feed(AskerLeft(ask))
        if calm:
            self.world.settle()

    @rule(way=st.sampled_from(["write", "tell", "full", "empty", "killed"]), most=st.integers(1, 4))
    def machine(self, way: str, most: int) -> None:
        match way:
            case "write":
                self.world.write(most)
            case "tell":
                self.world.tell(most)
            case "full":
                self.world.fill_disk()
            case "killed":
                self.kill()
            case _:
                self.world.make_room_on_disk()

    @rule(way=st.sampled_from(CHAINS_WAYS), which=st.integers(0, 2), calm=CALM)
    def chains(self, way: str, which: int, calm: bool) -> None:
        if way == "room":
            self.world.feed(RoomSeen(which + 1, 4))
        elif way == "time":
            self.world.pass_time([0.5, 2.0, 30.0][which])
        elif self.world.running:
            seq = sorted(self.world.running)[which % len(self.world.running)]
            self.runs += 1  # no two runs have the same end, so a second one would show
            if way == "end":
                # sometimes one that finds no room on a full disk
                self.world.finish(seq, f"answer {self.runs}" * (20_000 if which == 2 else 1))
            else:
                del self.world.running[seq]
                error = StageError if way == "fault" else UnavailableError
                self.world.feed(RunFailed(seq, error(f"run {self.runs}"), AT_S))
        if calm:
            self.world.settle()

    def kill(self) -> None:
        self.hear()
        for key in self.unwanted.values():
            self.give_up(key)
        self.submitted, self.asked, self.unwanted = {}, {}, {}
        self.world.crash()

    # ---- what has to hold

    @invariant()
    def hear(self) -> None:
        """Every answer agrees with all before it."""
        while self.world.said:
            ask, said = self.world.said.popleft()
            if ask in self.unwanted:
                self.give_up(self.unwanted.pop(ask))
                continue
            key, body = self.submitted.pop(ask) if ask in self.submitted else (self.asked.pop(ask), None)
            if key not in self.unwanted.values():
                self.compare(key, body, said)

    def give_up(self, key: str) -> None:
        self.held.pop(key, None)
        self.ends.pop(key, None)

    def compare(self, key: str, body: str | None, said: JobView | PotluckError) -> None:
        if isinstance(said, PotluckError):
            assert not isinstance(said, UnknownJobError) or key not in self.held, f"{key} is lost"
            if isinstance(said, JobConflictError):
                assert self.held.get(key) != body, f"{key} conflicts with itself"
            return
        view = said
        assert view.key == key
        if body is not None:
            assert self.held.setdefault(key, body) == body, f"{key} is two jobs"
        if view.ended_s is not None:
            assert self.ends.setdefault(key, view) == view, f"{key} has two results"
        else:
            assert key not in self.ends, f"{key} had ended and has not"

    def teardown(self) -> None:
        """On a machine that works again every promise comes true, and stays so when it is killed once more."""
        world = self.world
        self.hear()
        world.make_room_on_disk()
        for _ in range(6):
            world.settle()
            world.pass_time(30.0)
            world.feed(RoomSeen(3, 4))
            for seq in sorted(world.running):
                self.runs += 1
                world.finish(seq, f"answer {self.runs}")
        world.settle()
        self.hear()
        unanswered = {*self.submitted, *self.asked, *self.unwanted}
        assert unanswered == set(), "somebody was never answered"
        states = Counter(state for (state,) in world.database.execute("SELECT state FROM jobs"))
        assert states["queued"] == world.core.state.unfinished == 0, "a job was never run"
        assert states.total() == world.core.state.ended
        self.kill()
        for key, body in list(self.held.items()):
            found = world.submit(key, body)
            assert isinstance(found, JobView), f"{key} is lost: {found}"
            self.compare(key, body, found)
        world.close()
        shutil.rmtree(self.folder)


Crashes.TestCase.settings = settings(stateful_step_count=80)
TestCrashes = Crashes.TestCase
