"""`potluck bench recovery`: stages of a chain are killed again and again while streams run, and every token is counted.

A broker, three stages in a chain and a spare are real processes on this machine. When all streams are in the middle of
an answer, and a random number of tokens after the last fault, a stage is hit (`recovery_faults`); the cluster has to go
on by itself. Then the stage is started anew and becomes the spare. Half of the faults meet a cluster in which another
stage holds the slice already (warm), half one with --standby off (cold).

The time to the next token runs from the fault to the first token of the chain that took over, for each stream that was
hit: a token that was past the dead stage already does not count, although it comes later than the fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from potluck.model.facts import read_facts
from potluck.model.tokenizer import Tokenizer
from potluck.runtime.client import Client
from potluck.tools.local import LocalCluster, stage_name
from potluck.tools.recovery_checks import Heard, Tally, judge, percentile
from potluck.tools.recovery_faults import (
    Fault,
    Hit,
    as_text,
    chain_of,
    check_alive,
    covered,
    given_up,
    hang_options,
    repair,
    restored,
    strike,
)
from potluck.tools.recovery_streams import CONTEXT_TOKENS, Answer, Ask, Streams, make_asks, undisturbed
from potluck.wire.errors import NoBrokerError, PotluckError, UsageError
from potluck.wire.messages import StateView

STAGES = 3
ASKS = 3
"""Different requests per stream; the streams ask all of them again and again."""
STANDBY_ON: tuple[str, ...] = ("--standby", "auto")
"""The broker's options for a cluster with slices on standby."""
MOST_BETWEEN_TOKENS = 10
"""A fault comes at most so many tokens of each stream after the one before is over."""
JITTER_S = 0.03
"""Tokens come at the end of a turn around the chain; a fault has to meet every part of it."""
LOOK_S = 0.01
START_S = 120.0
ANSWERS_S = 300.0
RECOVER_S = 120.0
"""From the fault to the next token of every stream."""
RESTORE_S = 60.0
"""From the new process to the spare that is ready."""


@dataclass(frozen=True, slots=True)
class RecoveryBench:
    """What is to be measured. `standby` is auto (only warm), off (only cold) or both."""

    model: Path
    kills: int = 100
    streams: int = 8
    seed: int = 1
    exact: bool = False
    fault: Fault = Fault.KILL
    standby: str = "both"
    rounds_per_cluster: int = 25
    logs: Path | None = None
    """Where the processes' logs are kept."""

    def clusters(self) -> list[tuple[bool, int]]:
        """Whether warm, and how many faults, for each cluster in turn."""
        kinds = {"auto": (True,), "off": (False,), "both": (True, False)}[self.standby]
        left = {warm: self.kills // len(kinds) for warm in kinds}
        left[kinds[0]] += self.kills - sum(left.values())
        found = []
        while any(left.values()):
            for warm in kinds:
                rounds = min(left[warm], self.rounds_per_cluster)
                left[warm] -= rounds
                if rounds:
                    found.append((warm, rounds))
        return found


@dataclass(slots=True)
class RecoveryReport:
    """All sums, and what was wrong in words."""

    bench: RecoveryBench
    tally: Tally
    refused: int = 0
    faulty: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(self.tally.to_dict())

    def to_text(self) -> str:
        """A table."""
        tally = self.tally
        bench = self.bench
        lines = [
            f"{bench.model.name}, {STAGES} stages, {bench.streams} streams, {tally.kills} faults ({bench.fault})",
            f"  lost tokens            {tally.lost}",
            f"  duplicated tokens      {tally.duplicated}",
            f"  failed requests        {tally.failed}",
            f"  equal to undisturbed   {tally.equal} of {tally.disturbed} disturbed requests",
        ]
        if self.refused:
            lines.append(
                f"  sent again             {self.refused} (the broker took no request at that moment)"
            )
        lines.append("  time to the next token     median      95 %   streams hit")
        for kind, seconds in (("warm", tally.warm_s), ("cold", tally.cold_s)):
            if not seconds:
                lines.append(f"    {kind}                   not measured")
                continue
            median, most = percentile(seconds, 0.5), percentile(seconds, 0.95)
            lines.append(f"    {kind}                 {median:8.2f} s {most:7.2f} s {len(seconds):13}")
        return "\n".join([*lines, *self.faulty])


async def run_recovery(bench: RecoveryBench, tell: Callable[[str], None]) -> RecoveryReport:
    """Everything, within a time that grows with the number of faults. Raises PotluckError if the cluster does not
    recover; `tell` is given a line for each fault.
    """
    if bench.streams < 1 or bench.kills < 1:
        raise UsageError("--kills and --streams are at least 1.")
    facts = read_facts(bench.model)
    clusters = bench.clusters()
    limit_s = ANSWERS_S * (1 + len(clusters)) + (RECOVER_S + RESTORE_S) * bench.kills
    with Tokenizer(facts.path) as tokenizer:
        run = _Run(bench, tokenizer, tell)
        try:
            async with asyncio.timeout(limit_s):
                for number, (warm, rounds) in enumerate(clusters):
                    await run.cluster(number, warm, rounds)
        except TimeoutError:
            raise PotluckError(
                f"Not done within {limit_s:.0f} s, after {run.report.tally.kills} faults."
            ) from None
    return run.report


class _Run:
    """The clusters, one after the other."""

    def __init__(self, bench: RecoveryBench, tokenizer: Tokenizer, tell: Callable[[str], None]) -> None:
        self.bench = bench
        self.report = RecoveryReport(bench, Tally())
        self._tokenizer = tokenizer
        self._tell = tell
        self._chance = random.Random(bench.seed)
        self._asks: list[Ask] = make_asks(self._chance, ASKS * bench.streams)
        self._expected: dict[int, Answer] = {}

    async def cluster(self, number: int, warm: bool, rounds: int) -> None:
        """One cluster, from its start to the end of the answers that the last fault disturbed."""
        bench = self.bench
        options = [
            "--stages", str(STAGES), "--slots", str(bench.streams), "--context", str(CONTEXT_TOKENS), "--http", "off",
            *(["--exact"] if bench.exact else []), *(STANDBY_ON if warm else []),
            *(f"--reserve={stage_name(STAGES + extra)}" for extra in range(bench.fault.stages)),
        ]  # fmt: skip
        with self._folder(number) as folder:
            cluster = LocalCluster(bench.model, folder)
            try:
                await cluster.start_broker(*options)
                for index in range(STAGES):
                    await self._start(cluster, index)
                async with Client(cluster.address) as client:
                    async for _ in cluster.wait_ready(client, START_S):
                        pass
                    if not self._expected:
                        self._expected = await undisturbed(client, self._asks, bench.streams, ANSWERS_S)
                    await self._serve(cluster, client, warm, rounds)
            finally:
                await cluster.stop()

    async def _serve(self, cluster: LocalCluster, client: Client, warm: bool, rounds: int) -> None:
        asks = self._chance.sample(self._asks, len(self._asks))
        streams = Streams(client, asks, self.bench.streams)
        try:
            # While requests run, a stage that joins is a spare.
            await streams.until(lambda: streams.all_run, ANSWERS_S, "all streams run")
            for extra in range(self.bench.fault.stages):
                await self._start(cluster, STAGES + extra)
            for _ in range(rounds):
                await _Round(self, cluster, client, streams, warm).run()
            await streams.stop(ANSWERS_S)
            check_alive(cluster)
        finally:
            streams.cancel()
            self.report.refused += streams.refused
            for answer in streams.ended:
                self._judge(answer, warm)

    def _judge(self, answer: Answer, warm: bool) -> None:
        tally = self.report.tally
        times = tally.warm_s if warm else tally.cold_s
        times += [mark.next_s for mark in answer.marks if mark.next_s is not None]
        if answer.finish is None:
            tally.failed += 1
            self.report.faulty.append(f"{answer.ask.text} failed: {answer.error}")
            return
        said = answer.finish.usage.completion_tokens
        cuts = [count for mark in answer.marks for count in (mark.had, mark.closed or mark.had)]
        heard = Heard(answer.tokens, "".join(answer.text), said, answer.ask.max_tokens, cuts)
        read = b"".join(map(self._tokenizer.piece, answer.tokens)).decode(errors="replace")
        verdict = judge(heard, self._expected[answer.ask.number].tokens, read)
        tally.add(verdict, disturbed=any(mark.next_s is not None for mark in answer.marks))
        if verdict.why:
            self.report.faulty.append(f"{answer.ask.text}: {verdict.why}")

    async def _start(self, cluster: LocalCluster, index: int) -> None:
        name = stage_name(index)
        hang = hang_options(cluster.folder, name) if self.bench.fault is Fault.HANG else ()
        await cluster.start_stage(name, *hang)

    @contextlib.contextmanager
    def _folder(self, number: int) -> Iterator[Path]:
        if self.bench.logs is None:
            with tempfile.TemporaryDirectory(prefix="potluck-") as folder:
                yield Path(folder)
            return
        kept = self.bench.logs / f"cluster-{number + 1}"
        kept.mkdir(parents=True, exist_ok=True)
        yield kept


@dataclass(slots=True)
class _Round:
    """One fault, from the wait for a good moment to the spare that is ready again."""

    run_: _Run
    cluster: LocalCluster
    client: Client
    streams: Streams
    warm: bool

    async def run(self) -> None:
        """The whole of it. Raises PotluckError where the cluster does not get over it in time."""
        bench, chance = self.run_.bench, self.run_._chance
        wanted = bench.fault.stages
        view = await self._until(lambda view: self._prepared(view, wanted), RESTORE_S, "the spare is ready")
        goal = self.streams.tokens + chance.randint(1, MOST_BETWEEN_TOKENS * bench.streams)
        while True:
            await self.streams.until(
                lambda: self.streams.tokens >= goal and self.streams.all_run, ANSWERS_S, "all streams run"
            )
            await asyncio.sleep(chance.uniform(0.0, JITTER_S))
            if self.streams.all_run:
                break
        begun_s = asyncio.get_running_loop().time()
        marks = self.streams.hit()
        hit = await strike(bench.fault, self.cluster, view, chance)
        await self._until(lambda view: given_up(view, hit), RECOVER_S, f"{hit.names} given up", hit)
        noticed_s = asyncio.get_running_loop().time() - begun_s
        self.streams.closed()
        await self.streams.until(
            lambda: not self.streams.waiting, RECOVER_S, f"all streams go on without {hit.names}"
        )
        tally = self.run_.report.tally
        tally.kills += 1
        times = sorted(mark.next_s for mark in marks if mark.next_s is not None)
        span = f"next token after {times[0]:.2f} to {times[-1]:.2f} s" if times else "no stream was hit"
        self.run_._tell(
            f"{bench.fault} {tally.kills} of {bench.kills}: {hit.names}, {'warm' if self.warm else 'cold'}, "
            f"given up after {noticed_s:.2f} s, {span}"
        )
        await repair(bench.fault, self.cluster, hit)
        await self._until(
            lambda view: restored(view, hit, bench.fault, wanted), RESTORE_S, f"{hit.names} back as a spare"
        )

    def _prepared(self, view: StateView, spares: int) -> bool:
        whole = view.ready and len(chain_of(view)) == STAGES and len(view.stages) >= STAGES + spares
        return whole and (covered(view) or not self.warm)

    async def _until(
        self, wanted: Callable[[StateView], bool], within_s: float, what: str, hit: Hit | None = None
    ) -> StateView:
        """The first state that is as wanted. Raises PotluckError after the deadline."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + within_s
        view: StateView | None = None
        while True:
            with contextlib.suppress(NoBrokerError):
                view = await self.client.state()
                if wanted(view):
                    return view
            check_alive(self.cluster, hit)
            if loop.time() > end_s:
                said = "it does not answer" if view is None else as_text(view)
                done = self.run_.report.tally.kills
                raise PotluckError(
                    f"Not within {within_s:g} s, after {done} faults: {what}. The cluster: {said}."
                )
            await asyncio.sleep(LOOK_S)


__all__ = ["RecoveryBench", "RecoveryReport", "run_recovery"]
