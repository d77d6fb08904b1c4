"""Channels to workers, with the trace context of the caller in every call's metadata."""

from typing import TYPE_CHECKING, Any

import grpc
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from common.faults.injector import Injector, installed
from common.rpc.faulty import SENT, faulty_stream
from common.rpc.limits import CLIENT_OPTIONS
from common.rpc.tls import WORKER_NAME, TlsIdentity

if TYPE_CHECKING:  # generic for the type checker alone
    _UnaryUnary = grpc.aio.UnaryUnaryClientInterceptor[Any, Any]
    _UnaryStream = grpc.aio.UnaryStreamClientInterceptor[Any, Any]
    _StreamUnary = grpc.aio.StreamUnaryClientInterceptor[Any, Any]
    _StreamStream = grpc.aio.StreamStreamClientInterceptor[Any, Any]
else:
    _UnaryUnary = grpc.aio.UnaryUnaryClientInterceptor
    _UnaryStream = grpc.aio.UnaryStreamClientInterceptor
    _StreamUnary = grpc.aio.StreamUnaryClientInterceptor
    _StreamStream = grpc.aio.StreamStreamClientInterceptor

_PROPAGATOR = TraceContextTextMapPropagator()


class Connector:
    """Opens channels to workers; with an identity under mutual TLS, else as plain text."""

    def __init__(self, tls: TlsIdentity | None = None) -> None:
        self._tls = tls

    @property
    def version(self) -> int:
        """Rises when the identity's files change: channels opened before it show the old certificate for ever."""
        return 0 if self._tls is None else self._tls.version

    def open(self, address: str) -> grpc.aio.Channel:
        """A channel to `host:port`, which connects when first used and reconnects by itself.

        Pass streams of requests as an async iterator: the call then ends with the peer's own error, where `write` on a
        finished call can only say that it is finished.
        """
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS, interceptors=_interceptors())
        return grpc.aio.secure_channel(
            address,
            self._tls.channel_credentials(),
            options=(*CLIENT_OPTIONS, ("grpc.ssl_target_name_override", WORKER_NAME)),
            interceptors=_interceptors(),
        )


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel as plain text; see `Connector.open`."""
    return Connector().open(address)


def _interceptors() -> Any:
    interceptors: list[Any] = [_TraceUnaryUnary(), _TraceUnaryStream(), _TraceStreamUnary(), _TraceStreamStream()]
    injector = installed()
    if injector is not None:
        interceptors.append(_FaultyStreamStream(injector))
    return interceptors


def _with_trace_context(details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    metadata = grpc.aio.Metadata(*(details.metadata or ()), *carrier.items())
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )


class _TraceUnaryUnary(_UnaryUnary):
    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(_with_trace_context(client_call_details), request)


class _TraceUnaryStream(_UnaryStream):
    async def intercept_unary_stream(
        self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(_with_trace_context(client_call_details), request)


class _TraceStreamUnary(_StreamUnary):
    async def intercept_stream_unary(
        self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request_iterator: Any
    ) -> Any:
        return await continuation(_with_trace_context(client_call_details), request_iterator)


class _TraceStreamStream(_StreamStream):
    async def intercept_stream_stream(
        self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request_iterator: Any
    ) -> Any:
        return await continuation(_with_trace_context(client_call_details), request_iterator)


class _FaultyStreamStream(_StreamStream):
    """Innermost: what it does to a message happens on the way into the connection."""

    def __init__(self, injector: Injector) -> None:
        self._injector = injector

    async def intercept_stream_stream(
        self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request_iterator: Any
    ) -> Any:
        method = client_call_details.method
        point_of = SENT.get(method.decode() if isinstance(method, bytes) else method)
        if point_of is not None:
            request_iterator = faulty_stream(request_iterator, point_of, self._injector)
        return await continuation(client_call_details, request_iterator)
