"""Text to tokens and back, by llama.cpp's own tokenizer, read from the model's file without its weights.

Decides nothing about chats (`chat` does) or about text that is not complete yet (`text` does). Cores see it
as a `vocabulary.Vocabulary` only and need no llama.cpp.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from gguf.constants import GGUFValueType

from potluck.model.container import Container, read_container
from potluck.wire.errors import ModelError, RequestError

_ERROR_LEVEL: Final = 4
_ARRAY_TYPES: Final = {
    "tokenizer.ggml.tokens": (GGUFValueType.STRING,),
    "tokenizer.ggml.merges": (GGUFValueType.STRING,),
    "tokenizer.ggml.scores": (GGUFValueType.FLOAT32, GGUFValueType.INT32),
    "tokenizer.ggml.token_type": (GGUFValueType.INT32, GGUFValueType.UINT32),
}


class Tokenizer:
    """A model file's tokenizer. `bos` and `eos` are token ids, None where the model has none.

    Raises ModelError for a file that is truncated, damaged or without a tokenizer. Safe to use from several threads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _check(read_container(path))
        # Untyped, and imported here so that a process that needs no tokenizer does not load llama.cpp.
        self._api: Any = importlib.import_module("llama_cpp.llama_cpp")
        self._api.llama_backend_init()
        params = self._api.llama_model_default_params()
        params.vocab_only = True
        with _log_of(self._api) as log:
            self._model: Any = self._api.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise ModelError(
                f"llama.cpp can't read the tokenizer of {path}: {' '.join(log) or 'it gives no reason'}",
                hint="Download the file again, or convert the model with a current llama.cpp.",
            )
        self._vocab: Any = self._api.llama_model_get_vocab(self._model)
        self.size: int = self._api.llama_vocab_n_tokens(self._vocab)
        self.bos = self._token_or_none(self._api.llama_vocab_bos(self._vocab))
        self.eos = self._token_or_none(self._api.llama_vocab_eos(self._vocab))
        self.adds_bos: bool = self._api.llama_vocab_get_add_bos(self._vocab)
        self._pieces: dict[int, bytes] = {}
        self._ends: dict[int, bool] = {}

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """The text's tokens.

        `add_special` adds what the model wants around a text (BOS); `parse_special` takes the names of control tokens
        in the text, such as <|im_start|>, for the tokens: right for a rendered chat, wrong for a stranger's text.
        """
        raw = text.encode("utf-8", errors="replace")
        room = len(raw) + 8
        while True:
            tokens = (ctypes.c_int32 * room)()
            count = self._api.llama_tokenize(
                self._alive(), raw, len(raw), tokens, room, add_special, parse_special
            )
            if count >= 0:
                return list(tokens[:count])
            if count == -(1 << 31) or -count <= room:
                raise RequestError("The text is too long to be tokenized.", hint="Send less text.")
            room = -count

    def encode_chat(self, text: str) -> list[int]:
        """The tokens of a rendered chat: control tokens are taken as such, and BOS stands at the front only once."""
        written = self.bos is not None and self.adds_bos and text.startswith(self.text(self.bos))
        return self.encode(text, add_special=not written, parse_special=True)

    def piece(self, token: int) -> bytes:
        """The token's text, perhaps part of a character; empty for control tokens. Raises RequestError for no token."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._piece_of(self._checked(token))
        return piece

    def decode(self, tokens: Sequence[int]) -> bytes:
        """The pieces one after the other. Some tokenizers put a space before a text, and it is there."""
        return b"".join(map(self.piece, tokens))

    def is_end(self, token: int) -> bool:
        """Whether the token ends an answer (EOS, end of turn and their like)."""
        ends = self._ends.get(token)
        if ends is None:
            ends = self._ends[token] = bool(self._api.llama_vocab_is_eog(self._alive(), self._checked(token)))
        return ends

    def text(self, token: int) -> str:
        """The token as the vocabulary spells it, control tokens included: "<s>"."""
        raw: bytes = self._api.llama_vocab_get_text(self._alive(), self._checked(token)) or b""
        return raw.decode("utf-8", errors="replace")

    def close(self) -> None:
        """Frees the tokenizer. May be called twice."""
        if self._model:
            self._api.llama_model_free(self._model)
            self._model = self._vocab = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _piece_of(self, token: int) -> bytes:
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = self._api.llama_token_to_piece(self._alive(), token, buffer, room, 0, False)
            if count >= 0:
                return buffer.raw[:count]
            room = -count

    def _alive(self) -> Any:
        if not self._model:
            raise ModelError(f"The tokenizer of {self.path} is closed.", hint="Load the model again.")
        return self._vocab

    def _checked(self, token: int) -> int:
        """llama.cpp ends the process at a token outside the vocabulary."""
        if not 0 <= token < self.size:
            raise RequestError(
                f"There is no token {token} in a vocabulary of {self.size}.",
                hint=f"Use token ids from 0 to {self.size - 1}.",
            )
        return token

    def _token_or_none(self, token: int) -> int | None:
        return token if 0 <= token < self.size else None


def _check(container: Container) -> None:
    """Refuses what llama.cpp would not refuse but abort on: arrays of another type than it takes for granted."""
    tokens = container.entries.get("tokenizer.ggml.tokens")
    if tokens is None:
        raise ModelError(f"{container.path} has no tokenizer.", hint="Give the file of the whole model.")
    for key, types in _ARRAY_TYPES.items():
        entry = container.entries.get(key)
        if entry is not None and (entry.type is not GGUFValueType.ARRAY or entry.item_type not in types):
            raise ModelError(
                f"{container.path} has {key} as {entry.type.name} of {entry.item_type.name}.",
                hint="The file is damaged or made by a faulty converter: get another one.",
            )


@contextmanager
def _log_of(api: Any) -> Iterator[list[str]]:
    """Keeps llama.cpp's log off the terminal meanwhile and collects its errors; then the log goes where it went before.

    The log is one for the process: what others load at the same time is heard here as well, and no line is printed.
    """
    errors: list[str] = []

    @api.llama_log_callback  # type: ignore[untyped-decorator, unused-ignore]
    def heard(level: int, text: bytes, _user: object) -> None:
        if level == _ERROR_LEVEL:
            errors.append(text.decode("utf-8", errors="replace").strip())

    before, user = api.llama_log_callback(), ctypes.c_void_p()
    api.llama_log_get(ctypes.byref(before), ctypes.byref(user))
    api.llama_log_set(heard, None)
    try:
        yield errors
    finally:
        api.llama_log_set(before, user)


__all__ = ["Tokenizer"]
