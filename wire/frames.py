"""The bytes of one message: a fixed header, a bounded msgpack body, arrays as frames of their own.

Frame 0 is the header (16 bytes): magic, protocol version, kind, number of arrays, epoch. Frame 1 is the body. Frames
2.. are the arrays' raw bytes in C order; what they hold is said in the body, so they arrive and leave without a copy.
This file knows bytes only; `messages` knows what they mean. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import msgpack

from potluck.wire import limits
from potluck.wire.errors import FrameTooLargeError, MalformedError, VersionMismatchError
from potluck.wire.ids import Epoch

Buffer: TypeAlias = bytes | bytearray | memoryview
"""What a transport hands over and takes: anything that offers its bytes without copying them."""

_HEADER = struct.Struct("<4sBBHQ")
HEADER_BYTES = _HEADER.size


class Header(NamedTuple):
    """Frame 0, decoded. `kind` is a number of `messages.KINDS`."""

    version: int
    kind: int
    arrays: int
    epoch: Epoch


def pack_header(kind: int, epoch: Epoch, arrays: int = 0) -> bytes:
    """Frame 0 for one message."""
    return _HEADER.pack(limits.MAGIC, limits.PROTOCOL_VERSION, kind, arrays, epoch)


def unpack_header(frames: Sequence[Buffer]) -> Header:
    """The header of a multipart message, checked against the message's shape.

    Raises MalformedError (not ours, or parts are missing), VersionMismatchError, FrameTooLargeError.
    """
    if not 2 <= len(frames) <= limits.FRAMES_PER_MESSAGE:
        raise MalformedError(
            f"A message has 2 to {limits.FRAMES_PER_MESSAGE} parts, this one has {len(frames)}."
        )
    head = memoryview(frames[0])
    if head.nbytes != HEADER_BYTES:
        raise MalformedError(f"The header has {head.nbytes} bytes instead of {HEADER_BYTES}.")
    magic, version, kind, arrays, epoch = _HEADER.unpack(head)
    if magic != limits.MAGIC:
        raise MalformedError("The message does not start with Potluck's magic number.")
    if version != limits.PROTOCOL_VERSION:
        older = "the peer" if version < limits.PROTOCOL_VERSION else "this side"
        raise VersionMismatchError(
            f"The peer speaks protocol {version}, this side {limits.PROTOCOL_VERSION}.",
            hint=f"Upgrade {older} so that both run the same version of Potluck.",
            peer_version=version,
            own_version=limits.PROTOCOL_VERSION,
        )
    if arrays != len(frames) - 2:
        raise MalformedError(f"The header announces {arrays} arrays, the message has {len(frames) - 2}.")
    for array in frames[2:]:
        size = memoryview(array).nbytes
        if size > limits.ARRAY_BYTES:
            raise FrameTooLargeError(f"An array of {size} bytes is over the limit of {limits.ARRAY_BYTES}.")
    return Header(version, kind, arrays, Epoch(epoch))


def pack_body(body: object) -> bytes:
    """Builtin objects (dict, list, str, int, float, bool, None, bytes) as msgpack."""
    packed: bytes = msgpack.packb(body, use_bin_type=True)
    return packed


def unpack_body(frame: Buffer, limit_bytes: int) -> object:
    """Builtin objects from a peer's bytes; nothing larger than `limit_bytes` and nothing but plain data.

    Raises FrameTooLargeError before parsing, MalformedError for anything msgpack refuses.
    """
    size = memoryview(frame).nbytes
    if size > limit_bytes:
        raise FrameTooLargeError(f"A body of {size} bytes is over the limit of {limit_bytes}.")
    try:
        return msgpack.unpackb(
            frame,
            raw=False,
            strict_map_key=True,
            max_ext_len=0,
            max_str_len=limit_bytes,
            max_bin_len=limit_bytes,
            max_array_len=limit_bytes,
            max_map_len=min(limit_bytes, 4096),
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise MalformedError(f"The body is not valid msgpack: {type(error).__name__}.") from error


__all__ = ["HEADER_BYTES", "Buffer", "Header", "pack_body", "pack_header", "unpack_body", "unpack_header"]
