"""Measures this device at one model: real layers, timed until they are steady. Shell: clocks, a lock, files.

Decides when a kept profile will do. How one is made is `bench_run`'s. Runs on the compute lane, with its own engines.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from potluck.model.facts import ModelFacts, read_facts
from potluck.stage.bench_costs import SaysCosts, profile_of_costs
from potluck.stage.bench_rig import BenchSettings, Rig, Wanted
from potluck.stage.bench_rounds import Clock
from potluck.stage.bench_run import Run
from potluck.stage.bench_turn import alone
from potluck.stage.capabilities import binding_version
from potluck.stage.engine import Engine
from potluck.stage.holder import Models, Progressed
from potluck.stage.kept_profiles import Setting, keep_profile, kept_profile
from potluck.stage.memory import give_back
from potluck.wire.errors import ModelError, Phase
from potluck.wire.measures import Profile
from potluck.wire.messages import Measure


class Bench:
    """Answers Measure. Used by one thread at a time."""

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        models: Models,
        settings: BenchSettings,
        *,
        clock: Clock = time.perf_counter,
        busy_clock: Clock = time.process_time,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`clock` counts seconds, `busy_clock` those that all threads of this process have computed."""
        self._models = models
        self._rig = Rig(make_engine, settings, models.cache_dir, clock, busy_clock)
        self._pause = pause

    def __call__(
        self, message: Measure, wanted: Wanted, progressed: Progressed, *, fresh: bool = False
    ) -> Profile | None:
        """The profile, kept or measured; None if it was no longer `wanted` on the way. `fresh` uses no kept one.

        An engine that says what it costs is asked, and nothing is timed or kept. Raises PotluckError: no such model
        here, not enough memory for a single layer, no room on the disk.
        """
        make_engine, clock = self._rig.make_engine, self._rig.clock
        if isinstance(make_engine(), SaysCosts):
            return profile_of_costs(make_engine, message)
        source, facts = self._source(message)
        setting = self.setting(message)
        kept = None if fresh else kept_profile(self._models.cache_dir, setting)
        if kept is not None:
            return kept
        with alone(self._models.cache_dir, clock, self._pause, wanted, progressed):
            if not wanted():
                return None
            begun_s = clock()
            with tempfile.TemporaryDirectory(dir=self._models.cache_dir, prefix="bench-") as folder:
                run = Run(self._rig, message, source, facts, Path(folder), wanted, progressed)
                profile = run.profile()
            del run
            give_back()
            if profile is None:
                return None
            profile = msgspec.structs.replace(profile, took_s=clock() - begun_s)
            with contextlib.suppress(OSError):  # a full disk: it is measured again next time
                keep_profile(self._models.cache_dir, setting, profile)
            return profile

    def setting(self, message: Measure) -> Setting:
        """What the profile is true of."""
        mine, can = self._rig.settings, self._rig.settings.capabilities
        affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        return Setting(
            device=mine.device,
            cpu=can.cpu,
            cores=can.cores,
            threads=mine.threads,
            affinity=tuple(affinity),
            cpu_quota=can.cpu_quota,
            engine=mine.engine,
            llama=can.llama or binding_version(),
            fingerprint=message.model.fingerprint,
            slots=message.slots,
            context_tokens=message.context_tokens,
            batch_tokens=message.batch_tokens,
            exact=message.exact,
            gpu=mine.gpu,
            gpus=tuple(gpu.name for gpu in can.gpus) if mine.gpu else (),
        )

    def _source(self, message: Measure) -> tuple[Path, ModelFacts]:
        model = message.model
        source = self._models.files.get(model.fingerprint)
        if source is None:
            raise ModelError(
                f"There is no copy of {model.name} (fingerprint {model.fingerprint[:12]}) here.",
                hint="Copy the model file to this device and name it with potluck-stage --model PATH.",
                phase=Phase.MEASURE,
            )
        facts = read_facts(source)
        if facts.fingerprint != model.fingerprint:
            raise ModelError(f"{source} has changed since this stage started.", hint="Restart the stage.")
        return source, facts


__all__ = ["Bench", "BenchSettings"]
