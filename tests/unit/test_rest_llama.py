from __future__ import annotations

import pytest

from potluck.wire.sampling import Sampling
from rest_world import MODEL, World, error, frames, in_world


@in_world
async def test_a_prompt_is_answered_in_llama_cpp_s_shape(world: World) -> None:
    world.core.cached = 1
    body = (await world.llama(n_predict=20)).json()
    assert (body["content"], body["stop"], body["model"], body["truncated"]) == (
        "Good day!",
        True,
        MODEL,
        False,
    )
    assert (body["stop_type"], body["stopping_word"]) == ("eos", "")
    assert (body["tokens_predicted"], body["tokens_evaluated"], body["tokens"]) == (3, 5, [])
    assert body["timings"] == {
        "cache_n": 1, "prompt_n": 4, "prompt_ms": 1000.0, "prompt_per_token_ms": 250.0, "prompt_per_second": 4.0,
        "predicted_n": 3, "predicted_ms": 2000.0, "predicted_per_token_ms": pytest.approx(666.67, abs=0.01),
        "predicted_per_second": 1.5,
    }  # fmt: skip
    assert body["generation_settings"]["n_predict"] == 20
    assert body["generation_settings"]["seed"] == 4294967295
    assert "completion_probabilities" not in body


@pytest.mark.parametrize(
    ("reason", "stop", "kind", "word"),
    [("length", None, "limit", ""), ("stop", "\n", "word", "\n"), ("stop", None, "eos", "")],
)
@in_world
async def test_how_it_stopped_is_said(
    world: World, reason: str, stop: str | None, kind: str, word: str
) -> None:
    world.core.reason, world.core.stop = reason, stop
    body = (await world.llama()).json()
    assert (body["stop_type"], body["stopping_word"]) == (kind, word)


@in_world
async def test_a_stream_has_pieces_and_a_last_event_and_no_done(world: World) -> None:
    *pieces, last = frames(await world.llama(stream=True))
    assert [(piece["content"], piece["stop"]) for piece in pieces] == [
        ("Good", False),
        (" day", False),
        ("!", False),
    ]
    assert [piece["tokens_predicted"] for piece in pieces] == [1, 2, 3]
    assert (last["content"], last["stop"], last["stop_type"], last["tokens_predicted"]) == (
        "",
        True,
        "eos",
        3,
    )


@in_world
async def test_llama_cpp_s_defaults_hold(world: World) -> None:
    await world.llama()
    assert world.core.last.sampling == Sampling(seed=1000)
    assert world.core.last.sampling == Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=1000)
    assert world.core.last.max_tokens is None


@in_world
async def test_every_setting_reaches_the_core(world: World) -> None:
    await world.llama(
        prompt=[3, 4], n_predict=7, temperature=-1, top_k=0, top_p=0.5, min_p=0, repeat_penalty=1.1, repeat_last_n=-1,
        presence_penalty=1, frequency_penalty=2, seed=9, stop=["x"], logit_bias=[[5, 1.5], [6, False]], n_probs=2,
        cache_prompt=True, ignore_eos=True,
    )  # fmt: skip
    event = world.core.last
    assert event.sampling == Sampling(
        temperature=0.0, top_k=0, top_p=0.5, min_p=0.0, repeat_penalty=1.1, penalty_last_n=65_536, presence_penalty=1.0,
        frequency_penalty=2.0, seed=9, logit_bias=((5, 1.5), (6, -1e6)), top_logprobs=2,
    )  # fmt: skip
    assert (event.tokens, event.max_tokens, event.stops, event.ignore_eos) == ((3, 4), 7, ("x",), True)


@in_world
async def test_a_bias_may_be_an_object_as_openai_has_it(world: World) -> None:
    await world.llama(logit_bias={"5": 2, "6": False})
    assert world.core.last.sampling.logit_bias == ((5, 2.0), (6, -1e6))


@pytest.mark.parametrize("seed", [-1, None])
@in_world
async def test_a_seed_of_minus_one_is_drawn(world: World, seed: int | None) -> None:
    await world.llama(seed=seed)
    assert world.core.last.sampling.seed == 1000


@pytest.mark.parametrize("n_predict", [-1, -2, None])
@in_world
async def test_no_limit_means_until_the_context_is_full(world: World, n_predict: int | None) -> None:
    await world.llama(n_predict=n_predict)
    assert world.core.last.max_tokens is None


@in_world
async def test_probabilities_and_tokens_come_when_asked_for(world: World) -> None:
    world.core.says = ["G"]
    body = (await world.llama(n_probs=1, return_tokens=True)).json()
    assert body["tokens"] == [71]
    assert body["completion_probabilities"] == [
        {
            "id": 71, "token": "G", "bytes": [71], "logprob": -0.5,
            "top_logprobs": [{"id": 65, "token": "A", "bytes": [65], "logprob": -0.25}],
        }
    ]  # fmt: skip


@in_world
async def test_streamed_probabilities_miss_no_token(world: World) -> None:
    world.core.says = ["", "ok"]
    *pieces, last = frames(await world.llama(n_probs=1, stream=True))
    assert [len(piece["completion_probabilities"]) for piece in pieces] == [1, 1]
    assert "completion_probabilities" not in last


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt[0]"),
        ({"n_predict": 0}, "n_predict"),
        ({"n_predict": -3}, "n_predict"),
        ({"temperature": "x"}, "temperature"),
        ({"repeat_last_n": -2}, "repeat_last_n"),
        ({"logit_bias": [["a", 1]]}, "logit_bias[0][0]"),
        ({"logit_bias": [[5, True]]}, "logit_bias"),
        ({"logit_bias": [[5]]}, "logit_bias[0]"),
        ({"n_probs": 100}, "n_probs"),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"json_schema": {"type": "object"}}, "json_schema"),
    ],
)
@in_world
async def test_a_wrong_field_is_named(world: World, extra: dict, param: str) -> None:
    assert error(await world.llama(**extra))["param"] == param
    assert world.core.submitted == []
