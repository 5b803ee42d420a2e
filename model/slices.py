"""Writes slices to disk, once each, however many processes ask and whichever of them dies while writing.

Decides nothing about their content (`slice_layout` does). Data is streamed from file to file in bounded chunks; gguf's
GGUFWriter would need each tensor as an array. A slice appears under its name only when it is complete and on the disk:
it is written to NAME.part, under a lock the system drops with its holder, and then renamed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from potluck.model.architectures import rules_for
from potluck.model.container import open_model, read_container
from potluck.model.facts import ModelFacts, read_facts
from potluck.model.slice_layout import FORMAT, FileRange, Piece, SliceLayout, lay_out, marks
from potluck.wire.errors import ModelError, Phase, TruncatedModelError

COPY_BYTES: Final = 4 << 20
SPARE_BYTES: Final = 64 << 20
"""Disk space a slice leaves free."""


@dataclass(frozen=True, slots=True)
class SliceFiles:
    """What a stage loads: its slice, and for the first stage the file whose token_embd it looks tokens up in."""

    slice_path: Path
    embeddings_path: Path | None


def ensure_slice(
    source: Path, facts: ModelFacts, first: int, end: int, cache_dir: Path, *, allow_unlisted: bool = False
) -> SliceFiles:
    """The files for the blocks [first, end) of `source`, written unless the cache has them.

    All of the model is the source itself. Others are in `cache_dir`/slices/FINGERPRINT/FIRST-END.vFORMAT.gguf. Waits
    while another process writes the same slice. Raises ForbiddenCutError, UnsupportedArchitectureError,
    ModelError (disk full or not writable, source changed).
    """
    layout = lay_out(facts, rules_for(facts, allow_unlisted=allow_unlisted), first, end)
    embeddings = source if first == 0 else None
    if (first, end) == (0, facts.layers):
        return SliceFiles(source, embeddings)
    folder = cache_dir / "slices" / facts.fingerprint
    target = folder / f"{first}-{end}.v{FORMAT}.gguf"
    wanted = marks(facts, first, end)
    if not _holds(target, wanted):
        with _disk_errors(target):
            folder.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(folder, but=target)
            with _part_of(target) as part:
                if not _holds(target, wanted):  # another process may have written it while this one waited
                    _fill(part, source, facts, layout, target)
    return SliceFiles(target, embeddings)


def write_slice(source: Path, first: int, end: int, target: Path, *, allow_unlisted: bool = False) -> None:
    """Writes the blocks [first, end) of `source` to `target`, replacing it in one step. Raises as `ensure_slice`."""
    facts = read_facts(source)
    layout = lay_out(facts, rules_for(facts, allow_unlisted=allow_unlisted), first, end)
    with _disk_errors(target), _part_of(target) as part:
        _fill(part, source, facts, layout, target)


# ---- content


def _fill(part: int, source: Path, facts: ModelFacts, layout: SliceLayout, target: Path) -> None:
    """Writes the whole slice to the open file `part` and gives it its name."""
    need = layout.file_bytes + SPARE_BYTES
    free = shutil.disk_usage(target.parent).free
    if free < need:
        raise ModelError(
            f"{target.parent} has {free >> 20} MiB free, and a slice needs {need >> 20} MiB.",
            hint="Free some space or set another cache folder.",
            phase=Phase.SLICE,
            free_bytes=free,
            needed_bytes=need,
        )
    with open_model(source) as file:
        origin = file.fileno()
        size = os.fstat(origin).st_size
        if size < facts.file_bytes:
            raise _cut_off(source, size)
        if size > facts.file_bytes:
            raise ModelError(f"{source} has changed since it was read.", hint="Try again.", phase=Phase.SLICE)
        written = 0
        for item in layout.header:
            if isinstance(item, FileRange):
                _copy(source, origin, part, item.start, item.end - item.start)
                written += item.end - item.start
            else:
                _write(part, item)
                written += len(item)
        _write(part, bytes(layout.data_start - written))
        for piece in layout.pieces:
            if piece.factor is None:
                _copy(source, origin, part, piece.offset, piece.bytes)
            else:
                _write(part, _multiplied(source, origin, piece, piece.factor))
            _write(part, bytes(piece.padded_bytes - piece.bytes))
    os.fsync(part)
    _part_path(target).replace(target)
    _sync_folder(target.parent)


def _multiplied(source: Path, origin: int, piece: Piece, factor: float) -> bytes:
    """A small float32 tensor times `factor`, each number rounded once."""
    raw = os.pread(origin, piece.bytes, piece.offset)
    if len(raw) != piece.bytes:
        raise _cut_off(source, piece.offset + len(raw))
    return (np.frombuffer(raw, "<f4").astype(np.float64) * factor).astype("<f4").tobytes()


def _copy(source: Path, origin: int, part: int, offset: int, count: int) -> None:
    """Copies bytes from file to file: inside the kernel where the file system can, else through a small buffer."""
    end = offset + count
    while offset < end:
        wanted = min(end - offset, COPY_BYTES)
        done = 0
        if hasattr(os, "copy_file_range"):
            try:
                done = os.copy_file_range(origin, part, wanted, offset_src=offset)
            except OSError as error:
                if error.errno not in (
                    errno.EXDEV,
                    errno.EINVAL,
                    errno.ENOSYS,
                    errno.EOPNOTSUPP,
                    errno.EPERM,
                ):
                    raise
        if done == 0:  # not supported here, or the file has become shorter
            raw = os.pread(origin, wanted, offset)
            if not raw:
                raise _cut_off(source, offset)
            _write(part, raw)
            done = len(raw)
        offset += done


def _write(part: int, raw: bytes) -> None:
    view = memoryview(raw)
    while view:
        view = view[os.write(part, view) :]


def _cut_off(source: Path, at: int) -> TruncatedModelError:
    return TruncatedModelError(
        f"{source} has become shorter while it was read: it ends at byte {at}.",
        hint="Leave the model file alone while Potluck uses it, then try again.",
        phase=Phase.SLICE,
    )


# ---- names, locks and leftovers


def _holds(target: Path, wanted: dict[str, int | float | str | bool]) -> bool:
    """Whether a whole slice with these marks is there."""
    if not target.exists():
        return False
    try:
        entries = read_container(target).entries
    except ModelError:
        return False
    return all(key in entries and entries[key].value == value for key, value in wanted.items())


def _part_path(target: Path) -> Path:
    return target.with_name(f"{target.name}.part")


@contextmanager
def _part_of(target: Path) -> Iterator[int]:
    """The open, empty, locked file `target`.part; it is gone afterwards unless it was renamed to `target`.

    Waits for another process that holds it. The lock goes with its holder: what a dead one left is taken over.
    """
    path = _part_path(target)
    while True:
        part = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(part, fcntl.LOCK_EX)
            if _is_at(part, path):  # its last holder may have renamed or removed it
                os.ftruncate(part, 0)
                try:
                    yield part
                finally:
                    if _is_at(part, path):
                        path.unlink()
                return
        finally:
            os.close(part)


def _is_at(part: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(part), path.stat())
    except FileNotFoundError:
        return False


def _remove_leftovers(folder: Path, but: Path) -> None:
    """Removes the parts that no living process writes."""
    for path in folder.glob("*.part"):
        if path == _part_path(but):
            continue
        try:
            part = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(part, path):
                path.unlink()
        except BlockingIOError:
            continue
        finally:
            os.close(part)


def _sync_folder(folder: Path) -> None:
    """Makes a rename survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    """What the system says about the target's disk, in a person's words."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise ModelError(
            f"The slice {target} can't be written: {error.strerror}.",
            hint="Free some space or set another cache folder." if full else "Set another cache folder.",
            phase=Phase.SLICE,
        ) from error


__all__ = ["SliceFiles", "ensure_slice", "write_slice"]
