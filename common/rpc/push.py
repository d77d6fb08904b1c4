"""The PushBlocks call with frames whose payload bypasses protobuf; on the wire it is what proto/decode.proto says."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from common.kv.wire import Frame
from common.pb import decode_pb2, decode_pb2_grpc

SERVICE = "twostroke.v1.Decode"
PUSH = f"/{SERVICE}/PushBlocks"

PushCall = Callable[[AsyncIterator[Frame]], "grpc.aio.StreamStreamCall[Frame, decode_pb2.PushAck]"]


def push_call(channel: grpc.aio.Channel) -> PushCall:
    """As `DecodeStub.PushBlocks`, with frames of ours."""
    return channel.stream_stream(
        PUSH, request_serializer=Frame.encode, response_deserializer=decode_pb2.PushAck.FromString
    )


def add_decode_servicer(servicer: decode_pb2_grpc.DecodeServicer, server: Any) -> None:
    """As the generated function; the servicer's PushBlocks gets frames of ours."""
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.PushBlocks,
        request_deserializer=Frame.decode,
        response_serializer=decode_pb2.PushAck.SerializeToString,
    )
    decode_pb2_grpc.add_DecodeServicer_to_server(servicer, server)
    server.add_registered_method_handlers(SERVICE, {"PushBlocks": handler})  # in the place of the generated one
