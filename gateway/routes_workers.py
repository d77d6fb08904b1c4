"""The operator's routes: which workers there are, and taking one out of service. In no trace.

Draining is a PUT: it may be repeated, and no web page can make a browser send it here unasked.
"""

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from common.errors import BadRequest
from gateway.quote import quote
from gateway.services import GatewayServices

_FLAGS = {"": False, "false": False, "true": True}


def make_workers_router(services: GatewayServices) -> APIRouter:
    router = APIRouter(prefix="/operations")

    @router.get("/workers")
    async def list_workers(request: Request) -> Response:
        services.operator.check(request.headers.get("authorization"))
        return JSONResponse({"workers": services.fleet.describe()})

    @router.put("/workers/{worker:path}/drain")
    async def drain(request: Request, worker: str) -> Response:
        services.operator.check(request.headers.get("authorization"))
        force = request.query_params.get("force", "")
        if force not in _FLAGS:
            raise BadRequest(f"force is {quote(force)}; it may be true or false", param="force")
        return JSONResponse(await services.fleet.drain(worker, force=_FLAGS[force]))

    return router
