from struct import pack

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from common.errors import CorruptFrame
from common.kv.layout import KVFormat, KVLayout
from common.kv.wire import (
    MAX_FRAME_BYTES,
    Frame,
    blocks_per_frame,
    frame_runs,
    make_commit_frame,
    make_frame,
    seal,
    verified_payload,
)
from common.pb import decode_pb2, types_pb2

SMALL = KVLayout(KVFormat.INT8, 16, 1, 1, 16)
LARGE = KVLayout(KVFormat.INT8, 16, 80, 8, 128)


def plain_crc32c(data: bytes) -> int:
    """RFC 3720: the polynomial 0x1EDC6F41, bits reflected."""
    checksum = 0xFFFFFFFF
    for byte in data:
        checksum ^= byte
        for _ in range(8):
            checksum = checksum >> 1 ^ 0x82F63B78 * (checksum & 1)
    return checksum ^ 0xFFFFFFFF


def test_the_checksum_is_crc_32c_of_place_commit_and_payload() -> None:
    assert plain_crc32c(bytes(32)) == 0x8A9136AA, "RFC 3720, B.4"
    payload = bytes(range(100))
    assert make_frame(7, 3, 1, payload).head.crc32c == plain_crc32c(pack("<III", 7, 3, 1) + payload)
    commit = decode_pb2.Commit(num_blocks=9, num_prompt_tokens=140)
    place = pack("<III", 8, 0, 0)
    assert make_commit_frame(8, commit).head.crc32c == plain_crc32c(
        place + commit.SerializeToString(deterministic=True)
    )


def test_a_frame_that_is_whole_passes() -> None:
    payload = bytes(range(256)) * (2 * SMALL.block_bytes // 256) + bytes(128)
    assert verified_payload(make_frame(0, 0, 2, payload), SMALL) == payload


@pytest.mark.parametrize("field", ["sequence_number", "first_block"])
def test_blocks_that_say_another_place_are_refused(field: str) -> None:
    frame = make_frame(3, 2, 1, bytes(SMALL.block_bytes))
    setattr(frame.head, field, 1)
    with pytest.raises(CorruptFrame, match="CRC-32C"):
        verified_payload(frame, SMALL)


@pytest.mark.parametrize("field", ["num_blocks", "num_prompt_tokens", "num_cached_tokens"])
def test_a_damaged_commit_is_refused(field: str) -> None:
    frame = make_commit_frame(3, decode_pb2.Commit(first_token=types_pb2.OutputToken(token_id=5)))
    verified_payload(frame, SMALL)
    setattr(frame.head.commit, field, 1)
    with pytest.raises(CorruptFrame, match="CRC-32C"):
        verified_payload(frame, SMALL)
    setattr(frame.head.commit, field, 0)
    frame.head.commit.first_token.token_id ^= 1
    with pytest.raises(CorruptFrame, match="CRC-32C"):
        verified_payload(frame, SMALL)
    seal(frame)
    assert verified_payload(frame, SMALL) == b""


@given(st.integers(0, SMALL.block_bytes * 8 - 1))
def test_any_flipped_bit_is_found(bit: int) -> None:
    frame = make_frame(3, 0, 1, bytes(SMALL.block_bytes))
    damaged = bytearray(frame.payload)
    damaged[bit // 8] ^= 1 << bit % 8
    frame.parts = (bytes(damaged),)
    with pytest.raises(CorruptFrame, match="frame 3: CRC-32C is 0x"):
        verified_payload(frame, SMALL)


def test_a_frame_of_the_wrong_length_is_refused_with_both_numbers() -> None:
    with pytest.raises(CorruptFrame, match="100 bytes for 1 blocks of 576; 576 expected"):
        verified_payload(make_frame(0, 0, 1, bytes(100)), SMALL)


@given(st.integers(0, 300), st.integers(0, 300), st.sampled_from([SMALL, LARGE]))
def test_runs_cover_every_block_once_in_order(first: int, count: int, layout: KVLayout) -> None:
    runs = list(frame_runs(first, first + count, layout))
    assert [block for start, end in runs for block in range(start, end)] == list(range(first, first + count))
    assert all(0 < end - start <= blocks_per_frame(layout) for start, end in runs)


def test_a_frame_holds_at_least_one_block_however_large() -> None:
    assert LARGE.block_bytes > MAX_FRAME_BYTES
    assert blocks_per_frame(LARGE) == 1


PAYLOADS = st.one_of(st.binary(max_size=400), st.sampled_from([bytes(127), bytes(128), bytes(16_383), bytes(16_384)]))


@given(PAYLOADS, st.integers(0, 2**32 - 1), st.booleans())
def test_on_the_wire_a_frame_is_the_protobuf_message_that_proto_names(
    payload: bytes, number: int, has_commit: bool
) -> None:
    frame = make_frame(number, 3, 2, payload[:100], memoryview(payload)[100:])
    frame.head.ticket = b"ticket"
    if has_commit:
        frame.head.commit.num_blocks = 5
    message = decode_pb2.PushFrame()
    message.CopyFrom(frame.head)
    message.payload = payload
    assert decode_pb2.PushFrame.FromString(frame.encode()) == message
    for encoded in (frame.encode(), message.SerializeToString()):
        decoded = Frame.decode(encoded)
        assert decoded.head == frame.head, "the payload is no part of the head"
        assert decoded.payload == frame.payload == payload


def test_a_payload_is_read_where_it_lies() -> None:
    encoded = make_frame(1, 0, 1, bytes(range(200))).encode()
    payload = Frame.decode(encoded).payload
    assert isinstance(payload, memoryview)
    assert payload.obj is encoded


@given(st.integers(1, 220))
def test_a_message_that_is_cut_anywhere_is_no_frame_or_no_whole_one(length: int) -> None:
    encoded = make_frame(1, 0, 1, bytes(SMALL.block_bytes)).encode()
    try:
        frame = Frame.decode(encoded[:-length])
    except DecodeError:
        return
    with pytest.raises(CorruptFrame):
        verified_payload(frame, SMALL)


@pytest.mark.parametrize("data", [b"\x2a", b"\x2a\x80", b"\x2a\x05abcd", b"\x2a\xff\xff\xff\xff\xff\x01a", b"\x08"])
def test_what_is_no_message_is_refused_as_protobuf_refuses_it(data: bytes) -> None:
    with pytest.raises(DecodeError):
        Frame.decode(data)
