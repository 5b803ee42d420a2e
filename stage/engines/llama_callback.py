"""Takes the activations after the last layer of a slice out of llama.cpp's graph, and stops the graph there.

llama.cpp asks a callback for every node of the graph whether it wants to see it. This one wants a single tensor, copies
it and answers False, so that the norm and head behind it are not computed. It fires once per ubatch: rows are appended.
"""

from __future__ import annotations

import ctypes

import numpy as np

from potluck.stage.engine import FloatRows
from potluck.stage.engines.llama_lib import Library
from potluck.wire.errors import EngineError


class HiddenTap:
    """Rows of the tensor `name`, float32[rows, width], filled by llama.cpp while it decodes."""

    def __init__(self, library: Library, name: str, width: int, rows: int) -> None:
        self.buffer: FloatRows = np.empty((rows, width), np.float32)
        self.rows = 0
        """Rows filled since `begin`."""
        self.name = name
        self._wanted = name.encode() + b"\0"
        self._offset: int | None = None
        """Where a tensor's name stands in its struct, in bytes; found at the first call."""
        self._base = library.base
        self._string_at = ctypes.string_at
        self._error: BaseException | None = None
        self.callback = library.api.ggml_backend_sched_eval_callback(self._called)
        """What goes into the context's parameters. Keep this object as long as the context."""

    def begin(self) -> None:
        """Forgets the rows of the last micro-batch."""
        self.rows = 0
        self._error = None

    def raise_error(self) -> None:
        """Raises what went wrong inside the callback."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def settle(self, rows: int, extra: int) -> None:
        """Drops the last `extra` rows, which leaves `rows`. Raises EngineError if there are not that many."""
        if self.rows != rows + extra:
            raise EngineError(
                f"llama.cpp gave {self.rows} rows of {self.name}, {rows + extra} were expected."
            )
        self.rows = rows

    def _called(self, tensor: int, ask: bool, _user: object) -> bool:
        try:
            if ask:
                if self._offset is None:
                    self._offset = self._base.ggml_get_name(tensor) - tensor
                return self._string_at(tensor + self._offset, len(self._wanted)) == self._wanted
            if self._error is None:
                self._take(tensor)
        except BaseException as error:  # noqa: BLE001 - ctypes would only print it; `raise_error` does
            self._error = error
            return ask  # asks for the node, to be asked again and stop the graph there
        return False

    def _take(self, tensor: int) -> None:
        row_bytes = self.buffer.shape[1] * 4
        size = self._base.ggml_nbytes(tensor)
        rows, rest = divmod(size, row_bytes)
        if rest or not 0 < rows <= len(self.buffer) - self.rows:
            raise EngineError(
                f"{self.name} has {size} bytes: no rows of {row_bytes}, or more than the {len(self.buffer)} expected."
            )
        at = self.buffer.ctypes.data + self.rows * row_bytes
        self._base.ggml_backend_tensor_get(tensor, at, 0, size)
        self.rows += rows
