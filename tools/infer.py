"""`potluck infer`: one prompt, its answer, and the time of each token."""

from __future__ import annotations

import json
import time
from contextlib import aclosing
from dataclasses import dataclass, field

from rich.console import Console

from potluck.runtime.client import Client
from potluck.wire.messages import Accepted, ChatMessage, Delta, Finished
from potluck.wire.sampling import Sampling


@dataclass(slots=True)
class Run:
    """One answer and when its tokens came, in seconds since the prompt was sent."""

    prompt_tokens: int = 0
    text: str = ""
    at_s: list[float] = field(default_factory=list)
    reason: str = ""

    @property
    def first_s(self) -> float:
        """Time to the first token."""
        return self.at_s[0] if self.at_s else 0.0

    @property
    def token_ms(self) -> float:
        """Average time of a token after the first."""
        return 1000 * (self.at_s[-1] - self.at_s[0]) / (len(self.at_s) - 1) if len(self.at_s) > 1 else 0.0

    def to_json(self) -> str:
        """Everything as one JSON object."""
        gaps = [1000 * (b - a) for a, b in zip([0.0, *self.at_s], self.at_s, strict=False)]
        return json.dumps(
            {
                "text": self.text,
                "prompt_tokens": self.prompt_tokens,
                "tokens": len(self.at_s),
                "finish_reason": self.reason,
                "ttft_s": round(self.first_s, 4),
                "ms_per_token": round(self.token_ms, 2),
                "token_ms": [round(gap, 2) for gap in gaps],
            }
        )


async def infer(
    client: Client,
    prompt: str,
    *,
    raw: bool,
    system: str | None,
    max_tokens: int | None,
    sampling: Sampling,
    seed: int | None,
    stop: tuple[str, ...],
    console: Console | None,
    times: bool,
    timeout_s: float | None = None,
) -> Run:
    """Runs one prompt. With a console, prints the text as it comes, or with `times` a line per token."""
    run = Run()
    messages = [ChatMessage("system", system)] if system else []
    messages.append(ChatMessage("user", prompt))
    start = time.perf_counter()
    stream = client.stream(
        prompt if raw else None,
        messages=None if raw else messages,
        max_tokens=max_tokens,
        sampling=sampling,
        seed=seed,
        stop=stop,
        timeout_s=timeout_s,
    )
    async with aclosing(stream) as events:
        async for event in events:
            match event:
                case Accepted():
                    run.prompt_tokens = event.prompt_tokens
                case Delta():
                    for _ in event.tokens:
                        run.at_s.append(time.perf_counter() - start)
                    run.text += event.text
                    if console is not None:
                        _show(console, run, event.text, times)
                case Finished():
                    run.reason = event.reason
    return run


def _show(console: Console, run: Run, text: str, times: bool) -> None:
    if not times:
        console.out(text, end="", highlight=False)
        console.file.flush()
        return
    before = run.at_s[-2] if len(run.at_s) > 1 else 0.0
    note = " (pipeline fill)" if len(run.at_s) == 1 else ""
    console.out(
        f"Token {len(run.at_s)}: {1000 * (run.at_s[-1] - before):.0f} ms{note}  {text!r}", highlight=False
    )


def summary(run: Run) -> str:
    """The figures in one line."""
    count = len(run.at_s)
    rest = f", then {run.token_ms:.1f} ms per token" if count > 1 else ""
    return (
        f"{run.prompt_tokens} prompt tokens, {count} tokens: first after {run.first_s:.2f} s{rest}"
        f" (ended by {run.reason})."
    )
