"""A stage worker that holds several slices: it computes on while one is loaded beside it, and switches at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager

from potluck.stage.engine import Loaded, LoadSpec, Output, Work
from potluck.stage.engines.fake import FakeEngine, fake_continuation
from potluck.stage.machine import StageStatus
from potluck.wire.errors import OutOfMemoryError
from potluck.wire.messages import BatchDone, MicroBatch, Prepare, Prepared, PrepareFailed, Ready, Span
from stage_core import SLICE
from stage_world import DEADLINE_S, LAYERS, ScriptedBroker, assignment, int32, prompt_batch

FRONT, BACK = assignment(0, 2).slice, assignment(1, 2).slice


def go(work: Coroutine[object, object, None]) -> None:
    """Real time, bounded."""
    asyncio.run(asyncio.wait_for(work, 3 * DEADLINE_S))


class Workshop:
    """Makes engines whose loads and forwards stop at gates, and sees that none is used by two threads at a time."""

    def __init__(self) -> None:
        self.load_gate = threading.Semaphore(0)
        self.forward_gate = threading.Semaphore(0)
        self.loading = threading.Semaphore(0)
        self.computing = threading.Semaphore(0)
        self.fail_load: dict[int, OutOfMemoryError] = {}
        """By the first layer."""
        self.open: list[FakeEngine] = []

    def make(self) -> FakeEngine:
        shop = self

        class Engine(FakeEngine):
            def __init__(self) -> None:
                super().__init__()
                self.alone = threading.Lock()

            def load(self, spec: LoadSpec) -> Loaded:
                shop.loading.release()
                assert shop.load_gate.acquire(timeout=DEADLINE_S)
                self.fail_load = shop.fail_load.get(spec.first)
                loaded = super().load(spec)
                shop.open.append(self)
                return loaded

            def forward(self, work: Work) -> Output:
                with alone(self.alone):
                    shop.computing.release()
                    assert shop.forward_gate.acquire(timeout=DEADLINE_S)
                    return super().forward(work)

            def free(self, slot: int) -> None:
                with alone(self.alone):
                    super().free(slot)

            def close(self) -> None:
                with alone(self.alone):
                    if self in shop.open:
                        shop.open.remove(self)
                    super().close()

        return Engine()

    async def stands(self, at: threading.Semaphore) -> None:
        """Waits until one more call stands at that gate, or stood there."""
        assert await asyncio.to_thread(at.acquire, timeout=DEADLINE_S)


@contextmanager
def alone(lock: threading.Lock) -> Iterator[None]:
    assert lock.acquire(blocking=False), "an engine is used by one thread at a time"
    try:
        yield
    finally:
        lock.release()


@contextmanager
def workshop() -> Iterator[Workshop]:
    shop = Workshop()
    try:
        yield shop
    finally:
        shop.load_gate.release(1000)
        shop.forward_gate.release(1000)


async def serve(broker: ScriptedBroker, shop: Workshop) -> asyncio.Task[int]:
    running = broker.start(shop.make)
    await broker.welcome()
    shop.load_gate.release()
    await broker.make_ready(assignment())
    await shop.stands(shop.loading)
    return running


async def prepared(broker: ScriptedBroker) -> Prepared | PrepareFailed:
    message = (await broker.hear(Prepared, PrepareFailed)).message
    assert isinstance(message, Prepared | PrepareFailed)
    return message


def test_micro_batches_are_computed_while_another_slice_is_loaded_beside_them() -> None:
    async def scenario() -> None:
        broker = ScriptedBroker()
        with workshop() as shop:
            running = await serve(broker, shop)
            broker.say(Prepare(1, (BACK,)))
            await shop.stands(shop.loading)
            shop.forward_gate.release()
            await broker.send(prompt_batch(0), int32(5, 6, 7))
            _, tokens = await broker.result()
            assert tokens == fake_continuation([5, 6, 7], 1, LAYERS)
            shop.load_gate.release()
            answer = await prepared(broker)
            assert isinstance(answer, Prepared)
            assert answer.weights_bytes > 0
            await broker.worker.stop()
            assert await running == 0
            assert shop.open == []

    go(scenario())


def test_a_failed_preparation_is_told_and_costs_the_chain_nothing() -> None:
    async def scenario() -> None:
        broker = ScriptedBroker()
        with workshop() as shop:
            running = await serve(broker, shop)
            shop.fail_load[BACK.first] = OutOfMemoryError("3 GB short")
            shop.load_gate.release(2)
            broker.say(Prepare(1, (BACK, FRONT)))
            failed, well = await prepared(broker), await prepared(broker)
            assert isinstance(failed, PrepareFailed)
            assert (failed.index, failed.error.code, failed.error.device) == (0, "out_of_memory", "dev")
            assert isinstance(well, Prepared)
            assert broker.worker.machine.state.status is StageStatus.SERVING
            await broker.worker.stop()
            await running

    go(scenario())


def test_a_prepared_slice_takes_over_from_empty_slots_and_the_old_engine_ends_its_micro_batch_first() -> None:
    async def scenario() -> None:
        broker = ScriptedBroker()
        with workshop() as shop:
            running = await serve(broker, shop)
            shop.load_gate.release()
            broker.say(Prepare(1, (BACK,)))
            await prepared(broker)
            old, new = shop.open
            await broker.send(prompt_batch(0), int32(1, 2, 3))
            await shop.stands(shop.computing)
            broker.say(assignment(1, 2), 2)
            await broker.until(lambda: broker.worker.machine.state.epoch == 2)
            assert old in shop.open
            shop.forward_gate.release()
            assert isinstance((await broker.hear(Ready)).message, Ready)
            await broker.until(lambda: set(broker.worker.machine.state.held) == {BACK})
            shop.load_gate.release()
            broker.say(Prepare(2, (FRONT,)), 2)
            await prepared(broker)  # closing comes before loading
            assert old not in shop.open
            assert new in shop.open
            await broker.worker.stop()
            assert await running == 0
            assert shop.open == []

    go(scenario())


def test_the_chain_of_a_spare_gives_the_text_of_the_fake_model_after_two_switches() -> None:
    async def scenario() -> None:
        broker = ScriptedBroker()
        running = broker.start()
        await broker.welcome()
        broker.say(Prepare(1, (SLICE, BACK)))
        assert [(await prepared(broker)).index for _ in range(2)] == [0, 1]
        await broker.make_ready(assignment(1, 2), 1)
        for epoch in (2, 3):
            await broker.make_ready(assignment(), epoch)
            whole = MicroBatch(9, (Span(0, 0, 3, 1),))  # no trim: it fits only an empty slot
            await broker.send(whole, int32(5, 6, 7), epoch=epoch)
            done, tokens = await broker.result()
            assert isinstance(done, BatchDone)
            assert tokens == fake_continuation([5, 6, 7], 1, LAYERS)
        await broker.worker.stop()
        assert await running == 0

    go(scenario())


def test_a_stage_that_is_stopped_during_a_load_closes_what_comes_of_it() -> None:
    async def scenario() -> None:
        broker = ScriptedBroker()
        with workshop() as shop:
            running = await serve(broker, shop)
            broker.say(Prepare(1, (BACK,)))
            await shop.stands(shop.loading)
            stopping = asyncio.create_task(broker.worker.stop())
            await broker.until(lambda: broker.worker.machine.state.stopped)
            shop.load_gate.release()
            await stopping
            assert await running == 0
            assert shop.open == []

    go(scenario())
