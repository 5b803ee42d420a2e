"""Two stage workers with llama.cpp over ZeroMQ: one serves and copies its slots, the other one takes over."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np

from potluck.model.facts import read_facts
from potluck.model.reference import reference
from potluck.runtime.transport import Pull
from potluck.runtime.zmq_transport import ZmqTransport
from potluck.stage.engines.llama import LlamaEngine, prepare_process
from potluck.stage.settings import StageSettings
from potluck.stage.worker import StageWorker
from potluck.wire.ids import Epoch
from potluck.wire.messages import (
    BatchDone,
    Copied,
    Keep,
    MicroBatch,
    Mirror,
    Prepare,
    Prepared,
    Ready,
    Register,
    SlotSampling,
    Span,
    Welcome,
    decode,
    encode,
)
from potluck.wire.sampling import Sampling
from stage_world import DEADLINE_S, BrokerSide, assignment, int32, prompt_batch
from tiny_models import write_tiny
from zmq_world import ANY

# ggml reads its environment once in a process. This runs when tests are collected, before any of them computes.
prepare_process(exact=True)

PROMPT = [3, 14, 15, 9, 26, 5, 35, 89, 79, 32]
PENALIZED = Sampling(temperature=0.0, repeat_penalty=1.6, penalty_last_n=64)
"""The text depends on what the sampler has seen."""


class Stage(BrokerSide):
    """One worker, and a broker of its own for it."""

    def __init__(self, transport: ZmqTransport, path: Path, cache: Path, results: Pull) -> None:
        super().__init__(transport.router(ANY))
        self._transport = transport
        self.model = reference(read_facts(path), "tiny")
        self.assign = assignment(
            model=self.model,
            context_tokens=64,
            next_endpoint=results.endpoint,
            results_endpoint=results.endpoint,
        )
        settings = StageSettings("dev", {self.model.fingerprint: path}, cache_dir=cache)
        self.worker = StageWorker(transport, self.control.endpoint, settings, engine=LlamaEngine)
        self.running = asyncio.create_task(self.worker.run())
        self.results = results

    async def welcome(self) -> None:
        register = (await self.hear(Register)).message
        assert isinstance(register, Register)
        self.endpoint = register.data_endpoint
        self.push = self._transport.push(self.endpoint)
        self.say(Welcome("test", 1000.0, 3))

    async def compute(self, message: MicroBatch, tokens: list[int], epoch: int) -> list[int]:
        async with asyncio.timeout(DEADLINE_S):
            await self.push.send(encode(message, Epoch(epoch), [int32(*tokens)]))
            envelope = decode(await self.results.recv())
        assert isinstance(envelope.message, BatchDone)
        return list(np.frombuffer(envelope.arrays[0], "<i4").tolist())

    async def decode(self, text: list[int], steps: int, first: int, epoch: int) -> None:
        """Appends the next tokens, one micro-batch each."""
        for number in range(first, first + steps):
            samplings = (SlotSampling(0, PENALIZED),) if number == first else ()
            batch = MicroBatch(number, (Span(0, len(text) - 1, 1, 1),), (), samplings)
            text += await self.compute(batch, text[-1:], epoch)


def test_a_takeover_with_copied_slots_goes_on_with_the_same_text_penalties_included(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", "llama", layers=4)

    async def scenario() -> None:
        transport = ZmqTransport()
        results = transport.pull(ANY)
        one, two = (Stage(transport, path, tmp_path / name, results) for name in "ab")
        try:
            for stage in (one, two):
                await stage.welcome()
            one.say(one.assign, 1)
            await one.hear(Ready)
            two.say(Prepare(1, (one.assign.slice,)))
            await two.hear(Prepared)
            one.say(Mirror((two.endpoint,)), 1)
            text = PROMPT + await one.compute(prompt_batch(0, len(PROMPT)), PROMPT, 1)
            await one.decode(text, 20, first=1, epoch=1)
            copied = (await two.hear(Copied)).message
            assert isinstance(copied, Copied)
            held = copied.tokens
            two.say(msgspec.structs.replace(two.assign, keep=(Keep(0, held),)), 2)
            ready = (await two.hear(Ready)).message
            assert isinstance(ready, Ready)
            assert ready.kept
            again = text[: held + 1]
            await two.decode(again, 20 + len(PROMPT) + 1 - len(again), first=50, epoch=2)
            assert again == text
        finally:
            await asyncio.gather(one.worker.stop(), two.worker.stop())
            transport.close()

    asyncio.run(asyncio.wait_for(scenario(), 3 * DEADLINE_S))
