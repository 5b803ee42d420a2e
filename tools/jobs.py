"""`potluck jobs`: prompts whose answers are kept by the broker until they are fetched."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from potluck.runtime.client import Client
from potluck.tools.broker_address import broker_address
from potluck.tools.console import make_console
from potluck.wire.messages import ChatMessage, JobView
from potluck.wire.sampling import Sampling


@dataclass(frozen=True, slots=True)
class NewPrompt:
    """What is handed in."""

    text: str
    key: str | None
    max_tokens: int
    raw: bool
    system: str | None
    sampling: Sampling
    seed: int | None


async def list_jobs(console: Console, broker: str | None, limit: int, as_json: bool) -> None:
    """The newest jobs as a table."""
    async with Client(await broker_address(broker)) as client:
        jobs = await client.jobs(limit)
    if as_json:
        console.out(json.dumps([plain(job) for job in jobs]), highlight=False)
    elif jobs:
        console.print(job_table(jobs))
    else:
        console.print("No jobs.")


async def submit_job(
    console: Console, broker: str | None, wanted: NewPrompt, *, wait: bool, as_json: bool
) -> None:
    """Hands a job in and prints its key; with `wait` its answer, too."""
    messages = [ChatMessage("system", wanted.system)] if wanted.system else []
    messages.append(ChatMessage("user", wanted.text))
    async with Client(await broker_address(broker)) as client:
        job = await client.submit_job(
            wanted.text if wanted.raw else None,
            key=wanted.key,
            messages=None if wanted.raw else messages,
            max_tokens=wanted.max_tokens,
            sampling=wanted.sampling,
            seed=wanted.seed,
        )
        if not wait:
            _print(console, job, job.key, as_json)
            return
        make_console(stderr=True).print(f"Job {job.key}", markup=False)
        job = await client.job(job.key, math.inf)
    _print_answer(console, job, as_json)


async def show_job(console: Console, broker: str | None, key: str, *, wait: bool, as_json: bool) -> None:
    """A job's answer, or how far it is. Raises the error it failed with."""
    async with Client(await broker_address(broker)) as client:
        job = await client.job(key, math.inf if wait else 0.0)
    _print_answer(console, job, as_json)


async def forget_job(console: Console, broker: str | None, key: str, *, as_json: bool) -> None:
    """Cancels and forgets a job."""
    async with Client(await broker_address(broker)) as client:
        job = await client.forget_job(key)
    _print(console, job, f"Job {job.key} was {job.state} and is forgotten.", as_json)


def _print_answer(console: Console, job: JobView, as_json: bool) -> None:
    if not as_json and job.error is not None:
        raise job.error.restore()
    _print(console, job, job.text if job.state == "finished" else f"Job {job.key} is {job.state}.", as_json)


def _print(console: Console, job: JobView, text: str, as_json: bool) -> None:
    console.out(json.dumps(plain(job)) if as_json else text, highlight=False)


def plain(job: JobView) -> dict[str, Any]:
    """The job as plain data, every field that says something of it."""
    fields = {name: getattr(job, name) for name in job.__struct_fields__ if name != "question"}
    built: dict[str, Any] = msgspec.to_builtins(fields)
    return built


def job_table(jobs: tuple[JobView, ...]) -> Table:
    """One line per job."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("job", "state", "handed in", "took"):
        table.add_column(title)
    table.add_column("tokens", justify="right")
    table.add_column("note")
    for job in jobs:
        took = "" if job.ended_s is None else f"{max(0.0, job.ended_s - job.created_s):.1f} s"
        tokens = str(job.usage.completion_tokens) if job.state == "finished" else ""
        note = job.reason if job.error is None else job.error.what
        table.add_row(job.key, job.state, _when(job.created_s), took, tokens, note)
    return table


def _when(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")
