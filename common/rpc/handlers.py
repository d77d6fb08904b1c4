"""The server's interceptor: the caller's trace context in, our errors out as statuses, around every handler."""

import inspect
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
from opentelemetry import context as otel_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from common.errors import TwostrokeError
from common.faults.injector import installed
from common.rpc.faulty import with_faults
from common.rpc.status import abort_with, metadata_dict

log = logging.getLogger("twostroke.rpc")

if TYPE_CHECKING:  # generic for the type checker alone
    _ServerInterceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _ServerInterceptor = grpc.aio.ServerInterceptor

_PROPAGATOR = TraceContextTextMapPropagator()
_Behavior = Callable[[Any, Any], Any]
_FACTORIES: dict[str, Callable[..., "grpc.RpcMethodHandler[Any, Any]"]] = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


class HandlerInterceptor(_ServerInterceptor):
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any]"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """gRPC runs this and the handler in one contextvars context, which ends with the call: nothing to detach."""
        otel_context.attach(_PROPAGATOR.extract(metadata_dict(handler_call_details.invocation_metadata)))
        handler = await continuation(handler_call_details)
        return handler and _guard(handler, handler_call_details.method)


def _guard(handler: "grpc.RpcMethodHandler[Any, Any]", method: str) -> "grpc.RpcMethodHandler[Any, Any]":
    for kind, factory in _FACTORIES.items():
        behavior = getattr(handler, kind)
        if behavior is not None:
            injector = installed()
            if injector is not None:
                behavior = with_faults(behavior, method, injector)
            guarded = _translating_errors(_as_coroutine(behavior), method)
            return factory(guarded, handler.request_deserializer, handler.response_serializer)
    return handler


def _as_coroutine(behavior: _Behavior) -> _Behavior:
    """Async generators become coroutines that write, so that a cancelled call closes the generator at once."""
    if not inspect.isasyncgenfunction(behavior):
        return behavior

    async def write_all(request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        # Headers at once: a caller can tell a call that was heard from one that was not.
        await context.send_initial_metadata(())
        async with aclosing(behavior(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return write_all


def _translating_errors(behavior: _Behavior, method: str) -> _Behavior:
    async def handle(request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> Any:
        try:
            return await behavior(request, context)
        except TwostrokeError as error:
            await abort_with(context, error)
        except grpc.aio.AbortError:
            raise  # the handler has set a status of its own
        except Exception:
            log.exception("unexpected error in %s", method)
            await abort_with(context, TwostrokeError("internal error; the worker's log has the details"))

    return handle
