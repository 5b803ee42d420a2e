"""What can be done to a household, one small step after another: the words of a schedule, and how one is drawn.

A step says whom it means by a number that is taken modulo whoever is there, so every step makes sense after every
other: any of them can be left out, and what remains is still a schedule. That is what makes a failing one short. A
schedule prints as Python, to be pasted into a test.

Which kinds of steps a schedule has, and how often, is drawn first, anew for each one: a fault that many kinds hide
from each other is found by a schedule that has only a few of them (swarm testing; Groce et al., ISSTA 2012).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import hypothesis.strategies as st

# ---- time and requests


@dataclass(frozen=True, slots=True)
class Wait:
    """Time passes."""

    ms: int


@dataclass(frozen=True, slots=True)
class Submit:
    """A client asks; `seed` 0 is greedy; `stop` 0 is none, otherwise the text stops after about that many tokens."""

    client: int
    letter: int
    length: int
    tokens: int
    seed: int = 0
    stop: int = 0


@dataclass(frozen=True, slots=True)
class SubmitJob:
    """A client hands a job in, which is to survive everything, also the broker and the client."""

    client: int
    letter: int
    length: int
    tokens: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ForgetJob:
    """Nobody wants one of the jobs any more."""

    which: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """A client no longer wants one of its answers."""

    which: int


@dataclass(frozen=True, slots=True)
class ClientGoes:
    """A client's machine is switched off."""

    client: int


# ---- stages


@dataclass(frozen=True, slots=True)
class Join:
    """A device starts its stage: one that was there before, if `again`."""

    batch_ms: int
    load_ms: int
    again: bool = False


# Those that take a stage away spare the last one, unless `which` is EVEN_THE_LAST.


@dataclass(frozen=True, slots=True)
class Kill:
    which: int


@dataclass(frozen=True, slots=True)
class Leave:
    which: int


@dataclass(frozen=True, slots=True)
class LeaveInOrder:
    """A stage asks to leave, and goes when it is no longer needed."""

    which: int


@dataclass(frozen=True, slots=True)
class Drain:
    """A device is to have no work; or, if `back`, may have work again."""

    which: int
    back: bool = False


@dataclass(frozen=True, slots=True)
class Freeze:
    which: int


@dataclass(frozen=True, slots=True)
class Thaw:
    which: int


@dataclass(frozen=True, slots=True)
class BrokerSleeps:
    """The broker's process stands still for this long."""

    ms: int


@dataclass(frozen=True, slots=True)
class BrokerDies:
    """The broker is killed, and a new one is there after this long."""

    ms: int


# ---- engines


@dataclass(frozen=True, slots=True)
class EngineFails:
    """The next micro-batches of a stage fail."""

    which: int
    batches: int


@dataclass(frozen=True, slots=True)
class EngineHangs:
    """The next micro-batch of a stage takes this much longer; 0: for ever."""

    which: int
    ms: int


@dataclass(frozen=True, slots=True)
class LoadsFail:
    """The next loads of a stage fail."""

    which: int
    loads: int


@dataclass(frozen=True, slots=True)
class LoadsTake:
    """From now on a stage loads as long as this."""

    which: int
    ms: int


# ---- links, from one party to another: 0 is the broker, then come the stages, then the clients. A client's connection
# loses nothing but by breaking, as TCP does not.


@dataclass(frozen=True, slots=True)
class Slow:
    """From now on frames take this long."""

    source: int
    target: int
    ms: int


@dataclass(frozen=True, slots=True)
class Late:
    """The next frames are this late; what follows them waits behind them."""

    source: int
    target: int
    frames: int
    ms: int


@dataclass(frozen=True, slots=True)
class Lose:
    """The next frames are lost."""

    source: int
    target: int
    frames: int


@dataclass(frozen=True, slots=True)
class Double:
    """The next frames come twice, the second time this much later."""

    source: int
    target: int
    frames: int
    ms: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Nothing passes between the two."""

    one: int
    other: int


@dataclass(frozen=True, slots=True)
class Break:
    """The connection between the broker and a stage (0 to 5) or a client (6 to 8) breaks, and is made anew."""

    party: int


@dataclass(frozen=True, slots=True)
class Heal:
    """One of the cuts is mended."""

    which: int


# ---- plans


@dataclass(frozen=True, slots=True)
class ChainsOf:
    """From now on the planner makes chains of this many stages; 0: one of all of them."""

    stages: int


# ---- calm


@dataclass(frozen=True, slots=True)
class Calm:
    """Every fault ends and enough devices are there: everything must come to its end in time, and nothing be left."""


Step: TypeAlias = (
    Wait | Submit | SubmitJob | ForgetJob | Cancel | ClientGoes
    | Join | Kill | Leave | LeaveInOrder | Drain | Freeze | Thaw | BrokerSleeps | BrokerDies
    | EngineFails | EngineHangs | LoadsFail | LoadsTake
    | Slow | Late | Lose | Double | Cut | Break | Heal
    | ChainsOf | Calm
)  # fmt: skip
Schedule: TypeAlias = Sequence[Step]

EVEN_THE_LAST = 5
BEGINNING: Schedule = (Join(5, 0), Join(5, 100), Wait(800))
"""So that not every schedule has to draw a household first."""

Draw: TypeAlias = Callable[[int, int], int]
"""A number from the first to the second, both included; smaller ones are simpler."""


def _of(draw: Draw, *choices: int) -> int:
    return choices[draw(0, len(choices) - 1)]


MAKERS: dict[type, tuple[int, Callable[[Draw], Step]]] = {
    Wait: (16, lambda d: Wait(_of(d, 0, 1, 5, 20, 50, 100, 200, 400, 800, 1600, 3000))),
    Submit: (
        16,
        lambda d: Submit(
            d(0, 2), d(0, 3), _of(d, 1, 3, 9, 17, 40), d(1, 20), _of(d, 0, 0, 1, 2), _of(d, 0, 0, 0, 2, 5)
        ),
    ),
    SubmitJob: (
        2,
        lambda d: SubmitJob(d(0, 2), d(0, 3), _of(d, 1, 3, 9, 17, 40), d(1, 20), _of(d, 0, 0, 1, 2)),
    ),
    ForgetJob: (1, lambda d: ForgetJob(d(0, 9))),
    Cancel: (1, lambda d: Cancel(d(0, 9))),
    ClientGoes: (1, lambda d: ClientGoes(d(0, 2))),
    Join: (6, lambda d: Join(_of(d, 2, 5, 20), _of(d, 0, 100, 1000, 4000), d(0, 1) == 1)),
    Kill: (1, lambda d: Kill(d(0, 5))),
    Leave: (1, lambda d: Leave(d(0, 5))),
    LeaveInOrder: (1, lambda d: LeaveInOrder(d(0, 5))),
    Drain: (1, lambda d: Drain(d(0, 5), d(0, 2) == 1)),
    Freeze: (1, lambda d: Freeze(d(0, 5))),
    Thaw: (2, lambda d: Thaw(d(0, 5))),
    BrokerSleeps: (1, lambda d: BrokerSleeps(_of(d, 50, 400, 1000, 1600, 4000))),
    BrokerDies: (1, lambda d: BrokerDies(_of(d, 50, 400, 1000, 6000))),
    EngineFails: (1, lambda d: EngineFails(d(0, 5), _of(d, 1, 1, 2, 5))),
    EngineHangs: (1, lambda d: EngineHangs(d(0, 5), _of(d, 500, 3000, 7000, 0))),
    LoadsFail: (1, lambda d: LoadsFail(d(0, 5), _of(d, 1, 2))),
    LoadsTake: (1, lambda d: LoadsTake(d(0, 5), _of(d, 0, 300, 3000, 9000, 15000))),
    Slow: (1, lambda d: Slow(d(0, 8), d(0, 8), _of(d, 0, 1, 5, 30, 150))),
    Late: (1, lambda d: Late(d(0, 8), d(0, 8), _of(d, 1, 2, 5), _of(d, 5, 50, 400, 2000))),
    Lose: (1, lambda d: Lose(d(0, 5), d(0, 5), _of(d, 1, 1, 2, 5))),
    Double: (1, lambda d: Double(d(0, 5), d(0, 5), _of(d, 1, 2, 5), _of(d, 0, 5, 50, 400))),
    Cut: (1, lambda d: Cut(d(0, 5), d(0, 5))),
    Break: (1, lambda d: Break(d(0, 8))),
    Heal: (3, lambda d: Heal(d(0, 5))),
    ChainsOf: (1, lambda d: ChainsOf(d(0, 3))),
    Calm: (1, lambda d: Calm()),
}
"""How often a kind comes where it comes, and how it is made. The simplest one first: failing examples shrink to it."""
ALWAYS = (Wait, Submit, Join)


def draw_kinds(draw: Draw) -> list[type]:
    """The kinds of one schedule, each as often as it is to come."""
    kinds: list[type] = []
    for kind, (weight, _) in MAKERS.items():
        times = 1 if kind in ALWAYS else _of(draw, 0, 0, 1, 1, 4)
        kinds += [kind] * (weight * times)
    return kinds


def draw_step(draw: Draw, kinds: list[type]) -> Step:
    """One step of these kinds."""
    return MAKERS[kinds[draw(0, len(kinds) - 1)]][1](draw)


def seeded(seed: int, steps: int) -> list[Step]:
    """The schedule of a seed."""
    dice = random.Random(seed)
    kinds = draw_kinds(dice.randint)
    return [*BEGINNING, *(draw_step(dice.randint, kinds) for _ in range(steps - len(BEGINNING)))]


@st.composite
def schedules(draw: st.DrawFn, steps: int) -> list[Step]:
    """Up to this many steps, as Hypothesis likes."""

    def number(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    kinds = draw_kinds(number)
    drawn = [draw_step(number, kinds) for _ in range(steps - len(BEGINNING))]
    return [*BEGINNING, *(step for step in drawn if step != Wait(0))]


def shown(schedule: Schedule) -> str:
    """A schedule as Python, a step a line."""
    return "[\n" + "".join(f"    {step!r},\n" for step in schedule) + "]"


def shrunk(schedule: Schedule, fails: Callable[[Schedule], bool], tries: int = 300) -> list[Step]:
    """A shorter schedule that still fails, with at most so many tries: runs of steps are left out, long ones first."""
    kept = list(schedule)
    size = max(1, len(kept) // 2)
    while tries > 0:
        at, left_out = 0, False
        while at < len(kept) and tries > 0:
            tries -= 1
            rest = kept[:at] + kept[at + size :]
            if fails(rest):
                kept, left_out = rest, True
            else:
                at += size
        if size == 1 and not left_out:
            break
        size = max(1, size // 2)
    return kept
