"""What is measured before anything is planned: a device, its speed at one model, and the links between devices. Pure.

Stages measure and tell the broker; planners read it. Nothing in here is a guess, except where a described cluster
(`planner/described`) fills the same structs from a person's figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import numpy as np
from msgspec import Meta

from potluck.wire import limits
from potluck.wire.parts import Body, Count, Name, Rate, Row, Seconds, Text


class Gpu(Body, frozen=True):
    """A graphics processor that llama.cpp can compute on."""

    name: Text
    backend: Text
    """llama.cpp's name of the interface: CUDA, Metal, Vulkan, ..."""
    memory_bytes: Count = 0
    free_memory_bytes: Count = 0
    shares_memory: bool = False
    """Whether that is the machine's own memory, as integrated ones have it."""


class Capabilities(Body, frozen=True):
    """What a device says of itself when it joins. A figure that is not known is 0 or empty."""

    cores: Annotated[int, Meta(ge=1, le=4096)] = 1
    """Physical ones."""
    threads: Annotated[int, Meta(ge=1, le=4096)] = 1
    """That compute."""
    cpu: Text = ""
    features: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    """Instruction sets that llama.cpp uses here."""
    cpu_quota: Annotated[float, Meta(ge=0.0, le=4096.0)] = 0.0
    """Cores that a container may use; 0 without a limit."""
    memory_bytes: Count = 0
    """Of the machine, or of its container."""
    free_memory_bytes: Count = 0
    container_memory_bytes: Count = 0
    """The container's limit; 0 without one."""
    offered_bytes: Count = 0
    """What layers may take: free memory or the owner's limit, less a reserve. 0 where it is not known."""
    gpus: Annotated[tuple[Gpu, ...], Meta(max_length=16)] = ()
    offered_vram_bytes: Count = 0
    """What layers may take of the GPUs' memory."""
    allow_cpu_fallback: bool = True
    """Whether layers that the GPU has no room for may be computed by the CPU. Counts only where there is a GPU."""
    disk_read_bytes_s: Rate = 0.0
    """Of the folder in which the model lies."""
    power: Annotated[str, Meta(pattern="^(|mains|battery)$")] = ""
    system: Text = ""
    llama: Text = ""
    """Version of llama.cpp's binding."""


class Timing(Row, frozen=True):
    """Seconds that a micro-batch of `rows` takes, with `context_tokens` in the cache of each of its sequences."""

    rows: Annotated[int, Meta(ge=1, le=limits.BATCH_TOKENS)]
    context_tokens: Annotated[int, Meta(ge=0, le=limits.PROMPT_TOKENS)]
    seconds: Seconds
    """The median of several runs."""
    spread_s: Seconds = 0.0
    """Between the quartiles of the runs."""


Timings = Annotated[tuple[Timing, ...], Meta(max_length=64)]


def seconds_at(timed: Mapping[int, float], size: int) -> float:
    """What a size takes of which the neighbours were timed. At least one was.

    Between two of them in a straight line; below the least one as much as that; beyond the largest one as the last two
    say, but never less than that.
    """
    sizes = sorted(timed)
    if size > sizes[-1] and len(sizes) > 1:
        low, high = sizes[-2:]
        return timed[high] + max(0.0, timed[high] - timed[low]) * (size - high) / (high - low)
    return float(np.interp(size, sizes, [timed[known] for known in sizes]))


class Speed(Body, frozen=True):
    """How fast one processor is at one model. Times of several batch sizes, in the order of rows, then context."""

    decode: Timings
    """One layer, one token of each of `rows` sequences."""
    prefill: Timings
    """One layer, `rows` tokens of one prompt."""
    call_s: Seconds = 0.0
    """What a micro-batch costs a stage besides its layers."""
    head: Timings = ()
    """Norm, head and sampling for `rows` results."""
    embedding_s: Seconds = 0.0
    """Looking one token up."""
    layer_bytes: Count = 0
    """Weights of an average layer among those that were timed: a layer of another size takes its share."""


class Profile(Body, frozen=True):
    """One device at one model, context and number of slots: speed and memory, as measured there."""

    fingerprint: Name
    """The model's."""
    cpu: Speed | None = None
    gpu: Speed | None = None
    slots: Annotated[int, Meta(ge=1, le=limits.SLOTS)] = 1
    context_tokens: Annotated[int, Meta(ge=1, le=limits.PROMPT_TOKENS)] = 1
    kv_bytes: Count = 0
    """KV cache of one layer for all slots at full context."""
    compute_bytes: Count = 0
    """Compute buffers of a stage that is not the last."""
    head_compute_bytes: Count = 0
    """Compute buffers of the last stage."""
    extra_weight_share: Annotated[float, Meta(ge=0.0, le=4.0)] = 0.0
    """Memory for weights besides the file's own bytes (repacked copies), as a share of them."""
    took_s: Seconds = 0.0
    """How long measuring took."""
    kept: bool = False
    """Whether it was measured on an earlier occasion."""


class LinkTiming(Body, frozen=True):
    """One direction between two devices, with frames of the size of activations over the real sockets."""

    rtt_s: Seconds
    """There and back with a small frame: the median."""
    rtt_p95_s: Seconds = 0.0
    bytes_per_s: Rate = 0.0
    """One way, large frames: the median. 0 where no limit was found."""
    bytes_per_s_p5: Rate = 0.0
    """19 of 20 frames were at least this fast."""
