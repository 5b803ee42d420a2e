"""A hundred HTTP requests while stages join, leave, freeze and die and clients hang up, by a script Hypothesis draws.

Whatever the script: every invariant of every core holds after every event, every request ends exactly once and with
the undisturbed text (or a beginning of it, where its client left or it failed), whatever fails says why and the script
has a reason for it, and at the end nothing is left in anybody's hands. `--hypothesis-profile=ci` looks for longer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, note, settings

from potluck.broker.effects import RequestFailed, RequestFinished
from potluck.broker.rest_chat import ChatBody
from potluck.broker.rest_llama import LlamaBody
from potluck.broker.rest_text import CompletionBody
from potluck.wire.messages import Submit
from potluck.wire.sampling import Sampling
from sim.call import Call
from sim.cluster import CODEC, CONFIG, Cost, House, in_house, undisturbed
from sim.weather import Forecast

REQUESTS = 100
MOST_TOKENS = 8
LOAD_S = 0.3
HOUSE = dataclasses.replace(CONFIG, wait_limit_s=4.0)
RECOVERY_S = HOUSE.lost_after_s + HOUSE.heartbeat_s + HOUSE.settle_s + LOAD_S + 0.5
"""Once nothing changes any more and a stage lives, a chain serves within this time."""

BODIES = {"/v1/chat/completions": ChatBody, "/v1/completions": CompletionBody, "/completion": LlamaBody}


# ---- the script


@dataclass(frozen=True)
class Ask:
    """One request: `gap_ms` after the one before."""

    gap_ms: int
    path: str
    prompt: str
    tokens: int
    stream: bool
    seed: int | None
    """None: greedy."""
    leaves_after: int | None
    """The client hangs up after this many frames of a stream, or after as many times 10 ms."""

    @property
    def body(self) -> dict[str, Any]:
        chat, llama = "chat" in self.path, self.path == "/completion"
        prompt = {"messages": [{"role": "user", "content": self.prompt}]} if chat else {"prompt": self.prompt}
        chance = {"temperature": 0} if self.seed is None else {"temperature": 1, "seed": self.seed}
        return {
            **prompt,
            **chance,
            "n_predict" if llama else "max_tokens": self.tokens,
            "stream": self.stream,
        }

    @property
    def expected(self) -> str:
        """The undisturbed text."""
        body = msgspec.convert(self.body, BODIES[self.path])
        submit: Submit = body.submits()[0] if isinstance(body, CompletionBody) else body.submit()
        prompt = (
            CODEC.encode_chat(submit.messages)
            if submit.messages
            else CODEC.encode_prompt(submit.prompt or "")
        )
        return CODEC.decode(list(_answer(tuple(prompt), submit.sampling)[: self.tokens]))


@functools.cache
def _answer(prompt: tuple[int, ...], sampling: Sampling) -> tuple[int, ...]:
    return tuple(undisturbed(prompt, MOST_TOKENS, sampling))


@dataclass(frozen=True)
class Move:
    """What happens to a stage, `gap_ms` after the move before; to which one, if there are several."""

    gap_ms: int
    kind: str
    which: int
    cost_ms: int


@dataclass(frozen=True)
class Script:
    """Everything that will be done."""

    weather: int
    delay_ms: int
    first: list[int]
    """Milliseconds per micro-batch of the stages that serve when the first request comes."""
    asks: list[Ask]
    moves: list[Move]

    def __str__(self) -> str:
        at, lines = (
            0,
            [
                f"weather seed {self.weather}, links {self.delay_ms} ms, stages of {self.first} ms per micro-batch"
            ],
        )
        for move in self.moves:
            at += move.gap_ms
            lines.append(f"{at / 1000:7.3f} s  {move.kind} {move.which} ({move.cost_ms} ms)")
        at = 0
        for number, ask in enumerate(self.asks):
            at += ask.gap_ms
            leaves = "" if ask.leaves_after is None else f", hangs up after {ask.leaves_after}"
            how = ("streamed" if ask.stream else "whole") + ("" if ask.seed is None else f", seed {ask.seed}")
            lines.append(
                f"{at / 1000:7.3f} s  #{number} {ask.path} {len(ask.prompt)}+{ask.tokens} {how}{leaves}"
            )
        return "\n".join(lines)


PROMPTS = [letter * length for letter in "ab" for length in (1, 9, 16, 40)]
asks = st.builds(
    Ask,
    gap_ms=st.integers(0, 120),
    path=st.sampled_from(list(BODIES)),
    prompt=st.sampled_from(PROMPTS),
    tokens=st.integers(1, MOST_TOKENS),
    stream=st.booleans(),
    seed=st.sampled_from([None, None, 1, 2]),
    leaves_after=st.sampled_from([None, None, None, None, 1, 2, 5, 12]),
)
moves = st.builds(
    Move,
    gap_ms=st.integers(0, 1200),
    kind=st.sampled_from(["join", "join", "leave", "kill", "freeze", "thaw"]),
    which=st.integers(0, 3),
    cost_ms=st.sampled_from([0, 2, 5, 20]),
)
scripts = st.builds(
    Script,
    weather=st.integers(0, 1 << 16),
    delay_ms=st.sampled_from([0, 0, 1, 8]),
    first=st.lists(st.sampled_from([0, 2, 5, 20]), min_size=1, max_size=3),
    asks=st.lists(asks, min_size=REQUESTS, max_size=REQUESTS),
    moves=st.lists(moves, min_size=2, max_size=10),
)


# ---- the play


class Play:
    """Does what the script says, and remembers when the set of stages changed."""

    def __init__(self, house: House, script: Script) -> None:
        self.house = house
        self.script = script
        self.calls: list[Call] = []
        self.frozen: set[str] = set()
        self.changes: list[tuple[float, bool]] = []
        """When stages came, went, froze or woke, and whether any was awake after that."""
        self.names = iter(f"s{number}" for number in range(100))

    async def run(self) -> None:
        for cost_ms in self.script.first:
            self.join(cost_ms)
        self.changed()
        await self.house.until(lambda: self.house.core.state.ready)
        await asyncio.gather(self.ask(), self.move())
        for name in list(self.frozen):
            self.thaw(name)
        async with asyncio.timeout(60.0):
            await asyncio.gather(*(call.task for call in self.calls))

    async def ask(self) -> None:
        for ask in self.script.asks:
            await asyncio.sleep(ask.gap_ms / 1000)
            leaves = ask.leaves_after
            call = self.house.call(ask.path, ask.body, leaves if ask.stream else None)
            self.calls.append(call)
            if leaves is not None and not ask.stream:
                self.house.loop.call_later(leaves / 100, call.hang_up)

    async def move(self) -> None:
        for move in self.script.moves:
            await asyncio.sleep(move.gap_ms / 1000)
            awake = [name for name in self.house.living if name not in self.frozen]
            match move.kind:
                case "join" if len(self.house.living) < 5:
                    self.join(move.cost_ms)
                case "leave" if awake:
                    self.changed()
                    await self.house.leave(awake[move.which % len(awake)])
                case "kill" if self.house.living:
                    name = self.house.living[move.which % len(self.house.living)]
                    self.frozen.discard(name)
                    await self.house.kill(name)
                case "freeze" if awake:
                    name = awake[move.which % len(awake)]
                    self.frozen.add(name)
                    self.house.freeze(name)
                case "thaw" if self.frozen:
                    self.thaw(sorted(self.frozen)[move.which % len(self.frozen)])
                case _:
                    continue
            self.changed()

    def join(self, cost_ms: int) -> None:
        self.house.add_stage(next(self.names), Cost(cost_ms / 1000, load_s=LOAD_S))

    def thaw(self, name: str) -> None:
        self.frozen.discard(name)
        self.house.thaw(name)
        self.changed()

    def changed(self) -> None:
        self.changes.append((self.house.now, bool(set(self.house.living) - self.frozen)))

    def calm_since(self, at_s: float, until_s: float) -> bool:
        """Whether, in that time, stages were there and unchanged for long enough that a chain must have served."""
        times = [*self.changes, (until_s, False)]
        for (begin_s, alive), (end_s, _) in pairwise(times):
            if alive and min(end_s, until_s) - max(begin_s, at_s) >= RECOVERY_S:
                return True
        return False


def said(call: Call) -> tuple[str, bool, str | None]:
    """The text of an answer, whether it is whole, and the code of its error."""
    if call.status == 200 and call.body.get("stream"):
        frames = call.frames()
        failures = [frame["error"]["code"] for frame in frames if "error" in frame]
        frames = [frame for frame in frames if frame != "[DONE]" and "error" not in frame]
        if call.path == "/completion":
            ends = [frame for frame in frames if frame.get("stop")]
            text = "".join(frame["content"] for frame in frames)
        else:
            choices = [choice for frame in frames for choice in frame["choices"]]
            ends = [choice for choice in choices if choice.get("finish_reason")]
            chat = "chat" in call.path
            text = "".join(c["delta"].get("content") or "" if chat else c["text"] for c in choices)
        assert len(ends) + len(failures) <= 1
        assert call.hung_up or len(ends) + len(failures) == 1
        return text, bool(ends), failures[0] if failures else None
    if call.status == 499:
        return "", False, None
    body = call.json()
    if call.status != 200:
        return "", False, body["error"]["code"]
    if call.path == "/completion":
        return body["content"], True, None
    choice = body["choices"][0]
    return choice["message"]["content"] if "chat" in call.path else choice["text"], True, None


def check(play: Play, ask: Ask, call: Call) -> None:
    """One answer: right, or at least a beginning, and every failure with a reason."""
    assert (call.starts, call.ends) == (1, 1) or call.hung_up, "an answer ends once"
    text, whole, failure = said(call)
    expected = ask.expected
    assert expected.startswith(text), f"{text!r} is no beginning of {expected!r}"
    assert not whole or text == expected, f"{text!r} instead of {expected!r}"
    assert whole or failure or call.hung_up, "it neither ended nor failed, and its client stayed"
    end, end_s = play.house.server.ends[play.house.server.asked_by[call.name]]
    assert not call.hung_up or end_s <= (call.hung_up_s or 0.0), "its client left, and it went on"
    assert not whole or isinstance(end, RequestFinished)
    if failure is None:
        return
    assert isinstance(end, RequestFailed)
    assert failure == end.error.code == "unavailable"
    assert call.ended_s is not None
    if call.ended_s > call.begun_s:  # it was accepted, and no chain took it up again in time
        assert not play.calm_since(call.ended_s - HOUSE.wait_limit_s, call.ended_s), (
            "it could have been served"
        )
    else:
        recent = [at for at in play.house.server.epochs if at > call.begun_s - LOAD_S - 0.1]
        calm = play.calm_since(call.begun_s - RECOVERY_S, call.begun_s)
        assert recent or not calm, "it was refused while a chain must have served"


@pytest.mark.timeout(900)
@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
@given(script=scripts)
def test_a_hundred_requests_keep_every_invariant_while_stages_come_and_go_and_clients_leave(
    script: Script,
) -> None:
    note(str(script))

    async def story(house: House) -> None:
        play = Play(house, script)
        await play.run()
        await house.quiet()
        ends = house.server.ends
        assert len(ends) == REQUESTS, f"{len(ends)} of {REQUESTS} requests ended"
        for number, (ask, call) in enumerate(zip(script.asks, play.calls, strict=True)):
            try:
                check(play, ask, call)
            except AssertionError as error:
                error.add_note(f"request #{number}: {ask}, status {call.status}, begun {call.begun_s:.3f} s")
                raise
        assert len(house.server.epochs) <= 2 * len(play.changes) + 1, "plans come and go without need"
        if not house.living:
            play.join(0)
        await house.until(lambda: house.core.state.ready)
        last = house.call("/completion", {"prompt": "a", "n_predict": 3, "temperature": 0})
        await last.task
        assert said(last) == (Ask(0, "/completion", "a", 3, False, None, None).expected, True, None)

    in_house(story, config=HOUSE, weather=Forecast(script.weather, script.delay_ms / 1000))
