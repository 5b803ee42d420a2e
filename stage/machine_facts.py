"""What a machine's own files say of it: texts in, figures out. Pure; `capabilities` reads the files.

Sources: proc(5), the kernel's documentation of cgroup v1 (memory, cpu) and v2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

UNLIMITED = 1 << 60
"""cgroup v1 writes a number of this size where there is no limit."""

Read = Callable[[str], str | None]
"""A file's text by its path; None if it is not there."""


@dataclass(frozen=True, slots=True)
class Container:
    """What the groups that a process is in allow it. 0: no limit."""

    memory_bytes: int = 0
    free_bytes: int = 0
    """Of the tightest group's limit, what nobody in it uses; page cache that can be dropped counts as free."""
    cpu_quota: float = 0.0
    """Cores."""


def cpu_name(cpuinfo: str, device_tree: str | None) -> str:
    """The processor's name from /proc/cpuinfo, on ARM boards the board's name."""
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    if found:
        return " ".join(found[1].split())
    if device_tree:
        return device_tree.strip("\0 \n")
    found = re.search(r"^(?:Hardware|cpu model)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return found[1].strip() if found else ""


def features_in(text: str) -> tuple[str, ...]:
    """Instruction sets that are on, from llama.cpp's line `CPU : SSE3 = 1 | AVX = 0 | ...`."""
    return tuple(re.findall(r"(?:^|[|:])\s*(\w+) = 1\b", text))


def container(read: Read) -> Container:
    """The limits of this process's control groups and of every group around them."""
    text = read("/proc/self/cgroup") or ""
    memory = list(_memory_limits(text, read))
    quotas = [quota for quota in _quotas(text, read) if quota > 0]
    limit, free = min(memory, key=lambda pair: pair[1], default=(0, 0))
    return Container(limit, free, min(quotas, default=0.0))


def _memory_limits(cgroup: str, read: Read) -> Iterator[tuple[int, int]]:
    """Limit and free bytes of each group that has a limit."""
    for folder in _folders(cgroup, "memory", ("/sys/fs/cgroup/memory",)):
        limit = _number(read(f"{folder}/memory.limit_in_bytes"))
        used = _number(read(f"{folder}/memory.usage_in_bytes"))
        if limit is not None and used is not None and limit < UNLIMITED:
            stat = read(f"{folder}/memory.stat") or ""
            cache = _stat(stat, "total_inactive_file") + _stat(stat, "total_active_file")
            yield limit, max(0, limit - max(0, used - cache))
    for folder in _folders(cgroup, "", ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")):
        limit = _number(read(f"{folder}/memory.max"))
        used = _number(read(f"{folder}/memory.current"))
        if limit is not None and used is not None:
            stat = read(f"{folder}/memory.stat") or ""
            cache = _stat(stat, "inactive_file") + _stat(stat, "active_file")
            yield limit, max(0, limit - max(0, used - cache))


def _quotas(cgroup: str, read: Read) -> Iterator[float]:
    """Cores that each group may use."""
    for folder in _folders(cgroup, "cpu", ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct")):
        quota = _number(read(f"{folder}/cpu.cfs_quota_us"))
        period = _number(read(f"{folder}/cpu.cfs_period_us"))
        if quota is not None and period and quota > 0:
            yield quota / period
    for folder in _folders(cgroup, "", ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")):
        parts = (read(f"{folder}/cpu.max") or "").split()
        if len(parts) == 2 and parts[0].isdigit() and parts[1].isdigit() and int(parts[1]):
            yield int(parts[0]) / int(parts[1])


def _folders(cgroup: str, controller: str, mounts: Sequence[str]) -> Iterator[str]:
    """The group's folders from the innermost one out, for a controller of v1, or for v2 if that is empty."""
    for line in cgroup.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller not in controllers.split(","):
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for mount in mounts:
            for count in range(len(parts), -1, -1):
                yield "/".join([mount, *parts[:count]])


def _number(text: str | None) -> int | None:
    text = (text or "").strip()
    return int(text) if re.fullmatch(r"-?\d{1,19}", text) else None


def _stat(text: str, key: str) -> int:
    found = re.search(rf"^{key} (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0


# ---- GPUs, as llama.cpp lists them

GPU, INTEGRATED_GPU = 1, 2
"""GGML_BACKEND_DEVICE_TYPE_GPU and _IGPU."""


@dataclass(frozen=True, slots=True)
class BackendDevice:
    """One device of llama.cpp's list."""

    name: str
    description: str
    kind: int
    memory_bytes: int
    free_bytes: int

    @property
    def shares_memory(self) -> bool:
        """Whether its memory is the machine's own: integrated GPUs, and all of Apple's."""
        return self.kind == INTEGRATED_GPU or self.name.lower().startswith(("metal", "mtl"))

    @property
    def backend(self) -> str:
        """CUDA, Vulkan, ...: the name without its number."""
        return self.name.rstrip("0123456789") or self.name


def gpus_among(devices: Sequence[BackendDevice]) -> list[BackendDevice]:
    """Those that compute with a memory of their own or the machine's; one that two interfaces list counts once."""
    found: dict[str, BackendDevice] = {}
    for device in devices:
        if device.kind in (GPU, INTEGRATED_GPU) and device.memory_bytes > 0:
            found.setdefault(f"{device.description}#{device.memory_bytes >> 28}#{device.name[-1:]}", device)
    return list(found.values())


# ---- what layers may take

OWN_GROWTH_BYTES = 64 << 20
"""What a stage's process takes besides weights, caches and compute buffers after it has registered: arrays of a
micro-batch, sampling, sockets, and what measuring leaves behind. Measured: 25 to 55 MB with SmolLM2.
"""
MACHINE_SHARE = 0.05
"""Of a machine's memory that is left to others, so that it stays usable. A container is there for the stage alone."""
VRAM_RESERVE_SHARE = 0.06
"""Of a GPU's free memory that drivers and scratch buffers take."""
GB = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Owner:
    """What the owner of the device allows. None: no limit."""

    max_memory_gb: float | None = None
    max_vram_gb: float | None = None
    vram_pool_gb: float | None = None
    """GPU memory set aside for weights and caches: with it exactly so much is offered, if there is as much."""
    allow_cpu_fallback: bool = True


def offered(
    owner: Owner,
    total_bytes: int,
    free_bytes: int,
    own_bytes: int,
    box: Container,
    gpus: Sequence[BackendDevice],
) -> tuple[int, int]:
    """Bytes of main memory and of GPU memory that layers may take.

    `own_bytes` is what this process has now; `max_memory_gb` is for all of it. A GPU that shares the main memory gets
    its part of what is offered of that, so the two never add up to more than there is.
    """
    free = free_bytes - round(MACHINE_SHARE * total_bytes)
    if box.memory_bytes and box.memory_bytes < total_bytes:
        free = min(free, box.free_bytes)
    if owner.max_memory_gb is not None:
        free = min(free, round(owner.max_memory_gb * GB) - own_bytes)
    memory = max(1, free - OWN_GROWTH_BYTES)  # 0 would mean that nothing is known
    limits = [value for value in (owner.max_vram_gb, owner.vram_pool_gb) if value is not None]
    most = round(min(limits) * GB) if limits else None
    alone = sum(round(gpu.free_bytes * (1 - VRAM_RESERVE_SHARE)) for gpu in gpus if not gpu.shares_memory)
    shared = sum(round(gpu.free_bytes * (1 - VRAM_RESERVE_SHARE)) for gpu in gpus if gpu.shares_memory)
    shared = min(shared, memory - 1)
    if most is not None:
        alone = min(alone, most)
        shared = min(shared, most - alone)
    return memory - shared, alone + shared
