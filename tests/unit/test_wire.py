import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import CorruptFrame
from common.kv.layout import KVFormat, KVLayout
from common.kv.wire import MAX_FRAME_BYTES, blocks_per_frame, check_frame, frame_runs, make_frame

SMALL = KVLayout(KVFormat.INT8, 16, 1, 1, 16)
LARGE = KVLayout(KVFormat.INT8, 16, 80, 8, 128)


def test_the_checksum_is_crc_32c() -> None:
    """RFC 3720, B.4: 32 bytes of zeros."""
    assert make_frame(0, 0, 1, bytes(32)).crc32c == 0x8A9136AA


def test_a_frame_that_is_whole_passes() -> None:
    check_frame(make_frame(0, 0, 2, bytes(range(256)) * (2 * SMALL.block_bytes // 256) + bytes(128)), SMALL)


@given(st.integers(0, SMALL.block_bytes * 8 - 1))
def test_any_flipped_bit_is_found(bit: int) -> None:
    frame = make_frame(3, 0, 1, bytes(SMALL.block_bytes))
    damaged = bytearray(frame.payload)
    damaged[bit // 8] ^= 1 << bit % 8
    frame.payload = bytes(damaged)
    with pytest.raises(CorruptFrame, match="frame 3: CRC-32C is 0x"):
        check_frame(frame, SMALL)


def test_a_frame_of_the_wrong_length_is_refused_with_both_numbers() -> None:
    with pytest.raises(CorruptFrame, match="100 bytes for 1 blocks of 576; 576 expected"):
        check_frame(make_frame(0, 0, 1, bytes(100)), SMALL)


@given(st.integers(0, 300), st.integers(0, 300), st.sampled_from([SMALL, LARGE]))
def test_runs_cover_every_block_once_in_order(first: int, count: int, layout: KVLayout) -> None:
    runs = list(frame_runs(first, first + count, layout))
    assert [block for start, end in runs for block in range(start, end)] == list(range(first, first + count))
    assert all(0 < end - start <= blocks_per_frame(layout) for start, end in runs)


def test_a_frame_holds_at_least_one_block_however_large() -> None:
    assert LARGE.block_bytes > MAX_FRAME_BYTES
    assert blocks_per_frame(LARGE) == 1
