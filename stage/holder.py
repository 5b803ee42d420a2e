"""The slice that a stage holds: found, cut, loaded, cleared, closed. Runs on the compute lane. Pure but for files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from potluck.model.facts import read_facts
from potluck.model.slices import SliceFiles, ensure_slice
from potluck.model.verified import is_verified
from potluck.stage.batch import compute_batch
from potluck.stage.engine import Engine, Loaded, LoadSpec, Sampler, Work
from potluck.stage.events import Computed, Job
from potluck.wire.errors import EngineError, ModelError, Phase, PotluckError
from potluck.wire.messages import Assign, int32_array

NO_MODEL = Path("no-model")
"""What an engine that needs no file is given as its file."""

Progressed: TypeAlias = Callable[[Phase, int, int], None]
"""Told the phase, and how much of it is done of how much."""


@dataclass(frozen=True, slots=True)
class Models:
    """The model files at hand by fingerprint, None where the engine needs none, and where slices are kept."""

    files: Mapping[str, Path | None]
    cache_dir: Path


class Holder:
    """At most one engine with its sampler. Used by one thread at a time."""

    def __init__(
        self, make_engine: Callable[[], Engine], models: Models, threads: int, *, mlock: bool = False
    ) -> None:
        self._make_engine = make_engine
        self._models = models
        self._threads = threads
        self._mlock = mlock
        self._engine: Engine | None = None
        self._sampler: Sampler | None = None
        self._loaded: Loaded | None = None
        self._slots = 0

    def load(self, assign: Assign, wanted: Callable[[], bool], progressed: Progressed) -> Loaded | None:
        """Closes what is held and loads the assigned slice. None if it was no longer `wanted` on the way.

        Raises PotluckError with the phase in it; nothing is held then.
        """
        self.close()
        if not wanted():
            return None
        progressed(Phase.SLICE, 0, 1)
        files = self._files(assign)
        progressed(Phase.SLICE, 1, 1)
        if not wanted():
            return None
        progressed(Phase.LOAD, 0, 1)
        spec = LoadSpec(
            slice_path=files.slice_path,
            embeddings_path=files.embeddings_path,
            first=assign.first,
            end=assign.end,
            layers=assign.model.layers,
            slots=assign.slots,
            context_tokens=assign.context_tokens,
            batch_tokens=assign.batch_tokens,
            threads=self._threads,
            exact=assign.exact,
            # llama.cpp counts the output as one more layer, and takes it first
            gpu_layers=assign.gpu_layers + 1 if assign.gpu_layers else 0,
            mlock=self._mlock,
            tune=True,
        )
        engine = self._make_engine()
        try:
            loaded = engine.load(spec)
            if loaded.width != assign.model.width:
                raise ModelError(
                    f"{assign.model.name} has rows of {loaded.width} here and {assign.model.width} at the broker."
                )
            self._sampler = engine.sampler() if spec.is_last else None
        except Exception:
            engine.close()
            raise
        self._engine, self._loaded, self._slots = engine, loaded, assign.slots
        progressed(Phase.LOAD, 1, 1)
        return loaded

    def _files(self, assign: Assign) -> SliceFiles:
        model = assign.model
        if model.fingerprint not in self._models.files:
            raise ModelError(
                f"There is no copy of {model.name} (fingerprint {model.fingerprint[:12]}) here.",
                hint="Copy the model file to this device and name it with potluck-stage --model PATH.",
                phase=Phase.SLICE,
            )
        source = self._models.files[model.fingerprint]
        if source is None:
            return SliceFiles(NO_MODEL, NO_MODEL if assign.is_first else None)
        try:
            facts = read_facts(source)
            if facts.fingerprint != model.fingerprint:
                raise ModelError(f"{source} has changed since this stage started.", hint="Restart the stage.")
            return ensure_slice(
                source,
                facts,
                assign.first,
                assign.end,
                self._models.cache_dir,
                allow_unlisted=is_verified(self._models.cache_dir, facts),
            )
        except PotluckError as error:
            error.phase = error.phase or Phase.SLICE
            raise

    def clear(self) -> Loaded:
        """Empties every slot, and the sampler. Raises EngineError."""
        engine, loaded = self._engine, self._loaded
        if engine is None or loaded is None:
            raise EngineError("Nothing is loaded.")
        for slot in range(self._slots):
            engine.free(slot)
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = engine.sampler()
        return loaded

    def compute(self, job: Job) -> Computed:
        """One micro-batch. Raises PotluckError."""
        if self._engine is None:
            raise EngineError("Nothing is loaded.")
        return compute_batch(self._engine, self._sampler, job)

    def cost_s(self, job: Job) -> float:
        """What the engine says a micro-batch will take, for lanes on virtual time; 0 if it says nothing."""
        cost = getattr(self._engine, "cost_s", None)
        if cost is None or not job.message.spans:
            return 0.0
        return float(cost(Work(job.message.spans, int32_array(job.arrays[0], job.message.tokens))))

    def close(self) -> None:
        """Lets go of everything."""
        sampler, engine = self._sampler, self._engine
        self._sampler = self._engine = self._loaded = None
        if sampler is not None:
            sampler.close()
        if engine is not None:
            engine.close()


__all__ = ["NO_MODEL", "Holder", "Models", "Progressed"]
