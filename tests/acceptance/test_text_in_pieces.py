"""Characters of several bytes and stop strings over the borders of tokens, with the real tokenizer."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from acceptance.cluster_world import World, text_of
from potluck.model.facts import read_facts
from potluck.model.tokenizer import Tokenizer
from potluck.runtime.client import Client
from potluck.wire.sampling import GREEDY, Sampling

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

ECHO = {
    "emoji": "🚀🎉🐍🚀🎉🐍🚀🎉🐍🚀🎉🐍🚀🎉🐍🚀🎉🐍",
    "CJK": "日本語、中文、日本語、中文、日本語、中文、日本語、中文、日本語、",
    "joined emoji": "👩‍👩‍👧 👨‍👩‍👦 👩‍👩‍👧 👨‍👩‍👦 👩‍👩‍👧 👨‍👩‍👦 👩‍👩‍👧",
}
NEW_TOKENS = 24
BYTES_OF_A_ROCKET = "🚀".encode()


async def over_rest(world: World, prompt: str, **settings: Any) -> tuple[list[str], str, str]:
    """The pieces of a stream, the same answer in one piece, and how it ended."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": NEW_TOKENS, **settings}
    pieces, reason = [], ""
    async with world.rest() as client:
        whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line.removeprefix("data: "))["choices"][0]
                    pieces.append(choice["text"])
                    reason = choice["finish_reason"] or reason
    assert reason == whole["finish_reason"]
    return pieces, whole["text"], reason


@pytest.mark.parametrize("prompt", ECHO.values(), ids=ECHO)
def test_a_character_of_several_tokens_arrives_in_one_piece(exact: World, prompt: str) -> None:
    async def scenario() -> None:
        pieces, whole, _ = await over_rest(exact, prompt)
        assert "".join(pieces) == whole
        # The end of the answer may cut the last character; nothing before it may be cut.
        assert "\ufffd" not in "".join(pieces)[:-1]
        assert sum(len(piece.encode()) > len(piece) for piece in pieces) > 1
        async with Client(exact.address) as client:
            deltas, _ = await text_of(client.stream(prompt, max_tokens=NEW_TOKENS, sampling=GREEDY))
        assert "".join(deltas) == whole
        assert "" in deltas, "no character of the answer had more than one token: the test shows nothing"

    exact.run(scenario())


def test_lone_bytes_of_a_character_become_valid_text(exact: World, smollm2_path: Path) -> None:
    with Tokenizer(read_facts(smollm2_path).path) as tokenizer:
        whole_pieces = {tokenizer.piece(token): token for token in range(tokenizer.size)}
    lone = [whole_pieces[bytes([byte])] for byte in BYTES_OF_A_ROCKET if bytes([byte]) in whole_pieces]
    assert lone

    async def scenario() -> None:
        async with Client(exact.address) as client:
            for token in lone:
                forced = Sampling(temperature=0.0, logit_bias=((token, 1000.0),))
                deltas, tokens = await text_of(client.stream("Hello", max_tokens=6, sampling=forced))
                assert tokens == [token] * 6
                answer = await client.complete("Hello", max_tokens=6, sampling=forced)
                assert "".join(deltas) == answer.text
                assert set(answer.text) == {"\ufffd"}

    exact.run(scenario())


def test_a_stop_string_over_the_borders_of_tokens_ends_the_text_before_it(exact: World) -> None:
    prompt = "Once upon a time"

    async def scenario() -> None:
        async with Client(exact.address) as client:
            pieces, _ = await text_of(client.stream(prompt, max_tokens=NEW_TOKENS, sampling=GREEDY))
            text = "".join(pieces)
            borders = [border for border in accumulate(map(len, pieces)) if 4 < border < len(text) - 4]
            stops = [text[border - 2 : border + 2] for border in borders]
            over_three = text[borders[2] - 1 : borders[3] + 1]
            for stop in [*stops[:4], over_three]:
                answer = await client.complete(prompt, max_tokens=NEW_TOKENS, sampling=GREEDY, stop=[stop])
                assert answer.text == text[: text.index(stop)]
                assert (answer.finish.reason, answer.finish.stop) == ("stop", stop)
        streamed, whole, reason = await over_rest(exact, prompt, stop=stops[1])
        assert "".join(streamed) == whole == text[: text.index(stops[1])]
        assert reason == "stop"

    exact.run(scenario())


def test_a_stop_string_that_never_comes_holds_nothing_back_at_the_end(exact: World) -> None:
    prompt = "Once upon a time"

    async def scenario() -> None:
        async with Client(exact.address) as client:
            text = (await client.complete(prompt, max_tokens=NEW_TOKENS, sampling=GREEDY)).text
            almost = text[-3:] + "☃"
            deltas, _ = await text_of(
                client.stream(prompt, max_tokens=NEW_TOKENS, sampling=GREEDY, stop=[almost, "☃☃"])
            )
        assert "".join(deltas) == text

    exact.run(scenario())
