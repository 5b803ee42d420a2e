"""What processes hold at a quiet moment, and whether that is more than before.

A reading is taken when nobody is served, the same devices are there as at the reading before, and numbers have stopped
changing. Then the number of open files and of threads says exactly what is kept for nothing; memory does so less
exactly, because an allocator keeps what it may need again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

MB = 1_000_000
SPARE_FILES = 4
"""Connections that are kept open for a while, such as those that answer pings, may be there or not."""
SPARE_THREADS = 1
BASE_BYTES = 4 * MB
"""What an allocator's pools may still grow by after a third of the run."""
REQUEST_BYTES = 4_000
"""And what each request since then may leave: half a page. The shortest prompt with its answer is more than that."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One process. `rss_bytes` is what is in memory, of that `own_bytes` what is not a page of a file."""

    pid: int
    rss_bytes: int
    own_bytes: int
    files: int
    threads: int
    held_bytes: int = 0
    """Of its own memory, what it says its slices take: which it holds is the plan's choice at that moment."""

    @property
    def rest_bytes(self) -> int:
        """Its own memory without its slices: what may not grow."""
        return self.own_bytes - self.held_bytes

    @property
    def counts(self) -> tuple[int, int]:
        """What is exact."""
        return self.files, self.threads

    def to_dict(self) -> dict[str, int]:
        """As JSON has it."""
        return {
            "pid": self.pid,
            "rss_bytes": self.rss_bytes,
            "own_bytes": self.own_bytes,
            "files": self.files,
            "threads": self.threads,
            "held_bytes": self.held_bytes,
        }


@dataclass(frozen=True, slots=True)
class Census:
    """All processes at one moment."""

    name: str
    seconds: float
    """Since the cluster served."""
    requests: int
    """Ended by then."""
    readings: Mapping[str, Reading]


def read(pid: int, held_bytes: int = 0) -> Reading:
    """A process now, whose slices take `held_bytes`. Raises psutil.NoSuchProcess."""
    process = psutil.Process(pid)
    with process.oneshot():
        rss = process.memory_info().rss
        count = getattr(process, "num_fds", None) or process.num_handles  # type: ignore[attr-defined]
        handles = int(count())
        return Reading(pid, rss, _own_bytes(pid, rss), handles, process.num_threads(), held_bytes)


def _own_bytes(pid: int, rss: int) -> int:
    """Anonymous memory where the system says it; weights are pages of a file, and come and go."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    return rss


def grown(censuses: Sequence[Census]) -> list[str]:
    """What the last census has more of than the ones after warm-up, in words; nothing if all is flat.

    The first census is that of a cluster that has served nobody; by the second, a third of the run later, everything
    is filled that is filled once: pools, slices, compiled patterns. From then on nothing may grow.
    """
    *before, last = censuses[1:]
    found = []
    for name, reading in last.readings.items():
        earlier = [
            (census, census.readings[name])
            for census in before
            if name in census.readings and census.readings[name].pid == reading.pid
        ]
        if not earlier:
            continue
        since, _ = earlier[-1]
        allowed = max(r.rest_bytes for _, r in earlier) + BASE_BYTES
        allowed += REQUEST_BYTES * (last.requests - since.requests)
        if reading.rest_bytes > allowed:
            found.append(
                f"{name}: {reading.rest_bytes / MB:.1f} MB of memory besides what its slices take, "
                f"at most {allowed / MB:.1f} MB expected"
            )
        files = max(r.files for _, r in earlier)
        if reading.files > files + SPARE_FILES:
            found.append(f"{name}: {reading.files} open files, {files} before")
        threads = max(r.threads for _, r in earlier)
        if reading.threads > threads + SPARE_THREADS:
            found.append(f"{name}: {reading.threads} threads, {threads} before")
    return found


__all__ = ["Census", "Reading", "grown", "read"]
