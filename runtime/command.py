"""Click commands that report Potluck's errors as a line and an exit code, wherever they come up. Never a traceback."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

import click

from potluck.runtime import loop
from potluck.wire.errors import PotluckError

T = TypeVar("T")


class _Reports:
    """Mixed in before click's own class: options and the command itself may raise PotluckError."""

    name: str | None

    def main(self, *args: Any, **more: Any) -> NoReturn:
        """Runs the command and ends the process."""
        try:
            super().main(*args, **more)  # type: ignore[misc]
        except PotluckError as error:
            click.echo(f"{self.name}: {error}", err=True)
            sys.exit(error.exit_code)
        sys.exit(0)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command's function; Ctrl-C ends it with 130, before click makes its own of it."""
        try:
            return super().invoke(ctx)  # type: ignore[misc]
        except (KeyboardInterrupt, asyncio.CancelledError):
            click.echo("Cancelled.", err=True)
            ctx.exit(130)


class Command(_Reports, click.Command):
    """One command."""


class Group(_Reports, click.Group):
    """Commands under one name."""


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a command's work. SIGTERM cancels it as Ctrl-C does, so that whatever it started is ended, too."""
    terminated = False

    async def watched() -> T:
        here, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        with contextlib.suppress(NotImplementedError):
            here.add_signal_handler(signal.SIGTERM, stop)
        return await work

    try:
        return loop.run(watched())
    except asyncio.CancelledError:
        if terminated:
            sys.exit(128 + signal.SIGTERM)
        raise
