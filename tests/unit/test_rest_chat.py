from __future__ import annotations

import pytest

from potluck.wire.sampling import Sampling
from rest_world import HELLO, MODEL, World, error, frames, in_world


def deltas(chunks: list[dict], index: int = 0) -> list[dict]:
    return [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]


@in_world
async def test_a_chat_is_answered_in_openai_s_shape(world: World) -> None:
    world.core.cached = 4
    body = (await world.chat(model=MODEL)).json()
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["created"], body["model"]) == ("chat.completion", 1_700_000_000, MODEL)
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Good day!", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    assert body["usage"] == {
        "prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14, "prompt_tokens_details": {"cached_tokens": 4},
    }  # fmt: skip


@in_world
async def test_an_answer_that_was_cut_says_length(world: World) -> None:
    world.core.reason = "length"
    assert (await world.chat(max_tokens=3)).json()["choices"][0]["finish_reason"] == "length"
    assert world.core.last.max_tokens == 3


@in_world
async def test_the_fingerprint_stays_the_same_and_ids_do_not(world: World) -> None:
    one, two = (await world.chat()).json(), (await world.chat()).json()
    assert one["system_fingerprint"] == two["system_fingerprint"]
    assert one["id"] != two["id"]


@in_world
async def test_a_stream_begins_with_the_role_and_ends_with_done(world: World) -> None:
    *chunks, done = frames(await world.chat(stream=True))
    assert done == "[DONE]"
    assert deltas(chunks) == [
        {"role": "assistant", "content": ""}, {"content": "Good"}, {"content": " day"}, {"content": "!"}, {},
    ]  # fmt: skip
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


@in_world
async def test_a_stream_is_not_to_be_cached_or_buffered(world: World) -> None:
    headers = (await world.chat(stream=True)).headers
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")


@in_world
async def test_usage_comes_last_when_asked_for(world: World) -> None:
    *chunks, last, _ = frames(await world.chat(stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3


@in_world
async def test_text_held_back_sends_no_frame(world: World) -> None:
    world.core.says = ["", "", "ok"]
    *chunks, _ = frames(await world.chat(stream=True))
    assert [delta.get("content") for delta in deltas(chunks)] == ["", "ok", None]


@in_world
async def test_an_answer_without_text_still_has_a_role(world: World) -> None:
    world.core.says = []
    *chunks, _ = frames(await world.chat(stream=True))
    assert deltas(chunks) == [{"role": "assistant", "content": ""}, {}]


@in_world
async def test_several_answers_have_seeds_that_differ(world: World) -> None:
    body = (await world.chat(n=3, seed=7)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [event.sampling.seed for event in world.core.submitted] == [7, 8, 9]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (11, 9)


@in_world
async def test_several_answers_without_a_seed_get_drawn_ones(world: World) -> None:
    await world.chat(n=2)
    assert [event.sampling.seed for event in world.core.submitted] == [1000, 1001]


@in_world
async def test_several_answers_are_streamed_side_by_side(world: World) -> None:
    *chunks, done = frames(await world.chat(n=2, stream=True))
    assert done == "[DONE]"
    for index in (0, 1):
        assert "".join(delta.get("content", "") for delta in deltas(chunks, index)) == "Good day!"
        assert deltas(chunks, index)[0]["role"] == "assistant"


@in_world
async def test_without_settings_the_model_s_own_distribution_is_drawn_from(world: World) -> None:
    await world.chat()
    assert world.core.last.sampling == Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1000)
    assert (world.core.last.max_tokens, world.core.last.stops) == (None, ())


@in_world
async def test_every_setting_reaches_the_core(world: World) -> None:
    await world.chat(
        temperature=0.5, top_p=0.9, top_k=20, min_p=0.1, repeat_penalty=1.2, repeat_last_n=32, seed=5,
        presence_penalty=0.3, frequency_penalty=-0.4, logit_bias={"65": 10, "66": -100}, ignore_eos=True,
        stop=["a", "b"], max_completion_tokens=9, max_tokens=4, logprobs=True, top_logprobs=2, user="me",
    )  # fmt: skip
    event = world.core.last
    assert event.sampling == Sampling(
        temperature=0.5, top_p=0.9, top_k=20, min_p=0.1, repeat_penalty=1.2, penalty_last_n=32, seed=5,
        presence_penalty=0.3, frequency_penalty=-0.4, logit_bias=((65, 10.0), (66, -100.0)), top_logprobs=2,
    )  # fmt: skip
    assert (event.stops, event.max_tokens, event.ignore_eos) == (("a", "b"), 9, True)


NULLABLE = (
    "model temperature top_p n stop seed stream stream_options logit_bias logprobs top_logprobs max_tokens "
    "max_completion_tokens response_format tools presence_penalty frequency_penalty top_k user"
)


@pytest.mark.parametrize("field", NULLABLE.split())
@in_world
async def test_null_is_the_same_as_nothing(world: World, field: str) -> None:
    assert (await world.chat(**{field: None})).status_code == 200


@pytest.mark.parametrize(
    ("given", "kept"), [(0, 0), (-5, (1 << 32) - 5), (1 << 40, 0), ((1 << 63) - 1, (1 << 32) - 1)]
)
@in_world
async def test_any_64_bit_seed_is_taken(world: World, given: int, kept: int) -> None:
    assert (await world.chat(seed=given)).status_code == 200
    assert world.core.last.sampling.seed == kept


UNUSUAL: list[dict] = [
    {"tools": []},
    {"functions": []},
    {"response_format": {"type": "text"}},
    {"temperature": 0},
    {"temperature": 2},
    {"top_k": -1},
    {"stop": "x"},
    {"stop": []},
    {"stop": ["x"] * 16},
    {"n": 8},
    {"model": "default"},
    {"max_tokens": 10**9},
    {"never_heard_of": 1},
    {"grammar": ""},
    {"logprobs": False},
    {"logit_bias": {}},
]


@pytest.mark.parametrize("extra", UNUSUAL)
@in_world
async def test_unusual_but_valid_bodies_are_served(world: World, extra: dict) -> None:
    assert (await world.chat(**extra)).status_code == 200


@in_world
async def test_unknown_fields_leave_one_line_in_the_log(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="potluck")
    await world.chat(zeta=1, alpha=2, user="me")
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("potluck")]
    assert lines == ["Ignored unknown fields of a request: 'alpha', 'zeta'"]


@in_world
async def test_roles_are_mapped_and_parts_are_joined(world: World) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    await world.chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": parts, "name": "Ann"},
            {"role": "assistant", "content": None},
            {"role": "tool", "content": "4", "tool_call_id": "x"},
        ]
    )
    text = "".join(map(chr, world.core.last.tokens))
    assert text == "system:be brief\nuser:one\ntwo\nassistant:\ntool:4\n"


@in_world
async def test_logprobs_name_tokens_bytes_and_the_likeliest(world: World) -> None:
    world.core.says = ["é"]
    (entry,) = (await world.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"], entry["logprob"]) == ("é", [195, 169], -0.5)
    assert entry["top_logprobs"] == [
        {"token": "A", "logprob": -0.25, "bytes": [65]}, {"token": "B", "logprob": -9999.0, "bytes": [66]},
    ]  # fmt: skip


@in_world
async def test_streamed_logprobs_miss_no_token_not_even_one_held_back(world: World) -> None:
    world.core.says = ["", "ok"]
    *chunks, _ = frames(await world.chat(stream=True, logprobs=True))
    found = [c["choices"][0]["logprobs"] for c in chunks]
    assert [len(logprobs["content"]) for logprobs in found if logprobs] == [1, 1]
    assert world.core.last.sampling.top_logprobs == 0


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [*HELLO, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "FORBIDDEN"}]}, "messages"),
        ({"model": 5}, "model"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -1}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["ok", 3]}, "stop[1]"),
        ({"seed": 1 << 63}, "seed"),
        ({"seed": "lucky"}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
        ({"logit_bias": []}, "logit_bias"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"functions": [{}]}, "functions"),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"json_schema": {"type": "object"}}, "json_schema"),
        ({"ignore_eos": 1}, "ignore_eos"),
    ],
)
@in_world
async def test_a_wrong_field_is_named(world: World, extra: dict, param: str) -> None:
    found = error(await world.chat(**extra))
    assert (found["param"], found["type"]) == (param, "invalid_request_error")
    assert found["code"] in {"invalid_value", "invalid_request"}
    assert world.core.submitted == []
