"""Broker and stages that are checked after every event, and an engine whose faults are scripted.

What the checks need to know of the outside (the time, where to put what fails) is a `Watch`; the house is one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from potluck.broker.effects import Effect, Report, RequestFailed, RequestFinished, RequestText
from potluck.broker.events import BrokerEvent, RequestSubmitted
from potluck.broker.server import BrokerServer
from potluck.model.text import TextStream
from potluck.stage.engine import Loaded, LoadSpec, Output, Work
from potluck.stage.engines.fake import FakeEngine, fake_continuation
from potluck.stage.engines.fake_model import VOCAB
from potluck.stage.engines.fake_vocabulary import FakeVocabulary
from potluck.stage.events import BatchComputeFailed, StageEvent
from potluck.stage.worker import StageWorker
from potluck.wire.errors import EngineError, OutOfMemoryError
from potluck.wire.ids import RequestId
from potluck.wire.messages import Assign
from potluck.wire.sampling import GREEDY, Sampling

LAYERS = 12
FOR_EVER_S = 1e6
SCRIPTED = "scripted"
"""The first word of every error that a script asked for."""
_VOCABULARY = FakeVocabulary(VOCAB)


@functools.lru_cache(maxsize=4096)
def continuation(prompt: tuple[int, ...], n: int, sampling: Sampling) -> tuple[int, ...]:
    """The model's next `n` tokens."""
    return tuple(fake_continuation(prompt, n, LAYERS, sampling=sampling))


def undisturbed(
    prompt: Sequence[int], n: int, sampling: Sampling = GREEDY, stops: Sequence[str] = ()
) -> list[int]:
    """The tokens that must come out, whatever happens on the way. The one that completes a stop is the last."""
    tokens = list(continuation(tuple(prompt), n, sampling))
    text = TextStream(stops)
    for count, token in enumerate(tokens, start=1):
        text.push(_VOCABULARY.piece(token))
        if text.stopped is not None:
            return tokens[:count]
    return tokens


class Watch(Protocol):
    """Whoever looks after a broker and its stages."""

    @property
    def now(self) -> float: ...

    @property
    def faultless(self) -> bool:
        """Whether nothing but coming and going has happened, so that nobody has a reason to report an error."""

    def noticing(self) -> AbstractContextManager[None]:
        """Keeps an assertion that fails inside."""

    def stir(self) -> None:
        """Something happened."""


# ---- engines


@dataclass(slots=True)
class Troubles:
    """What goes wrong next with one device's engine."""

    failing_loads: int = 0
    failing_batches: int = 0
    hanging_batches: int = 0
    hang_s: float = 0.0
    stuck: bool = False
    """A micro-batch hangs that will never come out."""


class TroubledEngine(FakeEngine):
    """A fake engine of a device with troubles."""

    def __init__(self, troubles: Troubles, seconds_per_token: float, seconds_per_batch: float) -> None:
        super().__init__(seconds_per_token, seconds_per_batch)
        self._troubles = troubles

    def load(self, spec: LoadSpec) -> Loaded:
        if self._troubles.failing_loads > 0:
            self._troubles.failing_loads -= 1
            raise OutOfMemoryError(f"{SCRIPTED}: no memory for layers {spec.first} to {spec.end}")
        return super().load(spec)

    def cost_s(self, work: Work) -> float:
        hang_s = 0.0
        if self._troubles.hanging_batches > 0:
            self._troubles.hanging_batches -= 1
            hang_s = self._troubles.hang_s
            self._troubles.stuck = self._troubles.stuck or hang_s >= FOR_EVER_S
        return super().cost_s(work) + hang_s

    def forward(self, work: Work) -> Output:
        if self._troubles.failing_batches > 0:
            self._troubles.failing_batches -= 1
            raise EngineError(f"{SCRIPTED}: the engine fails")
        return super().forward(work)


# ---- stages


class WatchedStage(StageWorker):
    """A stage whose core is checked after every event."""

    watch: Watch
    load_s = 0.0
    lossless = False
    """No frame between stages is lost or late for ever: then the engine has no reason of its own to fail."""

    @property
    def running(self) -> bool:
        """Whether `run` has begun."""
        return self._machine is not None

    @property
    def goes(self) -> bool:
        """Whether it was asked to leave."""
        return self.running and (self.machine.leaving.due_s is not None or self.machine.state.stopped)

    def feed(self, event: StageEvent) -> None:
        epoch = self.machine.state.epoch
        super().feed(event)
        with self.watch.noticing():
            self.machine.validate()
            assert self.machine.state.epoch >= epoch, f"{self.stage_id}: an epoch went back"
            if isinstance(event, BatchComputeFailed) and self.lossless:
                assert SCRIPTED in event.error.what, f"{self.stage_id}: {event.error}"
        self.watch.stir()

    def _load(self, number: int, assign: Assign) -> None:
        self._loop.call_later(self.load_s, super()._load, number, assign)


# ---- the broker


class WatchedBroker(BrokerServer):
    """A broker whose core is checked after every event, and whose answers are checked token by token."""

    watch: Watch

    def __init__(self, *args: Any, **more: Any) -> None:
        self.submitted: dict[RequestId, RequestSubmitted] = {}
        self.expected: dict[RequestId, list[int]] = {}
        """The undisturbed tokens of each request."""
        self.said: dict[RequestId, list[int]] = {}
        """The tokens that have come out of it so far."""
        self.ends: dict[RequestId, tuple[RequestFinished | RequestFailed, float]] = {}
        """How and when each request ended."""
        self.asked_by: dict[str, RequestId] = {}
        """The request of an HTTP call, by the call's name."""
        self.epochs: list[float] = []
        """When each plan was made."""
        super().__init__(*args, **more)

    def feed(self, event: BrokerEvent) -> None:
        epoch = self.machine.state.epoch
        if isinstance(event, RequestSubmitted):
            self.asked_by[event.cause.rpartition(" ")[2]] = event.request
            self._expect(event)
        with self.watch.noticing():
            super().feed(event)
            self._validate()
            assert self.machine.state.epoch >= epoch, "an epoch went back"
        if self.machine.state.epoch > epoch:
            self.epochs.append(self.watch.now)
        self.watch.stir()

    def _validate(self) -> None:
        self.machine.validate()
        chains = self.machine.state.chains.values()
        owners = [stage for chain in chains for stage in chain.stages]
        assert len(owners) == len(set(owners)), f"two chains own one stage: {owners}"
        slots = [owner for chain in chains for owner in chain.slots if owner is not None]
        assert len(slots) == len(set(slots)), f"one request has two slots: {slots}"
        assert set(self._links) == {chain.chain for chain in chains if chain.open}, (
            "a link of a closed chain is left"
        )

    def _expect(self, event: RequestSubmitted) -> None:
        room = self.machine.config.context_tokens - len(event.tokens)
        if room < 1 or event.request in self.machine.state.requests:
            return  # it will be refused
        count = room if event.max_tokens is None else min(event.max_tokens, room)
        self.submitted[event.request] = event
        self.expected[event.request] = undisturbed(event.tokens, count, event.sampling, event.stops)
        self.said[event.request] = []
        self.ends.pop(event.request, None)  # a name may be used again

    def _perform(self, effect: Effect) -> None:
        with self.watch.noticing():
            match effect:
                case RequestText(request, _, tokens):
                    assert request not in self.ends, f"{request} speaks after its end"
                    said, expected = self.said[request], self.expected[request]
                    said.extend(tokens)
                    assert said == expected[: len(said)], f"{request} says {said} instead of {expected}"
                case RequestFinished(request):
                    assert request not in self.ends, f"{request} ended twice"
                    said, expected = self.said[request], self.expected[request]
                    assert said == expected, f"{request} finished with {said} instead of {expected}"
                    self.ends[request] = (effect, self.watch.now)
                case RequestFailed(request):
                    assert request not in self.ends, f"{request} ended twice"
                    self.ends[request] = (effect, self.watch.now)
                case Report("error", text):
                    assert not self.watch.faultless, text
                case _:
                    pass
        super()._perform(effect)
