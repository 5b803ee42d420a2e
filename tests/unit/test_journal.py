"""The journal's file: who may open it, what is refused by name, and what is on the disk when."""

from __future__ import annotations

import json
import shutil
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from jobs_world import AT_S, FINGERPRINT, new_job
from potluck.broker.job_events import (
    Ask,
    EndNotStored,
    EndStored,
    EndVoid,
    EraseJob,
    JobEnd,
    JobErased,
    JobKnown,
    JobNotStored,
    JobSeen,
    JobStored,
    LookUp,
    Seq,
    StoreEnd,
    StoreJob,
)
from potluck.broker.journal import (
    EPOCHS,
    Journal,
    decode_request,
    default_path,
    digest_of,
    encode_request,
)
from potluck.wire.errors import JournalBusyError, JournalError, RequestError
from potluck.wire.messages import ChatMessage, ErrorInfo, Submit, Timings, Usage
from potluck.wire.sampling import Sampling

ASK = Ask(1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "jobs.sqlite3"


def test_file_and_folder_are_made_for_their_owner_alone(path: Path) -> None:
    journal = Journal.open(path, FINGERPRINT)
    journal.perform([StoreJob(ASK, new_job("a"))])
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    files = sorted(path.parent.iterdir())
    assert [file.name for file in files] == ["jobs.sqlite3", "jobs.sqlite3-wal"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    journal.close()


def test_a_file_that_others_could_read_is_closed_to_them(path: Path) -> None:
    Journal.open(path, FINGERPRINT).close()
    path.chmod(0o644)
    Journal.open(path, FINGERPRINT).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_second_broker_is_refused_and_told_the_file(path: Path) -> None:
    first = Journal.open(path, FINGERPRINT)
    with pytest.raises(JournalBusyError, match=r"Another broker uses .*jobs\.sqlite3"):
        Journal.open(path, FINGERPRINT)
    assert isinstance(first.perform([StoreJob(ASK, new_job("a"))])[0], JobStored)
    first.close()
    second = Journal.open(path, FINGERPRINT)
    assert second.unfinished == 1
    second.close()


def test_a_second_process_is_refused_and_let_in_when_the_first_was_killed(path: Path) -> None:
    program = (
        "import pathlib, sys; from potluck.broker.journal import Journal; "
        f"journal = Journal.open(pathlib.Path(sys.argv[1]), {FINGERPRINT!r}); print('open', flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-P", "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(JournalBusyError):
            Journal.open(path, FINGERPRINT)
        holder.kill()
        holder.wait()
        Journal.open(path, FINGERPRINT).close()


def test_what_was_committed_is_in_the_files_before_it_is_said(path: Path, tmp_path: Path) -> None:
    journal = Journal.open(path, FINGERPRINT)
    end = JobEnd(AT_S + 1, "An answer, größer.", "length", Usage(3, 4), Timings(0.1, 0.2, 0.3))
    failed = JobEnd(AT_S + 2, error=ErrorInfo("stage_failed", "It broke.", device="mini", facts={"n": 1}))
    stored = [journal.perform([StoreJob(ASK, new_job(key))])[0] for key in ("a", "b", "c")]
    ended = journal.perform([StoreEnd(Seq(1), end), StoreEnd(Seq(2), failed)])
    shutil.copytree(path.parent, tmp_path / "copy")  # as a kill at this moment would leave them
    journal.close()
    copy = Journal.open(tmp_path / "copy" / path.name, FINGERPRINT)
    assert (copy.unfinished, copy.ended) == (1, 2)
    found = copy.perform([LookUp(ASK, key) for key in ("a", "b", "c")])
    views = [event.view for event in found if isinstance(event, JobSeen)]
    assert views[:2] == [event.view for event in ended if isinstance(event, EndStored)]
    assert views[2] == stored[2].view  # type: ignore[union-attr]
    assert (views[0].text, views[0].reason, views[0].usage, views[0].timings) == (
        end.text, end.reason, end.usage, end.timings,
    )  # fmt: skip
    assert views[1].error == failed.error
    copy.close()


def test_the_first_end_of_a_job_is_the_only_one(path: Path) -> None:
    journal = Journal.open(path, FINGERPRINT)
    journal.perform([StoreJob(ASK, new_job("a"))])
    first = journal.perform([StoreEnd(Seq(1), JobEnd(AT_S, "first", "stop"))])
    second = journal.perform([StoreEnd(Seq(1), JobEnd(AT_S + 9, "second", "length"))])
    assert first == second
    assert isinstance(first[0], EndStored)
    assert first[0].view.text == "first"
    assert journal.perform([StoreEnd(Seq(7), JobEnd(AT_S))]) == [EndVoid(Seq(7))]
    journal.close()


def test_prompts_are_not_in_the_file_any_more_once_they_are_not_needed(path: Path) -> None:
    journal = Journal.open(path, FINGERPRINT)
    for key in ("a", "b"):
        journal.perform([StoreJob(ASK, new_job(key, f"SECRET-{key}"))])
    journal.perform([StoreEnd(Seq(1), JobEnd(AT_S, "PUBLIC", "stop")), EraseJob(ASK, "b")])
    journal.close()
    raw = path.read_bytes()
    assert b"PUBLIC" in raw
    assert b"request of SECRET" not in raw


def test_one_operation_that_fails_does_not_take_the_others_down(path: Path) -> None:
    journal = Journal.open(path, FINGERPRINT)
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count = {pages}")
    large = StoreJob(Ask(2), new_job("b", "x" * 100_000))
    first, second, third = journal.perform(
        [StoreJob(ASK, new_job("a")), large, StoreEnd(Seq(1), JobEnd(AT_S, "y" * 100_000))]
    )
    assert isinstance(first, JobStored)
    assert isinstance(second, JobNotStored)
    assert "disk is full" in str(second.error)
    assert second.size == len(large.job.request)
    assert isinstance(third, EndNotStored)
    journal.close()


def test_a_key_is_free_again_after_it_was_erased_and_numbers_are_not(path: Path) -> None:
    journal = Journal.open(path, FINGERPRINT)
    stored, known, erased, again = journal.perform(
        [
            StoreJob(ASK, new_job("a")),
            StoreJob(ASK, new_job("a")),
            EraseJob(ASK, "a"),
            StoreJob(ASK, new_job("a")),
        ]
    )
    assert isinstance(stored, JobStored)
    assert isinstance(known, JobKnown)
    assert isinstance(erased, JobErased)
    assert isinstance(again, JobStored)
    assert stored.seq == known.seq == erased.seq < again.seq
    journal.close()


def test_epochs_grow_also_when_the_clock_is_set_back(path: Path) -> None:
    firsts = []
    for at_s in (1_000_000, 1_000_000, 5, 2_000_000):
        journal = Journal.open(path, FINGERPRINT)
        firsts.append(journal.first_epoch(at_s))
        journal.close()
    assert firsts[0] == 1_000_000
    assert firsts[1] > firsts[0] + EPOCHS
    assert firsts[2] > firsts[1] + EPOCHS
    assert firsts[3] == 2_000_000


# ---- files that are refused


def make_other_database(path: Path) -> None:
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE recipes (name TEXT)")
    other.close()


def make_text(path: Path) -> None:
    path.write_text("# my shopping list\n" * 100)


def make_newer(path: Path) -> None:
    Journal.open(path, FINGERPRINT).close()
    with sqlite3.connect(path) as later:
        later.execute("PRAGMA user_version = 2")
    later.close()


def make_other_model(path: Path) -> None:
    Journal.open(path, "0" * 64).close()


def make_damaged(path: Path) -> None:
    journal = Journal.open(path, FINGERPRINT)
    journal.perform([StoreJob(Ask(n), new_job(f"job-{n}", "x" * 2_000)) for n in range(50)])
    journal.close()
    raw = bytearray(path.read_bytes())
    for page in range(2, len(raw) // 4096):
        raw[page * 4096 : page * 4096 + 64] = b"\xff" * 64
    path.write_bytes(raw)


def make_cut_short(path: Path) -> None:
    journal = Journal.open(path, FINGERPRINT)
    journal.perform([StoreJob(Ask(n), new_job(f"job-{n}", "x" * 2_000)) for n in range(50)])
    journal.close()
    path.write_bytes(path.read_bytes()[:20_000])


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (make_other_database, "another program"),
        (make_text, "not a journal"),
        (make_newer, "another version of Potluck"),
        (make_other_model, "another model"),
        (make_damaged, "damaged"),
        (make_cut_short, "damaged"),
        (Path.mkdir, "can't be written"),
    ],
)
def test_a_file_that_is_no_journal_is_refused_by_name_and_left_as_it_is(
    make: object, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "file.sqlite3"
    make(path)  # type: ignore[operator]
    before, mode = path.read_bytes() if path.is_file() else b"", path.stat().st_mode
    with pytest.raises(JournalError) as caught:
        Journal.open(path, FINGERPRINT)
    assert why in caught.value.what
    assert str(path) in caught.value.what
    assert "--journal" in caught.value.hint
    assert caught.value.exit_code == 1
    assert (path.read_bytes() if path.is_file() else b"") == before
    assert path.stat().st_mode == mode
    assert [file.name for file in tmp_path.iterdir()] == ["file.sqlite3"]


@pytest.mark.parametrize("folder", ["/proc/potluck", "file/below"])
def test_a_place_where_nothing_can_be_written_is_refused_by_name(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"jobs\.sqlite3 can't be written"):
        Journal.open(tmp_path / folder / "jobs.sqlite3", FINGERPRINT)


def test_each_model_has_a_journal_of_its_own_in_the_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POTLUCK_STATE_DIR", str(tmp_path))
    assert default_path("ab" * 32).parent == tmp_path
    assert default_path("ab" * 32) != default_path("cd" * 32)
    monkeypatch.delenv("POTLUCK_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert default_path("ab" * 32).is_absolute()


# ---- what a request is


def test_a_request_comes_back_as_it_was() -> None:
    submit = Submit(
        "job", tokens=(1, 2, 3), max_tokens=7, stop=("\n",), seed_given=True, ignore_eos=True,
        sampling=Sampling(temperature=0.5, seed=9, logit_bias=((1, -2.0),)),
    )  # fmt: skip
    assert decode_request(encode_request(submit)) == submit


def test_a_request_that_can_not_be_read_is_the_job_s_own_fault() -> None:
    for raw in (b"\xff\x00", b"", b"\x81\xa5other\x01"):
        with pytest.raises(RequestError, match="can't be read"):
            decode_request(raw)


def test_an_end_that_another_version_wrote_still_has_its_text(path: Path) -> None:
    journal = Journal.open(path, FINGERPRINT)
    journal.perform([StoreJob(ASK, new_job("a")), StoreEnd(Seq(1), JobEnd(AT_S, "An answer.", "stop"))])
    journal._db.execute("UPDATE jobs SET outcome = ?", (b"\xff\x00",))
    found = journal.perform([LookUp(ASK, "a")])[0]
    assert isinstance(found, JobSeen)
    assert (found.view.state, found.view.text, found.view.reason) == ("finished", "An answer.", "")
    journal.close()


def test_requests_are_the_same_whatever_their_name_and_differ_by_what_they_ask_for() -> None:
    one = Submit("one", messages=(ChatMessage("user", "Hello"),), max_tokens=4)
    assert digest_of(one) == digest_of(Submit("two", messages=(ChatMessage("user", "Hello"),), max_tokens=4))
    assert digest_of(one) != digest_of(Submit("one", messages=(ChatMessage("user", "Hello"),), max_tokens=5))
    assert digest_of(one) != digest_of(Submit("one", prompt="Hello", max_tokens=4))


# ---- a disk that is really full

FULL_DISK = """
import json, pathlib, subprocess, sys
sys.path.insert(0, sys.argv[2])
from jobs_world import AT_S, FINGERPRINT, new_job
from potluck.broker.job_events import Ask, JobEnd, JobNotStored, JobStored, Seq, StoreEnd, StoreJob
from potluck.broker.journal import Journal

folder = pathlib.Path(sys.argv[1])
journal = Journal.open(folder / "jobs.sqlite3", FINGERPRINT)

def store(n):
    return journal.perform([StoreJob(Ask(n), new_job(f"job-{n}", "x" * 3_000))])[0]

said = []
while isinstance(outcome := store(len(said)), JobStored):
    said.append(outcome.view.key)
refused = [str(store(1_000).error) for _ in range(3)]
subprocess.run(["mount", "-o", "remount,size=4m", str(folder)], check=True)
said.append(store(2_000).view.key)
end = journal.perform([StoreEnd(Seq(1), JobEnd(AT_S, "y" * 50_000))])[0]
journal.close()
again = Journal.open(folder / "jobs.sqlite3", FINGERPRINT)
kept = [key for (key,) in again._db.execute("SELECT key FROM jobs ORDER BY seq")]
print(json.dumps([said, refused, type(end).__name__, kept, again.unfinished]))
"""


@pytest.mark.root
@pytest.mark.skipif(sys.platform != "linux", reason="mounts a file system")
def test_on_a_disk_that_is_full_what_was_said_is_kept_and_the_rest_is_refused(tmp_path: Path) -> None:
    mounted = 'mount -t tmpfs -o size=200k tmpfs "$1" && exec "$2" -P -c "$3" "$1" "$4"'
    tests = str(Path(__file__).parents[1])
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", mounted, "sh", str(tmp_path), sys.executable, FULL_DISK, tests],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    said, refused, end, kept, unfinished = json.loads(ended.stdout)
    assert kept == said
    assert len(said) > 5
    assert all("disk is full" in error for error in refused)
    assert end == "EndStored"
    assert unfinished == len(said) - 1
