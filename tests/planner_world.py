"""Households for the tests of planners: made by hand, or drawn by Hypothesis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

from hypothesis import strategies as st

from potluck.planner.plan import Candidate, Demand, Link, ModelShape, Network
from potluck.wire.ids import DeviceName, StageId
from potluck.wire.measures import Profile, Speed, Timing

MB = 1_000_000


def model(
    layers: int = 12, cuts: Sequence[int] | None = None, layer_bytes: Sequence[int] | None = None
) -> ModelShape:
    """Layers of 10 MB, a head of 5 MB, a width of 1,000."""
    return ModelShape(
        "toy",
        layers,
        1000,
        tuple(layer_bytes or (10 * MB,) * layers),
        5 * MB,
        5 * MB,
        frozenset(range(1, layers) if cuts is None else cuts),
    )


def speed(layer_s: float, *, row_s: float = 0.0, call_s: float = 0.0, head_s: float = 0.0) -> Speed:
    """A layer takes `layer_s`, and `row_s` more for each row after the first."""
    rows = (1, 2, 4, 8, 16)
    return Speed(
        decode=tuple(Timing(n, 0, layer_s + row_s * (n - 1)) for n in rows),
        prefill=tuple(Timing(n, 0, layer_s * n / 8) for n in (16, 64, 256)),
        call_s=call_s,
        head=tuple(Timing(n, 0, head_s * n) for n in rows) if head_s else (),
        layer_bytes=10 * MB,
    )


def device(
    name: str,
    layer_s: float = 0.001,
    *,
    memory_mb: float = 0,
    row_s: float = 0.0,
    call_s: float = 0.0,
    head_s: float = 0.0,
    gpu: Speed | None = None,
    vram_mb: float = 0,
    cpu_fallback: bool = True,
    kv_mb: float = 0.0,
) -> Candidate:
    """A measured device."""
    profile = Profile(
        "f" * 64,
        cpu=speed(layer_s, row_s=row_s, call_s=call_s, head_s=head_s),
        gpu=gpu,
        slots=8,
        context_tokens=2048,
        kv_bytes=round(kv_mb * MB),
        compute_bytes=MB,
        head_compute_bytes=2 * MB,
    )
    return Candidate(
        StageId(f"{name}/1"),
        DeviceName(name),
        round(memory_mb * MB),
        round(vram_mb * MB),
        cpu_fallback,
        profile,
    )


def network(
    candidates: Sequence[Candidate],
    rtt_s: float = 0.0005,
    mbit_s: float = 1000,
    special: Mapping[tuple[str, str], tuple[float, float]] | None = None,
) -> Network:
    """The same link everywhere, but for the special ones (RTT in seconds, Mbit/s)."""
    links = {}
    for a, b in permutations(candidates, 2):
        rtt, rate = (special or {}).get((a.device, b.device), (rtt_s, mbit_s))
        links[a.stage, b.stage] = Link(rtt / 2, rate * 1e6 / 8)
    legs = {c.stage: Link(rtt_s / 2) for c in candidates}
    return Network(links, legs, legs)


# ---- drawn

SECONDS = st.integers(1, 40).map(lambda n: n * 1e-4)


@st.composite
def devices(draw: st.DrawFn, name: str) -> Candidate:
    """Any device, with or without limits."""
    with_gpu = draw(st.integers(0, 4)) == 0
    return device(
        name,
        draw(SECONDS),
        memory_mb=draw(st.sampled_from([0, 0, 25, 45, 70, 100, 140])),
        row_s=draw(st.sampled_from([0.0, 0.0001, 0.0005])),
        call_s=draw(st.sampled_from([0.0, 0.0002])),
        head_s=draw(st.sampled_from([0.0, 0.001])),
        gpu=speed(draw(SECONDS) / 4) if with_gpu else None,
        vram_mb=draw(st.sampled_from([0, 18, 45, 90])) if with_gpu else 0,
        cpu_fallback=draw(st.booleans()),
        kv_mb=draw(st.sampled_from([0.0, 2.0])),
    )


@st.composite
def households(
    draw: st.DrawFn,
    most_devices: int = 5,
    most_layers: int = 12,
    least_devices: int = 1,
    least_layers: int = 1,
) -> tuple[ModelShape, list[Candidate], Network]:
    """A model, devices, and links between them: some slow, some cut, some that cost nothing."""
    layers = draw(st.integers(least_layers, most_layers))
    cuts = draw(st.sets(st.integers(1, layers - 1))) if layers > 1 and draw(st.booleans()) else None
    sizes = draw(st.lists(st.sampled_from([5 * MB, 10 * MB, 20 * MB]), min_size=layers, max_size=layers))
    shape = model(layers, None if cuts is None else sorted(cuts), sizes)
    count = draw(st.integers(least_devices, most_devices))
    candidates = [draw(devices("abcdefgh"[index])) for index in range(count)]
    links = {}
    for a, b in permutations(candidates, 2):
        kind = draw(st.sampled_from(["fast", "slow", "thin", "free", "cut"]))
        if kind != "free":
            links[a.stage, b.stage] = {
                "fast": Link(0.0002, 1e8),
                "slow": Link(0.004, 1e8),
                "thin": Link(0.0005, 1e6),
                "cut": Link(float("inf")),
            }[kind]
    way = st.sampled_from([0.0, 0.0, 0.0003, 0.0003, 0.002, 0.002, float("inf")])
    there, back = ({c.stage: Link(draw(way)) for c in candidates} for _ in range(2))
    return shape, candidates, Network(links, there, back)


DEMANDS = st.builds(
    Demand,
    users=st.integers(1, 6),
    slots=st.integers(1, 4),
    context_tokens=st.just(2048),
    held_tokens=st.just(100),
)
