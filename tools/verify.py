"""Whether a model, cut into stages, computes what it computes whole: the same logits and the same text.

The whole model runs first, fed token ids as llama.cpp does by itself; then the same micro-batches go through a chain of
slices. Every prompt is prefilled in chunks beside the others, then all continue greedily. Decides when a chain passes;
the command around it is in the cli.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from potluck.model.architectures import Rules, rules_for
from potluck.model.codecs import CODECS, Codec, decode, encode
from potluck.model.facts import ModelFacts, read_facts
from potluck.model.paths import cache_dir as default_cache_dir
from potluck.model.slices import ensure_slice
from potluck.model.tokenizer import Tokenizer
from potluck.model.verified import mark_verified
from potluck.planner.even import even_cuts
from potluck.planner.shape import shape_of
from potluck.stage.engine import FloatRows, LoadSpec, Work
from potluck.stage.engines.llama import LlamaEngine, prepare_process
from potluck.wire.errors import ModelError, UsageError
from potluck.wire.messages import Span

PROMPTS: Final = (
    "The capital of France is",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    (
        "Once upon a time, in a small house at the edge of the forest, there lived an old clockmaker who had never "
        "told anyone how many clocks he owned. Every morning he wound them all, one after the other, and every evening"
    ),
)
CHUNK: Final = 24
"""Tokens of one prompt in one micro-batch; the prompts' chunks travel together."""
_LONG_PROMPT: Final = 300
_LONGEST_PROMPT: Final = 4_500
_EDGE: Final = 240
_EXACT_LIMITS: Final = (0.0, 1.0)
_ROUNDED_LIMITS: Final = (0.02, 0.95)
_HALF_LIMITS: Final = (1.0, 0.8)
"""The largest difference allowed, as a share of the logits' standard deviation, and the share of positions where the
likeliest token has to be the same: where slices are exact; where their rules round; with an f16 hand-over, which keeps
11 bits of every activation at every cut (a wrong slice agrees nowhere, so this tells the two apart)."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was compared and what came out.

    Differences are between logits, over all positions that have the same tokens before them. `bounds` are the stages'
    first layers and the number of layers. `reason` says why it did not pass.
    """

    model: str
    architecture: str
    listed: bool
    layers: int
    stages: int
    cuts: tuple[int, ...]
    bounds: tuple[int, ...]
    activation: str
    exact: bool
    prompts: int
    longest_prompt: int
    positions_compared: int
    tokens_compared: int
    max_logit_difference: float
    mean_logit_difference: float
    logit_deviation: float
    allowed_difference: float
    top1_agreement: float
    tokens_equal: bool
    same_tokens: tuple[int, ...]
    """For each prompt, how many of its new tokens are the same before the first that differs."""
    passed: bool
    reason: str = ""
    marked_verified: bool = False

    def to_json(self) -> str:
        """One JSON object, a line per field."""
        return json.dumps(asdict(self), indent=2)

    def to_text(self) -> str:
        """A few lines for a person."""
        ranges = ", ".join(f"[{a}, {b})" for a, b in pairwise(self.bounds))
        text = (
            "the same"
            if self.tokens_equal
            else f"the same for {', '.join(map(str, self.same_tokens))} tokens"
        )
        lines = [
            f"{self.model} ({self.architecture}, {self.layers} layers) in {self.stages} stages: layers {ranges}",
            f"  compared    {self.positions_compared} positions, {self.activation} between stages",
            f"  prompts     {self.prompts}, the longest of {self.longest_prompt} tokens",
            f"  logits      largest difference {self.max_logit_difference:.6g}, allowed {self.allowed_difference:.3g}",
            f"              mean difference {self.mean_logit_difference:.3g}, spread {self.logit_deviation:.3g}",
            f"  likeliest   the same at {self.top1_agreement:.2%} of the positions",
            f"  text        {text}, {self.tokens_compared} new tokens",
            f"  {'PASSED' if self.passed else 'FAILED: ' + self.reason}",
        ]
        if self.marked_verified:
            lines.append(
                "  This file is served from now on, although its architecture is not in Potluck's table."
            )
        return "\n".join(lines)


def run_verify(
    model: Path,
    stages: int = 2,
    *,
    cuts: Sequence[int] | None = None,
    activation: Codec = "f32",
    exact: bool = False,
    threads: int = 1,
    tokens: int = 32,
    seed: int = 0,
    cache_dir: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> VerifyReport:
    """Compares the model whole with the model in `stages` stages, or cut before each of the layers `cuts`.

    `tokens` are generated per prompt. Slices go to `cache_dir` (Potluck's own by default), where a pass of an unlisted
    architecture is noted too. Raises UsageError, ModelError (also for a forbidden cut), PlanError, EngineError.
    """
    if activation not in CODECS:
        raise UsageError(f"There is no activation {activation!r}.", hint=f"Use one of: {', '.join(CODECS)}.")
    prepare_process(exact)
    cache = cache_dir or default_cache_dir()
    facts = read_facts(model)
    rules = rules_for(facts, allow_unlisted=True)
    bounds = _bounds(facts, rules, stages, cuts)
    prompts = _prompts(facts, tokens, seed)
    plan = _Batches(prompts, tokens)
    with ExitStack() as stack:
        progress(f"running {facts.name} whole")
        spec = plan.spec(model, 0, facts.layers, facts.layers, threads, exact)
        kept = stack.enter_context(_room_for(plan.positions, facts.vocab))
        with _chain([spec]) as whole:
            expected = plan.run(whole, "f32", kept)
        progress(f"writing and loading {len(bounds) - 1} slices")
        files = [ensure_slice(model, facts, a, b, cache, allow_unlisted=True) for a, b in pairwise(bounds)]
        specs = [
            replace(
                plan.spec(file.slice_path, a, b, facts.layers, threads, exact),
                embeddings_path=file.embeddings_path,
            )
            for file, (a, b) in zip(files, pairwise(bounds), strict=True)
        ]
        differences = _Differences(plan, kept, expected)
        with _chain(specs) as chain:
            progress(f"running it in {len(specs)} stages")
            found = plan.run(chain, activation, differences)
    report = _report(facts, rules, bounds, activation, exact, plan, differences, expected, found)
    if report.passed and not rules.listed and activation == "f32":
        mark_verified(cache, facts, {"cuts": str(list(report.cuts)), "positions": report.positions_compared})
        report = replace(report, marked_verified=True)
    return report


# ---- what is run


class _Batches:
    """The micro-batches of a run: chunks of all prompts side by side, then one token of each. Slot i is prompt i."""

    def __init__(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        self.prompts = prompts
        self.tokens = tokens
        self.longest = max(map(len, prompts))
        self.positions = 0
        """Results of a run, all told."""
        for slot, prompt in enumerate(prompts):
            for at in range(0, len(prompt), CHUNK):
                self.positions += self._wants(slot, at, min(CHUNK, len(prompt) - at))
            self.positions += tokens - 1

    def _wants(self, slot: int, at: int, size: int) -> int:
        """Results of a chunk: all, but one of each chunk in the middle of a very long prompt (logits are large)."""
        return size if at < _EDGE or len(self.prompts[slot]) - at <= _EDGE else 1

    def spec(self, path: Path, first: int, end: int, layers: int, threads: int, exact: bool) -> LoadSpec:
        """How each engine of a run is loaded: with the same limits, so that all make the same calls."""
        return LoadSpec(
            slice_path=path,
            embeddings_path=path if first == 0 else None,
            first=first,
            end=end,
            layers=layers,
            slots=len(self.prompts),
            context_tokens=self.longest + self.tokens,
            batch_tokens=CHUNK * len(self.prompts),
            threads=threads,
            exact=exact,
        )

    def run(
        self, chain: Sequence[LlamaEngine], activation: Codec, results: NDArray[np.float32] | _Differences
    ) -> list[list[int]]:
        """Runs everything through a chain. The logits go into `results` in order; the greedy tokens come back."""
        texts = [list(prompt) for prompt in self.prompts]
        done = [0] * len(texts)
        row = 0
        while any(at < len(self.prompts[i]) + self.tokens - 1 for i, at in enumerate(done)):
            spans = []
            fed: list[int] = []
            for slot, (text, at) in enumerate(zip(texts, done, strict=True)):
                last = len(self.prompts[slot]) + self.tokens - 1
                size = min(CHUNK, len(text) - at, last - at)
                if size > 0:
                    spans.append(Span(slot, at, size, self._wants(slot, at, size)))
                    fed.extend(text[at : at + size])
            logits = _through(chain, spans, np.array(fed, np.int32), activation)
            if isinstance(results, _Differences):
                results.take(spans, texts, row, logits)
            else:
                results[row : row + len(logits)] = logits
            row += len(logits)
            end = 0
            for span in spans:
                end += span.wants
                done[span.slot] += span.tokens
                if done[span.slot] == len(texts[span.slot]):
                    texts[span.slot].append(int(np.argmax(logits[end - 1])))
        return [text[len(prompt) :] for text, prompt in zip(texts, self.prompts, strict=True)]


def _through(
    chain: Sequence[LlamaEngine], spans: Sequence[Span], tokens: NDArray[np.int32], activation: Codec
) -> FloatRows:
    hidden: FloatRows | None = None
    for engine in chain:
        output = engine.forward(Work(spans, tokens, hidden))
        if output.logits is not None:
            return output.logits
        assert output.hidden is not None
        rows, width = output.hidden.shape
        hidden = decode(bytes(encode(output.hidden, activation)), rows, width, activation)
    raise UsageError("The chain has no last stage.")


@contextmanager
def _chain(specs: Sequence[LoadSpec]) -> Iterator[list[LlamaEngine]]:
    engines = [LlamaEngine() for _ in specs]
    try:
        for engine, spec in zip(engines, specs, strict=True):
            engine.load(spec)
        yield engines
    finally:
        for engine in engines:
            engine.close()


@contextmanager
def _room_for(rows: int, vocab: int) -> Iterator[NDArray[np.float32]]:
    """float32[rows, vocab] in a temporary file: the whole model's logits, while the slices need the memory."""
    with tempfile.TemporaryFile() as file:
        try:
            file.truncate(rows * vocab * 4)
            yield np.memmap(file, np.float32, "r+", shape=(rows, vocab))
        except OSError as error:
            raise ModelError(
                f"{rows * vocab * 4 >> 20} MiB are needed in {tempfile.gettempdir()}: {error.strerror}.",
                hint="Free some space, or set TMPDIR.",
            ) from error


def _bounds(facts: ModelFacts, rules: Rules, stages: int, cuts: Sequence[int] | None) -> tuple[int, ...]:
    """0, the cuts and the number of layers. Raises ForbiddenCutError, PlanError, UsageError."""
    if cuts is not None:
        bounds = (0, *sorted(set(cuts)), facts.layers)
        for a, b in pairwise(bounds):
            rules.check_slice(a, b)
        return bounds
    if stages < 1:
        raise UsageError(f"A model can't be cut into {stages} stages.", hint="Use 1 or more.")
    bounds = even_cuts(shape_of(facts, rules, facts.name), stages)
    for a, b in pairwise(bounds):
        rules.check_slice(a, b)
    return bounds


def _prompts(facts: ModelFacts, tokens: int, seed: int) -> list[list[int]]:
    """Random tokens, longer than a sliding window; a single one; and texts if the model has a tokenizer."""
    room = facts.context_train - tokens
    if tokens < 1 or room < 2:
        raise UsageError(
            f"{tokens} new tokens don't fit a model trained on {facts.context_train}.",
            hint="Ask for fewer tokens.",
        )
    window = facts.of_architecture("attention.sliding_window")
    wanted = max(_LONG_PROMPT, window + 2 * CHUNK if isinstance(window, int) else 0)
    chance = np.random.default_rng(seed)
    prompts = [
        chance.integers(0, facts.vocab, min(wanted, room, _LONGEST_PROMPT)).tolist(),
        chance.integers(0, facts.vocab, 1).tolist(),
    ]
    if facts.tokenizer_model not in ("", "none", "no_vocab"):
        with Tokenizer(facts.path) as tokenizer:
            prompts.extend(tokenizer.encode(text)[:room] for text in PROMPTS)
    else:
        prompts.extend(chance.integers(0, facts.vocab, min(length, room)).tolist() for length in (7, 25, 60))
    return prompts


# ---- what is compared


class _Differences:
    """The chain's logits against the kept ones, row by row, as far as the texts before them are the same."""

    def __init__(self, plan: _Batches, kept: NDArray[np.float32], expected: list[list[int]]) -> None:
        self._kept = kept
        self._texts = [list(p) + list(t) for p, t in zip(plan.prompts, expected, strict=True)]
        self.rows = 0
        self.largest = 0.0
        self.same_top = 0
        self._sum = 0.0
        self._deviation = 0.0

    def take(self, spans: Sequence[Span], texts: list[list[int]], row: int, logits: FloatRows) -> None:
        """The logits of one micro-batch; its first row is the run's `row`."""
        at = 0
        for span in spans:
            end = span.position + span.tokens
            if texts[span.slot][:end] == self._texts[span.slot][:end]:
                self._compare(self._kept[row + at : row + at + span.wants], logits[at : at + span.wants])
            at += span.wants

    def _compare(self, kept: FloatRows, found: FloatRows) -> None:
        difference = np.abs(kept - found)
        self.rows += len(kept)
        largest = float(difference.max())
        # A NaN on either side is the largest difference there is.
        self.largest = max(self.largest, math.inf if math.isnan(largest) else largest)
        self._sum += float(difference.mean(axis=1).sum())
        self._deviation += float(kept.std(axis=1).sum())
        self.same_top += int((kept.argmax(axis=1) == found.argmax(axis=1)).sum())

    @property
    def mean(self) -> float:
        """Mean absolute difference."""
        return self._sum / max(self.rows, 1)

    @property
    def deviation(self) -> float:
        """The kept logits' standard deviation, a mean over the rows."""
        return self._deviation / max(self.rows, 1)


def _report(
    facts: ModelFacts,
    rules: Rules,
    bounds: tuple[int, ...],
    activation: Codec,
    exact: bool,
    plan: _Batches,
    differences: _Differences,
    expected: list[list[int]],
    found: list[list[int]],
) -> VerifyReport:
    equal = expected == found
    agreement = differences.same_top / max(differences.rows, 1)
    if activation == "f16":
        share, wanted_agreement = _HALF_LIMITS
    else:
        share, wanted_agreement = _EXACT_LIMITS if rules.exact or len(bounds) == 2 else _ROUNDED_LIMITS
    allowed = share * differences.deviation
    reasons = []
    if not differences.largest <= allowed:
        reasons.append(f"the logits differ by {differences.largest:.6g}")
    if not agreement >= wanted_agreement:
        reasons.append(f"the likeliest token is the same at {agreement:.2%} of the positions only")
    if allowed == 0.0 and not equal:
        reasons.append("the texts differ")
    return VerifyReport(
        model=str(facts.path),
        architecture=facts.architecture,
        listed=rules.listed,
        layers=facts.layers,
        stages=len(bounds) - 1,
        cuts=bounds[1:-1],
        bounds=bounds,
        activation=activation,
        exact=exact,
        prompts=len(plan.prompts),
        longest_prompt=plan.longest,
        positions_compared=differences.rows,
        tokens_compared=plan.tokens * len(plan.prompts),
        max_logit_difference=differences.largest,
        mean_logit_difference=differences.mean,
        logit_deviation=differences.deviation,
        allowed_difference=allowed,
        top1_agreement=agreement,
        tokens_equal=equal,
        same_tokens=tuple(_same(a, b) for a, b in zip(expected, found, strict=True)),
        passed=not reasons,
        reason="; ".join(reasons),
    )


def _same(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens are the same from the start."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


__all__ = ["VerifyReport", "run_verify"]
