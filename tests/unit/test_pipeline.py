"""A stage worker's data path over a network in memory: order, overlap, bounds, bad frames, broken engines."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest

from potluck.runtime.memory import MemoryNetwork, Weather
from potluck.stage.compute import InlineLane, LaneJob, Spent, ThreadLane
from potluck.stage.engine import FloatRows, Output, Tokens, Work
from potluck.stage.engines.fake import FakeEngine, FakeSampler, fake_continuation
from potluck.stage.machine import StageStatus
from potluck.stage.pipeline import PLACES
from potluck.wire.errors import OutOfMemoryError, Phase
from potluck.wire.frames import pack_header
from potluck.wire.ids import Epoch
from potluck.wire.messages import (
    BatchDone,
    BatchFailed,
    Heartbeat,
    Hop,
    MicroBatch,
    Ready,
    SlotSampling,
    Span,
    StageFailed,
    Trim,
    encode,
)
from potluck.wire.sampling import Sampling, TokenLogprobs
from sim.virtual_time import run_virtual
from stage_world import DEADLINE_S, LAYERS, MODEL, ScriptedBroker, assignment, int32, prompt_batch


def go(work: Coroutine[object, object, None]) -> None:
    """Real time, bounded."""
    asyncio.run(asyncio.wait_for(work, 3 * DEADLINE_S))


class GatedEngine(FakeEngine):
    """Stops at the begin of every forward until the test lets it through."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(0)
        self._begun = threading.Semaphore(0)

    async def begun(self) -> None:
        """Waits until one more forward stands at the gate, or stood there."""
        assert await asyncio.to_thread(self._begun.acquire, timeout=DEADLINE_S)

    def forward(self, work: Work) -> Output:
        self._begun.release()
        assert self.gate.acquire(timeout=DEADLINE_S)
        return super().forward(work)


@contextmanager
def opened(engine: GatedEngine) -> Iterator[None]:
    """Lets whatever still waits at the gate through in the end, so that a failed test ends, too."""
    try:
        yield
    finally:
        engine.gate.release(1000)


async def served(broker: ScriptedBroker, **assign: object) -> None:
    await broker.welcome()
    await broker.make_ready(assignment(**assign))  # type: ignore[arg-type]


async def three_inside(broker: ScriptedBroker, engine: GatedEngine) -> None:
    """Three prompts have arrived, and the first one stands at the gate."""
    for number in range(3):
        await broker.send(prompt_batch(number, slot=number), int32(1, 2, 3))
    await broker.until(lambda: broker.worker._pipeline.inside == 3)
    await engine.begun()


def test_prompt_and_decodes_give_the_text_of_the_fake_model() -> None:
    async def scenario() -> None:
        broker = ScriptedBroker()
        running = broker.start()
        await served(broker)
        prompt, text = [5, 6, 7], []
        await broker.send(prompt_batch(0), int32(*prompt))
        for number in range(1, 6):
            done, tokens = await broker.result()
            assert isinstance(done, BatchDone)
            text += tokens
            span = Span(0, len(prompt) + number - 1, 1, 1)
            await broker.send(MicroBatch(number, (span,)), int32(*tokens))
        assert text == fake_continuation(prompt, 5, LAYERS)
        await broker.worker.stop()
        assert await running == 0

    go(scenario())


def test_two_stages_give_the_same_text_as_one_and_their_hops_add_up() -> None:
    async def scenario() -> None:
        first, last = ScriptedBroker(), ScriptedBroker()
        runs = [first.start(), last.start()]
        await served(first, index=0, stages=2, activation="f16")
        await served(last, index=1, stages=2)
        await first.send(prompt_batch(0), int32(5, 6, 7))
        onward = await first.forwarded()
        assert isinstance(onward.message, MicroBatch)
        assert onward.message.activation == "f16"
        assert onward.message.trims == (Trim(0, 0),)
        await last.send(onward.message, *map(bytes, onward.arrays))
        done, tokens = await last.result()
        assert tokens == fake_continuation([5, 6, 7], 1, LAYERS)
        assert isinstance(done, BatchDone)
        assert [hop.index for hop in done.hops] == [0, 1]
        assert [hop.bytes_in for hop in done.hops] == [12, 12 + 3 * MODEL.width * 2]
        for broker in (first, last):
            await broker.worker.stop()
        assert await asyncio.gather(*runs) == [0, 0]

    go(scenario())


def test_the_next_ones_arrive_and_the_last_one_leaves_while_one_is_computed() -> None:
    async def scenario() -> None:
        broker, engine = ScriptedBroker(), GatedEngine()
        with opened(engine):
            running = broker.start(lambda: engine)
            await served(broker)
            await three_inside(broker, engine)
            assert engine.forwards == 0  # the first is being computed: all three arrived meanwhile
            engine.gate.release()
            await engine.begun()
            done, _ = await broker.result()
            assert done.batch == 0
            assert engine.forwards == 1  # the second is being computed: the first left meanwhile
            engine.gate.release(2)
            assert [(await broker.result())[0].batch for _ in range(2)] == [1, 2]
            await broker.worker.stop()
            await running

    go(scenario())


def test_a_slow_engine_holds_few_micro_batches_and_all_come_out_in_order() -> None:
    async def scenario() -> None:
        broker, engine = ScriptedBroker(), GatedEngine()
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                await broker.worker.changed()
                most = max(most, broker.worker._pipeline.inside)

        with opened(engine):
            running = broker.start(lambda: engine)
            await served(broker)
            watching = asyncio.create_task(watch())

            async def feed() -> None:
                for number in range(20):
                    await broker.send(prompt_batch(number, slot=number % 4), int32(1, 2, 3))
                    await asyncio.sleep(0)  # lets it arrive

            feeding = asyncio.create_task(feed())
            await broker.until(lambda: broker.worker._pipeline.inside == PLACES)
            assert not feeding.done()
            engine.gate.release(20)
            assert [(await broker.result())[0].batch for _ in range(20)] == list(range(20))
            assert most <= PLACES
            watching.cancel()
            await feeding
            await broker.worker.stop()
            await running

    go(scenario())


def test_beats_go_on_while_the_engine_computes() -> None:
    async def scenario() -> None:
        broker, engine = ScriptedBroker(), GatedEngine()
        with opened(engine):
            running = broker.start(lambda: engine)
            await broker.welcome(heartbeat_s=0.01)
            await broker.make_ready(assignment())
            await broker.send(prompt_batch(0), int32(1, 2, 3))
            await engine.begun()
            for _ in range(3):
                await broker.hear(Heartbeat)
            assert engine.forwards == 0
            engine.gate.release()
            await broker.result()
            counted = 0
            while counted == 0:
                beat = (await broker.hear(Heartbeat)).message
                assert isinstance(beat, Heartbeat)
                counted = beat.counters.batches
            await broker.worker.stop()
            await running

    go(scenario())


def test_bad_frames_are_counted_and_the_next_good_one_is_served() -> None:
    async def scenario() -> None:
        broker = ScriptedBroker()
        running = broker.start()
        await served(broker)
        good = encode(prompt_batch(1), Epoch(1), [int32(1, 2, 3)])
        bad: list[list[bytes | bytearray | memoryview]] = [
            [b"hello"],
            [b"", b""],
            [pack_header(200, Epoch(1), 1), *good[1:]],
            [good[0], b"\xc1", good[2]],
            [good[0], b"\x91" * 100_000, good[2]],
            [good[0], bytes(2 << 20), good[2]],
            good[:2],
            list(encode(Heartbeat(), Epoch(1))),
        ]
        for frames in bad:
            await broker.send_frames(frames)
        await broker.send_frames(good)
        done, tokens = await broker.result()
        assert done.batch == 1
        assert len(tokens) == 1
        assert broker.worker.machine.state.sums.refused_frames == len(bad)
        await broker.worker.stop()
        await running

    go(scenario())


def test_a_micro_batch_of_another_epoch_is_dropped_and_the_next_good_one_is_served() -> None:
    async def scenario() -> None:
        broker = ScriptedBroker()
        running = broker.start()
        await served(broker)
        await broker.send(prompt_batch(0), int32(1, 2, 3), epoch=7)
        await broker.send(prompt_batch(1), int32(1, 2, 3))
        assert (await broker.result())[0].batch == 1
        assert broker.worker.machine.state.sums.dropped_frames == 1
        await broker.worker.stop()
        await running

    go(scenario())


@pytest.mark.parametrize("stages", [1, 2])
def test_an_engine_that_breaks_fails_that_micro_batch_and_computes_the_next(stages: int) -> None:
    async def scenario() -> None:
        broker = ScriptedBroker()
        running = broker.start(lambda: FakeEngine(fail_forward={1: OutOfMemoryError("no room")}))
        await served(broker, index=0, stages=stages)
        await broker.send(prompt_batch(1), int32(1, 2, 3))
        failed, _ = await broker.result()
        assert isinstance(failed, BatchFailed)
        assert (failed.batch, failed.error.code) == (1, "out_of_memory")
        assert (failed.error.device, failed.error.stage, failed.error.phase) == (
            "dev",
            "dev/1",
            Phase.PREFILL,
        )
        await broker.send(prompt_batch(2), int32(1, 2, 3))
        after = (await broker.result())[0] if stages == 1 else (await broker.forwarded()).message
        assert isinstance(after, BatchDone | MicroBatch)
        assert after.batch == 2
        await broker.worker.stop()
        await running

    go(scenario())


def test_a_bug_in_an_engine_fails_the_micro_batch_and_never_the_lane() -> None:
    class Buggy(FakeEngine):
        def forward(self, work: Work) -> Output:
            if self.forwards == 0:
                self.forwards += 1
                raise ZeroDivisionError("a bug")
            return super().forward(work)

    async def scenario() -> None:
        broker = ScriptedBroker()
        running = broker.start(Buggy)
        await served(broker)
        await broker.send(prompt_batch(1), int32(1, 2, 3))
        failed, _ = await broker.result()
        assert isinstance(failed, BatchFailed)
        assert "ZeroDivisionError" in failed.error.what
        await broker.send(prompt_batch(2), int32(1, 2, 3))
        assert isinstance((await broker.result())[0], BatchDone)
        await broker.worker.stop()
        await running

    go(scenario())


def test_a_failed_load_is_told_and_the_next_assignment_is_loaded() -> None:
    async def scenario() -> None:
        broker = ScriptedBroker()
        engines = iter([FakeEngine(fail_load=OutOfMemoryError("3 GB short")), FakeEngine()])
        running = broker.start(lambda: next(engines))
        await broker.welcome()
        broker.say(assignment(), 1)
        failed = (await broker.hear(StageFailed)).message
        assert isinstance(failed, StageFailed)
        assert (failed.error.code, failed.error.phase) == ("out_of_memory", Phase.LOAD)
        await broker.make_ready(assignment(), 2)
        await broker.worker.stop()
        assert await running == 0

    go(scenario())


def test_a_new_epoch_skips_what_was_queued_and_starts_with_empty_slots() -> None:
    async def scenario() -> None:
        broker, engine = ScriptedBroker(), GatedEngine()
        with opened(engine):
            running = broker.start(lambda: engine)
            await served(broker)
            await three_inside(broker, engine)
            broker.say(assignment(), 2)
            await broker.until(lambda: broker.worker.machine.state.epoch == 2)
            engine.gate.release()
            assert isinstance((await broker.hear(Ready)).message, Ready)
            assert engine.forwards == 1  # the other two were skipped
            engine.gate.release()
            whole = MicroBatch(9, (Span(0, 0, 3, 1),))  # no trim: it fits only an empty slot
            await broker.send(whole, int32(5, 6, 7), epoch=2)
            done, tokens = await broker.result()
            assert (done.batch, tokens) == (9, fake_continuation([5, 6, 7], 1, LAYERS))
            await broker.worker.stop()
            await running

    go(scenario())


def test_a_next_stage_that_takes_nothing_costs_frames_and_not_the_stage() -> None:
    class Cut(Weather):
        def connected(self, source: str, target: str) -> bool:
            return target != "next"

    async def scenario() -> None:
        broker = ScriptedBroker(MemoryNetwork(Cut()))
        running = broker.start(lane=InlineLane)
        await served(broker, index=0, stages=2)
        for number in range(3):
            await broker.send(prompt_batch(number), int32(1, 2, 3))
        await broker.until(lambda: broker.worker.machine.state.sums.dropped_frames == 3)
        assert broker.worker.machine.state.status is StageStatus.SERVING
        await broker.worker.stop()
        await running

    run_virtual(scenario())


def test_an_inline_lane_takes_the_engines_cost_on_the_loops_clock() -> None:
    async def scenario() -> None:
        broker = ScriptedBroker()
        running = broker.start(lambda: FakeEngine(seconds_per_batch=2.0), lane=InlineLane)
        await served(broker)
        await broker.send(prompt_batch(0), int32(1, 2, 3))
        await broker.send(prompt_batch(1), int32(1, 2, 3))
        (first, _), (second, _) = await broker.result(), await broker.result()
        assert isinstance(first, BatchDone)
        assert isinstance(second, BatchDone)
        assert [hop.compute_s for hop in (*first.hops, *second.hops)] == [2.0, 2.0]
        assert second.hops[0].wait_s == 0.0  # it was at hand when the first was done
        await broker.worker.stop()
        await running

    run_virtual(scenario())


# ---- the last stage


class Witness(FakeSampler):
    """Notes what it sees and samples, in order."""

    notes: list[tuple[str, int, int, tuple[int, ...]]]

    def __init__(self) -> None:
        super().__init__()
        self.notes = []

    def see(self, slot: int, position: int, tokens: Tokens) -> None:
        self.notes.append(("see", slot, position, tuple(tokens.tolist())))
        super().see(slot, position, tokens)

    def sample(self, slot: int, position: int, logits: FloatRows) -> tuple[int, TokenLogprobs | None]:
        self.notes.append(("sample", slot, position, ()))
        return super().sample(slot, position, logits)


def test_the_last_stage_samples_every_wanted_row_after_it_has_seen_the_tokens_before() -> None:
    witness = Witness()

    class Engine(FakeEngine):
        def sampler(self) -> FakeSampler:
            return witness

    async def scenario() -> None:
        broker = ScriptedBroker()
        running = broker.start(Engine)
        await served(broker)
        spans = (Span(0, 0, 2, 0), Span(1, 0, 3, 2), Span(2, 0, 1, 1))
        samplings = (SlotSampling(2, Sampling(temperature=0.0, top_logprobs=1)),)
        await broker.send(MicroBatch(0, spans, (), samplings), int32(1, 2, 3, 4, 5, 6))
        done, tokens = await broker.result()
        assert witness.notes == [
            ("see", 0, 0, (1, 2)),
            ("see", 1, 0, (3, 4)),
            ("sample", 1, 1, ()),
            ("see", 1, 2, (5,)),
            ("sample", 1, 2, ()),
            ("see", 2, 0, (6,)),
            ("sample", 2, 0, ()),
        ]
        expected = [fake_continuation(prompt, 1, LAYERS)[0] for prompt in ([3, 4], [3, 4, 5], [6])]
        assert tokens == expected
        assert isinstance(done, BatchDone)
        assert [detail is not None for detail in done.logprobs] == [False, False, True]
        await broker.worker.stop()
        await running

    go(scenario())


def test_trims_alone_travel_on_and_come_back_without_tokens() -> None:
    async def scenario() -> None:
        broker = ScriptedBroker()
        running = broker.start()
        await served(broker)
        await broker.send(MicroBatch(0, (), (Trim(0, 0),)), b"")
        done, tokens = await broker.result()
        assert isinstance(done, BatchDone)
        assert tokens == []
        await broker.worker.stop()
        await running

    go(scenario())


def test_activations_in_f32_leave_as_a_copy_of_the_engines_rows() -> None:
    class Reusing(FakeEngine):
        """Hands out the same buffer every time, as a real engine does."""

        buffer = np.zeros((16, MODEL.width), np.float32)

        def forward(self, work: Work) -> Output:
            hidden = super().forward(work).hidden
            assert hidden is not None
            view = self.buffer[: len(hidden)]
            view[:] = hidden
            return Output(hidden=view)

    async def scenario() -> None:
        broker = ScriptedBroker()
        running = broker.start(Reusing)
        await served(broker, index=0, stages=2)
        await broker.send(prompt_batch(0), int32(1, 2, 3))
        first = await broker.forwarded()
        kept = [bytes(array) for array in first.arrays]
        await broker.send(prompt_batch(1), int32(4, 5, 6))
        second = await broker.forwarded()
        assert [bytes(array) for array in first.arrays] == kept
        assert bytes(second.arrays[1]) != kept[1]
        await broker.worker.stop()
        await running

    go(scenario())


# ---- lanes


@pytest.mark.parametrize("lane_type", [ThreadLane, InlineLane])
def test_a_lane_runs_jobs_in_order_and_its_last_word_after_them(
    lane_type: type[ThreadLane | InlineLane],
) -> None:
    async def scenario() -> None:
        lane = lane_type()
        ran: list[int] = []
        results: list[int] = []
        everything = asyncio.Event()

        def done(result: int, spent: Spent) -> None:
            assert min(spent) >= 0.0
            results.append(result)
            if len(results) == 50:
                everything.set()

        def work(number: int) -> int:
            ran.append(number)
            return number

        for number in range(50):
            lane.submit(LaneJob(lambda number=number: work(number), done))  # type: ignore[misc]
        await everything.wait()
        await lane.close(lambda: ran.append(-1), DEADLINE_S)
        assert results == list(range(50))
        assert ran == [*range(50), -1]

    go(scenario())


@pytest.mark.parametrize("lane_type", [ThreadLane, InlineLane])
def test_a_lane_that_is_free_keeps_nothing_of_its_last_job(
    lane_type: type[ThreadLane | InlineLane],
) -> None:
    async def scenario() -> None:
        lane = lane_type()
        gone = [asyncio.Event(), asyncio.Event()]
        loop = asyncio.get_running_loop()

        class Large:
            def __init__(self, gone: asyncio.Event) -> None:
                weakref.finalize(self, loop.call_soon_threadsafe, gone.set)

        given, result = Large(gone[0]), Large(gone[1])
        results = [result]
        lane.submit(LaneJob(lambda given=given: (given, results.pop())[1], lambda result, spent: None))  # type: ignore[misc]
        del given, result
        async with asyncio.timeout(DEADLINE_S):
            for one in gone:
                await one.wait()
        await lane.close(lambda: None, DEADLINE_S)

    go(scenario())


def test_a_job_that_hangs_does_not_hold_up_the_end() -> None:
    async def scenario() -> None:
        lane = ThreadLane()
        hold = threading.Event()
        begun = threading.Event()

        def hang() -> None:
            begun.set()
            hold.wait(DEADLINE_S)

        lane.submit(LaneJob(hang, lambda result, spent: None))
        await asyncio.to_thread(begun.wait, DEADLINE_S)
        try:
            await lane.close(lambda: None, 0.01)
        finally:
            hold.set()

    go(scenario())


def test_the_wait_before_a_job_and_its_time_are_measured_on_the_lanes_own_clock() -> None:
    async def scenario() -> None:
        times = iter([0.0, 3.0, 5.0, 5.0, 9.0])
        lane = ThreadLane(clock=lambda: next(times))
        spents: list[Spent] = []
        both = asyncio.Event()

        def done(_: object, spent: Spent) -> None:
            spents.append(spent)
            if len(spents) == 2:
                both.set()

        for _ in range(2):
            lane.submit(LaneJob(lambda: None, done))
        await both.wait()
        await lane.close(lambda: None, DEADLINE_S)
        assert spents == [Spent(2.0, 3.0), Spent(4.0, 0.0)]

    go(scenario())


def test_a_micro_batch_with_a_hop_too_many_is_refused_to_the_broker() -> None:
    async def scenario() -> None:
        broker = ScriptedBroker()
        running = broker.start()
        await served(broker)
        wandering = msgspec.structs.replace(prompt_batch(3), hops=(Hop(0, 0.0, 0.0, 0),))
        await broker.send(wandering, int32(1, 2, 3))
        failed, _ = await broker.result()
        assert isinstance(failed, BatchFailed)
        assert "1 hops" in failed.error.what
        await broker.worker.stop()
        await running

    go(scenario())
