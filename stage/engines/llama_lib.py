"""llama.cpp's shared libraries in this process: set up once, silenced, and listened to.

The one place that touches llama-cpp-python's untyped interface by import; everything else gets the module from here as
`Any`. Decides nothing about models.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from potluck.wire.errors import EngineError

_log = logging.getLogger("potluck.llama")
_lock = threading.Lock()
_library: Library | None = None

_TILED = "GGML_CPU_TILED_MM"
_LEVEL_ERROR, _LEVEL_CONTINUED = 4, 5
_BUFFER = re.compile(r"\b(model|KV|RS|compute|output) buffer size = +([0-9.]+) MiB")

_MODEL_BUFFER = re.compile(r"(\S+) +model buffer size = +([0-9.]+) MiB")


def prepare_process(exact: bool) -> None:
    """Call before anything is computed: ggml reads its environment once, at its first matrix product.

    `exact` turns off the tiled product for K-quants and IQ quants, whose sums depend on how many rows share a
    micro-batch. What the user has set stays.
    """
    if exact:
        os.environ.setdefault(_TILED, "0")


def tiled_products() -> bool:
    """Whether ggml's tiled matrix products are on in this process (they are by default)."""
    try:
        return int(os.environ.get(_TILED, "1")) != 0
    except ValueError:
        return False


class _Ear(threading.local):
    """What llama.cpp says, by thread: one may load a slice while another one computes."""

    def __init__(self) -> None:
        self.errors: deque[str] = deque(maxlen=8)
        self.captured: list[str] | None = None
        self.line = ""
        self.level = 0


class Library:
    """The loaded libraries. `api` is the module llama_cpp.llama_cpp; `base` is libggml-base."""

    def __init__(self) -> None:
        self.computed_tiled: bool | None = None
        """Whether the first product of this process was made with tiling on; None before it."""
        self._ear = _Ear()
        try:
            self.api: Any = importlib.import_module("llama_cpp.llama_cpp")
            extensions: Any = importlib.import_module("llama_cpp._ctypes_extensions")
            folder = self.folder = Path(str(self.api.__file__)).parent / "lib"
            self.base: Any = extensions.load_shared_library("ggml-base", folder)
        except (ImportError, OSError, RuntimeError) as error:
            raise EngineError(
                f"llama.cpp could not be loaded: {error}.",
                hint="Install it again: pip install --force-reinstall --no-cache-dir llama-cpp-python==0.3.36",
            ) from error
        tensor = ctypes.c_void_p
        self.base.ggml_get_name.argtypes = [tensor]
        self.base.ggml_get_name.restype = ctypes.c_void_p
        self.base.ggml_nbytes.argtypes = [tensor]
        self.base.ggml_nbytes.restype = ctypes.c_size_t
        self.base.ggml_backend_tensor_get.argtypes = [
            tensor,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_size_t,
        ]
        self.base.ggml_backend_tensor_get.restype = None
        self._callback = self.api.llama_log_callback(self._heard)
        self.api.llama_log_set(self._callback, None)
        self.api.llama_backend_init()
        self.features: str = self.api.llama_print_system_info().decode(errors="replace")

    @property
    def has_llamafile(self) -> bool:
        """Whether float matrix products of two and more rows go through llamafile's kernels."""
        return "LLAMAFILE = 1" in self.features

    def last_error(self) -> str:
        """llama.cpp's most recent error in this thread, or an empty text."""
        return self._ear.errors[-1] if self._ear.errors else ""

    def errors(self) -> str:
        """llama.cpp's recent errors in this thread, oldest first, or an empty text."""
        return " | ".join(self._ear.errors)

    @contextmanager
    def capture(self) -> Iterator[list[str]]:
        """Every log line that this thread writes inside the block; its errors from before are forgotten."""
        ear = self._ear
        ear.errors.clear()
        lines: list[str] = []
        ear.captured = lines
        try:
            yield lines
        finally:
            ear.captured = None

    def _heard(self, level: int, text: bytes, _user: object) -> None:
        """Called by llama.cpp, from any of its threads: pieces of lines, ended by a newline."""
        ear = self._ear
        if level != _LEVEL_CONTINUED:
            ear.level = level
        ear.line += text.decode(errors="replace") if text else ""
        if not ear.line.endswith("\n"):
            return
        line, ear.line = ear.line.strip(), ""
        if not line:
            return
        if ear.level == _LEVEL_ERROR:
            ear.errors.append(line)
        if ear.captured is not None:
            ear.captured.append(line)
        _log.debug("%s", line)


def library() -> Library:
    """llama.cpp, loaded at the first call. Raises EngineError."""
    global _library  # noqa: PLW0603 - a process has one llama.cpp
    with _lock:
        if _library is None:
            _library = Library()
        return _library


def buffer_bytes(lines: list[str]) -> dict[str, int]:
    """Bytes of the buffers that llama.cpp's log names (model, KV, RS, compute, output), to 0.01 MiB."""
    sums: dict[str, int] = {}
    for line in lines:
        found = _BUFFER.search(line)
        if found:
            sums[found[1]] = sums.get(found[1], 0) + round(float(found[2]) * (1 << 20))
    return sums


def copied_bytes(lines: list[str]) -> int:
    """Bytes of weights that the CPU's code has laid out anew (CPU_REPACK, AMX, ...), besides the mapped file."""
    copies = 0
    for line in lines:
        found = _MODEL_BUFFER.search(line)
        if found and (found[1].startswith("CPU_") or found[1] == "AMX") and found[1] != "CPU_Mapped":
            copies += round(float(found[2]) * (1 << 20))
    return copies


__all__ = ["Library", "buffer_bytes", "copied_bytes", "library", "prepare_process", "tiled_products"]
