"""Measuring a device: what is timed, when a time is believed, and what follows from the times."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from potluck.model.architectures import Rules
from potluck.stage.bench import Bench, BenchSettings
from potluck.stage.bench_costs import profile_of_costs
from potluck.stage.bench_plan import (
    FILL_S,
    LONG_FILL_S,
    Part,
    Point,
    Windows,
    chunk_tokens,
    decode_rows,
    fill_tokens,
    full_rows,
    offered_at_best,
    points_of,
    room_for,
    times_gpu,
    windows_of,
)
from potluck.stage.bench_rounds import CALL_S, Rounds
from potluck.stage.bench_speed import Readings, speed_of
from potluck.stage.bench_turn import alone
from potluck.stage.engine import LoadSpec, Work
from potluck.stage.engines.fake import FakeEngine
from potluck.stage.holder import NO_MODEL, Models
from potluck.stage.kept_profiles import Setting, keep_profile, kept_profile, profile_path
from potluck.stage.steady import LEAST_LONG_RUNS, LEAST_RUNS, MOST_RUNS, POINT_S, Series, paired
from potluck.wire.errors import ModelError, Phase
from potluck.wire.measures import Capabilities, Gpu, Profile, Speed, Timing
from potluck.wire.messages import Measure, ModelRef, Span

MEGABYTE = 1 << 20
MODEL = ModelRef("m", "f" * 64, layers=24, width=64, architecture="llama")
MEASURE = Measure(MODEL, slots=8, context_tokens=512, batch_tokens=64)


# ---- when a median is believed


def series(*runs: float) -> Series:
    made = Series()
    for run in runs:
        made.add(run, run)
    return made


def test_equal_runs_are_steady_after_the_least_number_of_them() -> None:
    assert not series(*[1.0] * (LEAST_RUNS - 1)).steady
    assert series(*[1.0] * LEAST_RUNS).steady


def test_scattered_runs_are_not_steady_until_there_are_many() -> None:
    runs = [1.0, 1.1, 0.9, 1.05, 0.95]
    assert not series(*runs).steady
    assert series(*runs * 20).steady


def test_one_slow_run_in_ten_keeps_nothing_from_being_steady() -> None:
    assert series(*[1.0] * 9, 50.0).steady


def test_a_long_call_is_done_after_a_few_runs_however_they_scatter() -> None:
    assert not series(POINT_S, 3 * POINT_S).done
    assert series(*(POINT_S * (1 + run) for run in range(LEAST_LONG_RUNS))).done


def test_a_short_call_that_never_settles_is_done_at_the_most_runs() -> None:
    restless = [1e-6 * (1 + run % 7) for run in range(MOST_RUNS)]
    assert not series(*restless[:-1]).done
    assert series(*restless).done


def test_a_difference_is_taken_within_each_round() -> None:
    # The machine becomes ten times slower half-way; the medians alone would say 14, the rounds say 1 and 10.
    low, high = series(10, 10, 100), series(11, 11, 110)
    assert paired(lambda a, b: a - b, high, low) == 1
    assert series(5.0, 1.0, 3.0).median_s == 3.0


# ---- which slices


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    every=st.integers(1, 6),
    head=st.integers(0, 400),
    most=st.sampled_from([0, 60, 400]),
)
def test_every_slice_may_be_cut_there(sizes: list[int], every: int, head: int, most: int) -> None:
    rules = Rules("llama", len(sizes), cut_every=every)
    blocks = [size * MEGABYTE for size in sizes]
    windows = windows_of(blocks, rules, head * MEGABYTE, most * MEGABYTE)
    for window in (windows.deep, windows.short, windows.last):
        if window is not None:
            rules.check_slice(window.first, window.end)
            assert window.bytes == sum(blocks[window.first : window.end])
    assert windows.deep.bytes >= windows.short.bytes
    assert (windows.last is None) == (not rules.cuts())
    if windows.last is not None:
        assert windows.last.end == len(sizes)
        assert windows.short.end < len(sizes)


def test_small_blocks_are_timed_by_the_dozen_and_large_ones_by_two() -> None:
    small = windows_of([2 * MEGABYTE] * 30, Rules("llama", 30), 28 * MEGABYTE)
    assert (small.deep.layers, small.short.layers) == (15, 6)
    large = windows_of([200 * MEGABYTE] * 32, Rules("llama", 32), 400 * MEGABYTE)
    assert (large.deep.layers, large.short.layers) == (2, 1)


def test_slices_of_a_file_of_mixed_types_have_blocks_of_its_average_size() -> None:
    blocks = [(140 if layer < 4 or layer >= 28 or layer % 3 == 0 else 120) * MEGABYTE for layer in range(32)]
    windows = windows_of(blocks, Rules("llama", 32), 400 * MEGABYTE)
    usual = sum(blocks) / len(blocks)
    assert abs(windows.deep.layer_bytes - usual) <= 0.03 * usual
    assert abs(windows.short.layer_bytes - usual) <= 0.03 * usual


def test_a_device_with_little_memory_times_the_short_slice_only() -> None:
    windows = windows_of([200 * MEGABYTE] * 32, Rules("llama", 32), 100 * MEGABYTE, 600 * MEGABYTE)
    assert windows.deep == windows.short


def test_slices_are_so_short_that_their_caches_fit_too() -> None:
    blocks, head, cache = [2 * MEGABYTE] * 30, 28 * MEGABYTE, 12 * MEGABYTE
    for most in (120, 200, 400):
        windows = windows_of(blocks, Rules("llama", 30), head, most * MEGABYTE, cache)
        assert windows.last is not None
        parts = {windows.deep, windows.short, windows.last}
        assert sum(part.bytes + part.layers * cache for part in parts) + head <= most * MEGABYTE
    wide = windows_of(blocks, Rules("llama", 30), head, 1000 * MEGABYTE, cache)
    assert wide == windows_of(blocks, Rules("llama", 30), head)


def test_a_device_that_has_room_for_no_slice_tries_the_shortest() -> None:
    windows = windows_of([2 * MEGABYTE] * 30, Rules("llama", 30), 28 * MEGABYTE, 1, 12 * MEGABYTE)
    assert windows.last is not None
    assert [part.layers for part in (windows.deep, windows.short, windows.last)] == [1, 1, 1]


def test_a_device_could_have_either_memory_for_layers_or_the_one_that_both_processors_share() -> None:
    own, shared = (Gpu("x", "y", 2000, 2000, shares_memory=shares) for shares in (False, True))
    assert offered_at_best(Capabilities()) == 0
    assert offered_at_best(Capabilities(offered_bytes=1)) == 1
    assert offered_at_best(Capabilities(offered_bytes=1, gpus=(own,), offered_vram_bytes=999)) == 999
    assert offered_at_best(Capabilities(offered_bytes=400, gpus=(shared,), offered_vram_bytes=600)) == 1000


def test_timed_slices_leave_a_fifth_of_what_is_offered_and_have_no_bound_where_nothing_is_said() -> None:
    assert room_for(Capabilities(offered_bytes=1000)) == 800
    assert room_for(Capabilities()) == 0
    assert room_for(Capabilities(offered_bytes=1)) == 1, "no room at all is not the same as no bound"


def test_timed_slices_fit_the_memory_of_a_gpu_of_its_own_too() -> None:
    gpus = (Gpu("RTX", "CUDA", 2000, 2000),)
    assert room_for(Capabilities(offered_bytes=1000, gpus=gpus, offered_vram_bytes=500)) == 400
    assert room_for(Capabilities(offered_bytes=1000, gpus=gpus, offered_vram_bytes=2000)) == 800


def test_where_a_gpu_has_nearly_all_of_the_main_memory_slices_are_timed_in_the_whole_of_it() -> None:
    gpus = (Gpu("M4", "Metal", 2000, 2000, shares_memory=True),)
    assert room_for(Capabilities(offered_bytes=1, gpus=gpus, offered_vram_bytes=999)) == 800


def test_a_gpu_of_which_its_owner_gives_nothing_is_not_timed() -> None:
    gpus = (Gpu("RTX", "CUDA", 2000, 2000),)
    assert not times_gpu(Capabilities(offered_bytes=1000, gpus=gpus))
    assert room_for(Capabilities(offered_bytes=1000, gpus=gpus)) == 800
    assert times_gpu(Capabilities(gpus=gpus, offered_vram_bytes=1))
    assert not times_gpu(Capabilities())


def test_a_count_of_layers_that_llama_would_mistake_is_not_timed() -> None:
    rules = Rules("gemma3", 6, forbidden_counts=frozenset({1, 3}))
    windows = windows_of([MEGABYTE] * 6, rules, MEGABYTE)
    for window in (windows.deep, windows.short, windows.last):
        assert window is not None
        assert window.layers not in {1, 3}


# ---- which micro-batches


def test_decode_and_chunks_go_up_to_what_will_be_served() -> None:
    assert decode_rows(1) == (1,)
    assert decode_rows(6) == (1, 2, 4, 6)
    assert decode_rows(256) == (1, 2, 4, 8, 16)
    assert chunk_tokens(48) == (4, 16, 32, 48)
    assert chunk_tokens(1) == (1,)
    assert chunk_tokens(8192)[-1] == 512


@given(st.integers(1, 256), st.integers(1, 8192), st.integers(0, 4))
def test_no_micro_batch_is_timed_twice_and_all_fit(slots: int, batch: int, full: int) -> None:
    windows = windows_of([MEGABYTE] * 12, Rules("llama", 12), MEGABYTE)
    points = list(points_of(windows, slots, batch, full))
    assert len(points) == len(set(points))
    assert max(point.rows for point in points if not point.chunk) <= slots
    assert max(point.rows for point in points if point.chunk) <= batch
    assert all(not point.full for point in points) or full > 0


@given(st.integers(16, 100_000), st.sampled_from([1, 4]), st.floats(1e-6, 1.0), st.integers(1, 64))
def test_filling_a_cache_stays_within_its_time_and_half_the_context(
    context: int, sequences: int, token_s: float, step: int
) -> None:
    tokens, count = fill_tokens(context, sequences, token_s, step)
    assert 0 <= tokens <= context // 2
    assert count <= sequences
    assert tokens * count * token_s <= LONG_FILL_S * 1.001


def test_a_device_too_slow_to_fill_several_caches_fills_one_or_none() -> None:
    assert fill_tokens(2048, 4, FILL_S / 4096, 64) == (1024, 4)
    assert fill_tokens(2048, 4, FILL_S / 256, 64) == (256, 1)
    assert fill_tokens(2048, 4, LONG_FILL_S / 512, 64) == (512, 1)
    assert fill_tokens(2048, 4, 1.0, 64) == (0, 0)


# ---- what follows from the times


@dataclass(frozen=True)
class Planted:
    """A device whose every second is known."""

    windows: Windows
    byte_s: float = 1e-10
    call_s: float = 3e-4
    head_s: float = 2e-3
    held_s: float = 1e-7
    """One token in the cache, one layer, one row."""
    look_up_s: float = 1e-5

    def seconds(self, point: Point, held: int) -> float:
        window = self.windows.of(point.part)
        total = self.call_s + window.bytes * self.byte_s * (1 + point.rows)
        if point.full:
            total += held * self.held_s * point.rows * window.layers
        if window.first == 0:
            total += point.rows * self.look_up_s
        if point.part is Part.LAST:
            total += self.head_s * (1 + point.rows)
        return total


@given(
    blocks=st.lists(st.integers(10, 12), min_size=2, max_size=24),
    slots=st.integers(1, 20),
    call_s=st.floats(0, 1e-2),
    drift=st.lists(st.floats(0.5, 2.0), min_size=5, max_size=5),
)
def test_planted_seconds_are_found_again(
    blocks: list[int], slots: int, call_s: float, drift: list[float]
) -> None:
    sizes = [size * MEGABYTE for size in blocks]
    windows = windows_of(sizes, Rules("llama", len(sizes)), 20 * MEGABYTE)
    planted = Planted(windows, call_s=call_s if windows.deep.bytes > windows.short.bytes else 0.0)
    drift = sorted(drift)
    usual = drift[2]
    read: dict[Point, Series] = {}
    for point in points_of(windows, slots, 64, max(full_rows(slots))):
        read[point] = series(*(planted.seconds(point, 256) * factor for factor in drift))
    speed = speed_of(Readings(windows, read, 256, planted.look_up_s * usual))
    layer = windows.deep.layer_bytes
    assert speed.layer_bytes == round(layer)
    assert speed.call_s == pytest.approx(planted.call_s * usual, rel=1e-6, abs=1e-9)
    for timing in speed.decode:
        expected = (
            layer * planted.byte_s * (1 + timing.rows) + timing.context_tokens * planted.held_s * timing.rows
        )
        assert timing.seconds == pytest.approx(expected * usual, rel=1e-6)
    for timing in speed.head:
        assert timing.seconds == pytest.approx(planted.head_s * (1 + timing.rows) * usual, rel=1e-6)
    assert {timing.context_tokens for timing in speed.decode} == {0, 256}
    for timing in speed.prefill:
        # The short slice's blocks are not of the same size; where a chunk is timed on both, the deep slice decides.
        ratio = 1 if timing.rows >= 16 else windows.short.layer_bytes / layer
        expected = (
            layer * planted.byte_s * (1 + timing.rows) + timing.context_tokens * planted.held_s * timing.rows
        )
        assert timing.seconds == pytest.approx(expected * usual, rel=0.15 if ratio != 1 else 1e-6)


def test_timings_stand_in_the_order_of_rows_then_context() -> None:
    windows = windows_of([8 * MEGABYTE] * 12, Rules("llama", 12), MEGABYTE)
    planted = Planted(windows)
    read = {point: series(planted.seconds(point, 128)) for point in points_of(windows, 8, 64, 4)}
    speed = speed_of(Readings(windows, read, 128, 0.0))
    for timings in (speed.decode, speed.prefill, speed.head):
        keys = [(timing.rows, timing.context_tokens) for timing in timings]
        assert keys == sorted(keys)


def test_a_model_that_cannot_be_cut_has_its_head_among_its_layers() -> None:
    windows = windows_of([8 * MEGABYTE] * 4, Rules("llama", 4, uncuttable="so it is"), MEGABYTE)
    read = {point: series(0.4 * point.rows) for point in points_of(windows, 4, 64, 0)}
    speed = speed_of(Readings(windows, read, 0, 0.0))
    assert speed.head == ()
    assert speed.call_s == 0
    assert speed.decode[0].seconds == pytest.approx(0.1)


def test_times_that_a_quota_stretches_are_stretched_all_alike() -> None:
    windows = windows_of([8 * MEGABYTE] * 12, Rules("llama", 12), MEGABYTE)
    planted = Planted(windows)
    read = {point: series(planted.seconds(point, 128)) for point in points_of(windows, 8, 64, 4)}
    free, held_back = (speed_of(Readings(windows, read, 128, 1e-5, scale)) for scale in (1.0, 3.0))
    for ours, theirs in (
        (free.decode, held_back.decode),
        (free.prefill, held_back.prefill),
        (free.head, held_back.head),
    ):
        for one, other in zip(ours, theirs, strict=True):
            assert other.seconds == pytest.approx(3 * one.seconds)
    assert held_back.call_s == pytest.approx(3 * free.call_s)


# ---- the rounds


class Clocked:
    """A slice that takes what it is told to, on a clock of its own."""

    def __init__(self, seconds: Callable[[Point], float]) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.made: list[Point] = []

    def clock(self) -> float:
        return self.now

    def time(self, point: Point, clocks: Sequence[Callable[[], float]]) -> tuple[float, ...]:
        self.made.append(point)
        self.now += self.seconds(point)
        return tuple(self.seconds(point) for _ in clocks)


def rounds_of(device: Clocked, told: list[int], busy: Callable[[], float] | None = None) -> Rounds:
    windows = windows_of([8 * MEGABYTE] * 12, Rules("llama", 12), MEGABYTE)
    points = points_of(windows, 8, 512, 4)
    return Rounds(dict.fromkeys(Part, device), points, device.clock, busy, told.append)  # type: ignore[misc]


def test_a_quiet_device_is_measured_in_the_least_number_of_rounds() -> None:
    told: list[int] = []
    device = Clocked(lambda point: 1e-4 * point.rows)
    rounds = rounds_of(device, told)
    assert rounds.run(lambda: True)
    assert {len(found.runs) for found in rounds.series.values()} == {LEAST_RUNS}
    assert told == sorted(told)
    assert told[-1] == rounds.expected


def test_sizes_take_turns_so_that_a_slow_minute_hits_all_alike() -> None:
    device = Clocked(lambda point: 1e-4 * point.rows)
    rounds = rounds_of(device, [])
    rounds.run(lambda: True)
    per_round = len(device.made) // LEAST_RUNS
    assert device.made[:per_round] == device.made[per_round : 2 * per_round]


def test_a_slow_device_skips_long_chunks_and_still_has_two_of_every_kind() -> None:
    told: list[int] = []
    rounds = rounds_of(Clocked(lambda point: CALL_S / 40 * point.rows), told)
    assert rounds.run(lambda: True)
    chunks = [
        point.rows for point in rounds.series if point.part is Part.SHORT and point.chunk and not point.full
    ]
    assert chunks == [4, 16, 32]
    assert told[-1] == rounds.expected
    crawling = rounds_of(Clocked(lambda point: 10 * CALL_S * point.rows), [])
    assert crawling.run(lambda: True)
    assert {point.rows for point in crawling.series if point.part is Part.LAST} == {1, 2}


def test_measuring_ends_when_it_is_no_longer_wanted() -> None:
    device = Clocked(lambda point: 1e-4)
    rounds = rounds_of(device, [])
    assert not rounds.run(lambda: len(device.made) < 7)
    assert len(device.made) <= 8


def test_the_stretch_is_wall_time_per_computed_time() -> None:
    device = Clocked(lambda point: 1e-4 * point.rows)
    rounds = rounds_of(device, [], busy=lambda: device.now * 0.3)
    rounds.run(lambda: True)
    assert rounds.stretch() == pytest.approx(1 / 0.3)


# ---- what is kept

SETTING = Setting(
    device="laptop", cpu="C", cores=4, threads=3, affinity=(0, 1), cpu_quota=0.0, engine="llama", llama="1",
    fingerprint="f", slots=8, context_tokens=2048, batch_tokens=64, exact=False, gpu=False,
)  # fmt: skip
PROFILE = Profile("f", Speed((Timing(1, 0, 0.5, 0.1),), (Timing(16, 0, 4.0),), layer_bytes=7), kv_bytes=3)


def test_what_was_measured_is_found_again_and_says_so(tmp_path: Path) -> None:
    assert kept_profile(tmp_path, SETTING) is None
    path = keep_profile(tmp_path, SETTING, PROFILE)
    assert path == profile_path(tmp_path, SETTING)
    assert list(path.parent.iterdir()) == [path]
    assert kept_profile(tmp_path, SETTING) == msgspec.structs.replace(PROFILE, kept=True)


@pytest.mark.parametrize("field", Setting.__struct_fields__)
def test_another_setting_is_another_profile(tmp_path: Path, field: str) -> None:
    keep_profile(tmp_path, SETTING, PROFILE)
    value = getattr(SETTING, field)
    match value:
        case bool():
            other: object = not value
        case str():
            other = value + "x"
        case tuple():
            other = (*value, "9") if field == "gpus" else (*value, 9)
        case _:
            other = value + 1
    changed = msgspec.structs.replace(SETTING, **{field: other})
    assert profile_path(tmp_path, changed) != profile_path(tmp_path, SETTING)
    assert kept_profile(tmp_path, changed) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b'{"format": 1}', b"\xff\xfe", b"[" * 10_000])
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, content: bytes) -> None:
    path = keep_profile(tmp_path, SETTING, PROFILE)
    path.write_bytes(content)
    assert kept_profile(tmp_path, SETTING) is None
    keep_profile(tmp_path, SETTING, PROFILE)
    assert kept_profile(tmp_path, SETTING) is not None


def test_a_file_of_another_format_is_not_used(tmp_path: Path) -> None:
    path = keep_profile(tmp_path, SETTING, PROFILE)
    path.write_bytes(path.read_bytes().replace(b'"format": 1', b'"format": 0'))
    assert kept_profile(tmp_path, SETTING) is None


# ---- one at a time


def test_a_second_measurement_waits_until_the_first_has_ended(tmp_path: Path) -> None:
    other = (tmp_path / "measuring.lock").open("w")
    fcntl.flock(other, fcntl.LOCK_EX)
    now, told = [0.0], []

    def pause(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 1.0 and not other.closed:
            other.close()

    with alone(tmp_path, lambda: now[0], pause, lambda: True, lambda *said: told.append(said)):
        assert other.closed
    assert set(told) == {(Phase.MEASURE, 0, 1)}


def test_a_measurement_that_never_ends_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += 100 * seconds

    with (tmp_path / "measuring.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with alone(tmp_path, lambda: now[0], pause, lambda: True, lambda *_: None):
            assert now[0] >= 300


def test_waiting_ends_when_measuring_is_no_longer_wanted(tmp_path: Path) -> None:
    paused: list[float] = []
    with (tmp_path / "measuring.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with alone(tmp_path, lambda: 0.0, paused.append, lambda: len(paused) < 3, lambda *_: None):
            assert len(paused) == 3


def test_what_a_killed_measurement_left_behind_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "bench-left"
    left.mkdir()
    (left / "slice.gguf").write_bytes(b"much")
    with alone(tmp_path, lambda: 0.0, lambda _: None, lambda: True, lambda *_: None):
        assert not left.exists()


# ---- an engine that says what it costs


def test_the_fake_engines_profile_is_what_it_costs() -> None:
    profile = profile_of_costs(lambda: FakeEngine(0.002, 0.01), MEASURE)
    speed = profile.cpu
    assert speed is not None
    assert [timing.rows for timing in speed.decode] == [1, 2, 4, 8]
    assert [timing.rows for timing in speed.prefill] == [4, 16, 32, 64]
    for timing in (*speed.decode, *speed.prefill):
        assert timing.seconds == pytest.approx(0.002 * timing.rows)
    assert speed.call_s == pytest.approx(0.01)
    assert profile.kv_bytes == 8 * (512 + 1) * FakeEngine().width * 2


def test_a_simulated_device_is_asked_and_nothing_is_timed_or_kept(tmp_path: Path) -> None:
    def no_clock() -> float:
        raise AssertionError("the clock was asked")

    models = Models({MODEL.fingerprint: None}, tmp_path)
    bench = Bench(lambda: FakeEngine(0.5), models, BenchSettings("d", "fake"), clock=no_clock)
    profile = bench(MEASURE, lambda: True, lambda *_: None)
    assert profile is not None
    assert profile == profile_of_costs(lambda: FakeEngine(0.5), MEASURE)
    assert list(tmp_path.iterdir()) == []


def test_the_costs_of_a_stage_follow_from_its_profile() -> None:
    make = lambda: FakeEngine(0.003, 0.02)  # noqa: E731
    speed = profile_of_costs(make, MEASURE).cpu
    assert speed is not None
    engine = make()
    for first, end in pairwise((0, 5, 24)):
        engine.load(LoadSpec(NO_MODEL, None, first, end, 24, slots=8, context_tokens=64, batch_tokens=64))
        spans = [Span(slot, 0, 1, 0) for slot in range(4)]
        said = engine.cost_s(Work(spans, None))  # type: ignore[arg-type]
        four = next(timing for timing in speed.decode if timing.rows == 4)
        assert said == pytest.approx(speed.call_s + (end - first) * four.seconds)


def test_a_model_that_is_not_here_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    class Silent:
        """An engine that does not say what it costs."""

    bench = Bench(Silent, Models({}, tmp_path), BenchSettings("d"))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="no copy of m") as caught:
        bench(MEASURE, lambda: True, lambda *_: None)
    assert "--model" in caught.value.hint
