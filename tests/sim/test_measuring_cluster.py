"""A household that measures before it plans, with real probes over its sockets, on virtual time."""

from __future__ import annotations

from dataclasses import replace

from potluck.planner.even import plan_even
from potluck.wire.messages import Assign, Measure, Measured, Ping, PlanQuery, Pong, Probed
from sim.cluster import CONFIG, Cost, House, in_house
from sim.weather import Forecast, Rule

MEASURED = replace(CONFIG, measure=True, hop_s=0.0, measure_timeout_s=5.0, probe_timeout_s=8.0)
COST = Cost(batch_s=0.001, token_layer_s=0.0005)


def test_stages_and_links_are_measured_and_the_figures_are_the_networks_own():
    async def story(house: House) -> None:
        house.weather.slow("a", "b", 0.004)
        await house.serving("a", "b", cost=COST)
        links = {
            (sender.partition("/")[0], receiver.partition("/")[0]): link
            for (sender, receiver), link in house.core.state.links.items()
        }
        assert set(links) == {("a", "b"), ("b", "a"), ("a", ""), ("b", "")}
        # 4 ms from a to b and 1 ms back, whoever asks
        assert all(abs(link.rtt_s - 0.005) < 1e-6 for ends, link in links.items() if link and "" not in ends)
        assert all(abs(link.rtt_s - 0.002) < 1e-6 for ends, link in links.items() if link and "" in ends)
        profiles = [stage.profile for stage in house.core.state.stages.values()]
        assert all(profile is not None and profile.cpu is not None for profile in profiles)

    in_house(story, config=MEASURED, weather=Forecast(delay_s=0.001))


def test_what_is_predicted_for_a_fake_model_is_what_comes_out():
    async def story(house: House) -> None:
        await house.serving("a", "b", cost=COST)
        client = house.client()
        answer = await client.complete(tokens=[5, 6, 7], max_tokens=20)
        hops = [stage.hops for stage in house.core.state.stages.values()]
        assert all(hop.expected_s > 0 for hop in hops)
        assert all(abs(hop.expected_compute_s / hop.expected_s - 1) < 1e-6 for hop in hops)
        plan = await client.plan(PlanQuery(users=(1,)))
        predicted_s = plan.at[0].token_s
        timings = answer.finish.timings
        seen_s = (timings.total_s - timings.first_token_s) / (len(answer.tokens) - 1)
        assert abs(seen_s / predicted_s - 1) < 0.05

    in_house(story, config=MEASURED, weather=Forecast(delay_s=0.001))


def test_a_profile_that_was_lost_on_the_way_is_asked_for_again():
    async def story(house: House) -> None:
        house.weather.rules += [
            Rule((Measured,), times=1, lose=True),
            Rule((Measure,), target="b", times=1, lose=True),
        ]
        await house.serving("a", "b", cost=COST)

    in_house(story, config=MEASURED)


def test_a_link_that_is_cut_is_found_by_the_probe_and_the_plan_knows():
    async def story(house: House) -> None:
        house.partition("a", "b")
        house.add_stage("a", COST)
        house.add_stage("b", COST)
        await house.until(lambda: len(house.core.state.links) == 4)
        cut = {
            (sender.partition("/")[0], receiver.partition("/")[0])
            for (sender, receiver), link in house.core.state.links.items()
            if link is None
        }
        assert cut == {("a", "b"), ("b", "a")}

    in_house(story, config=MEASURED)


def test_lost_pings_pongs_and_answers_hold_up_nothing_for_ever():
    async def story(house: House) -> None:
        house.weather.rules += [
            Rule((Ping, Pong), chance=0.05, lose=True),
            Rule((Probed, Assign), chance=0.3, lose=True),
        ]
        for name in ("a", "b", "c"):
            house.add_stage(name, COST)
        await house.until(lambda: house.core.state.ready)
        assert len(house.core.state.links) == 9

    in_house(story, config=MEASURED, weather=Forecast(seed=3, delay_s=0.001))


def test_a_stage_that_leaves_while_it_is_probed_holds_up_nobody():
    async def story(house: House) -> None:
        house.weather.slow("a", "b", 0.3)
        house.add_stage("a", COST)
        house.add_stage("b", COST)
        await house.until(lambda: bool(house.core.state.probes))
        await house.kill("b")
        await house.until(lambda: house.chain == ["a"])

    in_house(story, config=MEASURED)


def test_a_restarted_broker_is_told_what_was_measured_before():
    async def story(house: House) -> None:
        await house.serving("a", "b", cost=COST)
        await house.kill("broker")
        house.start_broker()
        await house.until(lambda: house.chain == ["a", "b"])
        assert all(stage.profile for stage in house.core.state.stages.values())

    in_house(story, config=MEASURED, planner=plan_even)
