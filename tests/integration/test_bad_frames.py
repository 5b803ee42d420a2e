"""Garbage on every socket of a running cluster: refused and counted, and the cluster answers as before."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Iterator
from typing import Self

import msgpack
import pytest
import zmq
import zmq.asyncio

from acceptance.cluster_world import DEADLINE_S, FAST, World, idle, world
from potluck.runtime.client import Client
from potluck.wire import limits
from potluck.wire.errors import Phase
from potluck.wire.frames import pack_body, pack_header
from potluck.wire.ids import Epoch
from potluck.wire.messages import (
    Assign,
    BatchDone,
    BatchFailed,
    Delta,
    ErrorInfo,
    Finished,
    Goodbye,
    Heartbeat,
    MicroBatch,
    ModelRef,
    Progress,
    Ready,
    Refused,
    Register,
    Release,
    Span,
    StageFailed,
    StateQuery,
    StateView,
    Welcome,
    decode,
    encode,
)
from potluck.wire.sampling import GREEDY
from tiny_models import write_tiny

QUERY = 34
SUBMIT = 32
HEADER = pack_header(QUERY, Epoch(0))
BODY = pack_body({})
ERROR = ErrorInfo("stage_failed", "Made up.")


def header(version: int, kind: int = QUERY) -> bytes:
    return struct.pack("<4sBBHQ", limits.MAGIC, version, kind, 0, 0)


NESTED: object = None
for _ in range(900):
    NESTED = [NESTED]

GARBAGE = {
    "one part": [b"hello"],
    "an empty part": [b""],
    "nine parts": [HEADER, BODY, *[b""] * 8],
    "no header": [b"GET / HTTP/1.1", b"\r\n"],
    "another magic": [b"XXXX" + HEADER[4:], BODY],
    "an unknown kind": [header(limits.PROTOCOL_VERSION, 200), BODY],
    "no msgpack": [HEADER, b"\xc1\xff\xff"],
    "msgpack cut off": [pack_header(SUBMIT, Epoch(0)), pack_body({"request": "a" * 50})[:20]],
    "a body of another shape": [HEADER, pack_body([1, 2, 3])],
    "an unknown field": [HEADER, pack_body({"surprise": 1})],
    "a deep body": [pack_header(SUBMIT, Epoch(0)), msgpack.packb(NESTED)],
    "a length that is a lie": [pack_header(SUBMIT, Epoch(0)), b"\xdf\xff\xff\xff\xff"],
    "random bytes": [os.urandom(16), os.urandom(300)],
}
MODEL = ModelRef("tiny", "f" * 64, 4, 64, "llama")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("small")
    with world(write_tiny(folder / "tiny.gguf"), folder, 2, "--context", "128", *FAST) as made:
        yield made


async def answer(made: World) -> tuple[int, ...]:
    async with Client(made.address) as client:
        done = await client.complete("hello world", max_tokens=24, sampling=GREEDY, ignore_eos=True)
    return done.tokens


@pytest.fixture(autouse=True)
def nothing_is_lost(small: World) -> Iterator[None]:
    """The same processes answer the same in the same epoch afterwards."""

    async def look() -> tuple[tuple[int, ...], int]:
        tokens = await answer(small)
        return tokens, (await small.until(idle)).epoch

    before = small.run(look())
    yield
    assert small.run(look()) == before
    assert all(child.alive for child in small.children)


class Raw:
    """Bare ZeroMQ sockets."""

    def __init__(self, made: World) -> None:
        self.world = made
        self.context = zmq.asyncio.Context()
        self.sockets: list[zmq.asyncio.Socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for made in self.sockets:
            made.close(0)
        self.context.destroy(linger=0)

    def connect(self, kind: int, endpoint: str, identity: bytes = b"") -> zmq.asyncio.Socket:
        made = self.context.socket(kind)
        self.sockets.append(made)
        if identity:
            made.setsockopt(zmq.IDENTITY, identity)
        made.connect(endpoint)
        return made

    def control(self, identity: bytes = b"") -> zmq.asyncio.Socket:
        return self.connect(zmq.DEALER, f"tcp://{self.world.address}", identity)

    async def asked(self, dealer: zmq.asyncio.Socket, frames: list[bytes]) -> object:
        await dealer.send_multipart(frames)
        return decode(await asyncio.wait_for(dealer.recv_multipart(), DEADLINE_S)).message


# ---- control


@pytest.mark.parametrize("frames", GARBAGE.values(), ids=GARBAGE)
def test_garbage_on_control_is_answered_with_a_refusal(small: World, frames: list[bytes]) -> None:
    async def scenario() -> None:
        with Raw(small) as raw:
            dealer = raw.control()
            refused = await raw.asked(dealer, frames)
            assert isinstance(refused, Refused)
            assert refused.error.code == "malformed"
            # the same connection may still say something sensible
            assert isinstance(await raw.asked(dealer, list(map(bytes, encode(StateQuery())))), StateView)

    small.run(scenario())


@pytest.mark.parametrize("version", [0, limits.PROTOCOL_VERSION + 1, 255])
def test_a_peer_of_another_version_is_refused_with_both_versions(small: World, version: int) -> None:
    async def scenario() -> None:
        with Raw(small) as raw:
            refused = await raw.asked(raw.control(), [header(version), BODY])
        assert isinstance(refused, Refused)
        assert refused.error.code == "version_mismatch"
        assert refused.error.facts == {"peer_version": version, "own_version": limits.PROTOCOL_VERSION}
        assert str(version) in refused.error.what
        assert str(limits.PROTOCOL_VERSION) in refused.error.what
        assert "Upgrade" in refused.error.hint

    small.run(scenario())


def test_a_frame_over_the_limit_ends_the_connection_it_came_on(small: World) -> None:
    async def scenario() -> None:
        with Raw(small) as raw:
            dealer = raw.control()
            watch = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            raw.sockets.append(watch)
            assert isinstance(await raw.asked(dealer, list(map(bytes, encode(StateQuery())))), StateView)
            await dealer.send_multipart([HEADER, bytes(limits.CONTROL_BODY_BYTES + 1)])
            await asyncio.wait_for(watch.recv_multipart(), DEADLINE_S)

    small.run(scenario())


def test_what_is_no_zeromq_at_all_is_cut_off(small: World) -> None:
    async def scenario() -> None:
        view = await small.ready()
        ports = [int(small.address.rpartition(":")[2])]
        ports += [int(stage.endpoint.rpartition(":")[2]) for stage in view.stages]
        for port in ports:
            for raw in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", os.urandom(2000), b""):
                with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as plain:
                    plain.sendall(raw)

    small.run(scenario())


FROM_A_STAGE = [
    Heartbeat(),
    Progress(Phase.LOAD, 1, 2),
    Ready(0.1, 1),
    StageFailed(ERROR),
    Goodbye("bye"),
]
FOR_OTHERS = [
    Welcome("1", 1.0, 3),
    Release(),
    Assign(0, 0, 1, MODEL, 0, 4, "tcp://127.0.0.1:1", "tcp://127.0.0.1:1", 1, 16, 16),
    Delta("a", "b"),
    Finished("a", "stop"),
    MicroBatch(0, (Span(0, 0, 1, 1),)),
    BatchDone(0),
    BatchFailed(0, ERROR),
]


@pytest.mark.parametrize("message", FOR_OTHERS, ids=lambda message: type(message).__name__)
def test_a_client_that_sends_what_is_not_for_the_broker_is_refused(small: World, message: object) -> None:
    async def scenario() -> None:
        arrays = [bytes(4)] if isinstance(message, MicroBatch | BatchDone) else []
        frames = list(map(bytes, encode(message, Epoch(1), arrays)))  # type: ignore[arg-type]
        with Raw(small) as raw:
            refused = await raw.asked(raw.control(), frames)
        assert isinstance(refused, Refused)
        assert refused.error.code == "malformed"

    small.run(scenario())


@pytest.mark.parametrize("message", FROM_A_STAGE, ids=lambda message: type(message).__name__)
def test_a_client_that_plays_a_stage_changes_nothing(small: World, message: object) -> None:
    async def scenario() -> None:
        epoch = Epoch((await small.ready()).epoch)
        with Raw(small) as raw:
            for identity in (b"client-1", b"\xff\xfe not text"):
                dealer = raw.control(identity)
                await dealer.send_multipart(list(map(bytes, encode(message, epoch))))  # type: ignore[arg-type]
                # answered in order: what came before has been handled, too
                await dealer.send_multipart(list(map(bytes, encode(StateQuery()))))
                async with asyncio.timeout(DEADLINE_S):
                    while True:
                        said = decode(await dealer.recv_multipart()).message
                        if isinstance(said, StateView):
                            break
                        assert isinstance(said, Refused)
                assert said.ready
                assert len(said.stages) == 2

    small.run(scenario())


def test_a_client_can_t_register_as_a_stage_of_another_name_or_model(small: World) -> None:
    async def scenario() -> None:
        name = (await small.ready()).stages[0].stage
        with Raw(small) as raw:
            for stage, words in ((name, "another name"), ("client-1", "no copy of tiny")):
                register = Register(stage, "evil", "1", "llama", "tcp://127.0.0.1:1", ("f" * 64,))
                refused = await raw.asked(raw.control(b"client-1"), list(map(bytes, encode(register))))
                assert isinstance(refused, Refused)
                assert words in refused.error.what
        assert len((await small.ready()).stages) == 2

    small.run(scenario())


# ---- results and data


def results_of(made: World) -> str:
    """The broker's results socket: the listening port of its process that is neither control nor REST."""
    known = {int(made.address.rpartition(":")[2]), int(made.http.rpartition(":")[2])}
    (port,) = made.listening - known
    return f"tcp://127.0.0.1:{port}"


def forged(epoch: int) -> list[list[bytes]]:
    """Well-formed results of micro-batches that are not under way."""
    frames = [
        encode(BatchDone(1 << 40), Epoch(epoch), [struct.pack("<i", 5)]),
        encode(BatchDone(0), Epoch(epoch + 7), [struct.pack("<i", 5)]),
        encode(BatchDone(0), Epoch(epoch), [b"abc"]),
        encode(BatchFailed(1 << 40, ERROR), Epoch(epoch)),
        encode(Heartbeat(), Epoch(epoch)),
    ]
    return [list(map(bytes, message)) for message in frames]


def test_garbage_on_results_is_dropped_while_streams_go_on(small: World) -> None:
    async def scenario() -> None:
        expected = await answer(small)
        epoch = (await small.ready()).epoch
        with Raw(small) as raw:
            push = raw.connect(zmq.PUSH, results_of(small))
            async with asyncio.TaskGroup() as group:
                good = [group.create_task(answer(small)) for _ in range(4)]
                for frames in [*GARBAGE.values(), *forged(epoch)]:
                    await push.send_multipart(frames)
            assert [task.result() for task in good] == [expected] * 4

    small.run(scenario())


def test_garbage_on_a_stage_s_data_socket_is_dropped_and_counted(small: World) -> None:
    async def scenario() -> None:
        expected = await answer(small)
        view = await small.ready()
        stale = encode(MicroBatch(3, (Span(0, 0, 1, 1),)), Epoch(view.epoch + 7), [bytes(4)])
        with Raw(small) as raw:
            pushes = [
                raw.connect(zmq.PUSH, stage.endpoint.replace("0.0.0.0", "127.0.0.1")) for stage in view.stages
            ]
            async with asyncio.TaskGroup() as group:
                good = [group.create_task(answer(small)) for _ in range(4)]
                for push in pushes:
                    for frames in GARBAGE.values():
                        await push.send_multipart(frames)
                    await push.send_multipart(list(map(bytes, stale)))
            assert [task.result() for task in good] == [expected] * 4
        await small.until(lambda view: all(s.counters.refused_frames >= len(GARBAGE) for s in view.stages))
        await small.until(lambda view: all(s.counters.dropped_frames >= 1 for s in view.stages))

    small.run(scenario())


def test_garbage_by_the_thousand_fills_no_log(small: World) -> None:
    def size() -> int:
        return small.broker.log.stat().st_size

    async def scenario() -> None:
        before = size()
        with Raw(small) as raw:
            dealer = raw.control()
            for _ in range(3000):
                await dealer.send_multipart([b"hello"])
            heard = 0
            async with asyncio.timeout(DEADLINE_S):
                while heard < 3000:
                    heard += isinstance(decode(await dealer.recv_multipart()).message, Refused)
        assert size() - before < 3000

    small.run(scenario())
