"""Turns the bytes of token after token into text that may be sent at once, and finds the stop strings in it.

Held back are only the bytes of a character that is not complete, and the end of the text as long as it may be the
beginning of a stop string. The outcome depends on the text alone, never on where one token ends and the next begins:
the stop string that is complete first ends the text, before its first character; of two complete at the same
character, the one that began earlier. Nothing that belongs to it is ever sent. Pure.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """One answer's text. `stopped` is the stop string that ended it, None until one does. Empty stops are ignored."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.stopped: str | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = [_Matcher(stop) for stop in dict.fromkeys(stops) if stop]
        self._held = ""

    def push(self, piece: bytes) -> str:
        """Takes the bytes of the next token; returns the text that may go out now, often "", after a stop always ""."""
        return self._take(self._decoder.decode(piece))

    def finish(self) -> str:
        """The rest of the text at its end: what was held back; an incomplete character becomes U+FFFD."""
        text = self._take(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return text + rest

    def _take(self, text: str) -> str:
        if self.stopped is not None:
            return ""
        if not self._stops:
            return text
        whole = self._held + text
        for index, character in enumerate(text, start=len(self._held) + 1):
            complete = [stop for stop in self._stops if stop.step(character)]
            if complete:
                earliest = max(complete, key=lambda stop: len(stop.text))
                self.stopped, self._held = earliest.text, ""
                return whole[: index - len(earliest.text)]
        keep = max(stop.matched for stop in self._stops)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]


class _Matcher:
    """Finds one stop string, one character at a time (Knuth, Morris and Pratt): constant work for each on average.

    `matched` is how many of its first characters the text ends with.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # _back[n]: the longest proper beginning of the stop that its first n characters also end with.
        self._back = [0, 0]
        for index in range(1, len(text)):
            length = self._back[index]
            while length and text[index] != text[length]:
                length = self._back[length]
            self._back.append(length + (text[index] == text[length]))

    def step(self, character: str) -> bool:
        """Takes the next character; whether the stop string is complete with it."""
        matched = self.matched
        while matched and character != self.text[matched]:
            matched = self._back[matched]
        self.matched = matched + (character == self.text[matched])
        return self.matched == len(self.text)


__all__ = ["TextStream"]
