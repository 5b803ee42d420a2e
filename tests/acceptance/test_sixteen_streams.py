"""The stock `openai` client, sixteen streams at once over three real stages, with --exact."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from acceptance.cluster_world import World, idle

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

STORY = (
    "Once upon a time, in a small house at the edge of the forest, there lived an old clockmaker who had never told "
    "anyone how many clocks he owned. Every morning he wound them all, one after the other, and every evening he "
    "listened to them strike. "
)
PROMPTS = [
    "The",
    "The capital of France is",
    "def fibonacci(n):\n",
    "Water boils at",
    "1, 2, 3, 4, 5,",
    "My favourite colour is",
    "In the year 1969 two people",
    "The quick brown fox jumps over the lazy dog, and then",
    STORY,
    STORY + STORY,
    STORY + STORY + STORY + "One day",
    "List three fruits:\n1.",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is the largest planet?\nA:",
    "import numpy as np\n\ndef mean(values):\n",
    "Roses are red, violets are",
]
CHUNK = 64
GREEDY = {"temperature": 0.0, "max_tokens": 16}
SEEDED = {"temperature": 0.8, "max_tokens": 12}


async def streamed(world: World, prompt: str, settings: dict[str, Any]) -> tuple[str, str | None, int]:
    """Text, reason of its end, prompt tokens."""
    client = world.openai()
    text, reason, prompt_tokens = "", None, 0
    async with client:
        stream = await client.completions.create(
            model="default", prompt=prompt, stream=True, stream_options={"include_usage": True}, **settings
        )
        async for chunk in stream:
            if chunk.usage is not None:
                prompt_tokens = chunk.usage.prompt_tokens
            for choice in chunk.choices:
                text += choice.text
                reason = choice.finish_reason or reason
    return text, reason, prompt_tokens


@pytest.mark.parametrize("settings", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_sixteen_streams_at_once_say_what_each_says_alone(exact: World, settings: dict[str, Any]) -> None:
    asked = [
        {**settings, "seed": 100 + index} if settings is SEEDED else settings for index in range(len(PROMPTS))
    ]

    async def scenario() -> None:
        pairs = list(zip(PROMPTS, asked, strict=True))
        alone = [await streamed(exact, prompt, setting) for prompt, setting in pairs]
        async with asyncio.TaskGroup() as group:
            all_served = group.create_task(exact.until(lambda view: view.running == len(PROMPTS)))
            tasks = [group.create_task(streamed(exact, prompt, setting)) for prompt, setting in pairs]
        assert [task.result() for task in tasks] == alone
        assert all_served.result().queued == 0
        lengths = sorted(prompt_tokens for _, _, prompt_tokens in alone)
        assert lengths[0] < 3
        assert lengths[-1] > 2 * CHUNK
        assert all(text and reason in ("stop", "length") for text, reason, _ in alone)
        assert len({text for text, _, _ in alone}) > len(PROMPTS) - 2
        assert idle(await exact.until(idle))

    exact.run(scenario(), 100)


def test_a_seed_gives_its_text_again_and_another_seed_another(exact: World) -> None:
    async def scenario() -> None:
        texts = [(await streamed(exact, PROMPTS[0], {**SEEDED, "seed": seed}))[0] for seed in (1, 1, 2, 3)]
        assert texts[0] == texts[1]
        assert len(set(texts)) == 3

    exact.run(scenario())
