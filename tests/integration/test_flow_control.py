"""A receiver that is slow slows the sender: what is on the way between two pools is a few frames, however much there is
to send."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import torch

from common.ids import BlockId
from common.kv.cache import KVCache
from common.kv.layout import KVFormat, KVLayout
from common.kv.wire import MAX_FRAME_BYTES, Frame, blocks_per_frame, verified_payload
from common.pb import decode_pb2, decode_pb2_grpc
from common.rpc.channel import open_channel
from common.rpc.push import add_decode_servicer
from common.rpc.server import WorkerServer
from prefill_svc.kv_sender import MAX_QUEUED_FRAMES, KVSender

LAYOUT = KVLayout(KVFormat.INT8, block_size=16, num_layers=8, num_kv_heads=8, head_dim=256)  # blocks of half a MiB
NUM_BLOCKS = 96
MAX_FRAMES_ON_THE_WAY = 12
"""gRPC's windows grow to what the path takes: four to six frames here, however many there are to send."""


class SlowDecode(decode_pb2_grpc.DecodeServicer):
    """Takes its time over every frame, and notes how many were made by then."""

    def __init__(self) -> None:
        self.num_made = 0
        self.num_taken = 0
        self.most_on_the_way = 0

    async def PushBlocks(
        self, request_iterator: AsyncIterator[Frame], context: object
    ) -> AsyncIterator[decode_pb2.PushAck]:
        async for frame in request_iterator:
            for _ in range(200):  # turns in which a sender without flow control would go far ahead
                await asyncio.sleep(0)
            self.num_taken += 1
            self.most_on_the_way = max(self.most_on_the_way, self.num_made - self.num_taken)
            verified_payload(frame, LAYOUT)
            is_commit = frame.head.HasField("commit")
            yield decode_pb2.PushAck(sequence_number=frame.head.sequence_number, committed=is_commit)
            if is_commit:
                return


async def test_a_slow_decode_slows_the_sender_and_memory_is_bounded() -> None:
    decode = SlowDecode()
    server = WorkerServer("127.0.0.1:0")
    add_decode_servicer(decode, server.grpc_server)
    await server.start()
    channel: grpc.aio.Channel = open_channel(server.address)

    def count(num_bytes: int, _: int) -> None:
        assert num_bytes <= MAX_FRAME_BYTES
        decode.num_made += 1

    sender = KVSender(channel, "decode", KVCache(LAYOUT, NUM_BLOCKS, torch.device("cpu")), b"ticket", 0, count)
    block_ids = [BlockId(number) for number in range(NUM_BLOCKS)]
    try:
        pushing = asyncio.create_task(sender.push(block_ids, NUM_BLOCKS, NUM_BLOCKS * LAYOUT.block_size))
        while not pushing.done():
            ahead = sender.num_blocks_pushed // blocks_per_frame(LAYOUT) - decode.num_made
            assert ahead <= MAX_QUEUED_FRAMES, "the pusher went on where frames are not taken"
            await asyncio.sleep(0)
        await pushing
        await sender.commit(decode_pb2.Commit(num_blocks=NUM_BLOCKS))
    finally:
        await sender.close()
        await channel.close()
        await server.stop(0)
    assert decode.num_taken == decode.num_made + 1, "the commit is a frame too"
    assert decode.num_made == NUM_BLOCKS // blocks_per_frame(LAYOUT)
    assert decode.most_on_the_way <= MAX_FRAMES_ON_THE_WAY
