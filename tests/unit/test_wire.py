"""Frames and messages: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import contextlib
import struct

import hypothesis.strategies as st
import msgpack
import msgspec
import pytest
from hypothesis import given

from potluck.wire import errors, limits
from potluck.wire.errors import (
    FrameTooLargeError,
    MalformedError,
    Phase,
    PotluckError,
    VersionMismatchError,
    WireError,
)
from potluck.wire.frames import pack_header, unpack_body
from potluck.wire.ids import Epoch
from potluck.wire.messages import (
    KIND_OF,
    KINDS,
    Assign,
    BatchDone,
    ErrorInfo,
    Goodbye,
    Heartbeat,
    Hop,
    MicroBatch,
    ModelRef,
    Refused,
    Register,
    SlotSampling,
    Span,
    Submit,
    Trim,
    decode,
    encode,
    int32_array,
)
from potluck.wire.sampling import Sampling

MODEL = ModelRef("m", "f" * 64, 30, 576, "llama")
EXAMPLES = [
    Register("a/1", "a", "0.1.0", "llama", "tcp://1.2.3.4:5", ("f" * 64,)),
    Heartbeat(),
    Goodbye("tired"),
    Refused(
        ErrorInfo(
            "stage_failed", "what", "hint", "dev", "dev/1", Phase.LOAD, None, {"n": 1, "x": 0.5, "s": "t"}
        )
    ),
    Assign(0, 0, 2, MODEL, 0, 15, "tcp://a:1", "tcp://b:2", 8, 2048, 64),
    Submit("r", tokens=(1, 2, 3), sampling=Sampling(logit_bias=((5, -1.5),)), stop=("\n",)),
    MicroBatch(7, (Span(0, 5, 2, 1), Span(3, 0, 1, 0)), (Trim(3, 0),), (SlotSampling(3, Sampling(seed=9)),)),
    BatchDone(7, (Hop(0, 0.01, 0.0, 12),)),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_comes_out_as_it_went_in(message: object) -> None:
    arrays = [b"\1\0\0\0"] if isinstance(message, MicroBatch | BatchDone) else []
    envelope = decode(encode(message, Epoch(12), arrays))  # type: ignore[arg-type]
    assert envelope.message == message
    assert envelope.epoch == 12
    assert [bytes(array) for array in envelope.arrays] == arrays


def test_every_kind_has_one_number_and_one_message() -> None:
    assert len(KIND_OF) == len(KINDS)
    assert all(0 < kind < 256 for kind in KINDS)


def test_arrays_are_not_copied() -> None:
    array = bytearray(8)
    frames = encode(MicroBatch(1, (Span(0, 0, 2, 0),)), Epoch(1), [array])
    assert frames[2] is array
    seen = int32_array(decode(frames).arrays[0], 2)
    array[0] = 5
    assert seen.tolist() == [5, 0]


def test_another_version_is_refused_naming_both_and_who_has_to_upgrade() -> None:
    frames = encode(Heartbeat())
    for version, who in ((limits.PROTOCOL_VERSION + 1, "this side"), (0, "the peer")):
        head = bytearray(frames[0])
        head[4] = version
        with pytest.raises(VersionMismatchError) as caught:
            decode([head, frames[1]])
        assert f"protocol {version}" in str(caught.value)
        assert f"this side {limits.PROTOCOL_VERSION}" in str(caught.value)
        assert f"Upgrade {who}" in str(caught.value)


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([], "parts"),
        ([b"x"], "parts"),
        ([b"", b""], "header has 0 bytes"),
        ([b"HTTP/1.1 200 OK\r", b"\x80"], "magic"),
        ([pack_header(200, Epoch(0)), b"\x80"], "kind 200"),
        ([pack_header(2, Epoch(0), 1), b"\x80"], "announces 1 arrays"),
        ([pack_header(2, Epoch(0), 1), b"\x80", b""], "0 to 0 arrays"),
        ([pack_header(64, Epoch(0)), b"\x80"], "1 to 2 arrays"),
        ([pack_header(2, Epoch(0)), b"\xc1"], "msgpack"),
        ([pack_header(2, Epoch(0)), b"\x80\x80"], "msgpack"),
        ([pack_header(2, Epoch(0)), b""], "msgpack"),
        ([pack_header(2, Epoch(0)), b"\x91" * 2000], "msgpack"),
        ([pack_header(2, Epoch(0)), msgpack.packb({"unknown": 1})], "unknown"),
        ([pack_header(2, Epoch(0)), msgpack.packb([1])], "Heartbeat"),
        ([pack_header(33, Epoch(0)), msgpack.packb({"request": ""})], "request"),
        ([pack_header(33, Epoch(0)), msgpack.packb({"request": "x" * 129})], "request"),
        ([pack_header(33, Epoch(0)), msgpack.packb({"request": 5})], "request"),
        ([pack_header(33, Epoch(0)), msgpack.packb({1: 2})], "msgpack"),
        ([pack_header(33, Epoch(0)), b"\xc7\x01\x05x"], "msgpack"),
    ],
)
def test_frames_that_are_not_of_the_protocol_are_refused_in_words(frames: list[bytes], words: str) -> None:
    with pytest.raises(MalformedError, match=words):
        decode(frames)


def test_a_body_over_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(FrameTooLargeError):
        decode([pack_header(2, Epoch(0)), bytes(limits.CONTROL_BODY_BYTES + 1)])
    with pytest.raises(FrameTooLargeError):
        decode([pack_header(64, Epoch(0), 1), bytes(limits.DATA_BODY_BYTES + 1), b""])


def test_a_body_that_announces_more_than_it_has_is_refused_without_growing() -> None:
    for claim in (
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
    ):
        with pytest.raises(MalformedError):
            unpack_body(claim, 1 << 20)


def test_only_the_kinds_of_a_socket_are_accepted_there() -> None:
    with pytest.raises(MalformedError, match="not expected here"):
        decode(encode(Heartbeat()), frozenset({MicroBatch}))


@given(st.lists(st.binary(max_size=64), max_size=6))
def test_no_bytes_do_more_than_raise_a_wire_error(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames)


@given(
    kind=st.sampled_from(sorted(KINDS)),
    arrays=st.lists(st.binary(max_size=16), max_size=3),
    body=st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(1 << 63), (1 << 64) - 1)
        | st.floats()
        | st.text()
        | st.binary(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=12,
    ),
)
def test_a_well_packed_body_is_a_valid_message_or_a_wire_error(
    kind: int, arrays: list[bytes], body: object
) -> None:
    frames = [pack_header(kind, Epoch(1), len(arrays)), msgpack.packb(body), *arrays]
    try:
        envelope = decode(frames)
    except WireError:
        return
    assert isinstance(envelope.message, KINDS[kind])
    assert msgspec.convert(msgspec.to_builtins(envelope.message), KINDS[kind]) == envelope.message


@given(flip=st.integers(0, 200), bit=st.integers(0, 7))
def test_one_flipped_bit_never_does_more_than_raise_a_wire_error(flip: int, bit: int) -> None:
    frames = [bytearray(frame) for frame in encode(EXAMPLES[4], Epoch(3))]
    whole = [(frame, at) for frame in frames for at in range(len(frame))]
    frame, at = whole[flip % len(whole)]
    frame[at] ^= 1 << bit
    with contextlib.suppress(WireError):
        decode(frames)


def every_error(root: type[PotluckError] = PotluckError) -> list[type[PotluckError]]:
    return [root, *(child for direct in root.__subclasses__() for child in every_error(direct))]


@pytest.mark.parametrize("kind", [kind for kind in every_error() if kind.__module__ == errors.__name__])
def test_an_error_arrives_at_the_other_side_as_it_left(kind: type[PotluckError]) -> None:
    error = kind("It broke.", hint="Mend it.", device="d", stage="d/1", phase=Phase.LOAD, param="p", n=3)
    sent = decode(encode(Refused(ErrorInfo.of(error)))).message
    assert isinstance(sent, Refused)
    back = sent.error.restore()
    assert type(back) is kind
    assert str(back) == str(error) == "It broke. [device d, stage d/1, phase load] Mend it."
    assert back.facts == {"n": 3}


def test_every_error_has_its_own_code_and_a_sentence() -> None:
    kinds = [kind for kind in every_error() if kind.__module__ == errors.__name__]
    assert len({kind.code for kind in kinds}) == len(kinds)
    assert all(str(kind()).endswith(".") for kind in kinds)


def test_int32_arrays_of_another_size_are_refused() -> None:
    with pytest.raises(MalformedError):
        int32_array(struct.pack("<3i", 1, 2, 3), 2)
