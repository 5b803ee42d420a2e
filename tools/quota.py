"""A share of a core for a process, by a cgroup of its own (Linux, root): to try what a slow device does to a plan."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from potluck.wire.errors import UsageError

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 10_000
"""Short, so that a share is a slower processor and not one that stops for long."""


class Quota:
    """A cgroup that processes can be put into."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, pid: int) -> None:
        """From now on the process has the group's share."""
        (self._folder / "cgroup.procs").write_text(str(pid))


@contextlib.contextmanager
def cpu_quota(name: str, share: float) -> Iterator[Quota]:
    """A group that gets `share` of one core, removed on leaving. Raises UsageError where that can't be done."""
    version_1 = ROOT / "cpu"
    parent = version_1 if version_1.is_dir() else ROOT
    folder = parent / f"potluck-{os.getpid()}-{name}"
    quota = max(1000, round(share * PERIOD_US))
    try:
        folder.mkdir()
        if parent is version_1:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
    except OSError as error:
        raise UsageError(
            f"A share of a core can't be set: {error.strerror} ({folder}).",
            hint="Run as root on Linux with cgroups, or compare cores without --share.",
        ) from error
    try:
        yield Quota(folder)
    finally:
        _remove(folder, parent)


def _remove(folder: Path, parent: Path) -> None:
    """A group goes only when it is empty: whoever is left goes back to the parent."""
    with contextlib.suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            (parent / "cgroup.procs").write_text(pid)
        folder.rmdir()
