"""What the tests of a stage share: assignments, micro-batches, and a broker that only does what the test tells it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from potluck.runtime.memory import MemoryNetwork
from potluck.runtime.transport import Push, Router
from potluck.stage.engine import Engine
from potluck.stage.engines.fake import FakeEngine
from potluck.stage.engines.fake_model import WIDTH
from potluck.stage.settings import StageSettings
from potluck.stage.worker import StageWorker
from potluck.wire.ids import Epoch
from potluck.wire.messages import (
    Assign,
    BatchDone,
    BatchFailed,
    Envelope,
    Message,
    MicroBatch,
    ModelRef,
    Ready,
    Register,
    Span,
    Trim,
    Welcome,
    decode,
    encode,
)

DEADLINE_S = 20.0
"""How long a test waits for something that must happen; never reached when it passes."""
LAYERS = 4
MODEL = ModelRef("toy", "fp-toy", LAYERS, WIDTH, "fake")
NEXT, RESULTS = "tcp://next:1", "tcp://broker:7947"


def assignment(index: int = 0, stages: int = 1, **changes: object) -> Assign:
    """Stage `index` of a chain that divides the toy model evenly."""
    share = LAYERS // stages
    plain = Assign(
        chain=0,
        index=index,
        stages=stages,
        model=MODEL,
        first=index * share,
        end=(index + 1) * share,
        next_endpoint=RESULTS if index == stages - 1 else NEXT,
        results_endpoint=RESULTS,
        slots=4,
        context_tokens=32,
        batch_tokens=16,
    )
    return msgspec.structs.replace(plain, **changes)


def prompt_batch(
    number: int, tokens: int = 3, slot: int = 0, position: int = 0, wants: int = 1
) -> MicroBatch:
    """One span; one that begins a slot empties it first."""
    trims = (Trim(slot, 0),) if position == 0 else ()
    return MicroBatch(number, (Span(slot, position, tokens, wants),), trims)


def int32(*tokens: int) -> bytes:
    return np.asarray(tokens, "<i4").tobytes()


def rows(count: int, value: float = 1.0) -> bytes:
    """Activations in f32."""
    return np.full((count, WIDTH), value, "<f4").tobytes()


class BrokerSide:
    """The control socket of a broker that a test plays, and the stage that it hears."""

    patience_s = DEADLINE_S

    def __init__(self, control: Router) -> None:
        self.control = control
        self.peer = b""

    async def hear(self, *kinds: type[Message]) -> Envelope:
        """The stage's next control message of one of these kinds; others are passed over."""
        async with asyncio.timeout(self.patience_s):
            while True:
                self.peer, frames = await self.control.recv()
                envelope = decode(frames)
                if isinstance(envelope.message, kinds):
                    return envelope

    def say(self, message: Message, epoch: int = 0) -> None:
        assert self.control.send(self.peer, encode(message, Epoch(epoch)))


class ScriptedBroker(BrokerSide):
    """A broker's sockets on a network in memory, and the messages that came in, for one stage worker.

    `suffix` tells the hosts of several on one network apart.
    """

    def __init__(self, network: MemoryNetwork | None = None, suffix: str = "") -> None:
        self.network = network or MemoryNetwork()
        self.suffix = suffix
        self.transport = self.network.host(f"broker{suffix}")
        super().__init__(self.transport.router(f"tcp://broker{suffix}:7946"))
        self.results = self.transport.pull(RESULTS.replace("broker", f"broker{suffix}"))
        self.next = self.network.host(f"next{suffix}").pull(NEXT.replace("next", f"next{suffix}"))
        self.push: Push | None = None
        self.worker: StageWorker

    def start(
        self,
        engine: Callable[[], Engine] = FakeEngine,
        settings: StageSettings | None = None,
        **options: object,
    ) -> asyncio.Task[int]:
        """Runs a worker on a host of its own."""
        settings = settings or StageSettings(
            "dev", {MODEL.fingerprint: None}, engine="fake", listen_address="*"
        )
        self.worker = StageWorker(
            self.network.host(f"dev{self.suffix}"),
            self.control.endpoint,
            settings,
            engine=engine,
            stage_id="dev/1",
            **options,  # type: ignore[arg-type]
        )
        return asyncio.create_task(self.worker.run())

    async def welcome(self, heartbeat_s: float = 1000.0) -> Register:
        """Takes the stage in, and opens the way to its data socket."""
        register = (await self.hear(Register)).message
        assert isinstance(register, Register)
        self.push = self.transport.push(register.data_endpoint)
        self.say(Welcome("test", heartbeat_s, 3))
        return register

    async def make_ready(self, assign: Assign, epoch: int = 1) -> Ready:
        self.say(assign, epoch)
        ready = (await self.hear(Ready)).message
        assert isinstance(ready, Ready)
        return ready

    async def send(self, message: MicroBatch, *arrays: bytes, epoch: int = 1) -> None:
        await self.send_frames(encode(message, Epoch(epoch), arrays))

    async def send_frames(self, frames: Sequence[bytes | bytearray | memoryview]) -> None:
        assert self.push is not None
        async with asyncio.timeout(DEADLINE_S):
            await self.push.send(frames)

    async def result(self) -> tuple[BatchDone | BatchFailed, list[int]]:
        """The next message on the results socket, and its tokens."""
        async with asyncio.timeout(DEADLINE_S):
            envelope = decode(await self.results.recv())
        message = envelope.message
        assert isinstance(message, BatchDone | BatchFailed)
        tokens = np.frombuffer(envelope.arrays[0], "<i4").tolist() if envelope.arrays else []
        return message, tokens

    async def forwarded(self) -> Envelope:
        """The next micro-batch at the next stage."""
        async with asyncio.timeout(DEADLINE_S):
            return decode(await self.next.recv())

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for the worker's events until the condition holds."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await self.worker.changed()
