"""A broker's shell before peers that lie, flood and ask for too much: it goes on hearing the others."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from potluck.broker.config import BrokerConfig
from potluck.broker.events import RequestSubmitted
from potluck.broker.gateway import Gateway
from potluck.broker.machine import BrokerMachine
from potluck.broker.server import BrokerServer
from potluck.planner.even import plan_even
from potluck.runtime.client import Client
from potluck.runtime.loop import loop_factory
from potluck.runtime.transport import Dealer
from potluck.runtime.zmq_transport import ZmqTransport
from potluck.wire import limits
from potluck.wire.errors import ContextExceededError
from potluck.wire.frames import pack_body, pack_header
from potluck.wire.ids import Epoch, RequestId
from potluck.wire.messages import (
    KIND_OF,
    Assign,
    BatchDone,
    ChatMessage,
    Hop,
    Ready,
    Register,
    StageFailed,
    Submit,
    decode,
    encode,
)
from sim.core_world import MODEL, SHAPE, LetterVocabulary

ANY = "tcp://127.0.0.1:0"


class Codec(LetterVocabulary):
    """Counts how often it is asked to tokenize."""

    longest_piece = 4
    asked = 0

    def encode_prompt(self, text: str) -> list[int]:
        self.asked += 1
        return list(text.encode())

    def encode_chat(self, messages: tuple[ChatMessage, ...]) -> list[int]:
        return self.encode_prompt(messages[-1].content)

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


def with_server(story: Callable[[BrokerServer, ZmqTransport], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        transport = ZmqTransport()
        config = BrokerConfig(settle_s=0.0, context_tokens=64)
        machine = BrokerMachine(
            config, MODEL, SHAPE, LetterVocabulary(), plan_even, lambda stage: "tcp://0.0.0.0:1", "test"
        )
        server = BrokerServer(transport, machine, Codec(), control=ANY, results=ANY, random_seed=lambda: 1)
        server.start()
        try:
            async with asyncio.timeout(20):
                await story(server, transport)
        finally:
            await server.close()
            transport.close()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(whole())


async def join(server: BrokerServer, transport: ZmqTransport, endpoint: str) -> tuple[Dealer, Epoch]:
    """A stage that registers under an endpoint and says that it is ready."""
    dealer = transport.dealer(server.control_endpoint, "s/1")
    dealer.send(encode(Register("s/1", "s", "1", "llama", endpoint, (MODEL.fingerprint,))))
    while True:
        envelope = decode(await dealer.recv())
        if isinstance(envelope.message, Assign):
            dealer.send(encode(Ready(0.1, 1), envelope.epoch))
            return dealer, envelope.epoch


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what nobody announces; the story's deadline ends it."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def still_hears(server: BrokerServer, transport: ZmqTransport) -> None:
    async with Client(server.control_endpoint, transport=transport) as client:
        await client.state(5.0)


def test_an_endpoint_that_is_none_fails_its_stage_and_nothing_else() -> None:
    async def story(server: BrokerServer, transport: ZmqTransport) -> None:
        await join(server, transport, "nonsense")
        while server.view().stages[0].state != "failed":
            await server.changed()
        await still_hears(server, transport)

    with_server(story)


def test_sums_of_a_peer_stay_within_what_the_wire_carries() -> None:
    async def story(server: BrokerServer, transport: ZmqTransport) -> None:
        _, epoch = await join(server, transport, "tcp://127.0.0.1:9")
        await server.wait_ready()
        request = RequestSubmitted(cause="test", request=RequestId("r"), tokens=(1, 2), max_tokens=3)
        server.feed(request)
        hops = tuple(Hop(0, 1e9, 1e9, 1 << 62) for _ in range(8))
        push = transport.push(server.results_endpoint)
        await push.send(encode(BatchDone(1, hops), epoch, [struct.pack("<i", 5)]))
        while server.machine.state.tokens_out == 0:
            await server.changed()
        await still_hears(server, transport)

    with_server(story)


@pytest.mark.parametrize("fact", ["hint", "what", "self", "phase", "device", "stage", "param"])
def test_a_stage_s_error_with_odd_facts_is_refused_and_counted(fact: str) -> None:
    async def story(server: BrokerServer, transport: ZmqTransport) -> None:
        stranger = transport.dealer(server.control_endpoint, "stranger")
        body = pack_body({"error": {"code": "stage_failed", "what": "x", "facts": {fact: "y"}}})
        stranger.send([pack_header(KIND_OF[StageFailed], Epoch(0)), body])
        await stranger.recv()
        assert server.refused_frames == 1
        await still_hears(server, transport)

    with_server(story)


def test_a_fault_in_the_core_costs_one_message_and_not_the_broker_s_hearing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(server: BrokerServer, transport: ZmqTransport) -> None:
        handle = server.machine.handle
        monkeypatch.setattr(server.machine, "handle", lambda event, now: 1 / 0)
        dealer = transport.dealer(server.control_endpoint, "s/1")
        dealer.send(encode(Register("s/1", "s", "1", "llama", "tcp://a:1", (MODEL.fingerprint,))))
        await until(lambda: "ZeroDivisionError" in caplog.text)
        monkeypatch.setattr(server.machine, "handle", handle)
        await still_hears(server, transport)

    with_server(story)


def test_more_results_than_a_micro_batch_can_have_are_refused_unread() -> None:
    async def story(server: BrokerServer, transport: ZmqTransport) -> None:
        push = transport.push(server.results_endpoint)
        await push.send(encode(BatchDone(1), Epoch(0), [bytes(4 * limits.BATCH_TOKENS + 4)]))
        await until(lambda: server.refused_frames == 1)

    with_server(story)


def test_a_flood_on_one_socket_leaves_the_loop_its_turns() -> None:
    async def story(server: BrokerServer, transport: ZmqTransport) -> None:
        router = transport.router(ANY)
        dealer = transport.dealer(router.endpoint, "d")
        turns = heard = 0

        async def read() -> None:
            nonlocal heard
            for _ in range(3_000):
                await router.recv()
                heard += 1

        for _ in range(3_000):
            assert dealer.send([b"x"])
        reader = asyncio.create_task(read())
        most = before = 0
        while not reader.done():
            await asyncio.sleep(0)
            turns += 1
            most, before = max(most, heard - before), heard
        assert heard == 3_000
        assert most <= 200

    with_server(story)


def test_a_timer_that_comes_late_lets_waiting_frames_speak_first() -> None:
    async def story(server: BrokerServer, transport: ZmqTransport) -> None:
        dealer, _ = await join(server, transport, "tcp://127.0.0.1:9")
        await server.wait_ready()
        due = server.machine.next_deadline()
        assert due is not None
        loop = asyncio.get_running_loop()
        dealer.send(encode(Ready(0.1, 1), Epoch(0)))  # any frame is a sign of life
        while loop.time() <= due + 0.5:
            pass  # the loop is held up past the deadline, as by a very long prompt
        await server.changed()
        await server.changed()
        assert [stage.stage for stage in server.view().stages] == ["s/1"]

    with_server(story)


@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_that_can_not_fit_is_refused_without_being_tokenized(chat: bool) -> None:
    codec = Codec()
    gateway = Gateway("m", codec, lambda event: None, lambda: 1, lambda: None, context_tokens=64)  # type: ignore[arg-type, return-value]
    text = "x" * 1_000_000
    submit = Submit("r", messages=(ChatMessage("user", text),)) if chat else Submit("r", prompt=text)
    with pytest.raises(ContextExceededError) as caught:
        gateway.submit(submit, "test")
    assert codec.asked == 0
    assert caught.value.facts["n_ctx"] == 64
    assert int(caught.value.facts["n_prompt_tokens"]) > 64
    assert gateway.tokens_of(Submit("s", prompt="x" * 60)) == (120,) * 60
