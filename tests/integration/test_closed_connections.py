"""Processes that are killed: the broker learns it from their closed connections. Beats are due once an hour here."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from acceptance.cluster_world import DEADLINE_S, command_line, environment
from potluck.broker.config import BrokerConfig
from potluck.broker.machine import BrokerMachine
from potluck.broker.server import BrokerServer
from potluck.planner.even import plan_even
from potluck.runtime.client import Client
from potluck.runtime.zmq_transport import ZmqTransport
from potluck.stage.engines.fake import fake_continuation
from potluck.wire.sampling import GREEDY
from sim.cluster import CODEC, LAYERS, MODEL, SHAPE

ANY = "tcp://127.0.0.1:0"
HOUR_S = 3600.0
PROMPT = (256, 72, 101)


class Broker:
    """A broker in this process, and stages and clients that are processes of their own."""

    def __init__(self, server: BrokerServer) -> None:
        self.server = server
        self.processes: list[asyncio.subprocess.Process] = []

    async def start(self, command: str, *arguments: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *command_line(command, *arguments),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment(),
        )
        self.processes.append(process)
        return process

    async def stage(self, name: str, *options: str) -> asyncio.subprocess.Process:
        where = self.server.control_endpoint
        fake = ("--engine", "fake", "--fingerprint", MODEL.fingerprint, "--listen-address", "127.0.0.1")
        return await self.start("potluck-stage", where, "--name", name, *fake, *options)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for the core's events."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await self.server.changed()

    @property
    def serving(self) -> list[str]:
        """Devices of the open chain, in order."""
        stages = self.server.machine.state.stages
        for chain in self.server.machine.state.chains.values():
            if chain.open:
                return [stages[name].device for name in chain.stages]
        return []

    @property
    def members(self) -> set[str]:
        return {stage.device for stage in self.server.machine.state.stages.values()}

    async def ask(self, tokens: int) -> None:
        async with Client(self.server.control_endpoint) as client:
            answer = await client.complete(tokens=PROMPT, max_tokens=tokens, sampling=GREEDY)
        assert list(answer.tokens) == fake_continuation(PROMPT, tokens, LAYERS)


@asynccontextmanager
async def broker() -> AsyncIterator[Broker]:
    transport = ZmqTransport()
    config = BrokerConfig(heartbeat_s=HOUR_S, settle_s=0.1, context_tokens=2048, batch_timeout_s=HOUR_S)
    results = ""
    machine = BrokerMachine(config, MODEL, SHAPE, CODEC, plan_even, lambda stage: results, "test")
    server = BrokerServer(transport, machine, CODEC, control=ANY, results=ANY, random_seed=lambda: 1)
    results = server.results_endpoint
    server.start()
    made = Broker(server)
    try:
        yield made
    finally:
        for process in made.processes:
            if process.returncode is None:
                process.kill()
            await process.wait()
        await server.close()
        transport.close()


def with_broker(story: Callable[[Broker], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        async with broker() as made:
            await story(made)

    asyncio.run(whole())


def test_a_killed_stage_is_noticed_at_once_and_a_frozen_one_is_not_taken_for_killed() -> None:
    async def story(made: Broker) -> None:
        frozen, killed = await made.stage("frozen"), await made.stage("killed")
        await made.until(lambda: made.serving == ["frozen", "killed"])
        frozen.send_signal(signal.SIGSTOP)
        killed.kill()
        await made.until(lambda: "killed" not in made.members)
        assert "its connection closed" in str(made.server.machine.core.last_error)
        assert made.members == {"frozen"}
        frozen.send_signal(signal.SIGCONT)
        await made.until(lambda: made.serving == ["frozen"])
        await made.ask(5)

    with_broker(story)


def test_a_stage_killed_in_the_middle_of_an_answer_and_started_anew_on_its_port_loses_no_token() -> None:
    async def story(made: Broker) -> None:
        await made.stage("a")
        b = await made.stage("b", "--data-port", "0")
        await made.until(lambda: made.serving == ["a", "b"])
        stages = made.server.machine.state.stages.values()
        port = next(stage.endpoint for stage in stages if stage.device == "b").rpartition(":")[2]
        answers = [asyncio.create_task(made.ask(1000)) for _ in range(4)]
        await made.until(lambda: made.server.machine.state.tokens_out > 100)
        b.kill()
        await made.until(lambda: made.members == {"a"})
        await made.stage("b", "--data-port", port)
        await asyncio.gather(*answers)
        await made.until(lambda: made.serving == ["a", "b"])
        await made.ask(20)

    with_broker(story)


def test_a_killed_client_leaves_no_request_behind_although_no_token_comes() -> None:
    async def story(made: Broker) -> None:
        stage = await made.stage("a")
        await made.until(lambda: made.serving == ["a"])
        stage.send_signal(signal.SIGSTOP)  # it computes nothing, so nothing is sent to the client
        address = made.server.control_endpoint.removeprefix("tcp://")
        client = await made.start(
            "potluck", "infer", "--broker", address, "--raw", "--prompt", "a", "-n", "9"
        )
        await made.until(lambda: len(made.server.machine.state.requests) == 1)
        client.kill()
        await made.until(lambda: not made.server.machine.state.requests)
        stage.send_signal(signal.SIGCONT)
        await made.ask(5)

    with_broker(story)
