"""A memory limit for one process, by a control group of its own (Linux, root)."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryGroup:
    """A group with a limit."""

    folder: Path

    def add(self, pid: int) -> None:
        """From now on the process and what it starts count against the limit."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    @property
    def within(self) -> list[str]:
        """Before a command: it is in the group from its first instruction on."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs")]

    @property
    def kills(self) -> int:
        """How often the kernel has killed something in it for lack of memory."""
        for name in ("memory.oom_control", "memory.events"):
            with contextlib.suppress(OSError):
                found = re.search(r"^oom_kill (\d+)$", (self.folder / name).read_text(), re.MULTILINE)
                return int(found[1]) if found else 0
        raise AssertionError(f"{self.folder} does not say")


@contextlib.contextmanager
def memory_limit(limit_bytes: int) -> Iterator[MemoryGroup]:
    """A new group, removed on leaving. Skips the test, loudly, where that can't be."""
    version_1 = ROOT / "memory"
    parent = version_1 if version_1.is_dir() else ROOT
    folder = parent / f"potluck-test-{secrets.token_hex(4)}"
    limit = "memory.limit_in_bytes" if parent is version_1 else "memory.max"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(limit_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"NOTHING WAS TESTED UNDER A MEMORY LIMIT: {error} (root and a memory cgroup are needed)")
    try:
        yield MemoryGroup(folder)
    finally:
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (parent / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):
            folder.rmdir()
