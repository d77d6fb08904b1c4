"""Puts the HTTP surface together."""

from fastapi import FastAPI

from gateway.edge import ObservedRequests
from gateway.errors import install_error_handlers
from gateway.routes import make_openai_router
from gateway.routes_operations import make_operations_router
from gateway.routes_workers import make_workers_router
from gateway.services import GatewayLimits, GatewayServices

__all__ = ["GatewayLimits", "GatewayServices", "create_app"]


def create_app(services: GatewayServices) -> FastAPI:
    """The gateway as an ASGI app. It owns nothing of `services`: who made them closes them."""
    # Bodies are read and checked by `body` and `schemas`, so there is nothing for FastAPI to document.
    app = FastAPI(title="Twostroke", openapi_url=None, redirect_slashes=False)
    app.add_middleware(ObservedRequests, observer=services.observer, clock=services.clock)
    app.include_router(make_openai_router(services))
    app.include_router(make_operations_router(services))
    app.include_router(make_workers_router(services))
    install_error_handlers(app)
    return app
