"""/potluck/v1/jobs over the real desk, thread and journal; only the core that answers is scripted."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from jobs_world import FINGERPRINT
from potluck.broker.gateway import Gateway
from potluck.broker.job_desk import JobDesk
from potluck.broker.jobs import Step
from potluck.broker.journal import Journal
from potluck.broker.rest import make_app
from potluck.wire import limits
from potluck.wire.errors import InvalidValueError, StageError, UnavailableError
from potluck.wire.ids import RequestId
from rest_world import HELLO, MODEL, Call, Core, Words, error

PATH = "/potluck/v1/jobs"


class World:
    """A broker's jobs from HTTP to the disk. `restart` is a new broker over the same journal."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "jobs.sqlite3"
        self.slots = 4
        self._keys, self._seeds = itertools.count(1), itertools.count(1000)
        self.start()

    def start(self, journal: bool = True) -> None:
        self.core = Core()
        self.gateway = Gateway(MODEL, Words(), self.core.feed, lambda: next(self._seeds), self.core.view)
        self.core.gateway = self.gateway
        self.desk = JobDesk(
            self.gateway,
            Journal.open(self.path, FINGERPRINT) if journal else None,
            keep_s=3_600.0,
            check=self._check,
            room=lambda: (self.slots - len(self.core.running), self.slots),
        )
        self.desk.start()
        self.app = make_app(
            self.gateway,
            new_id=lambda: f"key{next(self._keys)}",
            clock=lambda: 1_700_000_000.9,
            jobs=self.desk,
        )
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://house")

    def _check(self, event: Any) -> None:
        if len(event.tokens) > 100:
            raise InvalidValueError("Too long.", param="prompt")

    async def stop(self) -> None:
        self.desk.stop()
        self.gateway.close(UnavailableError("The broker is shutting down."))
        await self.desk.close()
        await self.client.aclose()

    @contextlib.asynccontextmanager
    async def restarted(self) -> AsyncIterator[None]:
        """What is done in between happens while no broker is there."""
        await self.stop()
        yield
        self.start()

    async def submit(self, key: str | None = None, **body: object) -> httpx.Response:
        headers = {} if key is None else {"Idempotency-Key": key}
        return await self.client.post(PATH, json={"prompt": "Once", **body}, headers=headers)

    async def job(self, key: str, **query: object) -> httpx.Response:
        return await self.client.get(f"{PATH}/{key}", params=query)  # type: ignore[arg-type]

    async def running(self) -> RequestId:
        return await asyncio.wait_for(self.core.arrivals.get(), 10)


def in_world(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs `async def test(world, ...)` as a pytest test; afterwards nothing runs and nothing is left."""

    async def run(folder: Path, **given: object) -> None:
        before = asyncio.all_tasks()
        world = World(folder)
        async with asyncio.timeout(30):
            await test(world, **given)
            await world.stop()
        assert world.gateway._tickets == {}
        assert asyncio.all_tasks() - before == set(), "tasks were left behind"

    @functools.wraps(test)
    def wrapper(tmp_path: Path, **given: object) -> None:
        asyncio.run(run(tmp_path, **given))

    parameters = list(inspect.signature(test).parameters.values())[1:]
    folder = inspect.Parameter("tmp_path", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    wrapper.__signature__ = inspect.Signature([folder, *parameters])  # type: ignore[attr-defined]
    return wrapper


@in_world
async def test_a_job_is_taken_in_runs_and_can_be_fetched_again_and_again(world: World) -> None:
    taken = await world.submit()
    assert taken.status_code == 202
    key = taken.json()["key"]
    assert (taken.json()["status"], taken.json()["model"]) == ("queued", MODEL)
    found = await world.job(key, wait=10)
    assert found.status_code == 200
    job = found.json()
    assert (job["status"], job["text"], job["finish_reason"]) == ("finished", "Good day!", "stop")
    assert job["usage"]["total_tokens"] == 5 + 3
    assert job["error"] is None
    assert (await world.job(key)).json() == job
    listed = (await world.client.get(PATH)).json()
    assert listed == {"object": "list", "data": [{**job, "text": None}]}


@in_world
async def test_a_chat_is_a_job_too(world: World) -> None:
    world.core.holds = True
    body = {"messages": HELLO, "prompt": None, "max_tokens": 7, "temperature": 0.5, "key": "mine"}
    taken = await world.client.post(PATH, json=body)
    assert taken.json()["key"] == "mine"
    world.core.finish(await world.running())
    event = world.core.last
    assert "".join(map(chr, event.tokens)) == "user:Hello\n"
    assert (event.max_tokens, event.sampling.temperature) == (7, 0.5)


@in_world
async def test_the_same_key_is_the_same_job_and_another_body_a_conflict(world: World) -> None:
    first = (await world.submit("mine")).json()
    await world.job("mine", wait=10)
    again = (await world.submit("mine")).json()
    assert (again["status"], again["created"]) == ("finished", first["created"])
    assert len(world.core.submitted) == 1
    refused = error(await world.submit("mine", prompt="Twice"), 409)
    assert (refused["code"], refused["param"], refused["key"]) == ("job_conflict", "key", "mine")
    assert "mine" in refused["message"]


@in_world
async def test_a_key_in_quotes_or_in_the_body_is_the_same_key(world: World) -> None:
    await world.submit('"mine"')
    taken = await world.client.post(PATH, json={"prompt": "Once", "key": "mine"})
    assert taken.json()["key"] == "mine"
    assert len((await world.client.get(PATH)).json()["data"]) == 1


@pytest.mark.parametrize(
    ("headers", "body", "param"),
    [
        ({"Idempotency-Key": "a"}, {"prompt": "Once", "key": "b"}, "key"),
        ({"Idempotency-Key": "a/b"}, {"prompt": "Once"}, "key"),
        ({}, {"prompt": "Once", "key": ""}, "key"),
        ({}, {"prompt": "Once", "n": 2}, "n"),
        ({}, {"prompt": "Once", "stream": True}, "stream"),
        ({}, {"prompt": "Once", "logprobs": 0}, "logprobs"),
        ({}, {"messages": HELLO, "logprobs": True}, "logprobs"),
        ({}, {"prompt": ["Once", "Twice"]}, "prompt"),
        ({}, {"prompt": "Once", "messages": HELLO}, "prompt"),
        ({}, {"prompt": "x" * 200}, "prompt"),
        ({}, {"prompt": "Once", "temperature": 9}, "temperature"),
        ({}, {"messages": [{"role": "poet", "content": "x"}]}, "messages[0].role"),
        ({}, {}, "prompt"),
        ({}, [], None),
    ],
)
def test_what_can_not_be_a_job_is_refused_by_name_and_not_written(
    headers: dict[str, str], body: object, param: str | None, tmp_path: Path
) -> None:
    @in_world
    async def story(world: World) -> None:
        refused = error(await world.client.post(PATH, json=body, headers=headers))
        assert refused["param"] == param
        assert (await world.client.get(PATH)).json()["data"] == []

    story(tmp_path=tmp_path)


@in_world
async def test_a_job_whose_key_nobody_knows_is_not_found(world: World) -> None:
    assert error(await world.job("nobody"), 404)["code"] == "job_not_found"
    assert error(await world.client.delete(f"{PATH}/nobody"), 404)["code"] == "job_not_found"


@pytest.mark.parametrize("query", ["wait=61", "wait=-1", "wait=soon", "wait=nan"])
def test_a_wait_out_of_bounds_is_refused(query: str, tmp_path: Path) -> None:
    @in_world
    async def story(world: World) -> None:
        assert error(await world.client.get(f"{PATH}/a?{query}"))["param"] == "wait"

    story(tmp_path=tmp_path)


@in_world
async def test_a_list_has_as_many_as_asked_for(world: World) -> None:
    for number in range(3):
        await world.submit(f"job-{number}")
    listed = (await world.client.get(f"{PATH}?limit=2")).json()
    assert [job["key"] for job in listed["data"]] == ["job-2", "job-1"]
    assert error(await world.client.get(f"{PATH}?limit=0"))["param"] == "limit"
    assert error(await world.client.get(f"{PATH}?limit=1001"))["param"] == "limit"


@in_world
async def test_whoever_waits_is_answered_when_the_job_ends(world: World) -> None:
    world.core.holds = True
    await world.submit("mine")
    name = await world.running()
    waiting = asyncio.create_task(world.job("mine", wait=30))
    while not world.desk.core.state.waiters:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    world.core.say(name, "Here.")
    world.core.finish(name)
    assert (await waiting).json()["text"] == "Here."


@in_world
async def test_whoever_hangs_up_while_waiting_leaves_nothing_behind(world: World) -> None:
    world.core.holds = True
    await world.submit("mine")
    call = Call(world.app, f"{PATH}/mine", None, method="GET")
    call.hang_up()
    await call.task
    waiting = Call(world.app, f"{PATH}/mine", None, method="GET", query=b"wait=30")
    while not world.desk.core.state.waiters:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    waiting.hang_up()
    await waiting.task
    assert world.desk.core.state.waiters == {}
    assert world.desk.core.state.asks == {}
    world.core.finish(await world.running())


@in_world
async def test_a_job_that_is_forgotten_while_it_runs_is_cancelled(world: World) -> None:
    world.core.holds = True
    await world.submit("mine")
    name = await world.running()
    assert (await world.client.delete(f"{PATH}/mine")).json()["status"] == "cancelled"
    assert world.core.cancelled == [name]
    assert (await world.job("mine")).status_code == 404


@in_world
async def test_a_job_that_fails_says_why_as_a_request_would(world: World) -> None:
    world.core.holds = True
    await world.submit("mine")
    world.core.fail(
        await world.running(), StageError("It broke.", hint="Look there.", device="mini", stage="mini/1")
    )
    job = (await world.job("mine", wait=10)).json()
    assert (job["status"], job["text"]) == ("failed", None)
    assert job["error"] == {
        "message": "It broke. Look there.", "type": "server_error", "param": None, "code": "stage_failed",
        "device": "mini", "stage": "mini/1",
    }  # fmt: skip


@in_world
async def test_jobs_go_on_after_a_restart_with_the_same_seed_and_prompt(world: World) -> None:
    world.core.holds = True
    await world.submit("mine", prompt="Once upon")
    await world.running()
    before = world.core.last
    waiting = asyncio.create_task(world.job("mine", wait=30))
    while not world.desk.core.state.waiters:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    async with world.restarted():
        assert error(await waiting, 503)["code"] == "closing"
    found = (await world.job("mine", wait=10)).json()
    assert (found["status"], found["text"]) == ("finished", "Good day!")
    again = world.core.last
    assert (again.tokens, again.sampling, again.max_tokens) == (
        before.tokens,
        before.sampling,
        before.max_tokens,
    )
    assert before.sampling.seed >= 1000


@in_world
async def test_the_time_that_the_broker_gives_to_requests_is_not_for_jobs(world: World) -> None:
    world.core.holds = True
    await world.submit("mine")
    world.core.finish(await world.running())
    assert world.core.last.timeout_s == limits.TIMEOUT_S
    await world.submit("hasty", timeout_s=5)
    world.core.finish(await world.running())
    assert world.core.last.timeout_s == 5


@in_world
async def test_a_job_waits_for_a_chain_instead_of_failing(world: World) -> None:
    world.slots = 0
    await world.submit("mine")
    assert (await world.job("mine")).json()["status"] == "queued"
    world.slots = 4
    world.core.refuses, world.core.accepts = UnavailableError("No whole chain is ready."), 0
    world.desk.look_for_room()
    state = world.desk.core.state
    while state.count(Step.RUNNING) == 0:  # noqa: ASYNC110
        await asyncio.sleep(0)
    while state.count(Step.RUNNING) == 1:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert (await world.job("mine")).json()["status"] == "queued"
    world.core.refuses = None
    world.desk.look_for_room()
    assert (await world.job("mine", wait=10)).json()["status"] == "finished"


@in_world
async def test_jobs_leave_a_slot_and_the_queue_to_others(world: World) -> None:
    world.core.holds = True
    for number in range(10):
        await world.submit(f"job-{number}")
    for _ in range(3):
        await world.running()
    assert len(world.core.running) == 3
    other = asyncio.create_task(world.client.post("/v1/completions", json={"prompt": "Now"}))
    name = await world.running()
    assert not name.startswith("job-")
    world.core.finish(name)
    assert (await other).status_code == 200
    world.core.holds = False
    for running in list(world.core.running):
        world.core.finish(running)
    assert (await world.job("job-9", wait=20)).json()["status"] == "finished"


@in_world
async def test_many_submissions_share_commits(world: World) -> None:
    world.slots = 0
    taken = await asyncio.gather(*(world.submit(f"job-{number}") for number in range(100)))
    assert {response.status_code for response in taken} == {202}
    assert world.desk.core.state.unfinished == 100


@in_world
async def test_a_full_disk_is_a_503_and_jobs_are_taken_again_when_there_is_room(world: World) -> None:
    database = world.desk._journal._db  # type: ignore[union-attr]
    pages = database.execute("PRAGMA page_count").fetchone()[0]
    database.execute(f"PRAGMA max_page_count = {pages}")
    refused = await world.submit("mine", stop=["x" * 500 + str(n) for n in range(16)])
    assert error(refused, 503)["code"] == "journal_failed"
    assert int(refused.headers["retry-after"]) > 0
    assert (await world.job("mine")).status_code == 404
    database.execute("PRAGMA max_page_count = 100000")
    assert (await world.submit("mine")).status_code == 202


@in_world
async def test_without_a_journal_there_are_no_jobs_and_that_is_said(world: World) -> None:
    await world.stop()
    world.start(journal=False)
    for refused in (
        await world.submit(),
        await world.job("a"),
        await world.client.get(PATH),
        await world.client.delete(f"{PATH}/a"),
    ):
        said = error(refused, 501)
        assert said["code"] == "jobs_off"
        assert "--no-journal" in said["message"]


def test_prompts_and_answers_are_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    @in_world
    async def story(world: World) -> None:
        world.core.says = ["ANSWER"]
        await world.submit("mine", prompt="PROMPT")
        await world.job("mine", wait=10)
        error(await world.submit("mine", prompt="PROMPT2"), 409)
        error(await world.submit("other", prompt="PROMPT" * 50))
        database = world.desk._journal._db  # type: ignore[union-attr]
        database.execute(f"PRAGMA max_page_count = {database.execute('PRAGMA page_count').fetchone()[0]}")
        error(await world.submit("third", prompt="PROMPT", stop=["x" * 500 + str(n) for n in range(16)]), 503)

    story(tmp_path=tmp_path)
    assert "PROMPT" not in caplog.text
    assert "ANSWER" not in caplog.text


@in_world
async def test_the_openapi_page_knows_jobs(world: World) -> None:
    page = json.loads((await world.client.get("/openapi.json")).content)
    assert {"post", "get"} <= page["paths"][PATH].keys()
    assert {"get", "delete"} <= page["paths"][PATH + "/{key}"].keys()
    assert {"JobBody", "JobList", "JobChatBody", "JobCompletionBody"} <= page["components"]["schemas"].keys()
