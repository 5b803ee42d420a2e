"""The arrays of one llama_decode call, filled by numpy and pointed at by llama.cpp's own struct.

Nothing here is allocated per call, and nothing is done per token in Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from potluck.stage.engine import FloatRows, Tokens
from potluck.stage.engines.llama_calls import Piece

_ROPE_SECTIONS = 4
"""Position numbers per row of a model with M-RoPE: the first three are the position, the fourth is 0 for text."""


class Filled(NamedTuple):
    """The rows of one call, by their index in the micro-batch.

    `wanted`: those whose results are wanted. `outputs`: where these stand among the call's outputs, None for in order.
    """

    rows: NDArray[np.intp]
    wanted: NDArray[np.intp]
    outputs: NDArray[np.intp] | None


class CallArrays:
    """Room for `rows` rows, each of one slot. `width` is that of the activations, None when token ids go in."""

    def __init__(self, api: Any, rows: int, width: int | None, sections: bool) -> None:
        self._sections = sections and width is not None
        self._positions = np.zeros(rows * (_ROPE_SECTIONS if self._sections else 1), np.int32)
        self._slots = np.zeros(rows, np.int32)
        self._counts = np.ones(rows, np.int32)
        self._flags = np.zeros(rows, np.int8)
        first = self._slots.ctypes.data
        self._slot_pointers = np.arange(first, first + 4 * rows, 4, dtype=np.uintp)
        self._staged: NDArray[np.float32] | NDArray[np.int32] = (
            np.zeros(rows, np.int32) if width is None else np.zeros((rows, width), np.float32)
        )
        self._input = "token" if width is None else "embd"
        self.struct: Any = api.llama_batch()
        self._point("pos", self._positions)
        self._point("n_seq_id", self._counts)
        self._point("seq_id", self._slot_pointers)
        self._point("logits", self._flags)

    @property
    def staged_bytes(self) -> int:
        """Room for rows that don't follow one another."""
        return self._staged.nbytes

    def fill(
        self, call: Sequence[Piece], values: FloatRows | Tokens, flag_all: bool, pad: bool, pair: bool
    ) -> Filled:
        """Makes `struct` this call. `values` are the whole micro-batch's rows: activations, or token ids.

        `flag_all` asks for every row's output. `pad` adds a copy of the only row, one position on. `pair` asks for a
        second output when there would be one.
        """
        tokens, count = call[0].tokens, len(call)
        size = tokens * count
        steps = np.arange(tokens)
        rows = (np.array([piece.row for piece in call])[:, None] + steps).ravel()
        starts = np.array([piece.position for piece in call], np.int32)
        total = size + pad
        positions = np.empty(total, np.int32)
        positions[:size] = (starts[:, None] + steps).ravel()
        self._slots[:size] = np.repeat([piece.slot for piece in call], tokens)
        wanted = (steps >= tokens - np.array([piece.wants for piece in call])[:, None]).ravel()
        flags = self._flags[:total]
        flags[:size] = wanted
        if pad:
            positions[size] = positions[size - 1] + 1
            self._slots[size] = self._slots[size - 1]
            flags[size] = False
        if flag_all:
            flags[:] = True
        elif pair and np.count_nonzero(flags) == 1 and total > 1:
            flags[np.argmin(flags)] = True
        self._place_positions(positions)
        self._place_values(values, rows, pad)
        self.struct.n_tokens = total
        return Filled(rows, rows[wanted], np.flatnonzero(wanted[flags[:size] != 0]) if pair else None)

    def _place_positions(self, positions: NDArray[np.int32]) -> None:
        total = len(positions)
        if self._sections:
            sections = self._positions[: _ROPE_SECTIONS * total].reshape(_ROPE_SECTIONS, total)
            sections[:-1] = positions
            sections[-1] = 0
        else:
            self._positions[:total] = positions

    def _place_values(self, values: FloatRows | Tokens, rows: NDArray[np.intp], pad: bool) -> None:
        """Points at the rows where they are if they follow one another, else at a copy."""
        first, size = int(rows[0]), len(rows)
        together = int(rows[-1]) - first == size - 1 and (size < 3 or bool((np.diff(rows) == 1).all()))
        if together and not pad:
            self._point(self._input, values[first : first + size])
            return
        self._staged[:size] = values[rows]
        if pad:
            self._staged[size] = self._staged[size - 1]
        self._point(self._input, self._staged)

    def _point(self, field: str, array: NDArray[Any]) -> None:
        kind = dict(self.struct._fields_)[field]
        setattr(self.struct, field, ctypes.cast(array.ctypes.data, kind))


__all__ = ["CallArrays"]
