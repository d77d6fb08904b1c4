"""What the HTTP surface stands on: everything that `create_app` is given."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry

from common.errors import Unavailable
from gateway.generation import Dispatcher
from gateway.observe import RequestObserver
from gateway.operator_access import OperatorAccess
from gateway.served_model import ModelProvider, ServedModel
from gateway.wire_json import Json


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Bounds on one HTTP request."""

    max_body_bytes: int = 2**20
    max_choices: int = 128  # n times the number of prompts
    max_retries: int = 2  # the most that a request may ask for


class Fleet(Protocol):
    """The workers, as their operator deals with them."""

    def describe(self) -> list[Json]: ...

    async def drain(self, name: str, *, force: bool) -> Json: ...


@dataclass(frozen=True, slots=True)
class GatewayServices:
    """The parts that requests need, made by the gateway's start-up or by a test."""

    dispatcher: Dispatcher
    model: ModelProvider
    observer: RequestObserver
    registry: CollectorRegistry  # what /metrics shows
    fleet: Fleet
    operator: OperatorAccess
    why_not_ready: Callable[[], str | None]  # None: there is a way to serve; else the reason, for /readyz
    tenants_by_api_key: Mapping[str, str] | None = None  # None: no authentication, one tenant
    limits: GatewayLimits = field(default_factory=GatewayLimits)
    clock: Callable[[], float] = time.monotonic  # seconds; the dispatcher's clock too

    def served_model(self) -> ServedModel:
        """The model, or Unavailable while no worker has told of one."""
        served = self.model.current()
        if served is None:
            raise Unavailable("no worker has told the gateway which model it serves; retry shortly", retry_after_s=1.0)
        return served
