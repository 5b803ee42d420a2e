"""Which threads the kernel should wake first: those that move frames, before those that compute. Linux 6.12 and later.

A thread that asks for a short slice gets the processor from one with a longer slice as soon as it wakes (EEVDF), and
gives it back soon. Without that, a frame can wait a few milliseconds for a compute thread on the same core. No
privilege is needed; where the kernel or system can't do it, nothing happens.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys

_SYSCALL = {"x86_64": 314, "aarch64": 274}
"""sched_setattr, see sched_setattr(2) and the kernel's syscall tables."""
SHORT_SLICE_NS = 100_000
"""The shortest slice that Linux grants."""


class _SchedAttr(ctypes.Structure):
    """struct sched_attr, version 0, of linux/sched/types.h."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime_ns", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("period_ns", ctypes.c_uint64),
    )


def prefer_latency() -> bool:
    """For the calling thread and those it starts from now on. False where that is not to be had."""
    return _set_slice(SHORT_SLICE_NS)


def prefer_throughput() -> bool:
    """The kernel's own slice again, for a thread that computes."""
    return _set_slice(0)


def _set_slice(slice_ns: int) -> bool:
    if os.environ.get("NOSLICE"):
        return False
    number = _SYSCALL.get(platform.machine()) if sys.platform == "linux" else None
    if number is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
    except OSError:
        nice = 0
    attr = _SchedAttr(size=ctypes.sizeof(_SchedAttr), nice=nice, runtime_ns=slice_ns)
    return bool(libc.syscall(number, 0, ctypes.byref(attr), 0) == 0)
