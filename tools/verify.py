"""Whether a model, cut into stages, computes what it computes whole: the same logits and the same text.

The whole model runs first, fed token ids as llama.cpp does by itself; then the same micro-batches go through a chain of
slices. Every prompt is prefilled in chunks beside the others, then all continue greedily. Decides what is run;
`verify_report` decides when a chain passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from potluck.model.architectures import Rules, rules_for
from potluck.model.codecs import CODECS, Codec
from potluck.model.facts import ModelFacts, read_facts
from potluck.model.paths import cache_dir as default_cache_dir
from potluck.model.slices import ensure_slice
from potluck.model.tokenizer import Tokenizer
from potluck.model.verified import mark_verified
from potluck.planner.even import even_cuts
from potluck.planner.shape import shape_of
from potluck.stage.engines.llama import prepare_process
from potluck.tools.verify_report import Differences, VerifyReport, report_of
from potluck.tools.verify_run import CHUNK, Batches, Kept, chain_of, room_for
from potluck.wire.errors import UsageError

PROMPTS: Final = (
    "The capital of France is",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    (
        "Once upon a time, in a small house at the edge of the forest, there lived an old clockmaker who had never "
        "told anyone how many clocks he owned. Every morning he wound them all, one after the other, and every evening"
    ),
)
_LONG_PROMPT: Final = 300
_LONGEST_PROMPT: Final = 4_500


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
    plan = Batches(prompts, tokens)
    with ExitStack() as stack:
        progress(f"running {facts.name} whole")
        spec = plan.spec(model, 0, facts.layers, facts.layers, threads, exact)
        kept = stack.enter_context(room_for(plan.positions, facts.vocab))
        with chain_of([spec]) as whole:
            expected = plan.run(whole, "f32", Kept(kept).take)
        progress(f"writing and loading {len(bounds) - 1} slices")
        files = [ensure_slice(model, facts, a, b, cache, allow_unlisted=True) for a, b in pairwise(bounds)]
        specs = [
            replace(
                plan.spec(file.slice_path, a, b, facts.layers, threads, exact),
                embeddings_path=file.embeddings_path,
            )
            for file, (a, b) in zip(files, pairwise(bounds), strict=True)
        ]
        differences = Differences(plan, kept, expected)
        with chain_of(specs) as chain:
            progress(f"running it in {len(specs)} stages")
            found = plan.run(chain, activation, differences.take)
    report = report_of(facts, rules, bounds, activation, exact, plan, differences, expected, found)
    if report.passed and not rules.listed and activation == "f32":
        mark_verified(cache, facts, {"cuts": str(list(report.cuts)), "positions": report.positions_compared})
        report = replace(report, marked_verified=True)
    return report


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


__all__ = ["VerifyReport", "run_verify"]
