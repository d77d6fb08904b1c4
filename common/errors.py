"""Every error that crosses a seam, and its HTTP and gRPC status.

TwostrokeError
├── BadRequest (400)              the client's mistake: names the field and the value
│   ├── UnsupportedParameter
│   └── ContextLengthExceeded
├── Unauthorized (401)
├── Forbidden (403)
├── UnknownModel (404)
├── UnknownWorker (404)
├── LastWorker (409)              draining it would end the service; may be forced
├── NoRoom (429)                  overload; carries Retry-After
├── Cancelled (499)               the caller went away
├── Unavailable (503)
│   ├── NoWorker
│   └── Draining
├── TransferError (502)           a hand-off failed; the request may be recomputed
│   ├── UnknownTransfer
│   ├── StaleGeneration
│   ├── CorruptFrame
│   ├── PushAbandoned             the sender ended it before the commit: it may have had no need of one
│   ├── LeaseExpired
│   └── FingerprintMismatch
├── PeerLost (502)                a worker died or stopped answering
├── NumericFailure (500)          NaN or Inf in the model's values
├── ModelLoadError                start-up: the model cannot be served; names the file and the reason
└── ConfigError                   start-up: a setting is wrong; names it

gRPC carries the class by name in the trailing metadata `twostroke-error`, so that the peer raises the same class.
"""

from typing import ClassVar


class TwostrokeError(Exception):
    """Base of the tree. `str(error)` says what was wrong, the value, and what to do."""

    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    openai_type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequest(TwostrokeError):
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    openai_type = "invalid_request_error"
    code = "invalid_value"


class UnsupportedParameter(BadRequest):
    code = "unsupported_parameter"


class ContextLengthExceeded(BadRequest):
    code = "context_length_exceeded"


class Unauthorized(TwostrokeError):
    http_status = 401
    grpc_status = "UNAUTHENTICATED"
    openai_type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(TwostrokeError):
    http_status = 403
    grpc_status = "PERMISSION_DENIED"
    openai_type = "authentication_error"
    code = "forbidden"


class UnknownModel(TwostrokeError):
    http_status = 404
    grpc_status = "NOT_FOUND"
    openai_type = "invalid_request_error"
    code = "model_not_found"


class UnknownWorker(TwostrokeError):
    http_status = 404
    grpc_status = "NOT_FOUND"
    openai_type = "invalid_request_error"
    code = "worker_not_found"


class LastWorker(TwostrokeError):
    http_status = 409
    grpc_status = "FAILED_PRECONDITION"
    openai_type = "invalid_request_error"
    code = "last_worker"


class NoRoom(TwostrokeError):
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    openai_type = "rate_limit_error"
    code = "no_room"


class Cancelled(TwostrokeError):
    http_status = 499
    grpc_status = "CANCELLED"
    openai_type = "invalid_request_error"
    code = "cancelled"


class Unavailable(TwostrokeError):
    http_status = 503
    grpc_status = "UNAVAILABLE"
    code = "unavailable"


class NoWorker(Unavailable):
    code = "no_worker"


class Draining(Unavailable):
    code = "draining"


class TransferError(TwostrokeError):
    http_status = 502
    grpc_status = "ABORTED"
    code = "transfer_failed"


class UnknownTransfer(TransferError):
    grpc_status = "NOT_FOUND"
    code = "unknown_transfer"


class StaleGeneration(TransferError):
    grpc_status = "FAILED_PRECONDITION"
    code = "stale_generation"


class CorruptFrame(TransferError):
    grpc_status = "DATA_LOSS"
    code = "corrupt_frame"


class PushAbandoned(TransferError):
    code = "push_abandoned"


class LeaseExpired(TransferError):
    grpc_status = "FAILED_PRECONDITION"
    code = "lease_expired"


class FingerprintMismatch(TransferError):
    grpc_status = "FAILED_PRECONDITION"
    code = "fingerprint_mismatch"


class PeerLost(TwostrokeError):
    http_status = 502
    grpc_status = "UNAVAILABLE"
    code = "peer_lost"


class NumericFailure(TwostrokeError):
    code = "numeric_failure"


class ModelLoadError(TwostrokeError):
    code = "model_load_error"


class ConfigError(TwostrokeError):
    code = "config_error"


def all_error_classes() -> tuple[type[TwostrokeError], ...]:
    """Every class of the tree, the base included."""

    def walk(cls: type[TwostrokeError]) -> list[type[TwostrokeError]]:
        return [cls, *(sub for child in cls.__subclasses__() for sub in walk(child))]

    return tuple(walk(TwostrokeError))
