"""What an operator's tools ask: /healthz, /readyz, /metrics. Open to all, and in no trace."""

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, Response

from gateway.services import GatewayServices


def make_operations_router(services: GatewayServices) -> APIRouter:
    router = APIRouter()

    @router.get("/healthz")
    async def health() -> Response:
        """The process lives; whether it can serve is /readyz's question."""
        return JSONResponse({"status": "ok"})

    @router.get("/readyz")
    async def readiness() -> Response:
        """200 while a model is known and there is a way to serve it; else 503 with the reason."""
        reason = services.why_not_ready()
        if reason is None and services.model.current() is None:
            reason = "no worker has told the gateway which model it serves"
        if reason is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": reason}, 503, {"retry-after": "1"})

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(services.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    return router
