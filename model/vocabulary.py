"""What a core needs of a tokenizer: the bytes of a token and whether it ends the text. Pure."""

from __future__ import annotations

from typing import Protocol


class Vocabulary(Protocol):
    """Maps token ids in [0, size) to what they mean."""

    @property
    def size(self) -> int:
        """Number of tokens."""

    def piece(self, token: int) -> bytes:
        """The bytes a token adds to the text; empty for control tokens."""

    def is_end(self, token: int) -> bool:
        """Whether the model ends its text with this token."""
