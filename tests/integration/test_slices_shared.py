"""Several processes may want the same slice at once, and any of them may be killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from potluck.model.facts import read_facts
from potluck.model.slices import ensure_slice, write_slice
from tiny_models import write_tiny

WRITER = """
import os, sys
from pathlib import Path
from potluck.model import slices
from potluck.model.facts import read_facts

source, cache, stop_before_the_end = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "stop"
if stop_before_the_end:
    def stop(_handle):
        print("written", flush=True)
        sys.stdin.readline()
    slices.os.fsync = stop
print(slices.ensure_slice(source, read_facts(source), 0, 2, cache).slice_path.stat().st_ino, flush=True)
"""


def start(source: Path, cache: Path, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(source), str(cache), how]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_processes_that_want_one_slice_share_one_file(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "m.gguf")
    cache = tmp_path / "cache"
    processes = [start(source, cache, "go") for _ in range(3)]
    results = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(set(results)) == 1
    assert len(list(cache.rglob("*.gguf*"))) == 1


def test_slice_of_a_killed_writer_is_not_seen_and_is_written_by_the_next(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "m.gguf")
    cache = tmp_path / "cache"
    with start(source, cache, "stop") as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "written\n"
        assert [path.suffix for path in cache.rglob("*.gguf*")] == [".part"]
        killed.send_signal(signal.SIGKILL)
    path = ensure_slice(source, read_facts(source), 0, 2, cache).slice_path
    assert list(cache.rglob("*.gguf*")) == [path]
    write_slice(source, 0, 2, tmp_path / "fresh.gguf")
    assert path.read_bytes() == (tmp_path / "fresh.gguf").read_bytes()
