"""`potluck-stage` as a process of its own, over ZeroMQ, with a scripted broker on this side."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cgroups import memory_limit
from potluck.model.facts import read_facts
from potluck.model.reference import reference
from potluck.runtime.zmq_transport import ZmqTransport
from potluck.stage.engines.fake import fake_continuation
from potluck.wire.errors import PotluckError
from potluck.wire.frames import Buffer
from potluck.wire.ids import Epoch
from potluck.wire.messages import (
    Assign,
    BatchDone,
    ErrorInfo,
    Farewell,
    Goodbye,
    Heartbeat,
    Leave,
    MicroBatch,
    Ping,
    Ready,
    Refused,
    Register,
    Release,
    SlotSampling,
    Span,
    Welcome,
    decode,
    encode,
)
from potluck.wire.sampling import GREEDY
from stage_world import DEADLINE_S, LAYERS, MODEL, BrokerSide, assignment, int32, prompt_batch

FAKE = ["--engine", "fake", "--fingerprint", MODEL.fingerprint]


class Broker(BrokerSide):
    """A broker's sockets over TCP, and one stage process that was told their address."""

    patience_s = 3 * DEADLINE_S

    def __init__(self, transport: ZmqTransport) -> None:
        super().__init__(transport.router("tcp://127.0.0.1:*"))
        self.transport = transport
        self.results = transport.pull("tcp://127.0.0.1:*")
        self.process: asyncio.subprocess.Process | None = None

    async def start(
        self,
        *options: str,
        within: Sequence[str] = (),
        program: Sequence[str] = ("-m", "potluck.stage.cli"),
        **environment: str,
    ) -> None:
        command = [
            *within,
            sys.executable,
            *program,
            self.control.endpoint,
            "--name",
            "mini",
            *options,
        ]
        self.process = await asyncio.create_subprocess_exec(
            *command, stderr=asyncio.subprocess.PIPE, env={**os.environ, **environment}
        )

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def end(self) -> tuple[int, str]:
        """How the process ended, and what it said."""
        assert self.process is not None
        async with asyncio.timeout(DEADLINE_S):
            _, said = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, said.decode()

    async def welcome(self) -> Register:
        register = (await self.hear(Register)).message
        assert isinstance(register, Register)
        self.say(Welcome("test", 0.05, 3))
        return register

    async def serve(self, assign: Assign) -> Register:
        """Takes the stage in and has it load."""
        register = await self.welcome()
        ends = {"next_endpoint": self.results.endpoint, "results_endpoint": self.results.endpoint}
        self.say(msgspec.structs.replace(assign, **ends), 1)
        await self.hear(Ready)
        return register

    async def result(self) -> tuple[BatchDone, list[int]]:
        async with asyncio.timeout(DEADLINE_S):
            envelope = decode(await self.results.recv())
        assert isinstance(envelope.message, BatchDone), envelope.message
        return envelope.message, np.frombuffer(envelope.arrays[0], "<i4").tolist()


@contextlib.asynccontextmanager
async def broker() -> AsyncIterator[Broker]:
    with contextlib.closing(ZmqTransport()) as transport:
        side = Broker(transport)
        try:
            yield side
        finally:
            if side.process is not None and side.process.returncode is None:
                side.process.kill()
                await side.process.communicate()


async def push(side: Broker, register: Register, *messages: list[Buffer]) -> None:
    """Sends data frames to the stage's socket; 0.0.0.0 is the broker's own machine."""
    way = side.transport.push(register.data_endpoint.replace("0.0.0.0", "127.0.0.1"))
    async with asyncio.timeout(DEADLINE_S):
        for frames in messages:
            await way.send(frames)


STOPS = pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])


@STOPS
def test_a_stage_serves_beats_asks_to_leave_on_a_signal_and_goes_with_the_farewell(
    number: signal.Signals, code: int
) -> None:
    async def scenario() -> None:
        async with broker() as side:
            await side.start(*FAKE)
            register = await side.serve(assignment())
            assert register.device == "mini"
            assert register.models == (MODEL.fingerprint,)
            await side.hear(Heartbeat)
            side.signal(number)
            leave = (await side.hear(Leave)).message
            assert isinstance(leave, Leave)
            assert number.name in leave.reason
            await push(side, register, encode(prompt_batch(0), Epoch(1), [int32(5, 6, 7)]))
            done, tokens = await side.result()
            assert tokens == fake_continuation([5, 6, 7], 1, LAYERS)
            assert done.hops[0].compute_s > 0.0
            side.say(Farewell())
            goodbye = (await side.hear(Goodbye)).message
            assert isinstance(goodbye, Goodbye)
            assert number.name in goodbye.reason
            ended, said = await side.end()
            assert ended == code
            assert "Traceback" not in said
            assert said.count("waits up to 30 s for others to take over layers 0-3 of toy") == 1

    asyncio.run(scenario())


@STOPS
def test_a_second_signal_makes_a_stage_leave_at_once(number: signal.Signals, code: int) -> None:
    async def scenario() -> None:
        async with broker() as side:
            await side.start(*FAKE)
            await side.serve(assignment())
            side.signal(number)
            await side.hear(Leave)
            for _ in range(20):
                await side.hear(Heartbeat)  # twenty times 0.05 s: the next one is no doubled signal
            side.signal(number)
            await side.hear(Goodbye)
            assert (await side.end())[0] == code

    asyncio.run(scenario())


@pytest.mark.parametrize("before", [True, False])
def test_a_stage_whose_broker_is_gone_ends_at_once_on_a_signal(before: bool) -> None:
    async def scenario() -> None:
        async with broker() as side:
            await side.start(*FAKE, "--drain-timeout", "3600")
            await side.serve(assignment())
            if not before:
                side.signal(signal.SIGTERM)
                await side.hear(Leave)
            side.control.close()
            if before:
                side.signal(signal.SIGTERM)
            assert (await side.end())[0] == 0

    asyncio.run(scenario())


HANGING = """
import sys, time
from potluck.stage import worker
from potluck.stage.cli import main
from potluck.stage.engines.fake import FakeEngine

class Hanging(FakeEngine):
    def forward(self, work):
        time.sleep(3600)

worker.make_engine = lambda name: Hanging()
main()
"""


def test_a_stage_whose_engine_hangs_comes_back_as_a_fresh_one_but_not_for_ever() -> None:
    async def scenario() -> None:
        async with broker() as side:
            await side.start(*FAKE, "--hang-timeout", "0.1", program=("-P", "-c", HANGING))
            assert side.process is not None
            stages = set()
            for _ in range(4):
                register = await side.serve(assignment())
                stages.add(register.stage)
                batch = encode(prompt_batch(0), Epoch(1), [int32(5, 6, 7)])
                ping = encode(Ping(0, 0, side.results.endpoint), Epoch(0), [b"x"])
                await push(side, register, batch, ping)
                async with asyncio.timeout(DEADLINE_S):
                    await side.results.recv()  # the pong: what came before the ping is on the lane
                side.say(Release(), 2)
                goodbye = (await side.hear(Goodbye)).message
                assert isinstance(goodbye, Goodbye)
                assert "hangs" in goodbye.reason
            assert len(stages) == 4
            code, said = await side.end()
            assert code == 1
            assert said.count("Starting anew") == 3
            assert "potluck-stage: The engine hangs" in said
            assert "Traceback" not in said

    asyncio.run(scenario())


def test_a_stage_that_is_refused_ends_with_the_brokers_words() -> None:
    async def scenario() -> None:
        async with broker() as side:
            await side.start(*FAKE)
            await side.hear(Register)
            side.say(Refused(ErrorInfo.of(PotluckError("mini has no copy of toy.", hint="Copy it."))))
            code, said = await side.end()
            assert code == 1
            assert "potluck-stage: mini has no copy of toy. Copy it." in said
            assert "Traceback" not in said

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("options", "environment", "words"),
    [
        (["--model", "/no/such/file.gguf"], {}, "/no/such/file.gguf"),
        ([], {"POTLUCK_MODEL": "/no/such/other.gguf"}, "/no/such/other.gguf"),
        (["--listen-address", "203.0.113.7"], {}, "203.0.113.7"),
        (["--cpu", "4000"], {}, "core 4000"),
        (["--name", "x" * 200], {}, "--name"),
    ],
)
def test_a_mistake_is_told_in_a_line_or_two(
    options: list[str], environment: dict[str, str], words: str
) -> None:
    async def scenario() -> None:
        async with broker() as side:
            await side.start(*options, **environment)
            code, said = await side.end()
            assert code != 0
            assert words in said
            assert "Traceback" not in said
            assert len(said.strip().splitlines()) <= 2

    asyncio.run(scenario())


def test_a_taken_data_port_is_told_with_its_number() -> None:
    async def scenario() -> None:
        async with broker() as side:
            taken = side.results.endpoint.rpartition(":")[2]
            await side.start(*FAKE, "--listen-address", "127.0.0.1", "--data-port", taken)
            code, said = await side.end()
            assert code != 0
            assert taken in said
            assert "Traceback" not in said

    asyncio.run(scenario())


def test_a_stage_waits_for_its_broker_and_registers_with_it_once() -> None:
    async def scenario() -> None:
        async with broker() as side:
            side.control.close()
            await side.start(*FAKE)
            assert side.process is not None
            assert side.process.stderr is not None
            async with asyncio.timeout(DEADLINE_S):
                said = await side.process.stderr.readline()
            assert b"No broker answers" in said
            side.control = side.transport.router(side.control.endpoint)
            await side.welcome()
            kinds = [type((await side.hear(Register, Heartbeat)).message) for _ in range(3)]
            assert kinds == [Heartbeat] * 3

    asyncio.run(scenario())


@pytest.mark.real_model
def test_a_real_model_whole_in_one_stage_gives_its_greedy_text(smollm2_path: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        model = reference(read_facts(smollm2_path), "smollm2")
        assign = assignment(model=model, end=model.layers, context_tokens=64)
        async with broker() as side:
            await side.start(
                "--model", str(smollm2_path), "--drain-timeout", "0", POTLUCK_CACHE_DIR=str(tmp_path)
            )
            register = await side.serve(assign)
            prompt = [504, 3575, 282, 4649, 314]
            first = MicroBatch(0, (Span(0, 0, len(prompt), 1),), (), (SlotSampling(0, GREEDY),))
            await push(side, register, encode(first, Epoch(1), [int32(*prompt)]))
            done, tokens = await side.result()
            assert len(tokens) == 1
            assert 0 <= tokens[0] < 49_152
            await push(
                side,
                register,
                encode(MicroBatch(1, (Span(0, len(prompt), 1, 1),)), Epoch(1), [int32(*tokens)]),
            )
            done, _ = await side.result()
            assert done.batch == 1
            side.signal(signal.SIGTERM)
            assert (await side.end())[0] == 0

    asyncio.run(scenario())


@pytest.mark.root
def test_a_stage_in_a_container_says_so_and_offers_no_more_than_is_left_of_it() -> None:
    limit = 300_000_000

    async def scenario() -> None:
        with memory_limit(limit) as group:
            async with broker() as side:
                await side.start(*FAKE, within=group.within)
                can = (await side.welcome()).capabilities
                assert can.container_memory_bytes == pytest.approx(limit, rel=0.01)
                assert can.memory_bytes == can.container_memory_bytes
                assert 0 < can.offered_bytes < can.free_memory_bytes < can.memory_bytes
            assert group.kills == 0

    asyncio.run(scenario())


def test_a_stage_offers_no_more_than_its_owner_allows(tmp_path: Path) -> None:
    settings = tmp_path / "potluck.yaml"
    settings.write_text("resources: {max_memory_gb: 0.5, allow_cpu_fallback: false}\n")

    async def scenario() -> None:
        async with broker() as side:
            await side.start(*FAKE, "--config", str(settings))
            can = (await side.welcome()).capabilities
            assert 0 < can.offered_bytes < 500_000_000
            assert not can.allow_cpu_fallback
        async with broker() as side:
            await side.start(*FAKE, "--config", str(settings), "--max-memory-gb", "0.001", "--cpu-fallback")
            can = (await side.welcome()).capabilities
            assert can.offered_bytes == 1, (
                "less than the program itself takes: no room, and not 0, which is unknown"
            )
            assert can.allow_cpu_fallback

    asyncio.run(scenario())
