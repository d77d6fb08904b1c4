"""Blocks <-> frames. A frame is a run of whole blocks, or a commit, with the CRC-32C (RFC 3720) of all that it says."""

from collections.abc import Iterator
from struct import Struct

import google_crc32c

from common.errors import CorruptFrame
from common.kv.layout import KVLayout
from common.pb import decode_pb2

MAX_FRAME_BYTES = 2 * 1024 * 1024
"""Frames of 256 KiB to 4 MiB move fastest through gRPC; a single larger block still travels whole."""

_PLACE = Struct("<III")


def blocks_per_frame(layout: KVLayout) -> int:
    return max(1, MAX_FRAME_BYTES // layout.block_bytes)


def frame_runs(first_block: int, end_block: int, layout: KVLayout) -> Iterator[tuple[int, int]]:
    """Splits logical blocks [first_block, end_block) into half-open runs that fit a frame."""
    step = blocks_per_frame(layout)
    for start in range(first_block, end_block, step):
        yield start, min(start + step, end_block)


def make_frame(sequence_number: int, first_block: int, num_blocks: int, payload: bytes) -> decode_pb2.PushFrame:
    """Precondition: nobody writes the blocks any more; the checksum is of the bytes as they are sent."""
    frame = decode_pb2.PushFrame(
        sequence_number=sequence_number, first_block=first_block, num_blocks=num_blocks, payload=payload
    )
    frame.crc32c = _checksum(frame, payload)
    return frame


def make_commit_frame(sequence_number: int, commit: decode_pb2.Commit) -> decode_pb2.PushFrame:
    frame = decode_pb2.PushFrame(sequence_number=sequence_number, commit=commit)
    seal(frame)
    return frame


def seal(frame: decode_pb2.PushFrame) -> None:
    """Gives a frame the checksum of what it says now."""
    frame.crc32c = _checksum(frame, frame.payload)


def verified_payload(frame: decode_pb2.PushFrame, layout: KVLayout) -> bytes:
    """The frame's blocks. Raises CorruptFrame where length or checksum is not what the frame says: then nothing of it
    may be believed."""
    payload = frame.payload
    expected = frame.num_blocks * layout.block_bytes
    if len(payload) != expected:
        raise CorruptFrame(
            f"frame {frame.sequence_number}: {len(payload)} bytes for {frame.num_blocks} blocks of "
            f"{layout.block_bytes}; {expected} expected"
        )
    actual = _checksum(frame, payload)
    if actual != frame.crc32c:
        raise CorruptFrame(
            f"frame {frame.sequence_number}: CRC-32C is {actual:#010x}, the sender's {frame.crc32c:#010x}"
        )
    return payload


def _checksum(frame: decode_pb2.PushFrame, payload: bytes) -> int:
    """Of the payload with its place, and of the commit: a first token that was damaged is as wrong as a block. The
    ticket is signed."""
    commit = frame.commit.SerializeToString(deterministic=True) if frame.HasField("commit") else b""
    place = _PLACE.pack(frame.sequence_number, frame.first_block, frame.num_blocks)
    return google_crc32c.extend(google_crc32c.value(place + commit), payload)
