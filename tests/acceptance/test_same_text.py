"""Any number of stages gives the greedy text of llama.cpp on the whole file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from acceptance.cluster_world import World, idle, serving, world
from potluck.model.facts import read_facts
from potluck.model.tokenizer import Tokenizer
from potluck.runtime.client import Client
from potluck.wire.sampling import GREEDY

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small house at the edge of the forest, there lived an old clockmaker. " * 5,
)
NEW_TOKENS = 24
CHUNK = 64

# A process of its own: what Potluck sets for a whole process (compute.exact) must not reach this. With flash attention,
# as in the stages: without it llama.cpp rounds otherwise, and a near tie may fall to the other side.
WHOLE = """
import json, sys
from llama_cpp import Llama
model, chunk, count, prompts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
llama = Llama(
    model, n_ctx=512, n_batch=chunk, n_ubatch=chunk, n_threads=1, n_threads_batch=1, flash_attn=True, verbose=False
)
answers = []
for prompt in prompts:
    llama.reset()
    made = llama.generate(prompt, temp=0.0, repeat_penalty=1.0)
    answers.append([next(made) for _ in range(count)])
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def prompts(smollm2_path: Path) -> list[list[int]]:
    with Tokenizer(read_facts(smollm2_path).path) as tokenizer:
        tokens = [tokenizer.encode(text) for text in TEXTS]
    assert max(map(len, tokens)) > CHUNK
    return tokens


@pytest.fixture(scope="module")
def whole(smollm2_path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What llama-cpp-python says by itself."""
    arguments = [str(smollm2_path), str(CHUNK), str(NEW_TOKENS), json.dumps(prompts)]
    done = subprocess.run(
        [sys.executable, "-P", "-c", WHOLE, *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    answers: list[list[int]] = json.loads(done.stdout)
    return answers


async def answers(world: World, prompts: list[list[int]]) -> list[list[int]]:
    async with Client(world.address) as client:
        return [
            list(
                (
                    await client.complete(
                        tokens=prompt, max_tokens=NEW_TOKENS, sampling=GREEDY, ignore_eos=True
                    )
                ).tokens
            )
            for prompt in prompts
        ]


@pytest.fixture
def growing(smollm2_path: Path, tmp_path: Path) -> Iterator[World]:
    """A broker and one stage; the test adds more."""
    with world(smollm2_path, tmp_path, 1, "--context", "512", "--slots", "4") as made:
        yield made


def test_one_two_and_three_stages_give_the_text_of_llama_cpp_on_the_whole_file(
    growing: World, prompts: list[list[int]], whole: list[list[int]]
) -> None:
    async def scenario() -> None:
        assert await answers(growing, prompts) == whole
        for count in (2, 3):
            await growing.start_stage(f"stage-{count}")
            await growing.until(serving(count))
            assert await answers(growing, prompts) == whole, f"over {count} stages"
        assert idle(await growing.until(idle))

    growing.run(scenario(), 100)


def test_f16_between_the_stages_answers_almost_the_same(
    half: World, prompts: list[list[int]], whole: list[list[int]]
) -> None:
    async def scenario() -> None:
        found = await answers(half, prompts)
        assert [len(answer) for answer in found] == [NEW_TOKENS] * len(prompts)
        # A rounded activation may turn a close choice somewhere, but not at the very first token.
        assert [answer[0] for answer in found] == [answer[0] for answer in whole]

    half.run(scenario())
