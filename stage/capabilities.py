"""What this machine has, as the broker is told: asks the system and llama.cpp. Decides nothing; see `machine_facts`."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import ClassVar

import psutil

from potluck.stage.engines.llama_lib import library
from potluck.stage.machine_facts import (
    BackendDevice,
    Container,
    Owner,
    backend_name,
    container,
    cpu_name,
    features_in,
    gpus_among,
    offered,
    threads_for,
)
from potluck.wire.errors import EngineError
from potluck.wire.measures import Capabilities, Gpu

DISK_BLOCKS, DISK_BLOCK_BYTES = 16, 4 << 20
DISK_BUDGET_S = 0.5
TEXT_CHARS = 200


def capabilities(threads: int, owner: Owner, models: Sequence[Path], *, llama: bool = True) -> Capabilities:
    """What this machine has. `llama`: whether llama.cpp computes here, and is asked, too."""
    features, devices = _of_llama() if llama else ((), [])  # first: its libraries take memory
    box = container(_read)
    memory = psutil.virtual_memory()
    total = min(memory.total, box.memory_bytes or memory.total)
    free = min(memory.available, box.free_bytes) if box.memory_bytes else memory.available
    gpus = gpus_among(devices)
    own = psutil.Process().memory_info().rss
    offered_bytes, offered_vram_bytes = offered(owner, memory.total, memory.available, own, box, gpus)
    return Capabilities(
        cores=physical_cores(),
        threads=threads,
        cpu=_cpu()[:TEXT_CHARS],
        features=features[:64],
        cpu_quota=box.cpu_quota,
        memory_bytes=total,
        free_memory_bytes=free,
        container_memory_bytes=box.memory_bytes if box.memory_bytes < memory.total else 0,
        offered_bytes=offered_bytes,
        gpus=tuple(
            Gpu(
                gpu.description[:TEXT_CHARS],
                gpu.backend[:TEXT_CHARS],
                gpu.memory_bytes,
                gpu.free_bytes,
                gpu.shares_memory,
            )
            for gpu in gpus[:16]
        ),
        offered_vram_bytes=offered_vram_bytes,
        allow_cpu_fallback=owner.allow_cpu_fallback,
        disk_read_bytes_s=disk_speed(models[0]) if models else 0.0,
        power=_power(),
        system=f"{platform.system()} {platform.release()}"[:TEXT_CHARS],
        llama=binding_version(),
    )


def physical_cores() -> int:
    """Of this machine; at least 1."""
    return psutil.cpu_count(logical=False) or os.cpu_count() or 1


def default_threads() -> int:
    """Physical cores minus one, at least one; not more than this process or its container may use."""
    cores = physical_cores()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return threads_for(cores, usable, container(_read).cpu_quota)


def free_memory_bytes() -> int:
    """What this process could take now: of the machine, or of the container that leaves it least."""
    free = psutil.virtual_memory().available
    box = container(_read)
    return min(free, box.free_bytes) if box.memory_bytes else free


def memory_limits() -> Container:
    """What the container allows this process."""
    return container(_read)


def disk_speed(path: Path) -> float:
    """Bytes per second at which blocks of the file come from the disk; 0 where that can't be known.

    Reads past the system's cache, or drops the blocks from it first and checks that they are gone: a file that some
    other program holds mapped stays in memory, and would be read from there.
    """
    direct = getattr(os, "O_DIRECT", 0)
    for flags in (direct, 0) if direct else (0,):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY | flags)
            try:
                return _read_speed(file, dropping=not flags)
            finally:
                os.close(file)
    return 0.0


def _read_speed(file: int, *, dropping: bool) -> float:
    """Raises OSError, above all where the file system can't read past its cache."""
    size = os.fstat(file).st_size
    block = min(DISK_BLOCK_BYTES, size // DISK_BLOCKS // mmap.PAGESIZE * mmap.PAGESIZE)
    if block == 0 or (dropping and not hasattr(os, "posix_fadvise")):
        return 0.0
    read, spent_s = 0, 0.0
    with mmap.mmap(-1, block) as room:  # direct reads need whole pages to read into
        for index in range(DISK_BLOCKS):
            at = size // DISK_BLOCKS * index // mmap.PAGESIZE * mmap.PAGESIZE
            if dropping and not _dropped(file, at, block):
                continue
            begun_s = time.perf_counter()
            read += os.preadv(file, [room], at)
            spent_s += time.perf_counter() - begun_s
            if spent_s > DISK_BUDGET_S:
                break
    return read / spent_s if spent_s > 0 else 0.0


def _dropped(file: int, at: int, count: int) -> bool:
    """Whether the system holds none of these bytes any more, as far as it can be asked."""
    os.posix_fadvise(file, at, count, os.POSIX_FADV_DONTNEED)
    without_waiting = getattr(os, "RWF_NOWAIT", 0)
    if not without_waiting:
        return False
    try:
        os.preadv(file, [bytearray(1)], at, without_waiting)
    except BlockingIOError:
        return True
    except OSError:  # this file system can't say
        return False
    return False


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(errors="replace")[:65_536]
    except OSError:
        return None


def _cpu() -> str:
    if sys.platform == "darwin":
        try:
            asked = subprocess.run(
                ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"],
                capture_output=True,
                text=True,
                timeout=5,
                check=True,
            )
            return asked.stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return platform.processor() or platform.machine()
    name = cpu_name(_read("/proc/cpuinfo") or "", _read("/proc/device-tree/model"))
    return name or platform.processor() or platform.machine()


def _power() -> str:
    sensors = getattr(psutil, "sensors_battery", None)
    try:
        battery = sensors() if sensors is not None else None
    except (OSError, ValueError, NotImplementedError):  # a container without /sys/class/power_supply
        return ""
    if battery is None or battery.power_plugged is None:
        return ""
    return "mains" if battery.power_plugged else "battery"


def binding_version() -> str:
    """Of llama-cpp-python; empty where it is not installed."""
    try:
        return version("llama-cpp-python")
    except PackageNotFoundError:
        return ""


def _of_llama() -> tuple[tuple[str, ...], list[BackendDevice]]:
    """Instruction sets and devices, as llama.cpp says. Nothing where it can't be loaded: loading a slice says why."""
    try:
        found = library()
        return features_in(found.features), _devices(found.folder)
    except (EngineError, OSError, AttributeError):
        return (), []


class _Properties(ctypes.Structure):
    """ggml_backend_dev_props of the pinned llama.cpp."""

    _fields_: ClassVar = [
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", ctypes.c_size_t),
        ("memory_total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        ("caps", ctypes.c_bool * 32),  # five are used; the rest is room for those to come
    ]


def _devices(folder: Path) -> list[BackendDevice]:
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    prefix = "" if sys.platform == "win32" else "lib"
    registry = ctypes.CDLL(str(folder / f"{prefix}ggml.{suffix}"))
    base = ctypes.CDLL(str(folder / f"{prefix}ggml-base.{suffix}"))
    pointer = ctypes.c_void_p
    for library_, name, takes, gives in (
        (registry, "ggml_backend_dev_count", [], ctypes.c_size_t),
        (registry, "ggml_backend_dev_get", [ctypes.c_size_t], pointer),
        (base, "ggml_backend_dev_get_props", [pointer, ctypes.POINTER(_Properties)], None),
        (base, "ggml_backend_dev_backend_reg", [pointer], pointer),
        (base, "ggml_backend_reg_name", [pointer], ctypes.c_char_p),
    ):
        function = getattr(library_, name)
        function.argtypes, function.restype = takes, gives
    devices = []
    for index in range(registry.ggml_backend_dev_count()):
        device = registry.ggml_backend_dev_get(index)
        found = _Properties()
        base.ggml_backend_dev_get_props(device, ctypes.byref(found))
        interface = base.ggml_backend_reg_name(base.ggml_backend_dev_backend_reg(device))
        devices.append(
            BackendDevice(
                name=_text(found.name),
                backend=backend_name(_text(interface)),
                description=_text(found.description),
                kind=found.type,
                memory_bytes=found.memory_total,
                free_bytes=found.memory_free,
                id=_text(found.device_id),
            )
        )
    return devices


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode(errors="replace")


__all__ = [
    "binding_version",
    "capabilities",
    "default_threads",
    "disk_speed",
    "free_memory_bytes",
    "memory_limits",
    "physical_cores",
]
