"""The first Ctrl-C asks, the next one insists, then the process ends; one that comes doubled is one."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, sys
from potluck.runtime.loop import run
from potluck.runtime.signals import ONE_SIGNAL_S, stop_signals

async def main():
    loop = asyncio.get_running_loop()
    def stop(number):
        print("asked by", number.name, flush=True)
        loop.call_later(ONE_SIGNAL_S + 0.1, lambda: print("a moment later", flush=True))
    def insist(number):
        print("told by", number.name, flush=True)
        loop.call_later(ONE_SIGNAL_S + 0.1, lambda: print("a moment later", flush=True))
        todo.append(number)
        return len(todo) == 1
    todo = []
    with stop_signals(stop, *([insist] if sys.argv[1:] else [])):
        print("ready", flush=True)
        await asyncio.sleep(60)

run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("insists", [True, False])
def test_the_first_signal_asks_a_doubled_one_is_one_and_later_ones_insist_as_long_as_there_is_something_to_insist_on(
    number: signal.Signals, insists: bool
) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM, *["insist"] * insists],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        try:
            assert program.stdout.readline() == "ready\n"
            program.send_signal(number)
            assert program.stdout.readline() == f"asked by {number.name}\n"
            program.send_signal(number)
            assert program.stdout.readline() == "a moment later\n"
            program.send_signal(number)
            if insists:
                assert program.stdout.readline() == f"told by {number.name}\n"
                program.send_signal(number)
                assert program.stdout.readline() == "a moment later\n"
                program.send_signal(number)
            assert program.wait(20) == 128 + number
            assert program.stderr.read() == "Stopped at once.\n"
        finally:
            program.kill()
