"""Blocks <-> frames. A frame is a run of whole blocks, or a commit, with the CRC-32C (RFC 3720) of all that it says."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import Struct

import google_crc32c
import numpy as np
from google.protobuf.message import DecodeError

from common.errors import CorruptFrame
from common.kv.layout import KVLayout
from common.pb import decode_pb2

MAX_FRAME_BYTES = 2 * 1024 * 1024
"""Smaller frames cost both event loops more turns, larger ones memory; a single larger block still travels whole."""

Bytes = bytes | memoryview

_PLACE = Struct("<III")
_PAYLOAD_TAG = decode_pb2.PushFrame.PAYLOAD_FIELD_NUMBER << 3 | 2  # one byte: a field of a length
_MAX_VARINT_BYTES = 5  # of a length below 2**35


@dataclass(slots=True)
class Frame:
    """A PushFrame. Its payload stays outside protobuf, which copies what it is given, what it writes and what it reads.

    `head` is all the rest; its own payload is empty. `parts` make up the payload: memory of the sender's pool, copied
    once, into the message; or of the message that was received.
    """

    head: decode_pb2.PushFrame
    parts: Sequence[Bytes] = ()
    encoded: bytes | None = None  # by `encode_ahead`; the frame must not change after that

    @property
    def payload(self) -> Bytes:
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)

    @property
    def num_payload_bytes(self) -> int:
        return sum(len(part) for part in self.parts)

    def encode(self) -> bytes:
        """The message as protobuf reads it, with the payload as its first field."""
        if self.encoded is not None:
            return self.encoded
        num_bytes = self.num_payload_bytes
        if not num_bytes:
            return self.head.SerializeToString()
        return b"".join((bytes((_PAYLOAD_TAG,)), _varint(num_bytes), *self.parts, self.head.SerializeToString()))

    def encode_ahead(self) -> None:
        self.encoded = self.encode()

    @classmethod
    def decode(cls, data: bytes) -> "Frame":
        """Of any protobuf encoding; a payload that comes first is not copied. Raises DecodeError."""
        payload, rest = _leading_payload(data)
        head = decode_pb2.PushFrame.FromString(rest)
        if head.payload:
            payload = head.payload
            head.ClearField("payload")
        return cls(head, (payload,) if payload else ())


def blocks_per_frame(layout: KVLayout) -> int:
    return max(1, MAX_FRAME_BYTES // layout.block_bytes)


def frame_runs(first_block: int, end_block: int, layout: KVLayout) -> Iterator[tuple[int, int]]:
    """Splits logical blocks [first_block, end_block) into half-open runs that fit a frame."""
    step = blocks_per_frame(layout)
    for start in range(first_block, end_block, step):
        yield start, min(start + step, end_block)


def make_frame(sequence_number: int, first_block: int, num_blocks: int, *parts: Bytes) -> Frame:
    """Precondition: nobody writes the blocks any more. Where somebody does, before the frame is encoded, the checksum
    finds it out."""
    head = decode_pb2.PushFrame(sequence_number=sequence_number, first_block=first_block, num_blocks=num_blocks)
    frame = Frame(head, parts)
    seal(frame)
    return frame


def make_commit_frame(sequence_number: int, commit: decode_pb2.Commit) -> Frame:
    frame = Frame(decode_pb2.PushFrame(sequence_number=sequence_number, commit=commit))
    seal(frame)
    return frame


def seal(frame: Frame) -> None:
    """Gives a frame the checksum of what it says now."""
    frame.head.crc32c = _checksum(frame)


def verified_payload(frame: Frame, layout: KVLayout) -> Bytes:
    """The frame's blocks. Raises CorruptFrame where length or checksum is not what the frame says: then nothing of it
    may be believed."""
    head, num_bytes = frame.head, frame.num_payload_bytes
    expected = head.num_blocks * layout.block_bytes
    if num_bytes != expected:
        raise CorruptFrame(
            f"frame {head.sequence_number}: {num_bytes} bytes for {head.num_blocks} blocks of "
            f"{layout.block_bytes}; {expected} expected"
        )
    actual = _checksum(frame)
    if actual != head.crc32c:
        raise CorruptFrame(f"frame {head.sequence_number}: CRC-32C is {actual:#010x}, the sender's {head.crc32c:#010x}")
    return frame.payload


def _checksum(frame: Frame) -> int:
    """Of the payload with its place, and of the commit: a first token that was damaged is as wrong as a block. The
    ticket is signed."""
    head = frame.head
    commit = head.commit.SerializeToString(deterministic=True) if head.HasField("commit") else b""
    checksum: int = google_crc32c.value(_PLACE.pack(head.sequence_number, head.first_block, head.num_blocks) + commit)
    for part in frame.parts:
        # The library refuses a memoryview, and takes an array of the same memory.
        checksum = google_crc32c.extend(checksum, np.frombuffer(part, np.uint8))
    return checksum


def _leading_payload(data: bytes) -> tuple[Bytes, bytes]:
    """The payload where it is the first field, and the message's other bytes."""
    if not data or data[0] != _PAYLOAD_TAG:
        return b"", data
    length = start = 0
    for index, byte in enumerate(data[1 : 1 + _MAX_VARINT_BYTES]):
        length |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            start = index + 2
            break
    end = start + length
    if not start or end > len(data):
        raise DecodeError("the payload is cut short")
    return memoryview(data)[start:end], data[end:]


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
