"""A stage in a container of 200 MB is given only what fits there, and serves without being killed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cgroups import memory_limit
from potluck.runtime.client import Client
from potluck.tools.local import LocalCluster
from potluck.wire.messages import PlanQuery
from potluck.wire.sampling import GREEDY

pytestmark = [pytest.mark.root, pytest.mark.real_model, pytest.mark.slow]

LIMIT = 200_000_000
PROMPT = "Tell a long story about an old clockmaker. " * 30


def test_a_stage_with_200_mb_gets_no_more_layers_than_fit_and_answers(
    smollm2_path: Path, tmp_path: Path
) -> None:
    async def story() -> None:
        cluster = LocalCluster(smollm2_path, tmp_path)
        with memory_limit(LIMIT) as group:
            try:
                await cluster.start_broker(
                    "--plan", "measured", "--stages", "3", "--http", "off", "--misses", "20"
                )
                small = await cluster.start_stage("small")
                group.add(small.process.pid)
                for name in (
                    "large",
                    "other",
                ):  # neither can hold the model, so the small one is needed, or of use
                    await cluster.start_stage(name, "--max-memory-gb", "0.36")
                async with Client(cluster.address) as client:
                    view = [view async for view in cluster.wait_ready(client)][-1]
                    answers = await asyncio.gather(
                        *(
                            client.complete(
                                f"{number} {PROMPT}", max_tokens=12, sampling=GREEDY, ignore_eos=True
                            )
                            for number in range(4)
                        )
                    )
                    plan = await client.plan(PlanQuery())
                assert all(len(answer.tokens) == 12 for answer in answers)
                assert group.kills == 0
                assert small.alive
                stages = {stage.device: stage for stage in view.stages}
                assert stages["small"].capabilities.container_memory_bytes == pytest.approx(LIMIT, rel=0.01)
                assert 0 < stages["small"].capabilities.offered_bytes < LIMIT
                assert stages["small"].first is not None, "the limit was not put to the test"
                for stage in stages.values():
                    taken = stage.weights_bytes + stage.kv_bytes + stage.compute_bytes
                    assert taken <= stage.capabilities.offered_bytes
                assert plan.forecast is not None
                assert any("No device can hold the model alone" in reason for reason in plan.reasons)
            finally:
                await cluster.stop()

    asyncio.run(story())
