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
    """The smallest limit."""
    free_bytes: int = 0
    """What the group with the least room has left; page cache that can be dropped counts as free."""
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
    return Container(
        min((limit for limit, _ in memory), default=0),
        min((free for _, free in memory), default=0),
        min(quotas, default=0.0),
    )


def _memory_limits(cgroup: str, read: Read) -> Iterator[tuple[int, int]]:
    """Limit and free bytes of each group that has a limit."""
    for folder in _folders(cgroup, "memory", ("/sys/fs/cgroup/memory",)):
        limit = _number(read(f"{folder}/memory.limit_in_bytes"))
        used = _number(read(f"{folder}/memory.usage_in_bytes"))
        stat = read(f"{folder}/memory.stat") or ""
        # The groups around a container's own may not be seen from inside it; their limits are told all the same.
        around = _stat(stat, "hierarchical_memory_limit")
        if limit is not None and around:
            limit = min(limit, around)
        if limit is not None and used is not None and limit < UNLIMITED:
            cache = _stat(stat, "total_inactive_file") + _stat(stat, "total_active_file")
            yield limit, max(0, limit - max(0, used - cache))
    for folder in _folders(cgroup, "", ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")):
        # above memory.high nothing is killed, but everything waits: a limit as good as the other one
        limits = [_number(read(f"{folder}/memory.{name}")) for name in ("max", "high")]
        used = _number(read(f"{folder}/memory.current"))
        if used is None:
            continue
        stat = read(f"{folder}/memory.stat") or ""
        cache = _stat(stat, "inactive_file") + _stat(stat, "active_file")
        for limit in limits:
            if limit is not None:
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


def threads_for(cores: int, usable: int, quota: float) -> int:
    """Threads to compute with by default: physical cores minus one, so that the machine stays usable; at least one.

    Not more than the cores that the process may run on (`usable`), nor than whole cores of its quota (0: none): threads
    beyond it would all be halted together.
    """
    allowed = min(usable, int(quota)) if quota > 0 else usable
    return max(1, min(cores - 1, allowed))


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
    backend: str
    """The interface by which it is reached: CUDA, Vulkan, ..."""
    description: str
    kind: int
    memory_bytes: int
    free_bytes: int
    id: str = ""
    """The same whatever interface lists it, such as its place on the PCI bus; empty where it is not known."""

    @property
    def shares_memory(self) -> bool:
        """Whether its memory is the machine's own: integrated GPUs, and all of Apple's."""
        return self.kind == INTEGRATED_GPU or self.backend == METAL


METAL = "Metal"
_BACKENDS = {"MTL": METAL}
"""Interfaces for which people have another name than llama.cpp."""


def backend_name(registered: str) -> str:
    """An interface's name for people."""
    return _BACKENDS.get(registered, registered)


def gpus_among(devices: Sequence[BackendDevice]) -> list[BackendDevice]:
    """Those that llama.cpp will put layers on; what others have is nobody's to offer.

    As llama.cpp chooses: a GPU that two interfaces list counts once, integrated ones only where there is no other, and
    then those of one interface. One whose memory is not known has none to offer. Other machines (RPC) are none of ours.
    """
    alone: list[BackendDevice] = []
    integrated: list[BackendDevice] = []
    for device in devices:
        if device.memory_bytes <= 0 or device.backend == "RPC":
            continue
        if device.kind == GPU and not any(_same(device, other, devices) for other in alone):
            alone.append(device)
        if device.kind == INTEGRATED_GPU and all(device.backend == other.backend for other in integrated):
            integrated.append(device)
    return alone or integrated


def _same(one: BackendDevice, other: BackendDevice, devices: Sequence[BackendDevice]) -> bool:
    """Whether two interfaces list one GPU: by its id, or as the same one of those with its description."""
    if one.id and other.id:
        return one.id == other.id
    return one.backend != other.backend and _which(one, devices) == _which(other, devices)


def _which(device: BackendDevice, devices: Sequence[BackendDevice]) -> tuple[str, int]:
    """Its description, and how many of this description its interface lists before it."""
    before = devices[: devices.index(device)]
    alike = [one for one in before if (one.backend, one.description) == (device.backend, device.description)]
    return device.description, len(alike)


# ---- what layers may take

OWN_GROWTH_BYTES = 64 << 20
"""What a stage's process needs besides weights, caches and compute buffers and what it had when it registered.

Measured with SmolLM2 in containers of 200 MB: 10 to 16 MB of growth until it serves (arrays of micro-batches, sampling,
sockets, what measuring leaves behind), and 25 MB of mapped code of Python and llama.cpp, which the kernel counts as
cache and so as free, though it is read again and again. The rest is room for vocabularies that are larger.
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
    """GPU memory set aside for weights and caches: no more than this is offered, nor than the limit above."""
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
