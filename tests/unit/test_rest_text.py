from __future__ import annotations

import pytest

from rest_world import MODEL, World, error, frames, in_world


@in_world
async def test_a_prompt_is_answered_in_openai_s_shape(world: World) -> None:
    body = (await world.complete()).json()
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", MODEL)
    assert body["choices"] == [{"index": 0, "text": "Good day!", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["total_tokens"] == 8


@in_world
async def test_openai_s_limit_of_16_tokens_holds_unless_another_is_given(world: World) -> None:
    await world.complete()
    await world.complete(max_tokens=100)
    assert [event.max_tokens for event in world.core.submitted] == [16, 100]


@in_world
async def test_a_token_array_is_one_prompt(world: World) -> None:
    await world.complete(prompt=[5, 6, 7])
    assert world.core.last.tokens == (5, 6, 7)


@pytest.mark.parametrize("prompts", [["ab", "cde"], [[97, 98], [99, 100, 101]], ["ab", [99, 100]]])
@in_world
async def test_every_prompt_of_a_list_gets_its_choices_in_order(world: World, prompts: list) -> None:
    body = (await world.complete(prompt=prompts, n=2)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    sizes = [len(event.tokens) for event in world.core.submitted]
    assert sizes[0] == sizes[1]
    assert sizes[2] == sizes[3]
    assert body["usage"]["prompt_tokens"] == sizes[0] + sizes[2]


@in_world
async def test_a_stream_carries_text_then_the_reason_then_done(world: World) -> None:
    *chunks, done = frames(await world.complete(stream=True, stream_options={"include_usage": True}))
    assert done == "[DONE]"
    assert [choice["text"] for chunk in chunks for choice in chunk["choices"]] == ["Good", " day", "!", ""]
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] == 3


@in_world
async def test_logprobs_stand_side_by_side_with_offsets(world: World) -> None:
    world.core.says = ["G", "o"]
    (choice,) = (await world.complete(logprobs=1)).json()["choices"]
    assert choice["logprobs"] == {
        "text_offset": [0, 1], "token_logprobs": [-0.5, -0.5], "tokens": ["G", "o"],
        "top_logprobs": [{"A": -0.25, "G": -0.5}, {"A": -0.25, "o": -0.5}],
    }  # fmt: skip


@in_world
async def test_streamed_offsets_go_on_from_chunk_to_chunk(world: World) -> None:
    world.core.says = ["G", "o"]
    *chunks, _ = frames(await world.complete(stream=True, logprobs=0))
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry["text_offset"] for entry in found if entry] == [[0], [1]]


@pytest.mark.parametrize(
    "extra", [{"echo": False}, {"suffix": ""}, {"suffix": None}, {"best_of": 1}, {"logprobs": None}]
)
@in_world
async def test_harmless_values_are_served(world: World, extra: dict) -> None:
    assert (await world.complete(**extra)).status_code == 200


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": ["x"] * 17, "n": 8}, "prompt"),
        ({"prompt": "x" * 2_000_001}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
    ],
)
@in_world
async def test_a_wrong_field_is_named(world: World, extra: dict, param: str) -> None:
    assert error(await world.complete(**extra))["param"] == param
    assert world.core.submitted == []


@in_world
async def test_a_body_without_a_prompt_names_it(world: World) -> None:
    assert error(await world.post("/v1/completions"))["param"] == "prompt"
