"""One measurement at a time on a machine: two at once would slow each other down. Pure but for a lock file.

The system drops the lock with the process that holds it, so one that is killed blocks nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from potluck.stage.holder import Progressed
from potluck.wire.errors import ModelError, Phase

LOCK_S = 300.0
"""How long another stage of this machine may measure before this one measures beside it."""
POLL_S = 0.2


@contextlib.contextmanager
def alone(
    cache_dir: Path,
    clock: Callable[[], float],
    pause: Callable[[float], None],
    wanted: Callable[[], bool],
    progressed: Progressed,
) -> Iterator[None]:
    """While no other process of this machine measures, or after `LOCK_S`, or when it is no longer `wanted`.

    What a measurement that was killed has left behind is removed. Raises ModelError.
    """
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        lock = (cache_dir / "measuring.lock").open("a")
    except OSError as error:
        raise ModelError(
            f"{cache_dir} can't be written: {error.strerror}.",
            hint="Set another cache folder.",
            phase=Phase.MEASURE,
        ) from error
    with lock:
        begun_s, free = clock(), False
        while wanted() and not free:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                free = True
            except BlockingIOError:
                if clock() - begun_s > LOCK_S:
                    break
                progressed(Phase.MEASURE, 0, 1)
                pause(POLL_S)
        if free:
            for left in cache_dir.glob("bench-*"):
                shutil.rmtree(left, ignore_errors=True)
        yield


__all__ = ["alone"]
