"""The fake model's vocabulary: the 256 bytes, two specials, and syllables, so that tests of text have text."""

from __future__ import annotations

from potluck.stage.engines.fake_model import END_TOKEN, START_TOKEN, VOCAB

_CONSONANTS = b"bcdfghjklmnpqrstvwxz"
_VOWELS = b"aeiouy"


class FakeVocabulary:
    """Tokens 0-255 are the bytes, 256 starts a text, 257 ends one, the others are short ASCII syllables."""

    def __init__(self, size: int = VOCAB) -> None:
        if size <= END_TOKEN:
            raise ValueError(f"A fake vocabulary has more than {END_TOKEN} tokens, not {size}.")
        self.size = size
        self.start_token = START_TOKEN
        self.end_token = END_TOKEN

    def piece(self, token: int) -> bytes:
        """The bytes a token stands for; none for the specials. Raises ValueError outside the vocabulary."""
        if not 0 <= token < self.size:
            raise ValueError(f"Token {token} is not one of {self.size}.")
        if token < START_TOKEN:
            return bytes((token,))
        if token <= END_TOKEN:
            return b""
        index = token - END_TOKEN - 1
        consonant = _CONSONANTS[index % len(_CONSONANTS)]
        rest, vowel = divmod(index // len(_CONSONANTS), len(_VOWELS))
        return bytes((consonant, _VOWELS[vowel])) + (b"n" * rest) + (b" " if index % 3 == 0 else b"")

    @property
    def longest_piece(self) -> int:
        """Bytes of the longest token."""
        return max(len(self.piece(token)) for token in range(self.size))

    def is_end(self, token: int) -> bool:
        """Whether the token ends a text."""
        return token == END_TOKEN

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The text's bytes as tokens, after the start token if `special`."""
        return [START_TOKEN] * special + list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        """The tokens' pieces as text; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.piece(token) for token in tokens).decode(errors="replace")
