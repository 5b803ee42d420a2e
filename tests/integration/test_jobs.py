"""Jobs over real processes: the clients for Python, the commands, and how a broker starts and stops with a journal."""

from __future__ import annotations

import json
import math
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from acceptance.cluster_world import FAST, Ended, World, command, world
from potluck.runtime.client import Client
from potluck.runtime.sync_client import SyncClient
from potluck.wire.errors import (
    ContextExceededError,
    FrameTooLargeError,
    InvalidValueError,
    JobConflictError,
    NoBrokerError,
    UnknownJobError,
)
from potluck.wire.sampling import GREEDY
from tiny_models import write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def house(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("house")
    with world(tiny, folder, 1, "--slots", "2", "--context", "128", *FAST) as made:
        yield made


@pytest.fixture
def client(house: World) -> Iterator[SyncClient]:
    with SyncClient(house.address, timeout_s=30) as made:
        yield made


# ---- from Python


def test_a_job_from_a_program_without_asyncio(client: SyncClient) -> None:
    job = client.submit_job("hello", key="sync", max_tokens=5, sampling=GREEDY, ignore_eos=True)
    assert (job.key, job.state) == ("sync", "queued")
    done = client.job("sync", math.inf)
    assert (done.state, done.reason, done.usage.completion_tokens) == ("finished", "length", 5)
    assert done.text == client.complete("hello", max_tokens=5, sampling=GREEDY, ignore_eos=True).text
    assert client.submit_job("hello", key="sync", max_tokens=5, sampling=GREEDY, ignore_eos=True) == done
    assert client.jobs()[0].key == "sync"
    assert client.jobs()[0].text == ""
    with pytest.raises(JobConflictError, match="sync"):
        client.submit_job("hello", key="sync", max_tokens=6, sampling=GREEDY, ignore_eos=True)
    assert client.forget_job("sync") == done
    with pytest.raises(UnknownJobError, match="sync"):
        client.job("sync")


def test_a_key_is_drawn_if_none_is_given(client: SyncClient) -> None:
    one, two = (client.submit_job("hello", max_tokens=1) for _ in range(2))
    assert one.key != two.key
    assert client.job(one.key, 20.0).state == "finished"


def test_a_job_and_a_request_over_rest_are_the_same_job(house: World, client: SyncClient) -> None:
    async def story() -> None:
        async with house.rest() as rest:
            body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "key": "both"}
            assert (await rest.post("/potluck/v1/jobs", json=body)).status_code == 202
            found = (await rest.get("/potluck/v1/jobs/both?wait=20")).json()
        async with Client(house.address) as other:
            view = await other.job("both")
        assert found["status"] == view.state == "finished"
        assert found["text"] == view.text
        assert found["created"] == view.created_s

    house.run(story())


def test_what_can_not_be_a_job_is_refused_and_the_connection_goes_on(client: SyncClient) -> None:
    with pytest.raises(ContextExceededError):
        client.submit_job("hello " * 500, key="long")
    with pytest.raises(InvalidValueError, match="key"):
        client.submit_job("hello", key="two words")
    with pytest.raises(InvalidValueError):
        client.submit_job("hello", key="x" * 200)
    with pytest.raises(FrameTooLargeError):
        client.submit_job(messages=[{"role": "user", "content": "x" * 1_500_000}] * 3, key="huge")
    with pytest.raises(UnknownJobError):
        client.job("long")
    assert client.state().ready


def test_many_questions_at_once_are_answered_each_with_its_own(house: World) -> None:
    async def story() -> None:
        async with Client(house.address) as client:
            keys = [f"many-{number}" for number in range(20)]
            for number, key in enumerate(keys):
                await client.submit_job("hello", key=key, max_tokens=number + 1, ignore_eos=True)
            for number, key in enumerate(reversed(keys)):
                view = await client.job(key, 30.0)
                assert (view.key, view.usage.completion_tokens) == (key, 20 - number)

    house.run(story())


def test_nobody_there_is_said_after_the_time_given(house: World) -> None:
    async def story() -> None:
        async with Client("127.0.0.1:9", timeout_s=0.2) as client:
            with pytest.raises(NoBrokerError):
                await client.job("any")
            with pytest.raises(NoBrokerError):
                await client.submit_job("hello", timeout_s=0.2)

    house.run(story())


# ---- commands


def jobs(house: World, *arguments: str, stdin: str = "") -> Ended:
    return command("potluck", "jobs", "--broker", house.address, *arguments, stdin=stdin)


def test_the_commands_from_handing_in_to_forgetting(house: World) -> None:
    given = jobs(house, "submit", "hello", "--key", "command", "--max-tokens", "5", "--seed", "7")
    assert (given.code, given.out) == (0, "command\n")
    shown = jobs(house, "show", "command", "--wait", "--json")
    job = json.loads(shown.out)
    assert (job["key"], job["state"]) == ("command", "finished")
    assert jobs(house, "show", "command").out.rstrip("\n") == job["text"].rstrip("\n")
    listed = jobs(house)
    assert listed.code == 0
    assert "command" in listed.out
    assert "finished" in listed.out
    as_json = json.loads(jobs(house, "--json", "--limit", "1").out)
    assert [entry["key"] for entry in as_json] == ["command"]
    forgotten = jobs(house, "forget", "command")
    assert (forgotten.code, forgotten.out) == (0, "Job command was finished and is forgotten.\n")
    gone = jobs(house, "show", "command")
    assert gone.code == 1
    assert gone.lines == [
        (
            "potluck: There is no job command. It was never accepted, was forgotten, or is too old; "
            "potluck jobs lists those that are kept."
        )
    ]


def test_a_prompt_from_standard_input_is_waited_for(house: World) -> None:
    answered = jobs(house, "submit", "--wait", "--json", "--max-tokens", "3", "--raw", stdin="hello")
    job = json.loads(answered.out)
    assert job["state"] == "finished"
    assert answered.err == f"Job {job['key']}\n"


def test_a_broker_can_be_named_before_or_after_the_command(house: World) -> None:
    key = command(
        "potluck", "jobs", "submit", "hello", "--broker", house.address, "--max-tokens", "1"
    ).out.strip()
    assert command("potluck", "jobs", "show", key, "--wait", POTLUCK_BROKER=house.address).code == 0


# ---- brokers with and without a journal


def broker(tiny: Path, *options: str | Path) -> Ended:
    ports = ("--port", "0", "--results-port", "0", "--http", "off", "--listen-address", "127.0.0.1")
    return command("potluck-broker", "-m", tiny, *ports, *options)


def test_a_second_broker_on_the_same_journal_ends_and_names_the_file(
    house: World, tiny: Path, tmp_path: Path
) -> None:
    journal = next((house.cluster.folder / "state").glob("jobs-*.sqlite3"))
    ended = broker(tiny, "--journal", journal)
    assert ended.code == 1
    assert ended.lines == [
        (
            f"potluck-broker: Another broker uses the journal of jobs {journal}. [phase start] "
            "Stop that one, or give this one its own: --journal PATH."
        )
    ]


def test_a_file_that_is_no_journal_ends_the_broker_with_one_line(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("milk, eggs\n" * 200)
    with sqlite3.connect(tmp_path / "recipes.db") as other:
        other.execute("CREATE TABLE recipes (name TEXT)")
    other.close()
    for name in ("notes.txt", "recipes.db"):
        ended = broker(tiny, "--journal", tmp_path / name)
        assert ended.code == 1
        assert len(ended.lines) == 1
        assert str(tmp_path / name) in ended.err
    (tmp_path / "file").touch()
    ended = broker(tiny, "--journal", tmp_path / "file" / "jobs.sqlite3")
    assert (ended.code, len(ended.lines)) == (1, 1)
    assert "can't be written" in ended.err


def test_a_journal_and_none_exclude_each_other(tiny: Path, tmp_path: Path) -> None:
    ended = broker(tiny, "--journal", tmp_path / "jobs.sqlite3", "--no-journal")
    assert ended.code == 2
    assert "exclude each other" in ended.err


def test_without_a_journal_jobs_are_off_and_nothing_is_written(tiny: Path, tmp_path: Path) -> None:
    with world(tiny, tmp_path, 1, "--no-journal", *FAST) as made:
        refused = jobs(made, "submit", "hello")
        assert refused.code == 1
        assert "This broker keeps no journal" in refused.err
        assert command("potluck", "infer", "--broker", made.address, "-p", "hello", "-n", "1").code == 0
        assert not (tmp_path / "state").exists()


def test_a_broker_that_is_told_to_stop_leaves_its_jobs_for_the_next_one(tiny: Path, tmp_path: Path) -> None:
    with world(tiny, tmp_path, 1, "--slots", "1", "--context", "512", "--drain-timeout", "0", *FAST) as made:

        async def story() -> None:
            async with Client(made.address, timeout_s=60.0) as client:
                for number in range(5):
                    await client.submit_job(
                        f"hello {number}", key=f"job-{number}", max_tokens=400, ignore_eos=True
                    )
                await made.until(lambda view: view.running == 1)
                made.broker.kill(signal.SIGTERM)
                assert await made.broker.process.wait() == 0
                await made.cluster.restart_broker()
                made.children.append(made.broker)
                for number in range(5):
                    view = await client.job(f"job-{number}", math.inf)
                    assert (view.state, view.usage.completion_tokens) == ("finished", 400)

        made.run(story())
