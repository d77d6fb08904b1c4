"""The gateway's HTTP surface around a fake dispatcher, and ways to call it."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import FastAPI
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from common.tokenizer import Tokenizer
from gateway.app import GatewayLimits, GatewayServices, create_app
from gateway.fleet import RegistryFleet
from gateway.observe import TelemetryObserver
from gateway.operator_access import OperatorAccess
from gateway.registry import Registry
from gateway.served_model import ModelCard, ModelHolder, ServedModel
from tests.support.fake_dispatcher import FakeDispatcher, Script, says
from tests.support.tiny_tokenizers import MODEL_NAME, tiny_tokenizer


@dataclass
class TestGateway:
    """An app with everything that it stands on."""

    __test__ = False

    script: Script | None = None  # None: answers "Hello, world!"
    tokenizer: Tokenizer = field(default_factory=tiny_tokenizer)
    clock: Callable[[], float] = time.monotonic
    tenants_by_api_key: Mapping[str, str] | None = None
    limits: GatewayLimits = field(default_factory=GatewayLimits)
    operator: OperatorAccess = field(default_factory=lambda: OperatorAccess(None, is_local=True))
    workers: Registry = field(default_factory=lambda: Registry())
    not_ready: str | None = None
    knows_model: bool = True

    def __post_init__(self) -> None:
        self.dispatcher = FakeDispatcher(self.script or says(self.tokenizer, "Hello, world!"), self.clock)
        self.model = ModelHolder(served_model(self.tokenizer) if self.knows_model else None)
        self.registry = CollectorRegistry()
        self.spans = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        self.app: FastAPI = create_app(
            GatewayServices(
                dispatcher=self.dispatcher,
                model=self.model,
                observer=TelemetryObserver(provider.get_tracer("test"), self.registry),
                registry=self.registry,
                fleet=RegistryFleet(self.workers),
                operator=self.operator,
                why_not_ready=lambda: self.not_ready,
                tenants_by_api_key=self.tenants_by_api_key,
                limits=self.limits,
                clock=self.clock,
            )
        )

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://gateway")

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> httpx.Response:
        """`body` is sent as it is when it is bytes, else as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client() as client:
            return await client.post(path, content=content, headers=headers)

    async def complete(self, headers: Mapping[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": MODEL_NAME, "prompt": "Say hello."} | fields
        return await self.post("/v1/completions", body, headers)

    async def chat(self, headers: Mapping[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Say hello."}]} | fields
        return await self.post("/v1/chat/completions", body, headers)


def served_model(tokenizer: Tokenizer) -> ServedModel:
    meta = tokenizer.meta
    return ServedModel(
        ModelCard(meta.model_name, meta.max_model_len, meta.vocab_size, 1_700_000_000, "reference", "a reason"),
        tokenizer,
    )


def events_of(response: httpx.Response) -> list[str]:
    """The `data:` of each server-sent event."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.text.endswith("\n\n")
    events = response.text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a complete stream."""
    *chunks, done = events_of(response)
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def assert_refused(response: httpx.Response, status: int, code: str, param: str | None, *parts: str) -> None:
    """A 4xx in OpenAI's shape that names the field, and whose message has all `parts`."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, param), error
    for part in parts:
        assert part in error["message"], error


def prompt_json(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL_NAME, "prompt": "hi"} | fields
