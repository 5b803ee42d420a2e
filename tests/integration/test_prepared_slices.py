"""Slices of a real model held at once in llama.cpp: prepared, switched between, and computing as if each were alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from potluck.model.facts import read_facts
from potluck.model.reference import reference
from potluck.stage.engines.llama import LlamaEngine, prepare_process
from potluck.stage.settings import StageSettings
from potluck.wire.messages import (
    Assign,
    BatchDone,
    Hop,
    MicroBatch,
    ModelRef,
    Prepare,
    Prepared,
    SlotSampling,
    Span,
    Trim,
)
from potluck.wire.sampling import GREEDY
from stage_world import DEADLINE_S, ScriptedBroker, assignment, int32
from tiny_models import write_tiny

# ggml reads its environment once in a process. This runs when tests are collected, before any of them computes.
prepare_process(exact=True)

LAYERS = 4
PROMPT = [3, 14, 15, 9, 26, 5]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "llama.gguf", "llama", layers=LAYERS)


class Stage:
    """One worker with llama.cpp, and a broker that only does what the test tells it."""

    def __init__(self, path: Path, cache: Path) -> None:
        self.model: ModelRef = reference(read_facts(path), "tiny")
        self.broker = ScriptedBroker()
        settings = StageSettings("dev", {self.model.fingerprint: path}, cache_dir=cache, listen_address="*")
        self.running = self.broker.start(LlamaEngine, settings)
        self.epoch = 0

    def half(self, index: int) -> Assign:
        half = {"first": 2 * index, "end": 2 * index + 2, "context_tokens": 64, "exact": True}
        return assignment(index, 2, model=self.model, **half)

    async def prepare(self, *wishes: Assign) -> None:
        self.broker.say(Prepare(1, tuple(wish.slice for wish in wishes)))
        for index in range(len(wishes)):
            answer = (await self.broker.hear(Prepared)).message
            assert isinstance(answer, Prepared)
            assert (answer.index, answer.kv_bytes > 0, answer.load_s > 0) == (index, True, True)

    async def front(self, spans: Sequence[tuple[int, list[int]]]) -> list[bytes]:
        """The activations after the front half of these (position, tokens), in an epoch of its own."""
        self.epoch += 1
        await self.broker.make_ready(self.half(0), self.epoch)
        rows = []
        for number, (position, tokens) in enumerate(spans):
            batch = MicroBatch(number, (Span(0, position, len(tokens), 1),))
            await self.broker.send(batch, int32(*tokens), epoch=self.epoch)
            rows.append(bytes((await self.broker.forwarded()).arrays[1]))
        return rows

    async def back(
        self, spans: Sequence[tuple[int, list[int]]], rows: Sequence[bytes]
    ) -> list[tuple[list[int], object]]:
        """The tokens, and their log-probabilities, after the back half of such activations."""
        self.epoch += 1
        await self.broker.make_ready(self.half(1), self.epoch)
        greedy = SlotSampling(0, msgspec.structs.replace(GREEDY, top_logprobs=5))
        results: list[tuple[list[int], object]] = []
        for number, ((position, tokens), activations) in enumerate(zip(spans, rows, strict=True)):
            batch = MicroBatch(
                number, (Span(0, position, len(tokens), 1),), (), (greedy,), (Hop(0, 0.0, 0.0, 0),)
            )
            await self.broker.send(batch, int32(*tokens), activations, epoch=self.epoch)
            done, chosen = await self.broker.result()
            assert isinstance(done, BatchDone), done
            results.append((chosen, done.logprobs))
        return results

    async def end(self) -> None:
        await self.broker.worker.stop()
        assert await self.running == 0


def test_two_slices_held_at_once_compute_as_if_each_were_alone_however_often_they_are_switched(
    path: Path, tmp_path: Path
) -> None:
    spans = [(0, PROMPT), (6, [21]), (7, [8])]

    async def scenario() -> None:
        alone = [Stage(path, tmp_path), Stage(path, tmp_path)]
        for stage in alone:
            await stage.broker.welcome()
        rows = await alone[0].front(spans)
        results = await alone[1].back(spans, rows)
        for stage in alone:
            await stage.end()

        both = Stage(path, tmp_path)
        await both.broker.welcome()
        await both.prepare(both.half(1), both.half(0))
        engines = both.broker.worker._holder.engines
        for _ in range(2):
            assert await both.front(spans) == rows
            assert await both.back(spans, rows) == results
        assert both.broker.worker._holder.engines == engines, "nothing was loaded anew"
        await both.end()
        assert both.broker.worker._holder.engines == []

    asyncio.run(asyncio.wait_for(scenario(), 3 * DEADLINE_S))


def test_a_slice_is_loaded_beside_one_that_computes_and_disturbs_no_bit_of_it(
    path: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        stage = Stage(path, tmp_path)
        await stage.broker.welcome()
        spans = [(0, PROMPT)]
        rows = await stage.front(spans)
        stage.broker.say(Prepare(1, (stage.half(1).slice,)))
        hearing = asyncio.create_task(stage.broker.hear(Prepared))
        number = 1
        while not hearing.done():
            batch = MicroBatch(number, (Span(0, 0, len(PROMPT), 1),), (Trim(0, 0),))
            await stage.broker.send(batch, int32(*PROMPT), epoch=stage.epoch)
            assert bytes((await stage.broker.forwarded()).arrays[1]) == rows[0]
            number += 1
        await hearing
        await stage.end()

    asyncio.run(asyncio.wait_for(scenario(), 3 * DEADLINE_S))
