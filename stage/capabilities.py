"""What this machine has, as the broker is told: asks the system and llama.cpp. Decides nothing; see `machine_facts`."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from potluck.stage.engines.llama_lib import library
from potluck.stage.machine_facts import (
    BackendDevice,
    Container,
    Owner,
    container,
    cpu_name,
    features_in,
    gpus_among,
    offered,
)
from potluck.wire.errors import EngineError
from potluck.wire.measures import Capabilities, Gpu

DISK_BLOCKS, DISK_BLOCK_BYTES = 16, 4 << 20
DISK_BUDGET_S = 0.5
TEXT_CHARS = 200


def capabilities(threads: int, owner: Owner, models: Sequence[Path], *, llama: bool = True) -> Capabilities:
    """What this machine has. `llama`: whether llama.cpp computes here, and is asked, too."""
    box = container(_read)
    memory = psutil.virtual_memory()
    total = min(memory.total, box.memory_bytes or memory.total)
    free = min(memory.available, box.free_bytes) if box.memory_bytes else memory.available
    features, devices = _of_llama() if llama else ((), [])
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
            Gpu(gpu.description[:TEXT_CHARS], gpu.backend[:TEXT_CHARS], gpu.memory_bytes, gpu.free_bytes)
            for gpu in gpus[:16]
        ),
        offered_vram_bytes=offered_vram_bytes,
        allow_cpu_fallback=owner.allow_cpu_fallback,
        disk_read_bytes_s=disk_speed(models[0]) if models else 0.0,
        power=_power(),
        system=f"{platform.system()} {platform.release()}"[:TEXT_CHARS],
        llama=_llama_version(),
    )


def physical_cores() -> int:
    """Of this machine; at least 1."""
    return psutil.cpu_count(logical=False) or os.cpu_count() or 1


def default_threads() -> int:
    """Physical cores minus one, at least one; not more than this process or its container may use."""
    cores = physical_cores()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    quota = container(_read).cpu_quota
    if quota > 0:
        usable = min(usable, max(1, int(quota)))
    return max(1, min(cores - 1, usable))


def memory_limits() -> Container:
    """What the container allows this process."""
    return container(_read)


def disk_speed(path: Path) -> float:
    """Bytes per second at which blocks of the file come from the disk; 0 where that can't be known.

    What the system holds in memory of these blocks is dropped first, or it would answer for the disk.
    """
    if not hasattr(os, "posix_fadvise"):
        return 0.0
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            block = min(DISK_BLOCK_BYTES, size // DISK_BLOCKS // 4096 * 4096)
            if block == 0:
                return 0.0
            read, begun_s = 0, 0.0
            spent_s = 0.0
            for index in range(DISK_BLOCKS):
                at = size // DISK_BLOCKS * index // 4096 * 4096
                os.posix_fadvise(file.fileno(), at, block, os.POSIX_FADV_DONTNEED)
                begun_s = time.perf_counter()
                read += len(os.pread(file.fileno(), block, at))
                spent_s += time.perf_counter() - begun_s
                if spent_s > DISK_BUDGET_S:
                    break
    except OSError:
        return 0.0
    return read / spent_s if spent_s > 0 else 0.0


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
    battery = sensors() if sensors is not None else None
    if battery is None or battery.power_plugged is None:
        return ""
    return "mains" if battery.power_plugged else "battery"


def _llama_version() -> str:
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


def _devices(folder: Path) -> list[BackendDevice]:
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    prefix = "" if sys.platform == "win32" else "lib"
    registry = ctypes.CDLL(str(folder / f"{prefix}ggml.{suffix}"))
    base = ctypes.CDLL(str(folder / f"{prefix}ggml-base.{suffix}"))
    registry.ggml_backend_dev_count.restype = ctypes.c_size_t
    registry.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    registry.ggml_backend_dev_get.restype = ctypes.c_void_p
    for name in ("name", "description"):
        function = getattr(base, f"ggml_backend_dev_{name}")
        function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_char_p
    base.ggml_backend_dev_type.argtypes = [ctypes.c_void_p]
    base.ggml_backend_dev_type.restype = ctypes.c_int
    size = ctypes.POINTER(ctypes.c_size_t)
    base.ggml_backend_dev_memory.argtypes = [ctypes.c_void_p, size, size]
    base.ggml_backend_dev_memory.restype = None
    devices = []
    for index in range(registry.ggml_backend_dev_count()):
        device = registry.ggml_backend_dev_get(index)
        free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
        base.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        devices.append(
            BackendDevice(
                name=(base.ggml_backend_dev_name(device) or b"").decode(errors="replace"),
                description=(base.ggml_backend_dev_description(device) or b"").decode(errors="replace"),
                kind=base.ggml_backend_dev_type(device),
                memory_bytes=total.value,
                free_bytes=free.value,
            )
        )
    return devices


__all__ = ["capabilities", "default_threads", "disk_speed", "memory_limits", "physical_cores"]
