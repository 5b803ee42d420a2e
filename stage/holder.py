"""The slices that a stage holds: found, cut, loaded, cleared, closed. Pure but for files.

Slices are loaded and closed on one lane, cleared and computed with on another. Who calls sees to it that no slice is
closed while the other lane uses it; a slice that is being loaded is nobody else's until it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from potluck.model.facts import read_facts
from potluck.model.slices import SliceFiles, ensure_slice
from potluck.model.verified import is_verified
from potluck.stage.batch import compute_batch
from potluck.stage.engine import Engine, Loaded, LoadSpec, Sampler, Tokens, Work
from potluck.stage.events import Computed, Job
from potluck.stage.state import words_of
from potluck.wire.errors import EngineError, ModelError, Phase, PotluckError
from potluck.wire.frames import Buffer
from potluck.wire.messages import Keep, Slice, SlotCopy, int32_array

_NOTHING: Tokens = np.empty(0, np.int32)

NO_MODEL = Path("no-model")
"""What an engine that needs no file is given as its file."""

Progressed: TypeAlias = Callable[[Phase, int, int], None]
"""Told the phase, and how much of it is done of how much."""


@dataclass(frozen=True, slots=True)
class Models:
    """The model files at hand by fingerprint, None where the engine needs none, and where slices are kept."""

    files: Mapping[str, Path | None]
    cache_dir: Path


@dataclass(slots=True)
class _Kept:
    """One slice that is loaded."""

    engine: Engine
    sampler: Sampler | None
    loaded: Loaded
    slots: int
    batch: int = 0
    """The micro-batch that was computed last."""

    def close(self) -> None:
        if self.sampler is not None:
            self.sampler.close()
        self.engine.close()


@dataclass(frozen=True, slots=True)
class Cleared:
    """What is loaded, and whether the slots hold what was to be kept."""

    loaded: Loaded
    kept: bool


class Holder:
    """An engine with its sampler for each slice that is held. Each is used by one thread at a time."""

    def __init__(
        self, make_engine: Callable[[], Engine], models: Models, threads: int, *, mlock: bool = False
    ) -> None:
        self._make_engine = make_engine
        self._models = models
        self._threads = threads
        self._mlock = mlock
        self._kept: dict[Slice, _Kept] = {}
        """Single steps of a dictionary are safe between threads."""
        self._closed = False

    @property
    def engines(self) -> list[Engine]:
        """Of what is held, in the order it was loaded."""
        return [kept.engine for kept in self._kept.values()]

    def load(self, wished: Slice, wanted: Callable[[], bool], progressed: Progressed) -> Loaded | None:
        """Loads a slice that is not held. None if it was no longer `wanted` on the way.

        Raises PotluckError with the phase in it; nothing more is held then.
        """
        if not wanted():
            return None
        progressed(Phase.SLICE, 0, 1)
        files = self._files(wished)
        progressed(Phase.SLICE, 1, 1)
        if not wanted():
            return None
        progressed(Phase.LOAD, 0, 1)
        spec = LoadSpec(
            slice_path=files.slice_path,
            embeddings_path=files.embeddings_path,
            first=wished.first,
            end=wished.end,
            layers=wished.model.layers,
            slots=wished.slots,
            context_tokens=wished.context_tokens,
            batch_tokens=wished.batch_tokens,
            threads=self._threads,
            exact=wished.exact,
            # llama.cpp counts the output as one more layer, and takes it first
            gpu_layers=wished.gpu_layers + 1 if wished.gpu_layers else 0,
            mlock=self._mlock,
            tune=True,
        )
        kept = self._open(wished, spec)
        self._kept[wished] = kept
        if self._closed:
            self.drop((wished,))
            return None
        progressed(Phase.LOAD, 1, 1)
        return kept.loaded

    def _open(self, wished: Slice, spec: LoadSpec) -> _Kept:
        engine = self._make_engine()
        try:
            loaded = engine.load(spec)
            if loaded.width != wished.model.width:
                raise ModelError(
                    f"{wished.model.name} has rows of {loaded.width} here and {wished.model.width} at the broker.",
                    hint="Copy the broker's model file to this device.",
                )
            return _Kept(engine, engine.sampler() if spec.is_last else None, loaded, wished.slots)
        except Exception:
            engine.close()
            raise

    def _files(self, wished: Slice) -> SliceFiles:
        model = wished.model
        if model.fingerprint not in self._models.files:
            raise ModelError(
                f"There is no copy of {model.name} (fingerprint {model.fingerprint[:12]}) here.",
                hint="Copy the model file to this device and name it with potluck-stage --model PATH.",
                phase=Phase.SLICE,
            )
        source = self._models.files[model.fingerprint]
        if source is None:
            return SliceFiles(NO_MODEL, NO_MODEL if wished.is_first else None)
        try:
            facts = read_facts(source)
            if facts.fingerprint != model.fingerprint:
                raise ModelError(f"{source} has changed since this stage started.", hint="Restart the stage.")
            return ensure_slice(
                source,
                facts,
                wished.first,
                wished.end,
                self._models.cache_dir,
                allow_unlisted=is_verified(self._models.cache_dir, facts),
            )
        except PotluckError as error:
            error.phase = error.phase or Phase.SLICE
            raise

    def clear(self, held: Slice, keep: Sequence[Keep] = ()) -> Cleared:
        """Empties every slot of the slice, and its sampler, but for the first tokens of those in `keep`; if some of
        these are not there, all of them. How slots are sampled is forgotten in any case. Raises EngineError.
        """
        kept = self._find(held)
        seen = _trimmed(kept, keep)
        for slot in range(kept.slots):
            if slot not in seen:
                kept.engine.free(slot)
        if kept.sampler is not None:
            kept.sampler.close()
            kept.sampler = kept.engine.sampler()
            for slot, tokens in seen.items():
                kept.sampler.see(slot, 0, tokens)
        kept.batch = 0
        return Cleared(kept.loaded, bool(seen))

    def take(self, held: Slice, slot: int) -> tuple[SlotCopy, tuple[Buffer, ...]]:
        """A copy of a slot and its arrays; these are empty if the slot is. Raises EngineError."""
        kept = self._find(held)
        tokens = kept.engine.held(slot)
        copy = SlotCopy(held, slot, tokens, kept.batch)
        if tokens == 0:
            return copy, (b"", b"")
        seen = b"" if kept.sampler is None else _seen(kept.sampler, slot, tokens).astype("<i4").tobytes()
        return copy, (kept.engine.export(slot), seen)

    def restore(self, copy: SlotCopy, arrays: Sequence[Buffer]) -> None:
        """Puts a copy in place of what its slot holds. Raises EngineError; the slot is empty then."""
        kept = self._find(copy.slice)
        kept.engine.restore(copy.slot, copy.tokens, arrays[0])
        if kept.sampler is not None:
            kept.sampler.see(copy.slot, 0, int32_array(arrays[1], copy.tokens))

    def compute(self, job: Job) -> Computed:
        """One micro-batch, by the slice of its assignment. Raises PotluckError."""
        kept = self._find(job.assign.slice)
        computed = compute_batch(kept.engine, kept.sampler, job)
        kept.batch = job.message.batch
        return computed

    def _find(self, held: Slice) -> _Kept:
        kept = self._kept.get(held)
        if kept is None:
            raise EngineError(f"Nothing is loaded for {words_of(held)}.")
        return kept

    def cost_s(self, job: Job) -> float:
        """What the engine says a micro-batch will take, for lanes on virtual time; 0 if it says nothing."""
        kept = self._kept.get(job.assign.slice)
        cost = None if kept is None else getattr(kept.engine, "cost_s", None)
        if cost is None or not job.message.spans:
            return 0.0
        return float(cost(Work(job.message.spans, int32_array(job.arrays[0], job.message.tokens))))

    def drop(self, slices: Iterable[Slice]) -> None:
        """Closes these, if they are held."""
        for each in slices:
            kept = self._kept.pop(each, None)
            if kept is not None:
                kept.close()

    def close(self) -> None:
        """Lets go of everything, and of whatever is still being loaded."""
        self._closed = True
        self.drop(list(self._kept))


def _trimmed(kept: _Kept, keep: Sequence[Keep]) -> dict[int, Tokens]:
    """The slots, trimmed, with what their sampler has seen; none of them if one holds fewer tokens."""
    seen: dict[int, Tokens] = {}
    try:
        for each in keep:
            kept.engine.trim(each.slot, each.tokens)
            sampler = kept.sampler
            seen[each.slot] = _NOTHING if sampler is None else _seen(sampler, each.slot, each.tokens)
    except EngineError:
        return {}
    return seen


def _seen(sampler: Sampler, slot: int, tokens: int) -> Tokens:
    """The first tokens that a slot's sampler has seen. Raises EngineError if these are fewer."""
    seen = sampler.seen(slot)
    if len(seen) < tokens:
        raise EngineError(f"Slot {slot} holds {tokens} tokens, its sampler has seen {len(seen)}.", slot=slot)
    return seen[:tokens]


__all__ = ["NO_MODEL", "Cleared", "Holder", "Models", "Progressed"]
