"""Prompts and chats of one model as tokens, and tokens as text: the tokenizer and the chat template together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Protocol

from potluck.model.chat import ChatTemplate
from potluck.model.facts import ModelFacts
from potluck.model.tokenizer import Tokenizer


class Turn(Protocol):
    """One message of a chat."""

    @property
    def role(self) -> str:
        """Who speaks."""

    @property
    def content(self) -> str:
        """What is said."""


class ModelPrompts:
    """The served model's tokenizer and chat template. `today` gives the time to templates that write the date."""

    def __init__(self, facts: ModelFacts, today: Callable[[], datetime]) -> None:
        self.tokenizer = Tokenizer(facts.path)
        self._today = today
        self.template = ChatTemplate(
            facts.chat_template, bos=self._text(self.tokenizer.bos), eos=self._text(self.tokenizer.eos)
        )
        # At the start, not at the first request: a large vocabulary takes some tenths of a second.
        self.longest_piece = max((len(self.piece(token)) for token in range(self.size)), default=1) or 1
        """Bytes of the longest token."""

    @property
    def size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.tokenizer.size

    def piece(self, token: int) -> bytes:
        """The bytes a token adds to the text; empty for control tokens."""
        return self.tokenizer.piece(token)

    def is_end(self, token: int) -> bool:
        """Whether the model ends its text with this token."""
        return self.tokenizer.is_end(token)

    def encode_prompt(self, text: str) -> list[int]:
        """Tokens of a bare prompt, with the model's own opening token."""
        return self.tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[Turn]) -> list[int]:
        """Tokens of a chat, by the model's template. Raises RequestError."""
        turns = [{"role": message.role, "content": message.content} for message in messages]
        return self.tokenizer.encode_chat(self.template.render(turns, now=self._today()))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens; bytes that are no whole character become U+FFFD."""
        return b"".join(self.piece(token) for token in tokens).decode("utf-8", errors="replace")

    def close(self) -> None:
        """Frees the tokenizer."""
        self.tokenizer.close()

    def _text(self, token: int | None) -> str:
        return "" if token is None else self.tokenizer.text(token)
