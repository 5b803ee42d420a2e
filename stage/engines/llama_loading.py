"""How a slice is loaded with llama.cpp: the parameters, what exactness asks for, and errors with llama.cpp's own words.

What is exact, and why, was measured; see `Exactness`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from potluck.model.cache_size import cache_token_bytes
from potluck.model.facts import EMBEDDINGS, ModelFacts
from potluck.stage.capabilities import free_memory_bytes
from potluck.stage.engine import LoadSpec
from potluck.stage.engines.llama_callback import HiddenTap
from potluck.stage.engines.llama_calls import Limits
from potluck.stage.engines.llama_lib import Library, tiled_products
from potluck.wire.errors import EngineError, ModelError, OutOfMemoryError, Phase

MAX_SLOTS = 256
"""LLAMA_MAX_SEQ."""
_UBATCH_ROWS = 512
_EXACT_ROWS = 60
_WANTS = 64
_FLASH_ATTENTION_ON = 1
_LOAD_MODE_MMAP, _LOAD_MODE_MMAP_MLOCK = 1, 3
_ROPE_MULTI = (8, 40)
"""LLAMA_ROPE_TYPE_MROPE and _IMROPE."""
_SHORT_OF_MEMORY = ("alloc", "out of memory", "memory slot")


@dataclass(frozen=True, slots=True)
class Exactness:
    """What makes a row's result independent of the rows beside it, on llama.cpp's CPU code.

    - Flash attention takes another kernel from 64 queries of one sequence on: calls stay below.
    - A lone query over 512 cells and more is split over the threads, and llamafile's float products start at two rows:
      a call of one row gets a second one (`pad`), and a lone output too (`pair`).
    - Repacked weights and the tiled products of K-quants sum in another order: both are turned off.
    """

    on: bool = False
    pad: bool = False
    pair: bool = False

    @classmethod
    def of(cls, spec: LoadSpec, facts: ModelFacts, library: Library) -> Exactness:
        """What this slice needs. Raises EngineError if the process has begun to compute without it."""
        if not spec.exact:
            return cls()
        names = [
            tensor.type.name
            for tensor in facts.tensors.values()
            if len(tensor.shape) > 1 and (tensor.name != EMBEDDINGS or (spec.is_last and facts.tied))
        ]
        if any(name.endswith("_K") or name.startswith("IQ") for name in names) and library.computed_tiled:
            raise EngineError(
                "This process has computed with tiled matrix products, which exact mode has to turn off before.",
                hint="Start the stage with compute.exact on, or load exact models in a process of their own.",
                phase=Phase.LOAD,
            )
        floats = library.has_llamafile and any(name in ("F32", "F16", "BF16") for name in names)
        return cls(on=True, pad=floats or spec.threads > 1, pair=floats)


def limits_of(spec: LoadSpec, exact: bool) -> Limits:
    """What one call may hold: the same on every stage of a chain."""
    rows = max(spec.batch_tokens, spec.slots, 2)
    ubatch = min(rows, _UBATCH_ROWS)
    return Limits(
        batch_rows=rows,
        together_rows=ubatch,
        slot_rows=_EXACT_ROWS if exact else rows,
        wants=min(rows, max(_WANTS, spec.slots)),
    )


def load_model(library: Library, spec: LoadSpec, exact: bool) -> Any:
    """The slice as a llama_model pointer. Raises ModelError, OutOfMemoryError."""
    params = library.api.llama_model_default_params()
    params.n_gpu_layers = spec.gpu_layers
    params.load_mode = _LOAD_MODE_MMAP_MLOCK if spec.mlock else _LOAD_MODE_MMAP
    params.use_extra_bufts = not exact
    model = library.api.llama_model_load_from_file(str(spec.slice_path).encode(), params)
    if not model:
        raise _failed(library, ModelError, f"llama.cpp could not load {spec.slice_path}")
    return model


def _cells(spec: LoadSpec, exactness: Exactness) -> int:
    """Tokens that llama.cpp reserves per slot: it rounds up to 256, and a padding row needs one more."""
    return -(-(spec.context_tokens + exactness.pad) // 256) * 256


def check_room(spec: LoadSpec, facts: ModelFacts, exactness: Exactness) -> None:
    """Raises OutOfMemoryError if the KV cache can't fit the memory that is free now, in a container what is left of it.

    llama.cpp would be promised it by the system and killed when it fills it. A GPU refuses by itself.
    """
    cells = _cells(spec, exactness) * spec.slots
    need = cells * cache_token_bytes(facts)
    free = free_memory_bytes()
    if cells >= 1 << 32 or (need > free and spec.gpu_layers == 0):
        raise OutOfMemoryError(
            f"{spec.slots} slots of {spec.context_tokens} tokens need {need >> 20} MiB for the KV cache, "
            f"{free >> 20} MiB are free.",
            hint="Use fewer slots, a shorter context, or fewer layers on this device.",
            phase=Phase.LOAD,
            needed_bytes=need,
            free_bytes=free,
        )


def make_context(
    library: Library, model: Any, spec: LoadSpec, exactness: Exactness, limits: Limits, tap: HiddenTap | None
) -> Any:
    """A llama_context pointer with room for every slot. Raises OutOfMemoryError, EngineError."""
    params = library.api.llama_context_default_params()
    params.n_ctx = _cells(spec, exactness) * spec.slots
    params.n_seq_max = spec.slots
    params.kv_unified = False
    params.n_batch = limits.batch_rows
    params.n_ubatch = min(limits.batch_rows, _UBATCH_ROWS)
    # Room for logits is reserved per output: of all rows only where a row's output is a single number.
    params.n_outputs_max = limits.batch_rows if tap else limits.wants
    params.n_threads = params.n_threads_batch = spec.threads
    params.flash_attn_type = _FLASH_ATTENTION_ON
    params.swa_full = True  # keeps what a trim may go back to
    params.offload_kqv = params.op_offload = spec.gpu_layers != 0
    params.no_perf = True
    if tap is not None:
        params.cb_eval = tap.callback
    context = library.api.llama_init_from_model(model, params)
    if not context:
        raise _failed(
            library,
            EngineError,
            f"llama.cpp could not make room for {spec.slots} slots of {spec.context_tokens} tokens",
        )
    held = library.api.llama_n_ctx_seq(context)
    if held < spec.context_tokens + exactness.pad:
        library.api.llama_free(context)
        raise EngineError(
            f"llama.cpp gave a slot room for {held} tokens, {spec.context_tokens} were asked for."
        )
    return context


def position_sections(library: Library, model: Any) -> bool:
    """Whether the model's positions have several sections (M-RoPE)."""
    return library.api.llama_model_rope_type(model) in _ROPE_MULTI


def _failed(library: Library, kind: type[ModelError | EngineError], what: str) -> ModelError | EngineError:
    """An error with llama.cpp's last words; OutOfMemoryError when they are about memory."""
    said = library.errors()
    if any(mark in said.lower() for mark in _SHORT_OF_MEMORY):
        return OutOfMemoryError(
            f"{what}: {said}.",
            hint="Give this device fewer layers, slots or a shorter context.",
            phase=Phase.LOAD,
        )
    return kind(f"{what}: {said or 'it gave no reason'}.", phase=Phase.LOAD)


def note_computing(library: Library) -> None:
    """Remembers with which setting this process's first product is made: ggml never asks again."""
    if library.computed_tiled is None:
        library.computed_tiled = tiled_products()


__all__ = [
    "MAX_SLOTS",
    "Exactness",
    "check_room",
    "limits_of",
    "load_model",
    "make_context",
    "note_computing",
    "position_sections",
]
