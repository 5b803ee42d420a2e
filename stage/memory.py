"""Gives memory that was freed back to the system: glibc keeps it for later, where it counts against a container."""

from __future__ import annotations

import ctypes
import gc
import sys


def give_back() -> None:
    """Collects garbage and trims the heap, where the C library can."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
