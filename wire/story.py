"""What happened to one request or stage, in order: a bounded memory of events and their causes. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple


class Line(NamedTuple):
    """One thing that happened: when (seconds on the core's clock), to what, because of what."""

    at_s: float
    subject: str
    cause: str
    text: str

    def __str__(self) -> str:
        return f"{self.at_s:10.3f}  {self.subject}: {self.text}  (by {self.cause})"


class Story:
    """The last `keep` lines over all subjects."""

    def __init__(self, keep: int = 4096) -> None:
        self._lines: deque[Line] = deque(maxlen=keep)

    def tell(self, at_s: float, subject: str, cause: str, text: str) -> None:
        """Adds one line."""
        self._lines.append(Line(at_s, subject, cause, text))

    def of(self, subject: str) -> list[Line]:
        """The lines whose subject or cause this is, oldest first."""
        return [line for line in self._lines if subject in (line.subject, line.cause)]

    def __iter__(self) -> Iterator[Line]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)
