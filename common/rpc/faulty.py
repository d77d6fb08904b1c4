"""Carries out the faults of `common.faults` on the messages of calls. Only used where an injector is installed."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError, Message

from common.errors import CorruptFrame
from common.faults.injector import Fault, Injector
from common.faults.points import FaultKind, Point

if TYPE_CHECKING:  # every service loads this module, and not all of them know frames
    from common.kv.wire import Frame

PointOf = Callable[[Any], Point]

_PUSH = "/twostroke.v1.Decode/PushBlocks"
_RESERVE = "/twostroke.v1.Decode/Reserve"


def _frame_received(frame: "Frame") -> Point:
    return Point.COMMIT if frame.head.HasField("commit") else Point.FRAME_RECEIVED


SENT: dict[str, PointOf] = {_PUSH: lambda _: Point.FRAME_SENT}
"""By method: the point that a request of a client passes."""
RECEIVED: dict[str, PointOf] = {_PUSH: _frame_received}
"""By method: the point that a request passes on the server's side."""
ANSWERED: dict[str, PointOf] = {
    _PUSH: lambda _: Point.ACK,
    _RESERVE: lambda _: Point.RESERVE_REPLY,
    "/twostroke.v1.Prefill/Run": lambda _: Point.PREFILL_REPLY,
    "/twostroke.v1.Decode/Generate": lambda _: Point.DECODE_STREAM,
}
"""By method: the point that a response passes on the server's side."""


async def faulty_stream(
    messages: AsyncIterator[Any], point_of: PointOf, injector: Injector
) -> AsyncGenerator[Any, None]:
    """Messages of protobuf, or frames of a push."""
    late: Any = None  # comes after the next one
    async for message in messages:
        fault = await injector.pass_point(point_of(message))
        kind = fault.kind if fault is not None else None
        if kind is FaultKind.DROP:
            continue
        if kind is FaultKind.REORDER and late is None:
            late = message
            continue
        yield _damaged(message, fault)
        if kind is FaultKind.DUPLICATE:
            yield message
        if late is not None:
            yield late
            late = None
    if late is not None:
        yield late


def with_faults(behavior: Callable[[Any, Any], Any], method: str, injector: Injector) -> Callable[[Any, Any], Any]:
    """A handler that reads and answers through the faults of its method."""
    if method == _RESERVE:
        return _faulty_reply(behavior, ANSWERED[method], injector)
    if method not in ANSWERED:
        return behavior
    received, answered = RECEIVED.get(method), ANSWERED[method]

    async def stream(request: Any, context: Any) -> AsyncIterator[Message]:
        requests = request if received is None else faulty_stream(request, received, injector)
        async with (
            aclosing(behavior(requests, context)) as answers,
            aclosing(faulty_stream(answers, answered, injector)) as responses,
        ):
            async for response in responses:
                yield response

    return stream


def _faulty_reply(
    behavior: Callable[[Any, Any], Any], point_of: PointOf, injector: Injector
) -> Callable[[Any, Any], Any]:
    async def reply(request: Any, context: Any) -> Message:
        answer: Message = await behavior(request, context)
        fault = await injector.pass_point(point_of(answer))
        if fault is not None and fault.kind is FaultKind.DROP:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the reply was lost")
        return _damaged(answer, fault)

    return reply


def _damaged(message: Any, fault: Fault | None) -> Any:
    if fault is None or fault.kind not in (FaultKind.FLIP, FaultKind.TRUNCATE):
        return message
    if isinstance(message, Message):
        return _reparsed(message, _flipped(message.SerializeToString(), fault.bits))
    return _damaged_frame(message, fault)


def _damaged_frame(frame: "Frame", fault: Fault) -> "Frame":
    """Its blocks, where it has any."""
    payload = bytes(frame.payload)
    if fault.kind is FaultKind.TRUNCATE:
        return replace(frame, parts=(payload[: len(payload) // 2],), encoded=None)
    if payload:
        return replace(frame, parts=(_flipped(payload, fault.bits),), encoded=None)
    return replace(
        frame, head=_reparsed(frame.head, _flipped(frame.head.SerializeToString(), fault.bits)), encoded=None
    )


def _flipped(data: bytes, bits: int) -> bytes:
    position = bits % (8 * len(data))
    changed = bytearray(data)
    changed[position // 8] ^= 1 << position % 8
    return bytes(changed)


def _reparsed(message: Any, data: bytes) -> Any:
    try:
        return type(message).FromString(data)
    except DecodeError as error:  # gRPC itself ends a call so
        raise CorruptFrame(f"a message cannot be read: {error}") from None
