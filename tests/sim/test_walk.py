"""Households that anything may happen to: see `steps` for what can, and `walk` for what must hold nevertheless.

Two searches over the same schedules. Hypothesis makes short ones and shrinks what fails. Long ones come from seeds,
with everything that only time brings (many epochs, names used again, faults upon faults), and are shrunk by leaving
steps out. Both print a schedule that can be pasted into a test.

    make sim-long                            100,000 steps from seeds, and Hypothesis for longer
    SIM_SEED=17 SIM_STEPS=300 pytest ...     the walk of one seed again
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from potluck.stage.engines.fake import fake_continuation
from potluck.stage.engines.fake_model import VOCAB
from sim.steps import Step, schedules, seeded, shown, shrunk
from sim.walk import LAYERS, fails, play

SHORT, LONG = 60, 300
STEPS = int(os.environ.get("SIM_STEPS", "6000"))
"""How many steps the seeded walks have together."""
ONE_SEED = os.environ.get("SIM_SEED")


@pytest.mark.timeout(3600)
@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
@given(schedule=schedules(SHORT))
def test_whatever_happens_every_answer_is_right_and_ends_once_and_nothing_is_left(
    schedule: list[Step],
) -> None:
    note(shown(schedule))
    play(schedule)


@pytest.mark.timeout(3600)
def test_long_walks_of_a_household_keep_every_invariant(request: pytest.FixtureRequest) -> None:
    if ONE_SEED is not None:
        walk(int(ONE_SEED), STEPS)
        return
    first = int(request.config.getoption("hypothesis_seed"))
    for seed in range(first, first + max(1, STEPS // LONG)):
        walk(seed, LONG)


def walk(seed: int, steps: int) -> None:
    """One seed's schedule; if it fails, a short one that does."""
    schedule = seeded(seed, steps)
    try:
        play(schedule)
    except Exception as error:
        error.add_note(f"Again: SIM_SEED={seed} SIM_STEPS={steps}")
        short = shrunk(schedule, fails)
        play(short)  # raises with its own, short story
        error.add_note(shown(schedule))
        raise


# ---- what the oracle can see


@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=12),
    at=st.integers(0, 11),
    token=st.integers(0, VOCAB - 1),
    what=st.sampled_from(["lost", "doubled", "swapped", "another"]),
)
def test_any_token_that_is_lost_doubled_misplaced_or_wrong_changes_what_follows(
    prompt: list[int], at: int, token: int, what: str
) -> None:
    at %= len(prompt)
    other = list(prompt)
    match what:
        case "lost":
            del other[at]
        case "doubled":
            other.insert(at, other[at])
        case "swapped":
            other[at], other[at - 1] = other[at - 1], other[at]
        case _:
            other[at] = token
    if other != prompt:
        assert fake_continuation(other, 4, LAYERS) != fake_continuation(prompt, 4, LAYERS)


def test_the_schedule_of_a_seed_is_the_same_each_time_and_so_is_what_happens() -> None:
    schedule = seeded(5, LONG)
    assert schedule == seeded(5, LONG)
    assert play(schedule).house.log == play(schedule).house.log
