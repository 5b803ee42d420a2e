"""A small process beside the stage that tells the broker what the stage has died of, if it dies.

`witness` starts it and has it end with the stage's orderly end. What it does is in `witness_child`; this module, run as
a program, is what it becomes when there is a death to report. Where there is none (not on Linux, no process to be had)
a death is noticed all the same, only not explained.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from potluck.runtime.loop import run
from potluck.runtime.zmq_transport import ZmqTransport
from potluck.stage.obituary import Traces, cause_of_death
from potluck.wire.errors import PotluckError
from potluck.wire.messages import ErrorInfo, Obituary, StateQuery, encode

log = logging.getLogger("potluck.stage")

CHILD = Path(__file__).with_name("witness_child.py")
REPORT_S = 5.0
"""What the broker gets to take the report."""
END_S = 2.0
"""What the witness gets to end when all is well."""


class Witness:
    """The stage's end of it. Without a process it does nothing."""

    def __init__(self, device: str, process: subprocess.Popen[bytes] | None = None) -> None:
        self.device = device
        self.process = process

    def watch(self, broker: str, stage: str) -> None:
        """From now on a death is reported to this broker, as that of this stage."""
        told = json.dumps({"broker": broker, "stage": stage, "device": self.device})
        self._write(b"watch " + told.encode() + b"\n")

    def all_is_well(self) -> None:
        """The stage ends in order, and its witness with it."""
        if self.process is None:
            return
        faulthandler.disable()
        self._write(b"well\n")
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def _write(self, line: bytes) -> None:
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(OSError):  # somebody has killed the witness
                self.process.stdin.write(line)


@contextlib.contextmanager
def witness(device: str) -> Iterator[Witness]:
    """A witness of this process until the block is left, by whatever way that is one of this program's own."""
    made = Witness(device, _start())
    if made.process is not None and made.process.stdin is not None:
        made.watch("", "")
        faulthandler.enable(made.process.stdin.fileno())
    try:
        yield made
    finally:
        made.all_is_well()


def _start() -> subprocess.Popen[bytes] | None:
    if sys.platform != "linux":
        return None
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(CHILD), str(os.getpid())],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # signals for the stage's group are not for it
        )
    except OSError as error:
        log.warning(
            "No witness could be started: what this stage dies of, if it does, will not be known (%s).", error
        )
        return None


# ---- the report


async def report(broker: str, stage: str, error: PotluckError) -> None:
    """Tells the broker, and waits until it has heard it. Raises TimeoutError."""
    transport = ZmqTransport()
    try:
        dealer = transport.dealer(broker, f"witness of {stage}"[:255])
        dealer.send(encode(Obituary(stage, ErrorInfo.of(error))))
        dealer.send(encode(StateQuery()))  # an obituary has no answer; this has one, and comes after it
        async with asyncio.timeout(REPORT_S):
            await dealer.recv()
    finally:
        transport.close()


def main(told: str, crash: str, status: str, killed_in: str) -> None:
    """Says what has happened here, and to the broker."""
    about = json.loads(told or "{}")
    traces = Traces(None if int(status) < 0 else int(status), crash, killed_in)
    error = cause_of_death(about.get("device") or "This stage", about.get("stage", ""), traces)
    sys.stderr.write(f"{crash}potluck-stage: {error}\n")
    sys.stderr.flush()
    if about.get("broker"):
        with contextlib.suppress(TimeoutError, PotluckError):
            run(report(about["broker"], about["stage"], error))


if __name__ == "__main__":
    main(*sys.argv[1:])


__all__ = ["Witness", "witness"]
