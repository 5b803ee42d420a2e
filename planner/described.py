"""Machines that are only described: a person's figures turned into candidates and links as if measured. Pure.

A cluster is plain data (from a YAML file; docs/planning.md has every key with its unit). Speeds come from `roofline`,
models from `anatomy`. 1 GB is 1e9 bytes, 1 Mbit is 1e6 bits.

Two devices are connected by the slower of the sender's way up and the receiver's way down; one that has no connection
of its own has the network's. The time there and back is the network's, or the sum of those that have one of their own.
A link that is written out wins over both.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from potluck.planner.anatomy import Anatomy, ModelEntry, anatomy_of_entry
from potluck.planner.plan import FREE, Candidate, Demand, Link, Network
from potluck.planner.roofline import Processor, profile, together
from potluck.wire import limits
from potluck.wire.errors import SettingsError
from potluck.wire.ids import DeviceName, StageId
from potluck.wire.parts import Name
from potluck.wire.plain import convert

PAGE = "docs/planning.md"
GB = 1e9

DeviceLabel = Annotated[str, Meta(min_length=1, max_length=121, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""Room is left for the number of a `count`."""
Figure = Annotated[float, Meta(ge=0.001, le=1e9)]
Milliseconds = Annotated[float, Meta(ge=0.0, le=1e6)]


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the description."""


class GpuEntry(_Part, frozen=True):
    """One graphics processor."""

    vram_gb: Figure
    """What Potluck may take of it."""
    memory_gb_s: Figure
    gflops: Figure
    shares_memory: bool = False
    """Its memory is part of the device's `memory_gb`: integrated graphics, Apple's processors."""


class ConnectionEntry(_Part, frozen=True):
    """How one device is connected, where it differs from the network: Wi-Fi, a slow adapter."""

    up_mbit_s: Figure | None = None
    down_mbit_s: Figure | None = None
    rtt_ms: Milliseconds | None = None
    """To a device on the network and back."""


class DeviceEntry(_Part, frozen=True):
    """One machine, or `count` of a kind."""

    name: DeviceLabel
    memory_gb_s: Figure
    """Memory bandwidth that is reached."""
    gflops: Figure
    """1e9 operations per second that a prompt reaches."""
    memory_gb: Figure | None = None
    """What Potluck may take."""
    total_memory_gb: Figure | None = None
    """Of the machine: Potluck may take it less `reserve_gb`."""
    reserve_gb: Annotated[float, Meta(ge=0.0, le=1e6)] = 2.5
    """For the system and a browser."""
    gpus: Annotated[tuple[GpuEntry, ...], Meta(max_length=16)] = ()
    allow_cpu_fallback: bool = True
    overhead_ms: Milliseconds = 1.0
    """What a micro-batch costs besides its layers."""
    connection: ConnectionEntry = ConnectionEntry()
    count: Annotated[int, Meta(ge=1, le=limits.STAGES)] = 1


class LinkEntry(_Part, frozen=True):
    """Two devices between which it is different. With `one_way`, only from the first to the second."""

    devices: tuple[Name, Name]
    mbit_s: Figure
    rtt_ms: Milliseconds
    one_way: bool = False


class NetworkEntry(_Part, frozen=True):
    """The network that all devices are on. The defaults are those of gigabit Ethernet."""

    mbit_s: Figure = 940.0
    rtt_ms: Milliseconds = 0.5
    links: Annotated[tuple[LinkEntry, ...], Meta(max_length=65_536)] = ()


class ServeEntry(_Part, frozen=True):
    """What is to be served, where the command line does not say."""

    users: Annotated[int, Meta(ge=1, le=limits.USERS)] | None = None
    slots: Annotated[int, Meta(ge=1, le=256)] | None = None
    context: Annotated[int, Meta(ge=16, le=limits.PROMPT_TOKENS)] | None = None
    prompt: Annotated[int, Meta(ge=1, le=limits.PROMPT_TOKENS)] | None = None


class ClusterEntry(_Part, frozen=True):
    """The whole description."""

    devices: Annotated[tuple[DeviceEntry, ...], Meta(min_length=1, max_length=limits.STAGES)]
    network: NetworkEntry = NetworkEntry()
    broker: Name | None = None
    """The device on which the broker runs; the first one, unless said."""
    model: ModelEntry | None = None
    serve: ServeEntry = ServeEntry()


@dataclass(frozen=True, slots=True)
class Described:
    """A cluster that was read and checked."""

    devices: tuple[DeviceEntry, ...]
    """`count` written out."""
    network: Network
    serve: ServeEntry
    model: Anatomy | None

    def candidates(self, model: Anatomy, demand: Demand) -> tuple[Candidate, ...]:
        """The devices with the profiles that follow from their figures. Their stages' ids are their names."""
        return tuple(_candidate(device, model, demand) for device in self.devices)


def parse_cluster(raw: Any, source: str) -> Described:
    """A cluster from plain data. Raises SettingsError naming source and key."""
    if raw is None:
        raise SettingsError(f"{source} is empty.", hint=f"{PAGE} shows what a description looks like.")
    entry = convert(raw, ClusterEntry, source, PAGE)
    devices = tuple(one for device in entry.devices for one in _copies(device))
    names = [device.name for device in devices]
    if len(devices) > limits.STAGES:
        raise SettingsError(f"{source}: {len(devices)} devices; up to {limits.STAGES} can be planned for.")
    for device in devices:
        if names.count(device.name) > 1:
            raise SettingsError(
                f"{source}: two devices are named {device.name}.",
                hint="Give each a name of its own, or use count.",
            )
        _check_memory(device, source)
    for index, link in enumerate(entry.network.links):
        for name in link.devices:
            _known(name, names, f"{source}: network.links[{index}].devices")
    broker = names[0] if entry.broker is None else _known(entry.broker, names, f"{source}: broker")
    return Described(
        devices=devices,
        network=_network(devices, entry.network, broker),
        serve=entry.serve,
        model=None if entry.model is None else anatomy_of_entry(entry.model, source),
    )


def offered_bytes(device: DeviceEntry) -> int:
    """Memory that layers may take, a GPU's own not counted."""
    if device.memory_gb is not None:
        return round(device.memory_gb * GB)
    return round(((device.total_memory_gb or 0.0) - device.reserve_gb) * GB)


def _copies(device: DeviceEntry) -> Iterable[DeviceEntry]:
    if device.count == 1:
        return (device,)
    return (
        msgspec.structs.replace(device, name=f"{device.name}-{number}", count=1)
        for number in range(1, device.count + 1)
    )


def _check_memory(device: DeviceEntry, source: str) -> None:
    where = f"{source}: {device.name}"
    if (device.memory_gb is None) == (device.total_memory_gb is None):
        raise SettingsError(
            f"{where} needs either memory_gb or total_memory_gb.",
            hint="memory_gb is what Potluck may take; total_memory_gb is the machine's, less reserve_gb.",
        )
    if offered_bytes(device) <= 0:
        raise SettingsError(
            f"{where}: nothing is left of {device.total_memory_gb:g} GB after {device.reserve_gb:g} GB of reserve.",
            hint="Set reserve_gb or memory_gb.",
        )
    shared = sum(gpu.vram_gb for gpu in device.gpus if gpu.shares_memory)
    if shared * GB > offered_bytes(device):
        raise SettingsError(
            f"{where}: GPUs that share its memory have {shared:g} GB, more than the {offered_bytes(device) / GB:g} GB "
            "that it gives.",
            hint="vram_gb is part of memory_gb where shares_memory is true.",
        )


def _known(name: str, names: list[str], where: str) -> str:
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"Did you mean {near[0]}?" if near else f"The devices are {', '.join(names)}."
    raise SettingsError(f"{where}: there is no device {name}.", hint=hint)


def _candidate(device: DeviceEntry, model: Anatomy, demand: Demand) -> Candidate:
    call_s = device.overhead_ms / 1000
    cpu = Processor(device.memory_gb_s * GB, device.gflops * GB, call_s)
    gpus = [(Processor(gpu.memory_gb_s * GB, gpu.gflops * GB, call_s), gpu.vram_gb) for gpu in device.gpus]
    shared = sum(round(gpu.vram_gb * GB) for gpu in device.gpus if gpu.shares_memory)
    return Candidate(
        stage=StageId(device.name),
        device=DeviceName(device.name),
        memory_bytes=max(1, offered_bytes(device) - shared),  # 0 would mean that it is not known
        vram_bytes=sum(round(gpu.vram_gb * GB) for gpu in device.gpus),
        cpu_fallback=device.allow_cpu_fallback,
        profile=profile(cpu, together(gpus) if gpus else None, model, demand),
    )


def _network(devices: tuple[DeviceEntry, ...], network: NetworkEntry, broker: str) -> Network:
    ways = {
        (a.name, b.name): _way(a.connection, b.connection, network)
        for a in devices
        for b in devices
        if a != b
    }
    for link in network.links:
        first, second = link.devices
        way = _link(link.mbit_s, link.rtt_ms)
        ways[first, second] = way
        if not link.one_way:
            ways[second, first] = way
    stages = [StageId(device.name) for device in devices]
    return Network(
        links={(StageId(a), StageId(b)): way for (a, b), way in ways.items()},
        from_broker={stage: ways.get((broker, stage), FREE) for stage in stages},
        to_broker={stage: ways.get((stage, broker), FREE) for stage in stages},
    )


def _way(sender: ConnectionEntry, receiver: ConnectionEntry, network: NetworkEntry) -> Link:
    own = [rtt for rtt in (sender.rtt_ms, receiver.rtt_ms) if rtt is not None]
    mbit_s = min(sender.up_mbit_s or network.mbit_s, receiver.down_mbit_s or network.mbit_s)
    return _link(mbit_s, sum(own) if own else network.rtt_ms)


def _link(mbit_s: float, rtt_ms: float) -> Link:
    return Link(one_way_s=rtt_ms / 2000, bytes_per_s=mbit_s * 1e6 / 8)
