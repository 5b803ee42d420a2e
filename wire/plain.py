"""Plain data, as YAML gives it, into structs: checked key by key, for a misspelt key the likeliest one named. Pure."""

from __future__ import annotations

import difflib
import types
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import msgspec

from potluck.wire.errors import SettingsError

T = TypeVar("T", bound=msgspec.Struct)


def convert(raw: Any, kind: type[T], source: str, page: str) -> T:
    """`raw` as a `kind`. `page` is where a person finds every key. Raises SettingsError naming source and key.

    A section that is empty in YAML (None) counts as left out.
    """
    cleaned = _checked(raw, kind, source, "", page)
    try:
        return msgspec.convert(cleaned, kind)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}: {error}", hint=f"{page} shows every key with its unit.") from error


def _checked(raw: Any, kind: Any, source: str, path: str, page: str) -> Any:
    """The same data without empty sections. Raises for the first key that is not of its section."""
    struct, within = _section(kind)
    if struct is None:
        return raw
    if within is list:
        if not isinstance(raw, list):
            raise SettingsError(f"{source}: {path} must be a list.", hint=f"{page} shows how it is written.")
        return [_checked(one, struct, source, f"{path}[{index}]", page) for index, one in enumerate(raw)]
    if not isinstance(raw, dict):
        raise SettingsError(f"{source}: {path or 'the file'} must be keys and values.")
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(struct)}
    kept = {}
    for key, value in raw.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            near = near or [name for name in fields if name.startswith(str(key))]
            right = where[: len(where) - len(str(key))] + near[0] if near else ""
            hint = f"Did you mean {right}?" if near else f"{page} lists every key."
            raise SettingsError(f"{source}: there is no setting {where}.", hint=hint)
        if value is not None or _section(fields[key])[0] is None:
            kept[key] = _checked(value, fields[key], source, where, page)
    return kept


def _section(kind: Any) -> tuple[type[msgspec.Struct] | None, type | None]:
    """The struct that a field holds, if it holds one, and `list` if it holds several."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _section(get_args(kind)[0])
    if origin in (Union, types.UnionType):
        inner = [part for part in get_args(kind) if part is not types.NoneType]
        return _section(inner[0]) if len(inner) == 1 else (None, None)
    if origin in (tuple, list):
        return _section(get_args(kind)[0])[0], list
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind, None
    return None, None
