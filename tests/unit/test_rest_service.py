from __future__ import annotations

import re

import pytest

from rest_world import MODEL, Call, World, error, in_world


@in_world
async def test_health_is_ok_when_requests_can_be_served(world: World) -> None:
    response = await world.client.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


@in_world
async def test_health_says_what_is_missing(world: World) -> None:
    world.core.ready, world.core.detail = False, "1 of at least 2 stages have joined."
    response = await world.client.get("/health")
    found = error(response, 503)
    assert found["message"] == "1 of at least 2 stages have joined."
    assert response.json()["status"] == "loading"
    assert "retry-after" in response.headers


@in_world
async def test_the_one_model_is_listed(world: World) -> None:
    body = (await world.client.get("/v1/models")).json()
    assert body["object"] == "list"
    assert body["data"] == [
        {
            "id": MODEL,
            "object": "model",
            "created": 1_700_000_000,
            "owned_by": "potluck",
            "max_model_len": 2048,
        }
    ]


@pytest.mark.parametrize("path", [f"/v1/models/{MODEL}", "/v1/models/house%2Ftiny"])
@in_world
async def test_the_model_is_found_by_a_name_with_a_slash(world: World, path: str) -> None:
    assert (await world.client.get(path)).json()["id"] == MODEL


@in_world
async def test_no_other_model_is_found(world: World) -> None:
    assert error(await world.client.get("/v1/models/gpt-9"), 404)["code"] == "model_not_found"


@in_world
async def test_the_state_shows_every_field_even_those_at_their_default(world: World) -> None:
    body = (await world.client.get("/potluck/v1/state")).json()
    assert (body["epoch"], body["running"], body["tokens_out"]) == (3, 0, 0)
    (stage,) = body["stages"]
    assert (stage["device"], stage["first"], stage["counters"]["batches"]) == ("mini", None, 0)


@in_world
async def test_the_openapi_page_describes_bodies_and_answers(world: World) -> None:
    spec = (await world.client.get("/openapi.json")).json()
    schemas = spec["components"]["schemas"]
    assert set(re.findall(r"#/components/schemas/(\w+)", str(spec))) <= schemas.keys()
    assert {"messages", "temperature", "min_p"} <= schemas["ChatBody"]["properties"].keys()
    post = spec["paths"]["/completion"]["post"]
    assert post["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/LlamaBody")
    assert (await world.client.get("/docs")).status_code == 200


@in_world
async def test_a_request_s_id_is_echoed_and_is_its_cause(world: World) -> None:
    response = await world.client.post("/completion", json={"prompt": "x"}, headers={"x-request-id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    assert world.core.last.cause == "/completion abc-1"


@pytest.mark.parametrize("given", [None, "", "a b", "x" * 129, "é"])
@in_world
async def test_a_request_without_a_sane_id_gets_one(world: World, given: str | None) -> None:
    headers = {} if given is None else {"x-request-id": given.encode()}
    response = await world.client.get("/health", headers=headers)
    assert response.headers["x-request-id"].startswith("id")


@pytest.mark.parametrize("path", ["/nowhere", "/v1/models/gpt-9"])
@in_world
async def test_errors_carry_the_id_too(world: World, path: str) -> None:
    assert (await world.client.get(path)).headers["x-request-id"]


@in_world
async def test_names_of_requests_are_never_used_twice(world: World) -> None:
    await world.chat(n=2)
    await world.llama()
    names = [event.request for event in world.core.submitted]
    assert len(set(names)) == 3


@in_world
async def test_a_call_by_hand_works_like_one_by_the_client(world: World) -> None:
    call = Call(world.app, "/completion", {"prompt": "x"})
    assert (await call.sent())["status"] == 200
    await call.task
