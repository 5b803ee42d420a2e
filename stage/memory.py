"""Memory of this process: what it holds, and what it gives back.

glibc keeps what was freed for later, where it counts against a container.
"""

from __future__ import annotations

import ctypes
import gc
import sys

import psutil


def give_back() -> None:
    """Collects garbage and trims the heap, where the C library can."""
    gc.collect()
    trim()


def own_bytes() -> int:
    """Bytes of this process that are no file's; 0 where the system does not say."""
    trim()  # what was freed before would hide what comes next
    memory = psutil.Process().memory_info()
    shared = getattr(memory, "shared", None)
    return int(memory.rss - shared) if shared is not None else 0


def trim() -> None:
    """Gives back what was freed, where the C library can."""
    if sys.platform == "linux":
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if malloc_trim is not None:
            malloc_trim(0)
