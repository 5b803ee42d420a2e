"""What every message is made of: the two kinds of struct, and the bounds on their fields. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from potluck.wire import limits

Name = Annotated[str, Meta(min_length=1, max_length=limits.NAME_CHARS)]
Text = Annotated[str, Meta(max_length=limits.TEXT_CHARS)]
Endpoint = Annotated[str, Meta(min_length=1, max_length=256)]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Timeout = Annotated[float, Meta(gt=0.0, le=limits.TIMEOUT_S)]
Rate = Annotated[float, Meta(ge=0.0, le=1e18)]
"""Something per second."""
Layer = Annotated[int, Meta(ge=0, le=limits.LAYERS)]
Slot = Annotated[int, Meta(ge=0, lt=limits.SLOTS)]
Position = Annotated[int, Meta(ge=0, le=limits.PROMPT_TOKENS * 2)]
Port = Annotated[int, Meta(ge=1, le=65_535)]


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A message's body: a map of its fields, those at their default left out."""


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A part that comes in large numbers: its fields in order, without names."""
