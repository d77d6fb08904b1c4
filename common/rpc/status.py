"""Errors of `common.errors` <-> gRPC statuses. The class travels by name in the trailing metadata."""

from collections.abc import Iterable
from typing import Any, NoReturn, cast
from urllib.parse import quote, unquote

import grpc

from common.errors import Cancelled, NoRoom, PeerLost, TwostrokeError, all_error_classes

ERROR_KEY = "twostroke-error"
PARAM_KEY = "twostroke-param"
RETRY_AFTER_KEY = "twostroke-retry-after-s"

MAX_MESSAGE_CHARS = 2_000
"""gRPC sends the message in a header: a longer one would cost the peer the status itself."""

_BY_STATUS: dict[grpc.StatusCode, type[TwostrokeError]] = {
    grpc.StatusCode.UNAVAILABLE: PeerLost,
    grpc.StatusCode.DEADLINE_EXCEEDED: PeerLost,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.RESOURCE_EXHAUSTED: NoRoom,
    # Ours carry their class: these are gRPC's own, of a message that could not be read or a connection that broke.
    grpc.StatusCode.INTERNAL: PeerLost,
    grpc.StatusCode.UNKNOWN: PeerLost,
    grpc.StatusCode.DATA_LOSS: PeerLost,
}


async def abort_with(context: "grpc.aio.ServicerContext[Any, Any]", error: TwostrokeError) -> NoReturn:
    """Ends the call with the error's status, so that the peer can raise the same class. Never returns."""
    metadata = [(ERROR_KEY, type(error).__name__)]
    if error.param is not None:
        # Header values are ASCII; a parameter's name may be whatever a client sent.
        metadata.append((PARAM_KEY, quote(error.param[:MAX_MESSAGE_CHARS])))
    if error.retry_after_s is not None:
        metadata.append((RETRY_AFTER_KEY, repr(float(error.retry_after_s))))
    status = grpc.StatusCode[error.grpc_status]
    await context.abort(status, error.message[:MAX_MESSAGE_CHARS], tuple(metadata))


def rpc_error_to_exception(error: grpc.aio.AioRpcError, peer: str) -> TwostrokeError:
    """What the peer raised, or what its silence means. `peer` names it in the message of the latter."""
    code, details = error.code(), error.details() or ""
    metadata = metadata_dict(error.trailing_metadata())
    known = {cls.__name__: cls for cls in all_error_classes()}.get(metadata.get(ERROR_KEY, ""))
    if known is None:
        return _BY_STATUS.get(code, TwostrokeError)(f"{peer} answered {code.name}: {details}")
    param = metadata.get(PARAM_KEY)
    return known(
        details,
        param=None if param is None else unquote(param),
        retry_after_s=_seconds(metadata.get(RETRY_AFTER_KEY)),
    )


def metadata_dict(metadata: object) -> dict[str, str]:
    """gRPC's metadata (None where there was none) as a dictionary; of a repeated key the last value."""
    pairs = cast("Iterable[tuple[str, str | bytes]]", metadata or ())
    return {key: value for key, value in pairs if isinstance(value, str)}


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
