"""Where faults can be injected, and which kinds make sense there: the one table."""

from enum import StrEnum


class Point(StrEnum):
    FRAME_SENT = "kv.frame_sent"  # prefill: a frame on its way into the connection
    FRAME_RECEIVED = "kv.frame_received"  # decode: a frame out of the connection, before it is checked
    COMMIT = "kv.commit"  # decode: as above, the frame with the commit
    ACK = "kv.ack"  # decode: an acknowledgement on its way back
    RESERVE_REPLY = "decode.reserve_reply"  # decode: the ticket on its way to the gateway
    PREFILL_REPLY = "prefill.reply"  # prefill: first token and hand-off on their way to the gateway
    DECODE_STREAM = "decode.stream"  # decode: tokens on their way to the gateway
    INDEX_CALL = "index.call"  # any service: a call of the prefix index in Redis


class FaultKind(StrEnum):
    DROP = "drop"  # the message is lost; an index call fails
    DUPLICATE = "duplicate"
    REORDER = "reorder"  # the message comes after the next one
    TRUNCATE = "truncate"  # the second half of the payload is missing
    FLIP = "flip"  # one bit of the message, of its payload where it has one
    DELAY = "delay"
    STALL = "stall"  # nothing comes any more, and the connection stays
    KILL = "kill"  # SIGKILL to the own process


_ANYWHERE = frozenset({FaultKind.DROP, FaultKind.DELAY, FaultKind.STALL, FaultKind.KILL})
_STREAM = _ANYWHERE | {FaultKind.DUPLICATE, FaultKind.REORDER}

KINDS_AT: dict[Point, frozenset[FaultKind]] = {
    Point.FRAME_SENT: _STREAM | {FaultKind.TRUNCATE, FaultKind.FLIP},
    Point.FRAME_RECEIVED: _STREAM | {FaultKind.TRUNCATE, FaultKind.FLIP},
    Point.COMMIT: _STREAM | {FaultKind.FLIP},
    Point.ACK: _STREAM,
    Point.RESERVE_REPLY: _ANYWHERE | {FaultKind.FLIP},
    # No flips below: these messages carry no checksum of ours; their integrity is TCP's, and TLS's where it is on.
    Point.PREFILL_REPLY: _STREAM,
    Point.DECODE_STREAM: _STREAM,
    Point.INDEX_CALL: _ANYWHERE,
}
