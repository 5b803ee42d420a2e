"""What llama.cpp holds of one slot, as bytes that another context of the same slice takes in.

The bytes are llama.cpp's own: the cells' positions, then the keys and values of each layer. It checks them against its
cache as it reads (counts, types, row sizes), and empties the slot if they do not fit; what it can't know, how many
tokens they should be, is checked here.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from potluck.stage.engines.llama_lib import Library
from potluck.wire.errors import EngineError
from potluck.wire.frames import Buffer

_BYTES = ctypes.POINTER(ctypes.c_uint8)


class SlotStates:
    """Reads and writes the slots of one context."""

    def __init__(self, library: Library, context: Any, memory: Any) -> None:
        self._library = library
        self._context = context
        self._memory = memory

    def read(self, slot: int) -> Buffer:
        """What the slot holds, in memory of its own. Raises EngineError."""
        api = self._library.api
        state = np.empty(api.llama_state_seq_get_size(self._context, slot), np.uint8)
        written = api.llama_state_seq_get_data(self._context, _pointer(state), state.nbytes, slot)
        if written != state.nbytes:
            raise EngineError(
                f"llama.cpp copied {written} of {state.nbytes} bytes of slot {slot}: {self._why()}.",
                slot=slot,
            )
        return state.data

    def write(self, slot: int, tokens: int, state: Buffer) -> None:
        """Puts `tokens` tokens in the place of what the slot holds. Raises EngineError; the slot is empty then."""
        api = self._library.api
        given = np.frombuffer(state, np.uint8)
        read = api.llama_state_seq_set_data(self._context, _pointer(given), given.nbytes, slot)
        if read == given.nbytes and self._holds(slot, tokens):
            return
        self.empty(slot)
        why = "it does not hold that many" if read == given.nbytes else self._why()
        raise EngineError(
            f"The copy of slot {slot}, {tokens} tokens in {given.nbytes} bytes, does not fit this slice: {why}.",
            slot=slot,
            tokens=tokens,
        )

    def empty(self, slot: int) -> None:
        """Forgets the whole slot."""
        self._library.api.llama_memory_seq_rm(self._memory, slot, -1, -1)

    def _holds(self, slot: int, tokens: int) -> bool:
        """Whether the slot's positions end where they should. A cache that keeps only its last state knows no first."""
        api = self._library.api
        last = api.llama_memory_seq_pos_max(self._memory, slot)
        return last == tokens - 1 and api.llama_memory_seq_pos_min(self._memory, slot) in (0, last)

    def _why(self) -> str:
        return self._library.last_error() or "it gave no reason"


def _pointer(array: np.ndarray[Any, np.dtype[np.uint8]]) -> Any:
    return ctypes.cast(array.ctypes.data, _BYTES)


__all__ = ["SlotStates"]
