"""What a stage has died of, from what its witness could find out: the error that those who wait are told. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from potluck.wire.errors import OutOfMemoryError, PotluckError, StageLostError

SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV"}
"""Linux's numbers of those that end a process by a fault or by force."""
KILL, INTERRUPT, TERMINATE = 9, 2, 15
STOPPED_AT_ONCE = 128
"""A program that was told to end for the second time exits with this and the signal's number."""
AGAIN = "Start potluck-stage there again."


@dataclass(frozen=True, slots=True)
class Traces:
    """What is left of a stage. `status` as wait(2) gives it, None if somebody else has fetched it."""

    status: int | None = None
    crash: str = ""
    """What Python wrote when a fault ended it."""
    killed_in: str = ""
    """Where the kernel has just killed something for lack of memory: the stage's own `group`, the `machine`, or not."""

    @property
    def signal(self) -> int:
        """What ended it, 0 if no signal did or none is known."""
        return 0 if self.status is None else self.status & 0x7F

    @property
    def code(self) -> int | None:
        """What it exited with; None if it did not exit or that is not known."""
        return None if self.status is None or self.signal else self.status >> 8


def cause_of_death(device: str, stage: str, traces: Traces) -> PotluckError:
    """The likeliest cause, with what to do next."""
    what, hint, kind = _told(traces)
    return kind(f"{device} {what}.", hint=hint, device=device, stage=stage or None)


def _told(traces: Traces) -> tuple[str, str, type[PotluckError]]:
    number, code = traces.signal, traces.code
    fault = re.search(r"^Fatal Python error: (.{1,200})$", traces.crash, re.MULTILINE)
    if fault or (number in SIGNALS and number != KILL):
        named = " ".join(part for part in (SIGNALS.get(number, ""), f"({fault[1]})" if fault else "") if part)
        return f"crashed: {named}", f"Its log may say where. {AGAIN}", StageLostError
    if traces.killed_in and number in (0, KILL) and code is None:
        hint = "Start potluck-stage there again with a lower --max-memory-gb, or close other programs first."
        return "was killed by the kernel for lack of memory", hint, OutOfMemoryError
    if number:
        hint = f"Its machine's log may say by whom: a program may guard its memory. {AGAIN}"
        return f"was killed by {SIGNALS.get(number, f'signal {number}')}", hint, StageLostError
    if code in (STOPPED_AT_ONCE + INTERRUPT, STOPPED_AT_ONCE + TERMINATE):
        return "was stopped at once, by a second signal", AGAIN, StageLostError
    if code is not None:
        return f"ended with status {code}, without a word", f"Its log may say why. {AGAIN}", StageLostError
    return (
        "ended without a word: killed by SIGKILL or crashed",
        f"Its log may say why. {AGAIN}",
        StageLostError,
    )
