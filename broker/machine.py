"""The broker's core: events in, effects out. Knows no socket, clock or thread. Pure.

It decides who is a member, when to plan, which epoch is valid, what enters the chains, and how every request ends. How
layers are divided is left to the planner, which micro-batches are made to `scheduler`, what a token becomes to
`requests`, who is alive to `liveness`, what a break means for requests to `recovery`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from potluck.broker import liveness, recovery, requests, scheduler
from potluck.broker.config import BrokerConfig
from potluck.broker.effects import (
    CloseChain,
    Effect,
    ForgetStage,
    OpenChain,
    Report,
    RequestAccepted,
    RequestFailed,
    SendBatch,
    SendToStage,
)
from potluck.broker.events import (
    BatchBroke,
    BatchReturned,
    BrokerEvent,
    RequestCancelled,
    RequestSubmitted,
    StageBeat,
    StageBroke,
    StageLeft,
    StageLoaded,
    StageProgressed,
    StageRegistered,
    TimePassed,
)
from potluck.broker.state import BrokerState, Chain, Stage, StageStatus
from potluck.model.vocabulary import Vocabulary
from potluck.planner.plan import Candidate, ModelShape, Planner
from potluck.wire.errors import (
    CancelledError,
    Phase,
    PlanError,
    PotluckError,
    RequestError,
    StageError,
    StageLostError,
    UnavailableError,
)
from potluck.wire.ids import ChainId, Epoch, RequestId, StageId
from potluck.wire.messages import (
    Assign,
    ErrorInfo,
    Hop,
    HopSums,
    ModelRef,
    Refused,
    Release,
    StageCounters,
    Welcome,
)
from potluck.wire.story import Story

MAX_BREAKS = 3
"""A stage on which this many micro-batches in a row broke is left out until it joins anew."""


class BrokerMachine:
    """One broker's core. `handle` for every event, then `next_deadline` for the time of the next TimePassed."""

    def __init__(
        self,
        config: BrokerConfig,
        model: ModelRef,
        shape: ModelShape,
        vocabulary: Vocabulary,
        planner: Planner,
        results_endpoint: Callable[[StageId], str],
        version: str,
    ) -> None:
        self.config = config
        self.model = model
        self.shape = shape
        self.vocabulary = vocabulary
        self.planner = planner
        self.results_endpoint = results_endpoint
        self.version = version
        self.state = BrokerState()
        self.story = Story()
        self._plan_due_s: float | None = None
        self._check_due_s: float | None = None
        self._planned_once = False
        self._last_error: PotluckError | None = None
        self._now = 0.0

    # ---- the interface

    def handle(self, event: BrokerEvent, now: float) -> list[Effect]:
        """What is to be done because of `event`, in order. `now` never goes back."""
        self._now = now
        effects: list[Effect] = []
        match event:
            case StageRegistered():
                effects += self._register(event)
            case StageBeat():
                effects += self._beat(event)
            case StageProgressed():
                effects += self._progress(event)
            case StageLoaded():
                effects += self._loaded(event)
            case StageBroke():
                effects += self._stage_broke(event)
            case StageLeft():
                effects += self._remove(event.stage, event.cause, event.reason)
            case RequestSubmitted():
                effects += self._submit(event)
            case RequestCancelled():
                effects += self._cancel(event)
            case BatchReturned():
                effects += self._returned(event)
            case BatchBroke():
                effects += self._batch_broke(event)
            case TimePassed():
                effects += self._time_passed(event)
        if self._plan_due_s is not None and now >= self._plan_due_s:
            effects += self._plan(event.cause)
        batches: list[Effect] = list(self._schedule())
        # The chain waits for its next micro-batch, so that goes out before anything that people read.
        return batches + effects if isinstance(event, BatchReturned) else effects + batches

    def next_deadline(self) -> float | None:
        """When `handle(TimePassed())` is due, on the clock of `now`; None while nothing is waited for."""
        times = [self._plan_due_s, self._check_due_s]
        for chain in self.state.chains.values():
            if chain.in_flight:
                oldest = next(iter(chain.in_flight.values()))
                times.append(oldest.sent_s + self.config.batch_timeout_s)
            elif not chain.open:
                times.append(self._load_deadline(chain))
        if not self.state.ready and self.state.waiting:
            first = min(self.state.requests[name].waiting_since_s for name in self.state.waiting)
            times.append(first + self.config.wait_limit_s)
        return min((time for time in times if time is not None), default=None)

    def validate(self) -> None:
        """Raises AssertionError if the state contradicts itself."""
        self.state.validate()

    @property
    def missing(self) -> str:
        """Why no chain serves, in words, for a person who waits."""
        stages = self.state.stages.values()
        loading = [stage for stage in stages if stage.status is StageStatus.LOADING]
        usable = [stage for stage in stages if stage.status is not StageStatus.FAILED]
        if loading:
            return "Loading: " + ", ".join(f"{s.device} ({s.detail or 'starting'})" for s in loading) + "."
        if len(usable) < self._wanted:
            failed = f" Last error: {self._last_error}" if self._last_error else ""
            return f"{len(usable)} of at least {self._wanted} stages have joined.{failed}"
        return "The stages have joined, planning is due."

    # ---- members

    def _register(self, event: StageRegistered) -> Iterator[Effect]:
        if event.stage in self.state.stages:
            yield from self._remove(event.stage, event.cause, "registered again", forget=False)
        if self.model.fingerprint not in event.models:
            error = PotluckError(
                f"{event.device} has no copy of {self.model.name} (fingerprint {self.model.fingerprint[:12]}).",
                hint="Copy the model file to that device and name it with potluck-stage --model PATH.",
                device=event.device,
                phase=Phase.JOIN,
            )
            self._tell(event.stage, event.cause, "refused: no copy of the model")
            yield SendToStage(event.stage, Refused(ErrorInfo.of(error)), self.state.epoch)
            yield Report("warning", str(error))
            return
        self.state.stages[event.stage] = Stage(
            event.stage, event.device, event.endpoint, event.capabilities, last_heard_s=self._now
        )
        self._tell(event.stage, event.cause, f"joined from {event.endpoint}")
        welcome = Welcome(self.version, self.config.heartbeat_s, self.config.misses)
        yield SendToStage(event.stage, welcome, self.state.epoch)
        yield Report("info", f"{event.device} joined ({event.endpoint}).")
        self._watch()
        self._ask_for_plan(self.config.settle_s)

    def _beat(self, event: StageBeat) -> Iterator[Effect]:
        stage = self.state.stages.get(event.stage)
        if stage is None:
            error = StageError(
                "This broker does not know the stage.", hint="It has to register again.", phase=Phase.JOIN
            )
            yield SendToStage(event.stage, Refused(ErrorInfo.of(error)), self.state.epoch)
            return
        stage.last_heard_s = self._now
        if event.counters is not None and event.epoch == self.state.epoch:
            stage.counters = event.counters

    def _progress(self, event: StageProgressed) -> Iterator[Effect]:
        yield from self._beat(StageBeat(cause=event.cause, stage=event.stage, epoch=event.epoch))
        stage = self.state.stages.get(event.stage)
        if stage is not None and event.epoch == self.state.epoch:
            stage.last_progress_s, stage.detail = self._now, event.detail

    def _loaded(self, event: StageLoaded) -> Iterator[Effect]:
        yield from self._beat(StageBeat(cause=event.cause, stage=event.stage, epoch=event.epoch))
        stage = self.state.stages.get(event.stage)
        if stage is None or event.epoch != self.state.epoch or stage.chain is None:
            return
        chain = self.state.chains[stage.chain]
        stage.status, stage.weights_bytes, stage.detail = StageStatus.READY, event.weights_bytes, ""
        chain.ready.add(stage.stage)
        self._tell(event.stage, event.cause, f"ready after {event.load_s:.1f} s")
        yield Report("info", f"{stage.device} is ready ({event.load_s:.1f} s).")
        if chain.ready == set(chain.stages):
            chain.open = True
            yield OpenChain(chain.chain, chain.epoch, self.state.stages[chain.stages[0]].endpoint)
            yield Report("info", f"Chain {chain.chain} serves, epoch {chain.epoch}.")
            if self._spares():
                self._ask_for_plan(self.config.settle_s)

    def _stage_broke(self, event: StageBroke) -> Iterator[Effect]:
        stage = self.state.stages.get(event.stage)
        if stage is None or event.epoch != self.state.epoch:
            return
        stage.last_heard_s = self._now
        stage.status, stage.error, stage.detail = StageStatus.FAILED, event.error, event.error.what
        self._last_error = event.error
        self._tell(event.stage, event.cause, f"failed: {event.error}")
        yield Report("error", str(event.error))
        yield from self._break_chain_of(stage, event.cause, f"{stage.device} failed")

    def _remove(self, name: StageId, cause: str, reason: str, *, forget: bool = True) -> Iterator[Effect]:
        stage = self.state.stages.get(name)
        if stage is None:
            return
        self._tell(name, cause, f"gone: {reason}")
        yield from self._break_chain_of(stage, cause, f"{stage.device} is gone ({reason})")
        del self.state.stages[name]
        if forget:
            yield ForgetStage(name)
        self._last_error = StageLostError(
            f"{stage.device} is gone: {reason}.", device=stage.device, stage=name, phase=Phase.SERVE
        )
        yield Report("warning", f"{stage.device} is gone: {reason}.")

    # ---- plans

    @property
    def _wanted(self) -> int:
        """Stages needed before planning: as many as asked for at first, afterwards whatever is left."""
        return 1 if self._planned_once else max(1, self.config.min_stages)

    def _usable(self) -> list[Stage]:
        return [stage for stage in self.state.stages.values() if stage.status is not StageStatus.FAILED]

    def _spares(self) -> bool:
        return any(stage.status is StageStatus.SPARE for stage in self.state.stages.values())

    def _ask_for_plan(self, after_s: float) -> None:
        """A plan is due after `after_s`, counted anew from the last stage that joined."""
        self._plan_due_s = self._now + after_s

    def _plan(self, cause: str) -> Iterator[Effect]:
        self._plan_due_s = None
        usable = self._usable()
        if len(usable) < self._wanted:
            return
        whole = bool(self.state.chains)
        if whole and (not self._spares() or self.state.requests or not self.state.ready):
            return  # a chain that serves is changed only between requests; one that loads is left to finish
        try:
            plan = self.planner(
                self.shape, [Candidate(s.stage, s.device, s.capabilities.memory_bytes) for s in usable]
            )
        except PlanError as error:
            self._last_error = error
            yield Report("error", str(error))
            return
        wanted = {place.stage for chain in plan.chains for place in chain.stages}
        if whole and wanted == {name for chain in self.state.chains.values() for name in chain.stages}:
            return
        for chain in list(self.state.chains.values()):
            yield from self._close(chain, cause, "a better plan")
        self._planned_once = True
        self.state.epoch = Epoch(self.state.epoch + 1)
        epoch = self.state.epoch
        for reason in plan.reasons:
            yield Report("info", f"Epoch {epoch}: {reason}")
        for index, chain_plan in enumerate(plan.chains):
            chain = Chain(ChainId(index), epoch, chain_plan, [None] * self.config.slots)
            self.state.chains[chain.chain] = chain
            yield from self._assign(chain)
        for stage in usable:
            if stage.stage not in wanted:
                stage.status, stage.chain, stage.place = StageStatus.SPARE, None, None
                yield SendToStage(stage.stage, Release(), epoch)
        self._tell(f"epoch {epoch}", cause, " ".join(plan.reasons))

    def _assign(self, chain: Chain) -> Iterator[Effect]:
        places = chain.plan.stages
        for index, place in enumerate(places):
            stage = self.state.stages[place.stage]
            stage.status, stage.chain, stage.place = StageStatus.LOADING, chain.chain, place
            stage.last_progress_s, stage.detail = self._now, ""
            stage.hops, stage.counters = HopSums(), StageCounters()
            last = index == len(places) - 1
            message = Assign(
                chain=chain.chain,
                index=index,
                stages=len(places),
                model=self.model,
                first=place.first,
                end=place.end,
                next_endpoint=(
                    self.results_endpoint(place.stage)
                    if last
                    else self.state.stages[places[index + 1].stage].endpoint
                ),
                results_endpoint=self.results_endpoint(place.stage),
                slots=self.config.slots,
                context_tokens=self.config.context_tokens,
                batch_tokens=max(self.config.chunk_tokens, self.config.slots),
                activation=self.config.activation,
                exact=self.config.exact,
            )
            yield SendToStage(place.stage, message, chain.epoch)
            yield Report(
                "info", f"{place.device}: layers {place.first}-{place.end - 1} of {self.shape.layers}."
            )

    # ---- breaks

    def _close(self, chain: Chain, cause: str, why: str) -> Iterator[Effect]:
        """Ends a chain: its requests wait again, its stages are spares, its slots and frames are void."""
        for name in recovery.requeue(self.state, chain, self._now):
            self._tell(name, cause, f"off chain {chain.chain}: {why}")
        if chain.open:
            yield CloseChain(chain.chain)
        for member in chain.stages:
            stage = self.state.stages[member]
            stage.chain = stage.place = None
            if stage.status is not StageStatus.FAILED:
                stage.status = StageStatus.SPARE
        del self.state.chains[chain.chain]

    def _break_chain_of(self, stage: Stage, cause: str, why: str) -> Iterator[Effect]:
        if stage.chain is not None:
            chain = self.state.chains[stage.chain]
            yield Report("warning", f"Chain {chain.chain} of epoch {chain.epoch} is broken: {why}.")
            yield from self._close(chain, cause, why)
            self._ask_for_plan(0.0)

    def _batch_broke(self, event: BatchBroke) -> Iterator[Effect]:
        chain = self._chain_of(event.epoch, event.batch)
        if chain is None:
            return
        flight = chain.in_flight[event.batch]
        blamed = StageId(event.error.stage or "")
        self._tell(f"batch {event.batch}", event.cause, f"broke: {event.error}")
        yield Report("error", str(event.error))
        self._last_error = event.error
        stage = self.state.stages.get(blamed)
        if stage is not None:
            stage.breaks += 1
            if stage.breaks >= MAX_BREAKS:
                stage.status, stage.error, stage.detail = StageStatus.FAILED, event.error, event.error.what
        hit = {entry.request for entry in flight.entries}
        yield Report("warning", f"Chain {chain.chain} of epoch {chain.epoch} is broken: {event.error.what}")
        yield from self._close(chain, event.cause, event.error.what)
        self._ask_for_plan(0.0)
        for name in sorted(hit):
            request = self.state.requests.get(name)
            if request is not None:
                request.failures += 1
                if request.failures > recovery.MAX_REPLAYS:
                    yield requests.fail(self.state, request, event.error)

    # ---- requests

    def _submit(self, event: RequestSubmitted) -> Iterator[Effect]:
        try:
            requests.check_submission(event, self.state, self.config, self.vocabulary.size)
            if not self.state.ready:
                raise UnavailableError(
                    f"No whole chain is ready. {self.missing}",
                    hint="Try again shortly; potluck ps shows the stages.",
                    phase=Phase.SUBMIT,
                    retry_after_s=2,
                )
        except (RequestError, UnavailableError) as error:
            self._tell(event.request, event.cause, f"rejected: {error.what}")
            yield RequestFailed(event.request, error)
            return
        request = requests.new_request(event, self.config, self._now)
        self.state.requests[request.request] = request
        self.state.waiting[request.request] = None
        self._tell(request.request, event.cause, f"accepted with {request.prompt_tokens} prompt tokens")
        yield RequestAccepted(request.request, request.prompt_tokens)

    def _cancel(self, event: RequestCancelled) -> Iterator[Effect]:
        request = self.state.requests.get(event.request)
        if request is None:
            return
        self._tell(event.request, event.cause, f"cancelled after {request.generated} tokens")
        yield requests.fail(self.state, request, CancelledError())
        if self._spares():
            self._ask_for_plan(self.config.settle_s)

    def _returned(self, event: BatchReturned) -> Iterator[Effect]:
        chain = self._chain_of(event.epoch, event.batch)
        if chain is None:
            return
        flight = chain.in_flight[event.batch]
        owed = sum(entry.wants for entry in flight.entries)
        last = chain.plan.stages[-1]
        if len(event.tokens) != owed or any(not 0 <= token < self.vocabulary.size for token in event.tokens):
            error = StageError(
                f"{last.device} returned {len(event.tokens)} tokens where {owed} were due, or unknown ones.",
                hint="Check that all devices run the same version of Potluck and hold the same model.",
                device=last.device, stage=last.stage, phase=Phase.SERVE,
            )  # fmt: skip
            yield from self._batch_broke(
                BatchBroke(cause=event.cause, epoch=event.epoch, batch=event.batch, error=error)
            )
            return
        del chain.in_flight[event.batch]
        self._count(chain, event.hops)
        at = 0
        for entry in flight.entries:
            if entry.wants == 0:
                continue
            token = event.tokens[at]
            logprobs = event.logprobs[at] if at < len(event.logprobs) else None
            at += 1
            request = self.state.requests.get(entry.request)
            if request is None:
                continue  # cancelled while the micro-batch was on its way
            self.state.tokens_out += 1
            effects, last_token = requests.take_token(request, token, logprobs, self.vocabulary, self._now)
            yield from effects
            if last_token:
                self._tell(entry.request, event.cause, f"finished after {request.generated} tokens")
                requests.end(self.state, request)
                if not self.state.requests and self._spares():
                    self._ask_for_plan(self.config.settle_s)

    def _count(self, chain: Chain, hops: tuple[Hop, ...]) -> None:
        """Adds what the stages spent on a micro-batch to their sums."""
        for name in chain.stages:
            self.state.stages[name].breaks = 0
        for hop in hops:
            if hop.index < len(chain.stages):
                stage = self.state.stages[chain.stages[hop.index]]
                was = stage.hops
                stage.hops = HopSums(
                    was.batches + 1,
                    was.compute_s + hop.compute_s,
                    was.wait_s + hop.wait_s,
                    was.bytes_in + hop.bytes_in,
                )

    def _schedule(self) -> Iterator[Effect]:
        for chain in self.state.chains.values():
            if not chain.open:
                continue
            for name in scheduler.admit(self.state, chain, self._now):
                request = self.state.requests[name]
                self._tell(
                    name, f"chain {chain.chain}", f"slot {request.slot}, {request.rest} tokens to compute"
                )
            for message, tokens in scheduler.fill(self.state, chain, self.config.chunk_tokens, self._now):
                yield SendBatch(chain.chain, chain.epoch, message, tokens)

    # ---- time

    def _time_passed(self, event: TimePassed) -> Iterator[Effect]:
        if self._check_due_s is not None and self._now >= self._check_due_s:
            lost_after = self.config.lost_after_s
            for name in liveness.silent(self.state.stages.values(), self._now, lost_after):
                yield from self._remove(name, event.cause, f"no sign of life for {lost_after:g} s")
            self._watch()
        for chain in list(self.state.chains.values()):
            if chain.in_flight:
                oldest = next(iter(chain.in_flight.values()))
                if self._now >= oldest.sent_s + self.config.batch_timeout_s:
                    error = StageError(
                        f"A micro-batch did not come back within {self.config.batch_timeout_s:g} s.",
                        hint="A stage hangs or a link between two stages is cut; see potluck ps.",
                        phase=Phase.SERVE,
                    )
                    yield from self._batch_broke(
                        BatchBroke(cause=event.cause, epoch=chain.epoch, batch=oldest.batch, error=error)
                    )
            elif not chain.open and self._now >= self._load_deadline(chain):
                yield from self._give_up_loading(chain, event.cause)
        if not self.state.ready:
            for request in recovery.overdue(self.state, self._now, self.config.wait_limit_s):
                failure = UnavailableError(
                    f"No chain could take the request within {self.config.wait_limit_s:g} s. {self.missing}",
                    hint="Start more stages, or wait for the lost ones.",
                    phase=Phase.SERVE,
                    retry_after_s=30,
                )
                self._tell(request.request, event.cause, "waited too long for a chain")
                yield requests.fail(self.state, request, failure)

    def _load_deadline(self, chain: Chain) -> float:
        waiting = [self.state.stages[name] for name in chain.stages if name not in chain.ready]
        return min(stage.last_progress_s + self.config.load_timeout_s for stage in waiting)

    def _give_up_loading(self, chain: Chain, cause: str) -> Iterator[Effect]:
        for name in chain.stages:
            stage = self.state.stages[name]
            if name in chain.ready or self._now < stage.last_progress_s + self.config.load_timeout_s:
                continue
            error = StageError(
                f"{stage.device} made no progress while loading for {self.config.load_timeout_s:g} s.",
                hint="Look at its log; restart potluck-stage there.",
                device=stage.device, stage=name, phase=Phase.LOAD,
            )  # fmt: skip
            yield from self._stage_broke(StageBroke(cause=cause, stage=name, epoch=chain.epoch, error=error))
            return

    def _watch(self) -> None:
        self._check_due_s = liveness.next_check_s(self.state.stages.values(), self.config.lost_after_s)

    # ---- helpers

    def _chain_of(self, epoch: Epoch, batch: int) -> Chain | None:
        """The open chain that has this micro-batch in flight; None for anything late, old or unknown."""
        for chain in self.state.chains.values():
            if chain.epoch == epoch and batch in chain.in_flight:
                return chain
        return None

    def _tell(self, subject: str | RequestId | StageId, cause: str, text: str) -> None:
        self.story.tell(self._now, subject, cause, text)
