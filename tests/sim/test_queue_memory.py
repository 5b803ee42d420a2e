"""Ten thousand requests at a broker whose chain takes none any more: as many wait as it keeps, and nothing grows."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections import Counter

from potluck.broker.config import BrokerConfig
from potluck.broker.machine import BrokerMachine
from potluck.broker.server import BrokerServer
from potluck.planner.even import plan_even
from potluck.runtime.memory import MemoryNetwork
from potluck.wire.messages import Accepted, Assign, Ready, Register, Rejected, Submit, decode, encode
from sim.cluster import CODEC, CONTROL, MODEL, RESULTS, SHAPE, at_once
from sim.virtual_time import run_virtual

SLOTS, QUEUE = 4, 50
SUBMISSIONS = 10_000
AT_REST = 5_000
"""By then the story, which keeps the last 4,096 lines, is full."""
NOISE_BYTES = 30_000
"""A hundredth of what the other 5,000 requests would take if only their names were kept, with their prompts."""


def test_the_memory_of_a_broker_stays_flat_under_ten_thousand_submissions() -> None:
    async def story() -> None:
        network = MemoryNetwork()
        config = BrokerConfig(
            slots=SLOTS,
            queue_limit=QUEUE,
            settle_s=0.0,
            heartbeat_s=3600.0,
            context_tokens=64,
            batch_timeout_s=1e6,
        )
        machine = BrokerMachine(config, MODEL, SHAPE, CODEC, plan_even, lambda stage: RESULTS, "test")
        transport = network.host("broker")
        server = BrokerServer(
            transport, machine, CODEC, control=CONTROL, results=RESULTS, random_seed=lambda: 1, beside=at_once
        )
        server.start()
        # a stage that gets ready, and never computes
        host = network.host("a")
        pull, stage = host.pull("tcp://a:*"), host.dealer(CONTROL, "a/1")
        stage.send(encode(Register("a/1", "a", "1", "fake", pull.endpoint, (MODEL.fingerprint,))))
        while not isinstance((envelope := decode(await stage.recv())).message, Assign):
            pass
        stage.send(encode(Ready(0.1, 1), envelope.epoch))
        await server.wait_ready()

        client = network.host("sofa").dealer(CONTROL, "client-1")
        answers: Counter[str] = Counter()
        begun_bytes = 0
        for number in range(SUBMISSIONS):
            client.send(encode(Submit(f"{number:08}", tokens=tuple(range(1, 40)), max_tokens=10)))
            match decode(await client.recv()).message:
                case Accepted():
                    answers["accepted"] += 1
                case Rejected(_, error):
                    assert error.restore().http_status == 429
                    assert "Try again" in error.hint
                    answers[error.code] += 1
            if number == AT_REST:
                gc.collect()
                begun_bytes = tracemalloc.get_traced_memory()[0]
        gc.collect()
        grown_bytes = tracemalloc.get_traced_memory()[0] - begun_bytes

        assert answers == {"accepted": SLOTS + QUEUE, "queue_full": SUBMISSIONS - SLOTS - QUEUE}
        assert len(machine.state.requests) == SLOTS + QUEUE
        assert len(server.gateway._tickets) == len(server.clients._tickets) == SLOTS + QUEUE
        assert grown_bytes < NOISE_BYTES, (
            f"{grown_bytes} bytes more after {SUBMISSIONS - AT_REST} submissions"
        )

        client.close()  # its connection is closed: everything of it goes
        async with asyncio.timeout(10.0):
            while machine.state.requests:
                await server.changed()
        assert not server.gateway._tickets
        assert not server.clients._tickets
        stage.close()
        await server.close()

    tracemalloc.start()
    try:
        run_virtual(story())
    finally:
        tracemalloc.stop()
