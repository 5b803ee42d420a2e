"""Stages that copy their slots to one that stands by: it goes on with the text as if it had served all the time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np

from potluck.runtime.memory import MemoryNetwork
from potluck.stage.engine import LoadSpec, Work
from potluck.stage.engines.fake import FakeEngine, fake_continuation
from potluck.stage.holder import NO_MODEL
from potluck.stage.machine import StageStatus
from potluck.stage.mirroring import LEAST_TOKENS
from potluck.stage.settings import StageSettings
from potluck.wire.errors import EngineError, StageError
from potluck.wire.ids import Epoch
from potluck.wire.messages import (
    Assign,
    BatchDone,
    Copied,
    ErrorInfo,
    Keep,
    MicroBatch,
    Mirror,
    Prepare,
    Prepared,
    Refused,
    Register,
    SlotCopy,
    Span,
    Welcome,
    encode,
)
from stage_core import SLICE
from stage_world import DEADLINE_S, LAYERS, MODEL, ScriptedBroker, assignment, int32, prompt_batch

PROMPT = list(range(20, 20 + LEAST_TOKENS + 2))


def go(work: Coroutine[object, object, None]) -> None:
    """Real time, bounded."""
    asyncio.run(asyncio.wait_for(work, 3 * DEADLINE_S))


class Stage(ScriptedBroker):
    """A stage with a broker of its own, on a network with others."""

    running: asyncio.Task[int]

    def assign(self, **changes: Any) -> Assign:
        results = self.results.endpoint
        return assignment(next_endpoint=results, results_endpoint=results, **changes)

    async def decode(
        self, text: list[int], steps: int, slot: int = 0, epoch: int = 1, first: int = 1
    ) -> None:
        """Feeds the text's last token, and appends the one that comes out, step by step."""
        for number in range(first, first + steps):
            span = Span(slot, len(text) - 1, 1, 1)
            await self.send(MicroBatch(number, (span,)), int32(text[-1]), epoch=epoch)
            done, tokens = await self.result()
            assert isinstance(done, BatchDone)
            text += tokens

    async def begin(self, prompt: list[int], slot: int = 0, number: int = 0, epoch: int = 1) -> list[int]:
        """The prompt and its first token."""
        await self.send(prompt_batch(number, len(prompt), slot), int32(*prompt), epoch=epoch)
        done, tokens = await self.result()
        assert isinstance(done, BatchDone)
        return prompt + tokens

    async def copied(self) -> Copied:
        message = (await self.hear(Copied)).message
        assert isinstance(message, Copied)
        return message


async def serving(network: MemoryNetwork, suffix: str = "1") -> Stage:
    stage = Stage(network, suffix)
    stage.running = stage.start()
    await stage.welcome()
    await stage.make_ready(stage.assign())
    return stage


async def standing_by(network: MemoryNetwork, suffix: str = "2", engine: Any = FakeEngine) -> Stage:
    stage = Stage(network, suffix)
    stage.running = stage.start(engine)
    await stage.welcome()
    stage.say(Prepare(1, (SLICE,)))
    await stage.hear(Prepared)
    return stage


def data_endpoint(stage: Stage) -> str:
    return stage.worker.machine.me.data_endpoint


async def close(*stages: Stage) -> None:
    for stage in stages:
        await stage.worker.stop()
        assert await stage.running == 0


def text_of(prompt: list[int], n: int) -> list[int]:
    return prompt + fake_continuation(prompt, n, LAYERS)


def test_a_stage_that_stood_by_goes_on_with_copied_slots_where_they_end() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        one, two = await serving(network), await standing_by(network)
        one.say(Mirror((data_endpoint(two),)), 1)
        text = await one.begin(PROMPT)
        copy = await two.copied()
        assert copy == Copied(SLICE, 0, len(PROMPT), 0)
        ready = await two.make_ready(two.assign(keep=(Keep(0, len(PROMPT)),)), epoch=2)
        assert ready.kept
        await two.decode(text, 6, epoch=2, first=1)
        assert text == text_of(PROMPT, 7)
        await close(one, two)

    go(scenario())


def test_only_what_came_after_the_copy_is_computed_again_and_slots_that_are_not_named_are_empty() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        one, two = await serving(network), await standing_by(network)
        one.say(Mirror((data_endpoint(two),)), 1)
        text = await one.begin(PROMPT)
        assert (await two.copied()).slot == 0
        await one.begin(PROMPT[::-1], slot=2, number=1)
        assert (await two.copied()).slot == 2
        held = len(text) - 3
        ready = await two.make_ready(two.assign(keep=(Keep(0, held),)), epoch=2)
        assert ready.kept
        (engine,) = two.worker._holder.engines
        assert [engine.held(slot) for slot in range(4)] == [held, 0, 0, 0]
        await two.send(MicroBatch(9, (Span(0, held, 3, 1),)), int32(*text[held:]), epoch=2)
        _, tokens = await two.result()
        assert text + tokens == text_of(PROMPT, 2)
        await close(one, two)

    go(scenario())


def test_a_slot_grows_and_is_copied_again_and_the_newest_copy_counts() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        one, two = await serving(network), await standing_by(network)
        one.say(Mirror((data_endpoint(two),)), 1)
        text = await one.begin(PROMPT)
        assert (await two.copied()).tokens == len(PROMPT)
        await one.decode(text, LEAST_TOKENS)
        copy = await two.copied()
        assert (copy.tokens, copy.batch) == (len(PROMPT) + LEAST_TOKENS, LEAST_TOKENS)
        assert (await two.make_ready(two.assign(keep=(Keep(0, copy.tokens),)), epoch=2)).kept
        await two.decode(text, 2, epoch=2, first=20)
        assert text == text_of(PROMPT, LEAST_TOKENS + 3)
        await close(one, two)

    go(scenario())


def test_a_survivor_keeps_the_beginnings_of_its_own_slots() -> None:
    async def scenario() -> None:
        one = await serving(MemoryNetwork())
        text = await one.begin(PROMPT)
        other = await one.begin(PROMPT[2:], slot=1, number=1)
        await one.decode(text, 3, first=2)
        keep = (Keep(0, len(PROMPT)), Keep(1, len(other) - 1))
        assert (await one.make_ready(one.assign(keep=keep), epoch=2)).kept
        del text[len(PROMPT) + 1 :]
        await one.decode(text, 4, epoch=2, first=10)
        await one.decode(other, 2, slot=1, epoch=2, first=20)
        assert text == text_of(PROMPT, 5)
        assert other == text_of(PROMPT[2:], 3)
        await close(one)

    go(scenario())


def test_a_stage_that_lacks_one_of_the_slots_to_keep_says_so_and_empties_all() -> None:
    async def scenario() -> None:
        one = await serving(MemoryNetwork())
        text = await one.begin(PROMPT)
        keep = (Keep(0, len(PROMPT)), Keep(1, 1))
        assert not (await one.make_ready(one.assign(keep=keep), epoch=2)).kept
        (engine,) = one.worker._holder.engines
        assert [engine.held(slot) for slot in range(4)] == [0, 0, 0, 0]
        assert await one.begin(PROMPT, number=7, epoch=2) == text
        await close(one)

    go(scenario())


def test_a_stage_that_has_to_load_keeps_nothing() -> None:
    async def scenario() -> None:
        one = Stage(MemoryNetwork(), "1")
        one.running = one.start()
        await one.welcome()
        assert not (await one.make_ready(one.assign(keep=(Keep(0, 3),)))).kept
        await close(one)

    go(scenario())


def test_a_copy_that_does_not_fit_is_not_kept_and_the_stage_serves_on() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        two = await standing_by(network)
        assert two.push is not None
        for state in (b"noise", b""):
            copy = SlotCopy(SLICE, 0, 3, 5)
            await two.send_frames(encode(copy, Epoch(1), [state, int32(1, 2, 3)]))
        engine = FakeEngine()
        await two.send_frames(encode(good_copy(engine), Epoch(1), [engine.export(1), int32(1, 2, 3)]))
        assert await two.copied() == Copied(SLICE, 1, 3, 6)
        assert not (await two.make_ready(two.assign(keep=(Keep(0, 3),)), epoch=2)).kept
        assert two.worker.machine.state.status is StageStatus.SERVING
        await close(two)

    go(scenario())


def good_copy(engine: FakeEngine) -> SlotCopy:
    """Fills slot 1 of an engine of the same slice with the tokens 1, 2, 3."""
    engine.load(LoadSpec(NO_MODEL, NO_MODEL, 0, LAYERS, LAYERS, 4, 32, 16))
    engine.forward(Work([Span(1, 0, 3, 1)], np.array([1, 2, 3], np.int32)))
    return SlotCopy(SLICE, 1, 3, 6)


def test_a_mirror_that_takes_nothing_is_dropped_and_the_others_get_their_copies() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        one, two = Stage(network, "1"), await standing_by(network)
        settings = StageSettings(
            "dev", {MODEL.fingerprint: None}, engine="fake", listen_address="*", send_timeout_s=0.05
        )
        one.running = one.start(settings=settings)
        await one.welcome()
        await one.make_ready(one.assign())
        silent = one.next.endpoint
        one.say(Mirror((silent, data_endpoint(two))), 1)
        text = await one.begin(PROMPT)
        assert (await two.copied()).slot == 0
        await one.until(lambda: one.worker.machine.mirroring.mirrors == (data_endpoint(two),))
        await one.decode(text, LEAST_TOKENS)
        assert (await two.copied()).tokens == len(PROMPT) + LEAST_TOKENS
        await close(one, two)

    go(scenario())


def test_an_engine_that_can_not_copy_serves_on_without() -> None:
    class Unable(FakeEngine):
        def export(self, slot: int) -> bytes:
            raise EngineError("no state")

    async def scenario() -> None:
        network = MemoryNetwork()
        one, two = Stage(network, "1"), await standing_by(network)
        one.running = one.start(Unable)
        await one.welcome()
        await one.make_ready(one.assign())
        one.say(Mirror((data_endpoint(two),)), 1)
        text = await one.begin(PROMPT)
        await one.until(lambda: one.worker.machine.mirroring.mirrors == ())
        await one.decode(text, 3)
        assert text == text_of(PROMPT, 4)
        await close(one, two)

    go(scenario())


def test_copies_are_forgotten_when_another_broker_takes_the_stage_in() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        one, two = await serving(network), await standing_by(network)
        one.say(Mirror((data_endpoint(two),)), 1)
        await one.begin(PROMPT)
        await two.copied()
        (held,) = two.worker.machine.state.held.values()
        assert held.copies == {0: 0}
        two.say(Refused(ErrorInfo.of(StageError("This broker does not know the stage."))))
        await two.hear(Register)
        two.say(Welcome("test", 1000.0, 3))
        await two.until(lambda: not held.copies)
        await close(one, two)

    go(scenario())
