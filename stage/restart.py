"""A stage whose engine hangs starts its process anew: a thread that hangs in a driver ends with its process only.

Not for ever: an engine that hangs again and again needs somebody to look at it. The times of former restarts are handed
on by an environment variable.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from typing import NoReturn

from potluck.wire.errors import EngineHangsError

log = logging.getLogger("potluck.stage")

RESTARTS = "POTLUCK_STAGE_RESTARTS"
"""Seconds since 1970 of the restarts so far, with spaces between."""
MOST = 3
WITHIN_S = 3600.0


def times_with(before: str, now_s: float) -> str | None:
    """What `RESTARTS` is after one more restart at `now_s`; None if there were enough of them lately."""
    recent = []
    for word in before.split():
        with contextlib.suppress(ValueError):
            if 0 <= now_s - float(word) < WITHIN_S:
                recent.append(word)
    return None if len(recent) >= MOST else " ".join([*recent, f"{now_s:.0f}"])


def restart(error: EngineHangsError) -> NoReturn:
    """Takes this process's place with the same arguments. Raises `error` if that was done often enough."""
    times = times_with(os.environ.get(RESTARTS, ""), time.time())
    if times is None:
        log.error("It has hung %d times within an hour, and is not started again.", MOST + 1)
        raise error
    log.warning("Starting anew, as a fresh stage.")
    os.environ[RESTARTS] = times
    logging.shutdown()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


__all__ = ["MOST", "RESTARTS", "WITHIN_S", "restart", "times_with"]
