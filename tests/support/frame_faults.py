"""Faults on the way from the sender's frames to the receiver, of a `worker_pair` or anything with a KVReceiver."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable

from common.kv.wire import Frame
from common.pb import decode_pb2
from decode_svc.kv_receiver import KVReceiver

Fault = Callable[[Frame], list[Frame]]
"""What arrives instead of a frame."""


def flip_payload_bit(frame: Frame) -> list[Frame]:
    damaged = bytearray(frame.payload)
    if not damaged:
        return flip_checksum_bit(frame)
    damaged[len(damaged) // 2] ^= 4
    frame.parts = (bytes(damaged),)
    return [frame]


def flip_checksum_bit(frame: Frame) -> list[Frame]:
    frame.head.crc32c ^= 1
    return [frame]


def move(frame: Frame) -> list[Frame]:
    """Good bytes that say another place."""
    frame.head.first_block ^= 1
    return [frame]


def move_far_away(frame: Frame) -> list[Frame]:
    frame.head.first_block ^= 1 << 20
    return [frame]


def truncate(frame: Frame) -> list[Frame]:
    if frame.payload:
        frame.parts = (frame.payload[:-1],)
        return [frame]
    return flip_checksum_bit(frame)


def drop(frame: Frame) -> list[Frame]:
    return []


def repeat(frame: Frame) -> list[Frame]:
    return [frame, frame, frame]


ALL_FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (flip_payload_bit, flip_checksum_bit, move, move_far_away, truncate, drop, repeat)
}


def pass_on(frame: Frame) -> list[Frame]:
    return [frame]


class FaultyWay:
    """`choose` says for each frame (its number on the way, whether it holds the commit) what happens to it; `overtake`
    lets every frame of an even number be overtaken by the one after it."""

    def __init__(self, choose: Callable[[int, Frame], Fault], *, overtake: bool = False) -> None:
        self._choose = choose
        self._overtake = overtake
        self.num_frames = 0

    def put_before(self, receiver: KVReceiver) -> None:
        receive = receiver.receive

        def receive_faulty(frames: AsyncIterator[Frame]) -> AsyncGenerator[decode_pb2.PushAck, None]:
            return receive(self._changed(frames))

        receiver.receive = receive_faulty  # type: ignore[method-assign]

    async def _changed(self, frames: AsyncIterator[Frame]) -> AsyncGenerator[Frame, None]:
        late: list[Frame] = []
        async for frame in frames:
            fault = self._choose(self.num_frames, frame)
            self.num_frames += 1
            if self._overtake and not late and not frame.head.HasField("commit"):
                late = fault(frame)
                continue
            for arriving in [*fault(frame), *late]:
                yield arriving
            late = []
