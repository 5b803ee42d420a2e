"""One measurement of this device, from the slices to the profile: in which order they are loaded, and what is kept.

Memory is read at the settings that will be served, speed from smaller caches. What is timed is `bench_plan`'s, how
often `bench_rounds`', and what follows from it `bench_speed`'s.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from potluck.model.architectures import rules_for
from potluck.model.cache_size import cache_token_bytes
from potluck.model.embeddings import Embeddings
from potluck.model.facts import ModelFacts
from potluck.model.slices import SliceFiles, ensure_slice
from potluck.model.verified import is_verified
from potluck.stage.bench_plan import (
    Part,
    Point,
    Window,
    Windows,
    chunk_tokens,
    compared_chunks,
    decode_rows,
    fill_tokens,
    full_rows,
    offered_at_best,
    points_of,
    room_for,
    windows_of,
)
from potluck.stage.bench_rig import Rig, Wanted
from potluck.stage.bench_rounds import Clock, Rounds
from potluck.stage.bench_slice import Rows, TimedSlice
from potluck.stage.bench_speed import Readings, speed_of
from potluck.stage.engine import LoadSpec
from potluck.stage.holder import Progressed
from potluck.stage.memory import own_bytes
from potluck.stage.steady import LEAST_RUNS, Series
from potluck.wire.errors import OutOfMemoryError, Phase, PotluckError
from potluck.wire.measures import Profile, Speed
from potluck.wire.messages import Measure

ALL_LAYERS = 1 << 16
"""llama.cpp takes it as every layer and the head."""
_LOADS = 3
_LOOK_UP_TOKENS = 8
_LOOK_UPS = 20


@dataclass(frozen=True, slots=True)
class _Memory:
    """What one processor takes."""

    kv_bytes: int
    compute_bytes: int
    head_compute_bytes: int
    extra_share: float


@dataclass(frozen=True, slots=True)
class _Held:
    """What one slice takes."""

    kv_bytes: int
    compute_bytes: int
    copied_bytes: int


class Run:
    """One measurement, from the slices to the profile."""

    def __init__(
        self,
        rig: Rig,
        message: Measure,
        source: Path,
        facts: ModelFacts,
        folder: Path,
        wanted: Wanted,
        progressed: Progressed,
    ) -> None:
        """Cuts the slices into `folder`. Raises PotluckError: no room on the disk, or for the fewest layers."""
        self._rig = rig
        self._settings = rig.settings
        self._message = message
        self._facts = facts
        self._wanted = wanted
        self._progressed = progressed
        rules = rules_for(facts, allow_unlisted=is_verified(rig.cache_dir, facts))
        room = room_for(self._settings.capabilities)
        cache = message.slots * message.context_tokens * cache_token_bytes(facts) // facts.layers
        self._windows: Windows = windows_of(facts.block_bytes, rules, facts.head_bytes, room, cache)
        self._refuse_without_room(self._windows.short, cache)
        self._parts = [part for part in Part if part is not Part.LAST or self._windows.last is not None]
        self._files = {
            part: ensure_slice(source, facts, window.first, window.end, folder, allow_unlisted=True)
            for part in self._parts
            for window in (self._windows.of(part),)
        }
        self._embedding_s = self._look_up_s(source, rules.token_scale)
        self._rows = Rows(message.batch_tokens, facts.vocab, facts.width)
        self._done = 0
        points = len(list(points_of(self._windows, message.slots, message.batch_tokens, 1)))
        self._total = (1 + self._settings.gpu) * (2 * _LOADS + LEAST_RUNS * points)

    def _refuse_without_room(self, least: Window, cache_bytes: int) -> None:
        """Timing more than is offered would bring the device to a standstill, and end in no layers for it."""
        can = self._settings.capabilities
        need, most = least.bytes + least.layers * cache_bytes, offered_at_best(can)
        if 0 < most < need:
            raise OutOfMemoryError(
                f"{least.layers} of {self._facts.layers} layers need {need / 1e6:.0f} MB with the caches of "
                f"{self._message.slots} slots, {most / 1e6:.0f} MB are offered here.",
                hint="Give the device more memory, or serve fewer slots or a shorter context.",
                phase=Phase.MEASURE,
                needed_bytes=need,
                free_bytes=most,
            )

    def profile(self) -> Profile | None:
        """None if it was no longer wanted. Raises PotluckError."""
        cpu = self._measured(gpu=False)
        if cpu is None:
            return None
        speed, memory = cpu
        on_gpu: Speed | None = None
        if self._settings.gpu:
            try:
                found = self._measured(gpu=True)
            except OutOfMemoryError:
                found = None  # a GPU without room for one layer is none
            if not self._wanted():
                return None
            if found is not None:
                on_gpu, held = found
                memory = _Memory(
                    kv_bytes=max(memory.kv_bytes, held.kv_bytes),
                    compute_bytes=max(memory.compute_bytes, held.compute_bytes),
                    head_compute_bytes=max(memory.head_compute_bytes, held.head_compute_bytes),
                    extra_share=memory.extra_share,
                )
        self._progressed(Phase.MEASURE, self._total, self._total)
        return Profile(
            fingerprint=self._facts.fingerprint,
            cpu=speed,
            gpu=on_gpu,
            slots=self._message.slots,
            context_tokens=self._message.context_tokens,
            kv_bytes=memory.kv_bytes,
            compute_bytes=memory.compute_bytes,
            head_compute_bytes=memory.head_compute_bytes,
            extra_weight_share=memory.extra_share,
        )

    def _measured(self, gpu: bool) -> tuple[Speed, _Memory] | None:
        """One processor. None if it was no longer wanted."""
        memory = self._memory(gpu)
        if memory is None:
            return None
        speed = self._speed(gpu)
        return None if speed is None else (speed, memory)

    # ---- memory, at the settings that will be served

    def _memory(self, gpu: bool) -> _Memory | None:
        inner = self._held(Part.SHORT, gpu)
        if inner is None:
            return None
        window = self._windows.short
        share = inner.copied_bytes / window.bytes
        head_bytes = inner.compute_bytes
        if self._windows.last is not None:
            last = self._held(Part.LAST, gpu)
            if last is None:
                return None
            # A head that is laid out anew is held by the last stage only, as its buffers are.
            copied = last.copied_bytes - round(share * self._windows.last.bytes)
            head_bytes = max(last.compute_bytes + max(0, copied), inner.compute_bytes)
        return _Memory(inner.kv_bytes // window.layers, inner.compute_bytes, head_bytes, share)

    def _held(self, part: Part, gpu: bool) -> _Held | None:
        """What a slice takes with all slots, the full context and the largest micro-batch."""
        if not self._wanted():
            return None
        message = self._message
        before = own_bytes()
        spec = self._spec(part, gpu, message.slots, message.context_tokens, tune=False)
        with contextlib.closing(self._load(spec)) as held:
            rows = min(message.batch_tokens, message.context_tokens)
            held.time(Point(part, True, rows), [self._rig.clock])
            loaded = held.loaded
            # What the system counts is more where the process keeps things that llama.cpp does not speak of.
            grown = own_bytes() - before - loaded.kv_bytes - loaded.copied_bytes if not gpu else 0
        self._step()
        return _Held(loaded.kv_bytes, max(loaded.compute_bytes, grown), loaded.copied_bytes)

    # ---- speed

    def _speed(self, gpu: bool) -> Speed | None:
        message, clock = self._message, self._rig.clock
        batch = message.batch_tokens
        sequences = max(full_rows(message.slots))
        chunk = compared_chunks(batch)[-1]
        with contextlib.ExitStack() as opened:
            # How many tokens a context takes to fill follows from one chunk; the caches are then made for that.
            spec = self._spec(Part.SHORT, gpu, 2, chunk, tune=False)
            with contextlib.closing(self._load(spec)) as probe:
                probe.time(Point(Part.SHORT, True, chunk), [clock])
                (chunk_s,) = probe.time(Point(Part.SHORT, True, chunk), [clock])
            tokens, full_slots = fill_tokens(message.context_tokens, sequences, chunk_s / chunk, chunk)
            room = {
                Part.DEEP: (max(decode_rows(message.slots)), chunk),
                Part.SHORT: (full_slots + sequences, tokens + max(chunk_tokens(batch))),
                Part.LAST: (max(decode_rows(message.slots)), chunk),
            }
            slices: dict[Part, TimedSlice] = {}
            for part in self._parts:
                if not self._wanted():
                    return None
                spec = self._spec(part, gpu, *room[part], tune=True)
                slices[part] = self._load(spec, full_slots if part is Part.SHORT else 0)
                opened.callback(slices[part].close)
                self._step()
            slices[Part.SHORT].fill(tokens, self._wanted)
            self._step()
            return self._timed(slices, tokens, full_slots, gpu)

    def _timed(self, slices: dict[Part, TimedSlice], tokens: int, full_slots: int, gpu: bool) -> Speed | None:
        message = self._message
        points = points_of(self._windows, message.slots, message.batch_tokens, full_slots)
        quota = self._settings.capabilities.cpu_quota
        busy: Clock | None = None
        if 0 < quota < self._settings.threads and not gpu:
            # A process that is stopped at its quota computes short calls at full speed and stands still between them.
            busy = self._busy_s
        begun = self._done
        rounds = Rounds(slices, points, self._rig.clock, busy, lambda done: self._tell(begun + done))
        if not rounds.run(self._wanted):
            return None
        self._done = begun + rounds.expected
        scale = 1.0 if busy is None else max(1.0, rounds.stretch())
        return speed_of(Readings(self._windows, rounds.series, tokens, self._embedding_s, scale))

    def _busy_s(self) -> float:
        """Seconds that each of the threads has computed."""
        return self._rig.busy_clock() / self._settings.threads

    def _look_up_s(self, source: Path, scale: float) -> float:
        """Seconds per token of a micro-batch of a few."""
        clock, series = self._rig.clock, Series()
        chance = np.random.default_rng(1)
        with Embeddings(source, scale) as embeddings:
            for _ in range(_LOOK_UPS):
                tokens = chance.integers(0, embeddings.vocab, _LOOK_UP_TOKENS, np.int32)
                begun = clock()
                embeddings.look_up(tokens)
                series.add(clock() - begun, 0.0)
        return max(0.0, series.median_s) / _LOOK_UP_TOKENS

    # ---- loading and telling

    def _spec(self, part: Part, gpu: bool, slots: int, context_tokens: int, *, tune: bool) -> LoadSpec:
        window: Window = self._windows.of(part)
        files: SliceFiles = self._files[part]
        return LoadSpec(
            slice_path=files.slice_path,
            embeddings_path=files.embeddings_path,
            first=window.first,
            end=window.end,
            layers=self._facts.layers,
            slots=slots,
            context_tokens=context_tokens,
            batch_tokens=self._message.batch_tokens,
            threads=self._settings.threads,
            exact=self._message.exact,
            gpu_layers=ALL_LAYERS if gpu else 0,
            tune=tune,
        )

    def _load(self, spec: LoadSpec, full_slots: int = 0) -> TimedSlice:
        try:
            return TimedSlice(self._rig.make_engine(), spec, self._message.model, self._rows, full_slots)
        except PotluckError as error:
            error.phase = Phase.MEASURE
            raise

    def _step(self) -> None:
        self._done += 1
        self._tell(self._done)

    def _tell(self, done: int) -> None:
        self._progressed(Phase.MEASURE, min(done, self._total - 1), self._total)


__all__ = ["Run"]
