"""The engines that can compute a slice: `llama` (llama.cpp) and `fake` (numpy, deterministic, for tests and demos)."""

from __future__ import annotations

from potluck.stage.engine import Engine
from potluck.wire.errors import UsageError

NAMES = ("llama", "fake")


def make_engine(name: str) -> Engine:
    """A new engine, nothing loaded. What an engine needs is imported only when that engine is asked for.

    Raises UsageError for a name that is not one of `NAMES`.
    """
    match name:
        case "llama":
            from potluck.stage.engines.llama import LlamaEngine

            return LlamaEngine()
        case "fake":
            from potluck.stage.engines.fake import FakeEngine

            return FakeEngine()
        case _:
            raise UsageError(f"There is no engine named {name!r}.", hint=f"Use one of: {', '.join(NAMES)}.")


__all__ = ["NAMES", "make_engine"]
