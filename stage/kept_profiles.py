"""Profiles that were measured before, as files: one per device, model and settings. Pure but for files.

Anything that changes how fast a device is, or what it must hold, is part of the key. A file that can't be read is as
good as none: what it said is measured anew.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import msgspec

from potluck.wire.measures import Profile

FORMAT = 1
"""Of the files, and of what is timed: another one makes every kept profile void."""


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a profile is true of."""

    device: str
    cpu: str
    cores: int
    threads: int
    affinity: tuple[int, ...]
    """Cores that the process may use; empty where the system does not say."""
    cpu_quota: float
    engine: str
    llama: str
    fingerprint: str
    slots: int
    context_tokens: int
    batch_tokens: int
    exact: bool
    gpu: bool
    gpus: tuple[str, ...] = ()


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    setting: Setting
    profile: Profile


def profile_path(cache_dir: Path, setting: Setting) -> Path:
    """Where the profile of this setting is kept."""
    digest = hashlib.sha256(msgspec.json.encode([FORMAT, setting])).hexdigest()
    return cache_dir / "profiles" / f"{digest}.json"


def kept_profile(cache_dir: Path, setting: Setting) -> Profile | None:
    """What was measured before, marked as kept; None if there is nothing, or nothing that can be used."""
    try:
        found = msgspec.json.decode(profile_path(cache_dir, setting).read_bytes(), type=_Kept)
    except (OSError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    if found.format != FORMAT or found.setting != setting:
        return None
    return msgspec.structs.replace(found.profile, kept=True)


def keep_profile(cache_dir: Path, setting: Setting, profile: Profile) -> Path:
    """Writes the file in one step and returns its path. Raises OSError."""
    path = profile_path(cache_dir, setting)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(_Kept(FORMAT, setting, profile)))
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".profile-", delete=False) as file:
        part = Path(file.name)
        try:
            file.write(text)
            file.flush()
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    return path


__all__ = ["FORMAT", "Setting", "keep_profile", "kept_profile", "profile_path"]
