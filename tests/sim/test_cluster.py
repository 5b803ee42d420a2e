"""Stories of a whole household: who joins, breaks, freezes and leaves, and that no answer is any different for it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from contextlib import aclosing

import pytest

from potluck.runtime.client import ASK_S, LAST_WORDS_S, Answer, Client
from potluck.stage.engines.fake import FakeEngine
from potluck.wire.errors import NoBrokerError, UnavailableError
from potluck.wire.messages import (
    Assign,
    BatchDone,
    Delta,
    Finished,
    Heartbeat,
    Message,
    MicroBatch,
    Ready,
    Register,
    Welcome,
)
from potluck.wire.sampling import GREEDY, Sampling
from sim.call import Call
from sim.cluster import BROKER, CODEC, CONFIG, Cost, House, in_house, undisturbed
from sim.weather import Forecast, Rule

PROMPT = (256, 72, 101, 108, 108, 111)
STEP = Cost(batch_s=0.01)


async def ask(
    client: Client, n: int = 12, prompt: Sequence[int] = PROMPT, sampling: Sampling = GREEDY
) -> Answer:
    """One answer, which has to be the undisturbed one."""
    answer = await client.complete(tokens=prompt, max_tokens=n, sampling=sampling, seed=sampling.seed)
    assert list(answer.tokens) == undisturbed(tuple(prompt), n, sampling)
    assert answer.text == CODEC.decode(list(answer.tokens))
    assert answer.finish.usage.completion_tokens == n
    return answer


async def told(house: House, call: Call) -> Call:
    """The call with its whole answer."""
    await call.task
    assert (call.starts, call.ends) == (1, 1)
    return call


# ---- serving


def test_three_stages_answer_zmq_and_http_with_the_same_text() -> None:
    async def story(house: House) -> None:
        await house.serving("a", "b", "c", cost=STEP)
        answer = await ask(house.client())
        body = {"prompt": "Hello", "n_predict": 12, "temperature": 0}
        whole = await told(house, house.call("/completion", body))
        assert (whole.status, whole.json()["content"]) == (200, answer.text)
        stream = await told(house, house.call("/completion", {**body, "stream": True}))
        assert "".join(frame["content"] for frame in stream.frames()) == answer.text

    in_house(story)


def test_a_sampled_answer_depends_on_its_seed_and_not_on_who_shares_the_batches() -> None:
    async def story(house: House) -> None:
        await house.serving("a", "b", cost=STEP)
        client = house.client()
        warm = [Sampling(temperature=1.0, seed=seed) for seed in range(6)]
        answers = await asyncio.gather(*(ask(client, sampling=sampling) for sampling in warm))
        assert len({answer.text for answer in answers}) > 1

    in_house(story)


def test_requests_find_no_chain_before_the_first_stage_has_joined() -> None:
    async def story(house: House) -> None:
        with pytest.raises(UnavailableError, match="0 of at least 1 stages have joined"):
            await ask(house.client())
        refused = await told(house, house.call("/completion", {"prompt": "Hello"}))
        assert refused.status == 503
        await house.serving("a")
        await ask(house.client("other"))

    in_house(story)


# ---- joining and leaving


def test_a_stage_that_joins_late_takes_its_share_while_requests_run() -> None:
    async def story(house: House) -> None:
        await house.serving("a", cost=STEP)
        running = asyncio.create_task(ask(house.client(), 40))
        house.add_stage("b", STEP)
        await house.until(lambda: house.chain == ["a", "b"])
        assert not running.done()
        await running
        await ask(house.client("other"))

    in_house(story)


def test_a_stage_that_leaves_politely_loses_no_token() -> None:
    async def story(house: House) -> None:
        await house.serving("a", "b", "c", cost=STEP)
        running = [asyncio.create_task(ask(house.client(), 40)) for _ in range(3)]
        await house.until(lambda: house.core.state.tokens_out > 30)
        await house.leave("b")
        await asyncio.gather(*running)
        assert house.chain == ["a", "c"]

    in_house(story)


# ---- death


@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_a_stage_killed_between_two_tokens_loses_none(victim: str) -> None:
    async def story(house: House, after: int) -> None:
        await house.serving("a", "b", "c", cost=STEP)
        client = house.client()
        other = asyncio.create_task(ask(client, 20, (256, 1, 2)))
        tokens: list[int] = []
        async with aclosing(client.stream(tokens=PROMPT, max_tokens=20, sampling=GREEDY)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    tokens += event.tokens
                    if len(tokens) == after:
                        await house.kill(victim)
                elif isinstance(event, Finished):
                    assert event.usage.completion_tokens == 20
        assert tokens == undisturbed(PROMPT, 20)
        await other
        assert victim not in house.chain

    for after in (1, 2, 7, 19):
        in_house(lambda house, after=after: story(house, after))


def test_the_last_stage_killed_makes_requests_wait_for_the_next_one() -> None:
    async def story(house: House) -> None:
        await house.serving("a", cost=STEP)
        running = asyncio.create_task(ask(house.client(), 40))
        await house.until(lambda: house.core.state.tokens_out > 10)
        await house.kill("a")
        await asyncio.sleep(10.0)
        assert not running.done()
        house.add_stage("b", STEP)
        await running

    in_house(story)


def test_requests_that_no_stage_takes_in_time_fail_and_say_what_is_missing() -> None:
    async def story(house: House) -> None:
        await house.serving("a", cost=STEP)
        running = asyncio.create_task(ask(house.client(), 40))
        await house.until(lambda: house.core.state.tokens_out > 10)
        await house.kill("a")
        begun_s = house.now
        with pytest.raises(UnavailableError, match="0 of at least 1 stages have joined"):
            await running
        assert house.now - begun_s < CONFIG.wait_limit_s + CONFIG.lost_after_s + 1.0

    in_house(story)


def test_requests_that_wait_behind_others_for_long_outlive_the_death_of_a_stage() -> None:
    async def story(house: House) -> None:
        await house.serving("a", "b", cost=Cost(batch_s=0.1))
        client = house.client()
        running = [asyncio.create_task(ask(client, 30, (256, n))) for n in range(4)]
        await asyncio.sleep(3 * CONFIG.batch_timeout_s)  # the last ones wait for a slot all that time
        assert house.core.state.waiting
        await house.kill("b")
        await asyncio.gather(*running)

    in_house(story, config=dataclasses.replace(CONFIG, slots=1, wait_limit_s=8.0))


def test_a_killed_stage_is_noticed_by_its_closed_connection_without_waiting_for_beats() -> None:
    async def story(house: House) -> None:
        await house.serving("a", "b", "c", cost=STEP)
        running = asyncio.create_task(ask(house.client(), 40))
        await house.until(lambda: house.core.state.tokens_out > 10)
        lost, begun_s = house.stage_id("b"), house.now
        await house.kill("b")
        await house.until(lambda: lost not in house.core.state.stages)
        assert house.now - begun_s <= 2 * link_s
        assert "its connection closed" in str(house.core.core.last_error)
        await running
        assert house.chain == ["a", "c"]

    link_s = 0.002
    config = dataclasses.replace(CONFIG, heartbeat_s=3600.0)
    in_house(story, config=config, weather=Forecast(delay_s=link_s))


@pytest.mark.parametrize("fault", ["frozen", "cut off"])
def test_a_stage_that_is_frozen_or_cut_off_is_noticed_by_its_missing_beats(fault: str) -> None:
    async def story(house: House) -> None:
        await house.serving("a", "b", cost=STEP)
        lost, begun_s = house.stage_id("b"), house.now
        if fault == "frozen":
            house.freeze("b")
        else:
            house.partition("b", BROKER)
        await house.until(lambda: lost not in house.core.state.stages)
        assert house.now - begun_s >= CONFIG.lost_after_s - CONFIG.heartbeat_s
        assert "no sign of life" in str(house.core.core.last_error)
        house.thaw("b")
        house.heal("b", BROKER)
        await house.until(lambda: house.chain == ["a", "b"])

    in_house(story)


# ---- frozen


def test_a_frozen_stage_that_wakes_up_changes_nothing_with_its_old_frames() -> None:
    async def story(house: House) -> None:
        await house.serving("a", "b", "c", cost=STEP)
        client = house.client()
        first = [asyncio.create_task(ask(client, 40, (256, n))) for n in range(6)]
        await house.until(lambda: house.core.state.tokens_out > 30)
        frozen, epoch = house.workers["b"], house.core.state.epoch
        assert frozen.machine.state.epoch == epoch
        house.freeze("b")
        await asyncio.gather(*first)  # by the others, once it is missed
        assert house.core.state.epoch > epoch
        second = [asyncio.create_task(ask(client, 40, (256, n))) for n in range(6)]
        await house.until(lambda: house.core.state.tokens_out > 300)
        assert frozen.machine.state.epoch == epoch
        house.thaw("b")
        await asyncio.gather(*second)
        await house.until(lambda: house.chain == ["a", "b", "c"])
        await ask(client)

    in_house(story)


def test_a_stage_frozen_for_less_than_three_beats_only_pauses_the_streams() -> None:
    async def story(house: House) -> None:
        await house.serving("a", "b", cost=STEP)
        running = asyncio.create_task(ask(house.client(), 40))
        await house.until(lambda: house.core.state.tokens_out > 10)
        epoch = house.core.state.epoch
        house.freeze("a")
        await asyncio.sleep(CONFIG.heartbeat_s)
        house.thaw("a")
        await running
        assert house.core.state.epoch == epoch

    in_house(story)


def test_a_stage_that_beats_but_computes_no_more_is_found_and_avoided() -> None:
    async def story(house: House) -> None:
        await house.serving("a", "b", "c", cost=STEP)
        client = house.client()
        running = [asyncio.create_task(ask(client, 40, (256, n))) for n in range(4)]
        await house.until(lambda: house.core.state.tokens_out > 30)
        for engine in house.workers["b"]._holder.engines:
            assert isinstance(engine, FakeEngine)
            engine.seconds_per_batch = 1e6
        begun_s = house.now
        await asyncio.gather(*running)
        assert house.now - begun_s < CONFIG.batch_timeout_s + 2.0
        assert house.chain == ["a", "c"]
        assert house.stage_id("b") in house.core.state.stages

    in_house(story)


def test_a_stage_whose_engine_hangs_comes_back_by_itself_as_a_fresh_one_and_serves_again() -> None:
    async def story(house: House) -> None:
        await house.serving("a", "b", "c", cost=STEP)
        running = asyncio.create_task(ask(house.client(), 40))
        await house.until(lambda: house.core.state.tokens_out > 10)
        old = house.workers["b"]
        house.pace("b", Cost(batch_s=1e6))
        await running
        await house.until(lambda: house.workers["b"] is not old)
        await house.until(lambda: house.chain == ["a", "b", "c"])
        await ask(house.client("other"))

    in_house(story)


# ---- links


@pytest.mark.parametrize(("one", "other"), [("a", "b"), ("b", "c")])
def test_a_cut_between_two_stages_that_both_beat_is_found_and_avoided(one: str, other: str) -> None:
    async def story(house: House) -> None:
        await house.serving("a", "b", "c", cost=STEP)
        client = house.client()
        running = [asyncio.create_task(ask(client, 40, (256, n))) for n in range(4)]
        await house.until(lambda: house.core.state.tokens_out > 30)
        house.partition(one, other)
        begun_s = house.now
        await asyncio.gather(*running)
        assert house.now - begun_s < CONFIG.batch_timeout_s + 2.0
        assert set(house.chain) < {"a", "b", "c"}
        assert len(house.chain) == 2
        assert len(house.core.state.stages) == 3
        await ask(client)

    in_house(story)


def test_results_that_do_not_reach_the_broker_are_the_last_stages_fault() -> None:
    async def story(house: House) -> None:
        await house.serving("a", "b", cost=STEP)
        running = asyncio.create_task(ask(house.client(), 40))
        await house.until(lambda: house.core.state.tokens_out > 10)
        house.weather.rules.append(Rule((BatchDone,), source="b", lose=True))
        await running
        assert house.chain == ["a"]

    in_house(story)


def test_the_only_stage_is_not_avoided_after_a_micro_batch_was_lost() -> None:
    async def story(house: House) -> None:
        await house.serving("a", cost=STEP)
        running = asyncio.create_task(ask(house.client(), 40))
        await house.until(lambda: house.core.state.tokens_out > 10)
        house.weather.rules.append(Rule((BatchDone,), lose=True, times=1))
        await running
        assert house.chain == ["a"]

    in_house(story)


def test_frames_that_come_twice_change_nothing() -> None:
    async def story(house: House) -> None:
        stages = [Register, Welcome, Assign, Ready, Heartbeat, MicroBatch, BatchDone]
        house.weather.rules.append(Rule(tuple(stages), chance=0.3, also_s=(0.0,)))
        await house.serving("a", "b", "c", cost=STEP)
        client, epoch = house.client(), house.core.state.epoch
        await asyncio.gather(*(ask(client, 20, (256, n)) for n in range(12)))
        assert house.core.state.epoch == epoch

    for seed in range(5):
        in_house(story, weather=Forecast(seed, delay_s=0.002))


def test_frames_that_are_late_hold_streams_up_and_change_nothing() -> None:
    async def story(house: House) -> None:
        house.weather.rules.append(Rule((MicroBatch, BatchDone, Heartbeat), chance=0.1, delay_s=0.4))
        await house.serving("a", "b", "c", cost=STEP)
        client, epoch = house.client(), house.core.state.epoch
        await asyncio.gather(*(ask(client, 20, (256, n)) for n in range(12)))
        assert house.core.state.epoch == epoch

    for seed in range(5):
        in_house(story, weather=Forecast(seed, delay_s=0.002))


def test_micro_batches_that_get_lost_cost_time_and_no_token() -> None:
    async def story(house: House) -> None:
        await house.serving("a", "b", "c", cost=STEP)
        house.weather.rules.append(Rule((MicroBatch,), chance=0.05, lose=True, times=2))
        client = house.client()
        await asyncio.gather(*(ask(client, 20, (256, n)) for n in range(12)))

    for seed in range(5):
        in_house(story, weather=Forecast(seed))


@pytest.mark.parametrize("lost", [Assign, Ready])
def test_an_assignment_that_gets_lost_or_its_answer_is_asked_for_again(lost: type[Message]) -> None:
    async def story(house: House) -> None:
        house.weather.rules.append(Rule((lost,), lose=True, times=1))
        await house.serving("a", "b", "c", cost=STEP)
        assert house.now < CONFIG.load_timeout_s
        await ask(house.client())

    in_house(story)


# ---- clients


def test_a_client_that_leaves_its_stream_frees_its_slot() -> None:
    async def story(house: House) -> None:
        await house.serving("a", "b", cost=STEP)
        client = house.client()
        async with aclosing(client.stream(tokens=PROMPT, max_tokens=50, sampling=GREEDY)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    break
        await house.until(lambda: not house.core.state.requests)
        await ask(client)

    in_house(story)


def test_a_client_that_vanishes_frees_its_slot_at_the_next_token() -> None:
    async def story(house: House) -> None:
        await house.serving("a", "b", cost=STEP)
        client = house.client("phone")
        events = client.stream(tokens=PROMPT, max_tokens=50, sampling=GREEDY)
        while not isinstance(await anext(events), Delta):
            pass
        out = house.core.state.tokens_out
        await house.kill("phone")
        await house.until(lambda: not house.core.state.requests)
        assert house.core.state.tokens_out <= out + 2
        await events.aclose()
        await ask(house.client("other"))

    in_house(story)


def test_a_client_that_vanishes_while_no_token_comes_frees_its_slot_and_its_place_in_the_queue_at_once() -> (
    None
):
    async def story(house: House) -> None:
        await house.serving("a", cost=Cost(batch_s=4.0))
        phone = house.client("phone")
        lost = [asyncio.create_task(ask(phone, 50)) for _ in range(2)]
        await house.until(lambda: len(house.core.state.requests) == 2)
        assert house.core.state.waiting
        begun_s = house.now
        await house.kill("phone")
        await house.until(lambda: not house.core.state.requests)
        assert house.now == begun_s
        for task in lost:
            task.cancel()
        await asyncio.gather(*lost, return_exceptions=True)
        await ask(house.client("other"), 2)

    in_house(story, config=dataclasses.replace(CONFIG, slots=1))


def test_an_http_client_that_hangs_up_frees_its_slot() -> None:
    async def story(house: House) -> None:
        await house.serving("a", "b", cost=STEP)
        body = {"prompt": "Hello", "n_predict": 50, "stream": True}
        await house.call("/completion", body, hang_up_after=3).task
        assert not house.core.state.requests
        assert house.core.state.tokens_out < 10

    in_house(story)


# ---- the broker


def test_stages_find_a_restarted_broker_by_themselves_and_keep_what_they_hold() -> None:
    async def story(house: House) -> None:
        await house.serving("a", "b", "c", cost=Cost(0.01, load_s=5.0))
        await ask(house.client())
        engines = [house.workers[name]._holder.engines for name in "abc"]
        await house.kill(BROKER)
        await asyncio.sleep(3.0)
        house.start_broker()
        begun_s = house.now
        await house.until(lambda: house.chain == ["a", "b", "c"])
        assert house.now - begun_s < CONFIG.heartbeat_s + CONFIG.settle_s + 1.0
        assert [house.workers[name]._holder.engines for name in "abc"] == engines
        await ask(house.client("other"))

    in_house(story)


def test_a_stage_that_slept_through_a_restart_changes_nothing_with_its_old_frames() -> None:
    async def story(house: House, wait: int) -> None:
        await house.serving("a", "b", "c", cost=STEP)
        house.add_stage("d", STEP)
        lost = [house.call("/completion", {"prompt": "lost", "n_predict": 50}) for _ in range(6)]
        await house.until(lambda: house.core.state.tokens_out > 30)
        house.freeze("c")  # with results in its hands
        await asyncio.sleep(0.1)
        await house.kill(BROKER)
        assert all(call.task.done() for call in lost)
        house.start_broker()
        await house.until(lambda: house.chain == ["a", "b", "d"])
        epoch, client = house.core.state.epoch, house.client()
        running = [asyncio.create_task(ask(client, 40, (256, n))) for n in range(6)]
        await house.until(lambda: house.core.state.next_batch >= wait)
        house.thaw("c")
        await asyncio.gather(*running)  # each checks its tokens
        assert house.core.state.epoch >= epoch

    patient = dataclasses.replace(CONFIG, settle_s=1.0)  # all three are back before the new broker plans
    for wait in range(16, 30):
        in_house(lambda house, wait=wait: story(house, wait), config=patient)


# ---- speed, in virtual time


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_the_slowest_of_balanced_stages_is_always_busy_with_two_sequences_per_stage(stages: int) -> None:
    batch_s, tokens = 0.02, 50

    async def story(house: House) -> None:
        names = [f"s{index}" for index in range(stages)]
        await house.serving(*names, cost=Cost(batch_s))
        client = house.client()
        begun_s = house.now
        await asyncio.gather(*(ask(client, tokens, (256, n)) for n in range(2 * stages)))
        computed = house.workers["s0"].machine.state.sums.batches
        assert computed >= 0.95 * (house.now - begun_s) / batch_s
        assert computed < 1.1 * stages * tokens  # and with the sequences shared out, two by two

    in_house(story, config=dataclasses.replace(CONFIG, slots=2 * stages))


def test_an_uneven_chain_goes_at_the_pace_of_its_slowest_stage() -> None:
    async def story(house: House) -> None:
        for name, batch_s in (("a", 0.02), ("b", 0.03), ("c", 0.01)):
            house.add_stage(name, Cost(batch_s))
        await house.until(lambda: house.chain == ["a", "b", "c"])
        client = house.client()
        begun_s = house.now
        await asyncio.gather(*(ask(client, 50, (256, n)) for n in range(6)))
        sums = house.workers["b"].machine.state.sums
        assert sums.compute_s >= 0.9 * (house.now - begun_s)

    in_house(story)


def test_one_sequence_takes_the_stages_costs_and_the_links_delays_per_token() -> None:
    async def story(house: House) -> None:
        costs, links = {"a": 0.020, "b": 0.030, "c": 0.010}, 0.005
        for name, batch_s in costs.items():
            house.add_stage(name, Cost(batch_s))
        await house.until(lambda: house.chain == ["a", "b", "c"])
        tokens = 30
        finish = (await ask(house.client(), tokens)).finish
        per_token_s = (finish.timings.total_s - finish.timings.first_token_s) / (tokens - 1)
        assert per_token_s == pytest.approx(sum(costs.values()) + 4 * links)

    in_house(story, weather=Forecast(delay_s=0.005))


def test_a_zmq_client_whose_broker_dies_is_told_so_and_does_not_wait_for_ever() -> None:
    async def story(house: House) -> None:
        await house.serving("a", "b", cost=Cost(batch_s=1.0))
        client = house.client()
        running = asyncio.ensure_future(client.complete(tokens=PROMPT, max_tokens=500, sampling=GREEDY))
        await house.until(lambda: house.server.view().running == 1)
        await house.kill(BROKER)
        begun = house.now
        with pytest.raises(UnavailableError, match=r"connection to the broker .* broke"):
            await running
        assert house.now - begun <= LAST_WORDS_S
        with pytest.raises(NoBrokerError, match="No broker answers"):
            await client.complete(tokens=PROMPT, max_tokens=500, sampling=GREEDY)
        assert house.now - begun <= LAST_WORDS_S + client.timeout_s + 2 * ASK_S
        house.start_broker()

    in_house(story)


def test_a_zmq_client_whose_broker_was_started_anew_hears_that_its_request_is_lost() -> None:
    async def story(house: House) -> None:
        await house.serving("a", "b", cost=Cost(batch_s=1.0))
        client = house.client()
        running = asyncio.ensure_future(client.complete(tokens=PROMPT, max_tokens=500, sampling=GREEDY))
        await house.until(lambda: house.server.view().running == 1)
        await house.kill(BROKER)
        house.start_broker()
        with pytest.raises(UnavailableError, match="request is lost"):
            await running

    in_house(story)


def test_a_zmq_client_whose_connection_breaks_hears_that_its_request_is_lost_and_may_ask_again() -> None:
    async def story(house: House) -> None:
        await house.serving("a", "b", cost=Cost(batch_s=1.0))
        client = house.client("sofa")
        running = asyncio.ensure_future(client.complete(tokens=PROMPT, max_tokens=500, sampling=GREEDY))
        await house.until(lambda: house.core.state.tokens_out > 2)
        house.network.sever("sofa", BROKER)
        begun_s = house.now
        with pytest.raises(UnavailableError, match=r"connection to the broker .* broke"):
            await running
        assert house.now - begun_s <= LAST_WORDS_S
        assert not house.core.state.requests
        await ask(client, n=2)

    in_house(story)


def test_an_answer_that_has_arrived_whole_is_no_matter_of_the_connection_any_more() -> None:
    async def story(house: House) -> None:
        await house.serving("a", cost=STEP)
        running = asyncio.ensure_future(ask(house.client("sofa"), n=2))
        await house.until(lambda: bool(house.core.state.requests))
        house.freeze("sofa")  # everything arrives, and nobody reads it
        await asyncio.sleep(1.0)
        assert not house.core.state.requests
        house.network.sever("sofa", BROKER)
        house.thaw("sofa")
        await running

    in_house(story)


def test_a_long_silence_of_a_request_is_no_silence_of_the_broker() -> None:
    async def story(house: House) -> None:
        await house.serving("a", "b", cost=Cost(batch_s=25.0))
        client = house.client()
        assert client.timeout_s < 25
        await ask(client, n=2)

    in_house(story, config=dataclasses.replace(CONFIG, batch_timeout_s=600.0))
