"""A household whose devices change their speed in service: when the plan follows, and when it stays."""

from __future__ import annotations

from dataclasses import replace

from potluck.planner.measured import MeasuredPlanner
from potluck.wire.sampling import GREEDY
from sim.cluster import CONFIG, Cost, House, in_house, undisturbed

DRIFT = replace(
    CONFIG,
    measure=True,
    hop_s=0.0,
    users=1,
    drift_window_s=2.0,
    drift_hold_s=20.0,
    repay_s=600.0,
)
FAST, NEARLY, SLOW = Cost(token_layer_s=0.001), Cost(token_layer_s=0.0013), Cost(token_layer_s=0.003)
PLANNER = MeasuredPlanner(DRIFT.demand)


async def ask(house: House, index: int, tokens: int = 30) -> None:
    """One request, answered in full and as if nothing had happened."""
    prompt = (index % 200, 7, 9)
    answer = await house.client(f"guest-{index}").complete(
        tokens=list(prompt), max_tokens=tokens, ignore_eos=True, sampling=GREEDY
    )
    assert list(answer.tokens) == undisturbed(prompt, tokens)


def test_the_faster_device_serves_one_user_alone():
    async def story(house: House) -> None:
        house.add_stage("a", FAST)
        house.add_stage("b", NEARLY)
        await house.until(lambda: house.chain == ["a"])
        await ask(house, 1)

    in_house(story, config=DRIFT, planner=PLANNER)


def test_a_device_that_stays_slow_loses_its_layers_between_two_requests():
    async def story(house: House) -> None:
        house.add_stage("a", FAST)
        house.add_stage("b", NEARLY)
        await house.until(lambda: house.chain == ["a"])
        await ask(house, 0)
        house.pace("a", SLOW)
        for index in range(1, 60):
            await ask(house, index)
            if house.chain != ["a"]:
                break
        await house.until(lambda: house.chain == ["b"])
        await ask(house, 99)
        moves = len(house.server.epochs)
        for index in range(100, 130):
            await ask(house, index)
        assert len(house.server.epochs) == moves

    in_house(story, config=DRIFT, planner=PLANNER)


def test_a_device_that_flaps_does_not_make_the_plan_flap():
    async def story(house: House) -> None:
        house.add_stage("a", FAST)
        house.add_stage("b", NEARLY)
        await house.until(lambda: house.chain == ["a"])
        for index in range(60):
            house.pace("a", SLOW if index % 5 == 0 else FAST)
            await ask(house, index)
        assert house.chain == ["a"]
        assert len(house.server.epochs) == 1

    in_house(story, config=DRIFT, planner=PLANNER)


def test_devices_that_change_places_again_and_again_move_the_plan_ever_more_rarely():
    async def story(house: House) -> None:
        fast, slow = Cost(token_layer_s=0.008), Cost(token_layer_s=0.024)
        house.add_stage("a", fast)
        house.add_stage("b", fast)
        await house.until(lambda: house.chain == ["a"])
        for index in range(200):
            a_is_slow = (index // 5) % 2 == 0
            house.pace("a", slow if a_is_slow else fast)
            house.pace("b", fast if a_is_slow else slow)
            await ask(house, index)
        assert house.now > 500
        assert 1 < len(house.server.epochs) <= 8

    in_house(story, config=DRIFT, planner=PLANNER, within_s=5000.0)


def test_a_gain_that_loading_eats_up_is_left_aside():
    config = replace(DRIFT, repay_s=1.0)

    async def story(house: House) -> None:
        house.add_stage("a", FAST)
        house.add_stage("b", NEARLY)
        await house.until(lambda: house.chain == ["a"])
        house.pace("a", SLOW)
        for index in range(40):
            await ask(house, index)
        assert house.chain == ["a"]

    in_house(story, config=config, planner=PLANNER)
