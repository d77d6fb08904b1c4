"""Blocks <-> frames. A frame is a run of whole blocks with the CRC-32C (RFC 3720) of its bytes."""

from collections.abc import Iterator

import google_crc32c

from common.errors import CorruptFrame
from common.kv.layout import KVLayout
from common.pb import decode_pb2

MAX_FRAME_BYTES = 2 * 1024 * 1024
"""Frames of 256 KiB to 4 MiB move fastest through gRPC; a single larger block still travels whole."""


def blocks_per_frame(layout: KVLayout) -> int:
    return max(1, MAX_FRAME_BYTES // layout.block_bytes)


def frame_runs(first_block: int, end_block: int, layout: KVLayout) -> Iterator[tuple[int, int]]:
    """Splits logical blocks [first_block, end_block) into half-open runs that fit a frame."""
    step = blocks_per_frame(layout)
    for start in range(first_block, end_block, step):
        yield start, min(start + step, end_block)


def make_frame(sequence_number: int, first_block: int, num_blocks: int, payload: bytes) -> decode_pb2.PushFrame:
    """Precondition: nobody writes the blocks any more; the checksum is of the bytes as they are sent."""
    return decode_pb2.PushFrame(
        sequence_number=sequence_number,
        first_block=first_block,
        num_blocks=num_blocks,
        payload=payload,
        crc32c=google_crc32c.value(payload),
    )


def check_frame(frame: decode_pb2.PushFrame, layout: KVLayout) -> None:
    """Raises CorruptFrame where the payload's length or checksum is not what the frame says."""
    expected = frame.num_blocks * layout.block_bytes
    if len(frame.payload) != expected:
        raise CorruptFrame(
            f"frame {frame.sequence_number}: {len(frame.payload)} bytes for {frame.num_blocks} blocks of "
            f"{layout.block_bytes}; {expected} expected"
        )
    actual = google_crc32c.value(frame.payload)
    if actual != frame.crc32c:
        raise CorruptFrame(
            f"frame {frame.sequence_number}: CRC-32C is {actual:#010x}, the sender's {frame.crc32c:#010x}"
        )
