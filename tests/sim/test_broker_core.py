"""The broker's core under every order of events that Hypothesis thinks of, checked after each one."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.sim.core_world import END, MODEL, SHAPE, VOCAB, CoreWorld, LetterVocabulary, continuation

from potluck.broker.config import BrokerConfig
from potluck.broker.effects import RequestFailed, RequestFinished
from potluck.broker.events import (
    BatchBroke,
    BatchReturned,
    DrainAsked,
    DrainEnded,
    RequestCancelled,
    RequestSubmitted,
    StageBroke,
    StageLeaves,
    StageLeft,
    StageRegistered,
)
from potluck.broker.machine import BrokerMachine
from potluck.broker.state import StageStatus
from potluck.planner.manual import ManualPlanner
from potluck.wire.errors import (
    ContextExceededError,
    EngineError,
    InvalidValueError,
    OutOfMemoryError,
    QueueFullError,
    StageError,
    UnavailableError,
)
from potluck.wire.ids import BatchId, ChainId, DeviceName, Epoch, RequestId, StageId
from potluck.wire.sampling import Sampling

MAX = BrokerConfig().lost_after_s


def ask(
    world: CoreWorld, name: str, prompt: tuple[int, ...] = (1, 2, 3), limit: int | None = 4, **more: object
) -> RequestId:
    request = RequestId(name)
    world.feed(RequestSubmitted(cause="test", request=request, tokens=prompt, max_tokens=limit, **more))  # type: ignore[arg-type]
    return request


def ends_well(world: CoreWorld, request: RequestId) -> RequestFinished:
    end = world.ends[request]
    assert isinstance(end, RequestFinished)
    return end


def test_a_prompt_is_answered_by_three_stages_with_the_undisturbed_tokens() -> None:
    world = CoreWorld()
    world.start("a", "b", "c")
    request = ask(world, "r", limit=5)
    world.settle()
    assert tuple(world.tokens[request]) == continuation((1, 2, 3), 5)
    end = ends_well(world, request)
    assert end.reason == "length"
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (3, 5)


def test_three_stages_have_three_micro_batches_in_flight_when_six_sequences_decode() -> None:
    world = CoreWorld(BrokerConfig(slots=8, context_tokens=64, chunk_tokens=8))
    world.start("a", "b", "c")
    for index in range(6):
        ask(world, f"r{index}", limit=40)
    most = 0
    for _ in range(60):
        world.move_one()
        flights = world.core.state.chains[ChainId(0)].in_flight.values()
        most = max(most, sum(not flight.prefill for flight in flights))
        assert sum(not flight.prefill for flight in flights) <= 3
    assert most == 3
    sizes = [flight.tokens for flight in world.core.state.chains[ChainId(0)].in_flight.values()]
    assert sizes == [2, 2, 2]


def test_the_chunks_of_one_prompt_fill_the_chain() -> None:
    world = CoreWorld(BrokerConfig(slots=2, context_tokens=128, chunk_tokens=8))
    world.start("a", "b", "c")
    ask(world, "r", prompt=tuple(range(100)), limit=1)
    assert [flight.tokens for flight in world.core.state.chains[ChainId(0)].in_flight.values()] == [8] * 4


def test_a_prompt_comes_in_between_the_tokens_of_running_streams() -> None:
    world = CoreWorld(BrokerConfig(slots=4, context_tokens=256, chunk_tokens=8))
    world.start("a", "b")
    ask(world, "short", limit=100)
    ask(world, "other", limit=100)
    for _ in range(8):
        world.move_one()
    ask(world, "long", prompt=tuple(range(200)), limit=1)
    before = len(world.tokens[RequestId("short")])
    while RequestId("long") not in world.ends:
        world.move_one()
    gained = len(world.tokens[RequestId("short")]) - before
    assert gained >= 200 // 8 - 2


def test_a_request_that_arrives_late_joins_without_waiting_for_the_others_to_end() -> None:
    world = CoreWorld()
    world.start("a", "b")
    first = ask(world, "first", limit=50)
    for _ in range(5):
        world.move_one()
    second = ask(world, "second", limit=2)
    while second not in world.ends:
        assert world.move_one()
    assert first not in world.ends


def test_cancelled_request_frees_its_slot_and_the_next_one_gets_clean_tokens() -> None:
    world = CoreWorld(BrokerConfig(slots=1, context_tokens=64, chunk_tokens=8))
    world.start("a", "b")
    gone = ask(world, "gone", prompt=tuple(range(20)), limit=30)
    next_one = ask(world, "next", prompt=(7, 8), limit=3)
    world.move_one()
    world.feed(RequestCancelled(cause="client", request=gone))
    world.settle()
    assert tuple(world.tokens[next_one]) == continuation((7, 8), 3)
    end = world.ends[gone]
    assert isinstance(end, RequestFailed)
    assert end.error.code == "cancelled"


def test_end_token_stops_the_text_and_is_not_part_of_it() -> None:
    world = CoreWorld()
    world.start("a")
    request = ask(world, "r", limit=10)
    sent = world.chains[ChainId(0)].coming.popleft()
    world.chains[ChainId(0)].compute(sent)
    world.feed(BatchReturned(cause="x", epoch=sent.epoch, batch=BatchId(sent.message.batch), tokens=(END,)))
    assert ends_well(world, request).reason == "stop"
    assert world.text[request] == ""


def test_stop_string_across_two_tokens_ends_the_text_before_it() -> None:
    world = CoreWorld()
    world.start("a", "b")
    answer = bytes(continuation((1, 2, 3), 8)).decode()
    stop = answer[2:4]
    request = ask(world, "r", limit=8, stops=(stop,))
    world.settle()
    end = ends_well(world, request)
    assert (end.reason, end.stop) == ("stop", stop)
    assert world.text[request] == answer[: answer.index(stop)]


def test_lost_stage_moves_its_requests_to_the_others_and_no_token_is_lost_or_doubled() -> None:
    world = CoreWorld()
    _, b, _ = world.start("a", "b", "c")
    requests = [ask(world, f"r{i}", prompt=(i, i), limit=12) for i in range(4)]
    for _ in range(7):
        world.move_one()
    world.alive.discard(b)
    epoch = world.core.state.epoch
    world.wait(MAX + 2)
    world.settle()
    assert world.core.state.epoch == epoch + 1
    for i, request in enumerate(requests):
        assert tuple(world.tokens[request]) == continuation((i, i), 12)
        ends_well(world, request)


def test_frames_of_an_older_epoch_change_nothing() -> None:
    world = CoreWorld()
    a, b = world.start("a", "b")
    request = ask(world, "r", limit=3)
    old = world.chains[ChainId(0)].coming[0]
    world.feed(StageLeft(cause="b", stage=b, reason="gone"))
    world.settle()
    before = list(world.tokens[request])
    world.feed(BatchReturned(cause="zombie", epoch=old.epoch, batch=BatchId(old.message.batch), tokens=(5,)))
    assert world.tokens[request] == before
    world.feed(
        BatchBroke(
            cause="zombie", epoch=old.epoch, batch=BatchId(old.message.batch), error=EngineError(stage=a)
        )
    )
    assert world.core.state.ready


def test_stage_without_the_model_is_refused_with_the_reason_and_the_remedy() -> None:
    world = CoreWorld()
    stage = world.join("a", models=("other",))
    assert world.refused == [stage]
    assert stage not in world.core.state.stages


def test_unknown_stage_that_beats_is_told_to_register_again() -> None:
    world = CoreWorld()
    world.alive.add(StageId("ghost/1"))
    world.wait(1.5)
    assert StageId("ghost/1") in world.refused


def test_broker_waits_for_as_many_stages_as_it_was_told() -> None:
    world = CoreWorld(BrokerConfig(min_stages=3, settle_s=0.5))
    world.join("a")
    world.join("b")
    world.wait(5)
    assert not world.assigned
    world.join("c")
    world.wait(1)
    assert len(world.assigned) == 3


def test_stage_that_joins_late_is_taken_up_between_requests_only() -> None:
    world = CoreWorld()
    world.start("a")
    request = ask(world, "r", limit=3)
    late = world.join("b")
    world.wait(2)
    assert late not in world.assigned
    world.settle()
    assert request in world.ends
    world.wait(2)
    assert late in world.assigned


def test_stage_that_can_not_load_is_left_out_and_the_rest_serves() -> None:
    world = CoreWorld()
    world.join("a")
    b = world.join("b")
    world.wait(1)
    error = OutOfMemoryError("2 GB are needed, 1 GB is free.", device="b", stage=b)
    world.feed(StageBroke(cause="b", stage=b, epoch=world.core.state.epoch, error=error))
    world.wait(1)
    world.settle()
    assert world.core.state.ready
    assert set(world.core.state.chains[ChainId(0)].stages) == {StageId("a/1")}


def test_request_whose_batches_break_again_and_again_fails_and_the_others_go_on() -> None:
    world = CoreWorld(BrokerConfig(slots=2, context_tokens=64, chunk_tokens=8, settle_s=0.0))
    world.start("a", "b")
    bad = ask(world, "bad", prompt=(9,), limit=3)
    error = EngineError("It broke.", device="a")
    for _ in range(3):
        while not world.core.state.ready:
            world.wait(0.1)
            world.load_one()
        flight = next(iter(world.core.state.chains[ChainId(0)].in_flight.values()))
        world.feed(BatchBroke(cause="a", epoch=world.core.state.epoch, batch=flight.batch, error=error))
    end = world.ends[bad]
    assert isinstance(end, RequestFailed)
    assert end.error is error
    world.wait(1)
    world.settle()
    good = ask(world, "good", limit=2)
    world.settle()
    ends_well(world, good)


def test_chain_that_a_micro_batch_broke_is_planned_anew_at_once() -> None:
    world = CoreWorld(BrokerConfig(settle_s=60.0))
    world.join("a")
    world.join("b")
    world.wait(61)
    world.settle()
    ask(world, "r", limit=3)
    flight = next(iter(world.core.state.chains[ChainId(0)].in_flight.values()))
    epoch = world.core.state.epoch
    world.feed(BatchBroke(cause="a", epoch=epoch, batch=flight.batch, error=EngineError("It broke.")))
    assert world.core.state.epoch == epoch + 1


def test_micro_batch_that_never_comes_back_breaks_the_chain_and_its_requests_go_on_in_a_new_epoch() -> None:
    world = CoreWorld(BrokerConfig(batch_timeout_s=5.0, settle_s=0.0))
    world.start("a", "b")
    request = ask(world, "r", limit=3)
    epoch = world.core.state.epoch
    world.wait(6)
    world.settle()
    assert world.core.state.epoch == epoch + 1
    assert tuple(world.tokens[request]) == continuation((1, 2, 3), 3)


def test_how_long_a_micro_batch_may_take_follows_the_pace_of_its_chain() -> None:
    world = CoreWorld(BrokerConfig(slots=2, context_tokens=200, chunk_tokens=50, settle_s=0.0, patience=10.0))
    world.start("a", "b")
    epoch = world.core.state.epoch
    slow = ask(world, "slow", prompt=tuple(range(50)), limit=3)
    world.wait(500)  # an old laptop reads its weights from the disk
    world.move_one()
    ask(world, "second", prompt=tuple(range(50)), limit=1)
    world.wait(600)  # 10 s per token so far: 50 tokens may take 5,000 s, one token 100 s
    assert world.core.state.epoch == epoch + 1
    world.settle()
    assert tuple(world.tokens[slow]) == continuation(tuple(range(50)), 3)


def test_a_fast_chain_that_stops_is_found_in_seconds() -> None:
    world = CoreWorld(BrokerConfig(slots=2, context_tokens=64, settle_s=0.0))
    world.start("a", "b")
    request = ask(world, "r", limit=20)
    for _ in range(3):
        world.wait(0.1)
        world.move_one()
    epoch = world.core.state.epoch
    world.wait(world.config.least_batch_timeout_s + 1)
    assert world.core.state.epoch == epoch + 1
    world.settle()
    assert tuple(world.tokens[request]) == continuation((1, 2, 3), 20)


def test_a_chain_that_was_slow_for_a_while_and_stops_much_later_is_found_in_seconds_too() -> None:
    world = CoreWorld(BrokerConfig(slots=2, context_tokens=1024, settle_s=0.0))
    world.start("a", "b")
    request = ask(world, "r", limit=600)
    for step in range(300):
        world.wait(4.0 if 3 <= step < 9 else 0.01)
        world.move_one()
    epoch = world.core.state.epoch
    world.wait(world.config.least_batch_timeout_s + 1)
    assert world.core.state.epoch == epoch + 1
    world.settle()
    assert tuple(world.tokens[request]) == continuation((1, 2, 3), 600)


def test_requests_wait_for_new_stages_up_to_the_limit_and_then_fail_naming_what_is_missing() -> None:
    world = CoreWorld(BrokerConfig(wait_limit_s=10.0))
    (a,) = world.start("a")
    request = ask(world, "r", limit=3)
    world.feed(StageLeft(cause="a", stage=a, reason="power cut"))
    world.alive.clear()
    world.wait(9)
    assert request not in world.ends
    world.wait(2)
    end = world.ends[request]
    assert isinstance(end, RequestFailed)
    assert isinstance(end.error, UnavailableError)
    assert "power cut" in str(end.error)


def test_submissions_that_can_not_be_served_say_why() -> None:
    world = CoreWorld(BrokerConfig(slots=1, context_tokens=16, queue_limit=1))
    early = ask(world, "early")
    world.start("a")
    ask(world, "running")
    ask(world, "waiting")
    cases = {
        "long": ({"prompt": tuple(range(16))}, ContextExceededError),
        "empty": ({"prompt": ()}, InvalidValueError),
        "alien": ({"prompt": (VOCAB,)}, InvalidValueError),
        "bias": ({"sampling": Sampling(logit_bias=((VOCAB, 1.0),))}, InvalidValueError),
        "full": ({}, QueueFullError),
    }
    for name, (settings_, kind) in cases.items():
        request = ask(world, name, **settings_)  # type: ignore[arg-type]
        end = world.ends[request]
        assert isinstance(end, RequestFailed)
        assert isinstance(end.error, kind)
    end = world.ends[early]
    assert isinstance(end, RequestFailed)
    assert isinstance(end.error, UnavailableError)
    facts = world.ends[RequestId("long")].error.facts  # type: ignore[union-attr]
    assert (facts["n_prompt_tokens"], facts["n_ctx"]) == (16, 16)


@pytest.mark.parametrize("tokens", [(), (1, 2), (VOCAB,), (-1,)])
def test_results_that_do_not_fit_the_micro_batch_break_the_chain_and_not_the_request(
    tokens: tuple[int, ...],
) -> None:
    world = CoreWorld(BrokerConfig(settle_s=0.0))
    world.start("a")
    request = ask(world, "r", limit=2)
    flight = next(iter(world.core.state.chains[ChainId(0)].in_flight.values()))
    world.feed(BatchReturned(cause="liar", epoch=world.core.state.epoch, batch=flight.batch, tokens=tokens))
    world.wait(1)
    world.settle()
    assert tuple(world.tokens[request]) == continuation((1, 2, 3), 2)


def test_one_request_that_breaks_its_batches_does_not_cost_a_stage() -> None:
    world = CoreWorld(BrokerConfig(settle_s=0.0))
    _, b = world.start("a", "b")
    poison = ask(world, "poison")
    for _ in range(3):
        while not world.core.state.ready:
            world.wait(0.1)
            world.load_one()
        flight = next(iter(world.core.state.chains[ChainId(0)].in_flight.values()))
        error = EngineError("The logits overflow.", stage=b)
        world.feed(BatchBroke(cause="b", epoch=world.core.state.epoch, batch=flight.batch, error=error))
    assert isinstance(world.ends[poison], RequestFailed)
    world.wait(1)
    world.settle()
    assert {stage.status for stage in world.core.state.stages.values()} == {StageStatus.READY}


def test_a_request_that_goes_on_between_breaks_is_to_blame_for_none_of_them() -> None:
    world = CoreWorld()
    _, b = world.start("a", "b")
    request = ask(world, "long", limit=12)
    for tokens in range(1, 7):
        while len(world.tokens[request]) < tokens:
            if not world.load_one():
                assert any(world.move_one(chain) for chain in world.chains)
        (chain,) = world.core.state.chains.values()
        error = EngineError("A hiccup.", stage=b)
        world.feed(BatchBroke(cause="b", epoch=chain.epoch, batch=next(iter(chain.in_flight)), error=error))
    world.settle()
    ends_well(world, request)
    assert tuple(world.tokens[request]) == continuation((1, 2, 3), 12)


def test_stage_on_which_everybody_s_batches_break_is_left_out() -> None:
    world = CoreWorld(BrokerConfig(settle_s=0.0, slots=1))
    _, b = world.start("a", "b")
    ask(world, "first")
    ask(world, "second", prompt=(9,))
    for _ in range(4):  # three times the first request, which fails then, and once the second
        while not world.core.state.ready:
            world.wait(0.1)
            world.load_one()
        flight = next(iter(world.core.state.chains[ChainId(0)].in_flight.values()))
        blamed = EngineError("Its memory is damaged.", stage=b)
        world.feed(BatchBroke(cause="b", epoch=world.core.state.epoch, batch=flight.batch, error=blamed))
    assert world.core.state.stages[b].status is StageStatus.FAILED
    world.wait(1)
    world.settle()
    ends_well(world, RequestId("second"))


def test_a_name_used_again_does_not_get_the_tokens_of_the_request_that_was_cancelled() -> None:
    world = CoreWorld()
    world.start("a", "b")
    request = ask(world, "r", (1, 2, 3))
    world.feed(RequestCancelled(cause="test", request=request))
    world.ends.clear()
    ask(world, "r", (7, 8, 9))
    world.settle()
    assert tuple(world.tokens[request]) == continuation((7, 8, 9), 4)


def assigned() -> CoreWorld:
    """A world whose layers are assigned by hand to a and b."""
    world = CoreWorld()
    planner = ManualPlanner({"a": (0, 5), "b": (6, 11)})
    world.core = BrokerMachine(
        world.config, MODEL, SHAPE, LetterVocabulary(), planner, lambda stage: "tcp://x:1", "t"
    )
    return world


def test_a_plan_is_made_once_what_was_in_its_way_is_gone() -> None:
    world = assigned()
    old = world.join("a")
    world.wait(1.0)
    world.alive.discard(old)  # killed, and started again under the same name
    new = StageId("a/2")
    world.alive.add(new)
    world.feed(
        StageRegistered(
            cause=new, stage=new, device=DeviceName("a"), endpoint="tcp://a:1", models=(MODEL.fingerprint,)
        )
    )
    world.join("b")
    world.wait(30.0)
    world.settle()
    assert world.core.state.ready


def test_missing_says_which_device_the_assignment_waits_for() -> None:
    world = assigned()
    world.join("a")
    world.wait(2.0)
    assert "waits for b" in world.core.missing


def test_a_slow_chain_that_moves_is_not_taken_for_a_stuck_one() -> None:
    world = CoreWorld(BrokerConfig(slots=4, context_tokens=256, chunk_tokens=8))
    world.start("a", "b", "c")
    request = ask(world, "r", tuple(range(1, 101)), 2)
    world.wait(3 * 120.0)  # two minutes per chunk and stage
    world.move_one()
    for _ in range(20):
        world.wait(120.0)
        world.move_one()
    ends_well(world, request)


def test_story_tells_what_happened_to_a_request_and_by_whom() -> None:
    world = CoreWorld()
    a, _ = world.start("a", "b")
    request = ask(world, "r", limit=2)
    world.feed(StageLeft(cause=a, stage=a, reason="unplugged"))
    world.settle()
    told = " | ".join(str(line) for line in world.core.story.of(request))
    for part in ("accepted with 3 prompt tokens", "slot 0", "off chain 0", "finished after 2 tokens"):
        assert part in told


class BrokerCoreMachine(RuleBasedStateMachine):
    """Stages come, go, hang and lie; requests come and go; time passes. Answers stay right."""

    requests: Bundle[RequestId] = Bundle("requests")

    @initialize(slots=st.integers(1, 4), chunk=st.integers(1, 9), stages=st.integers(1, 3))
    def begin(self, slots: int, chunk: int, stages: int) -> None:
        self.world = CoreWorld(
            BrokerConfig(
                slots=slots, context_tokens=40, chunk_tokens=chunk, settle_s=0.5, queue_limit=6,
                batch_timeout_s=20.0, wait_limit_s=30.0, load_timeout_s=25.0,
            )
        )  # fmt: skip
        self.prompts: dict[RequestId, tuple[int, ...]] = {}
        self.limits: dict[RequestId, int] = {}
        self.cancelled: set[RequestId] = set()
        self.count = 0
        self.world.start(*"abc"[:stages])

    @rule(
        target=requests,
        prompt=st.lists(st.integers(0, 255), min_size=0, max_size=42),
        limit=st.integers(1, 20),
    )
    def submit(self, prompt: list[int], limit: int) -> object:
        self.count += 1
        request = RequestId(f"r{self.count}")
        self.prompts[request], self.limits[request] = tuple(prompt), limit
        ask(self.world, request, tuple(prompt), limit)
        return request

    @rule(request=requests)
    def cancel(self, request: RequestId) -> None:
        if request not in self.world.ends:
            self.cancelled.add(request)
        self.world.feed(RequestCancelled(cause="client", request=request))

    @rule(times=st.integers(1, 6))
    def move(self, times: int) -> None:
        for _ in range(times):
            self.world.move_one()

    @rule()
    def load(self) -> None:
        self.world.load_one()

    @rule()
    def prepare(self) -> None:
        self.world.prepare_one()

    @precondition(lambda self: self.world.prepares and self.world.chains and self.world.last_batch)
    @rule(data=st.data(), slot=st.integers(0, 3))
    def copy(self, data: st.DataObject, slot: int) -> None:
        keeper = data.draw(st.sampled_from(sorted(self.world.prepares)))
        chain = data.draw(st.sampled_from(sorted(self.world.chains)))
        if keeper in self.world.alive and self.world.chains[chain].coming:
            self.world.copy(keeper, slot, chain)

    @rule(name=st.sampled_from("abcde"))
    def forget(self, name: str) -> None:
        """From now on it keeps nothing when it is told to."""
        self.world.forgets.add(StageId(f"{name}/1"))

    @rule(name=st.sampled_from("abcde"))
    def drain(self, name: str) -> None:
        self.world.feed(DrainAsked(cause="test", device=DeviceName(name)))

    @rule(name=st.sampled_from("abcde"))
    def undrain(self, name: str) -> None:
        self.world.feed(DrainEnded(cause="test", device=DeviceName(name)))

    @precondition(lambda self: self.world.alive)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        stage = data.draw(st.sampled_from(sorted(self.world.alive)))
        self.world.feed(StageLeaves(cause=stage, stage=stage, reason="SIGTERM"))

    @rule(seconds=st.floats(0.01, 8.0))
    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule(name=st.sampled_from("abcde"))
    def join(self, name: str) -> None:
        if StageId(f"{name}/1") not in self.world.alive:
            self.world.join(name)

    @precondition(lambda self: self.world.alive)
    @rule(data=st.data(), politely=st.booleans())
    def lose(self, data: st.DataObject, politely: bool) -> None:
        stage = data.draw(st.sampled_from(sorted(self.world.alive)))
        self.world.alive.discard(stage)
        if politely:
            self.world.feed(StageLeft(cause=stage, stage=stage, reason="bye"))

    @precondition(lambda self: self.world.alive)
    @rule(data=st.data())
    def register_again(self, data: st.DataObject) -> None:
        stage = data.draw(st.sampled_from(sorted(self.world.alive)))
        self.world.feed(
            StageRegistered(
                cause=stage,
                stage=stage,
                device=DeviceName(stage[0]),
                endpoint="tcp://x:1",
                models=(MODEL.fingerprint,),
            )
        )

    @rule(
        batch=st.integers(0, 60), epoch=st.integers(0, 9), tokens=st.lists(st.integers(-1, 400), max_size=5)
    )
    def lie(self, batch: int, epoch: int, tokens: list[int]) -> None:
        """A result that nobody should believe: of a batch that is not in flight, or of another epoch."""
        chains = self.world.core.state.chains.values()
        if not any(chain.epoch == epoch and batch in chain.in_flight for chain in chains):
            self.world.feed(
                BatchReturned(cause="liar", epoch=Epoch(epoch), batch=BatchId(batch), tokens=tuple(tokens))
            )

    @precondition(lambda self: any(chain.in_flight for chain in self.world.core.state.chains.values()))
    @rule(blame=st.sampled_from(["a/1", "b/1", "", "z/9"]))
    def break_one(self, blame: str) -> None:
        chain = next(chain for chain in self.world.core.state.chains.values() if chain.in_flight)
        batch = next(iter(chain.in_flight))
        self.world.feed(
            BatchBroke(
                cause="engine", epoch=chain.epoch, batch=batch, error=StageError("It broke.", stage=blame)
            )
        )

    @invariant()
    def every_answer_is_a_prefix_of_the_undisturbed_one(self) -> None:
        for request, tokens in getattr(self, "world", None).tokens.items() if hasattr(self, "world") else ():
            assert tuple(tokens) == continuation(self.prompts[request], len(tokens))
            assert len(tokens) <= self.limits[request]

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for name in "abcde":
            world.feed(DrainEnded(cause="test", device=DeviceName(name)))
        for name in "abc":
            if StageId(f"{name}/1") not in world.alive:
                world.join(name)
        for _ in range(200):
            world.wait(1.0)
            world.settle()
            if not world.core.state.requests:
                break
        assert set(world.ends) == set(self.prompts), "a request did not end"
        for request, end in world.ends.items():
            if isinstance(end, RequestFinished):
                assert len(world.tokens[request]) == min(
                    self.limits[request], 40 - len(self.prompts[request])
                )
        assert all(owner is None for chain in world.core.state.chains.values() for owner in chain.slots)


BrokerCoreMachine.TestCase.settings = settings(stateful_step_count=80, deadline=None, print_blob=True)
TestBrokerCore = BrokerCoreMachine.TestCase
