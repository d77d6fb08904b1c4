"""The OpenAI API: /v1/models, /v1/completions, /v1/chat/completions."""

from collections.abc import Awaitable, Callable, Sequence

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from common.errors import UnknownModel
from common.ids import mint_request_id
from gateway.answer import GenerationResponse
from gateway.auth import Authenticator
from gateway.body import parse_body_bytes, read_body
from gateway.edge import record_of, wants_transfer
from gateway.failure_options import failure_options
from gateway.off_loop import in_thread_if
from gateway.planning import CHAT, COMPLETIONS, Asked, Endpoint, Prompts, check_num_choices, plan
from gateway.prompts import TokenIds, tokenize_chat, tokenize_prompts
from gateway.quote import quote
from gateway.schemas import BodyT, ChatBody, CompletionBody, parse_body
from gateway.served_model import ModelCard, ServedModel
from gateway.services import GatewayServices
from gateway.transfer_fields import refuse_transfer_fields
from gateway.wire_json import Json

INLINE_BODY_BYTES = 16_384
"""Longer bodies are parsed in a thread: one of megabytes takes a second."""


def make_openai_router(services: GatewayServices) -> APIRouter:
    router = APIRouter(prefix="/v1")
    generations = _Generations(services)

    @router.get("/models")
    async def list_models(request: Request) -> Response:
        generations.authenticate(request)
        return JSONResponse({"object": "list", "data": [_card_json(services.served_model().card)]})

    @router.get("/models/{model:path}")
    async def show_model(request: Request, model: str) -> Response:
        generations.authenticate(request)
        served = services.served_model()
        _check_model(model, served.card)
        return JSONResponse(_card_json(served.card))

    @router.post("/completions")
    async def complete(request: Request) -> Response:
        async def tokenize(served: ServedModel, body: CompletionBody) -> Sequence[TokenIds]:
            check_num_choices(body.n, len(body.prompt), services.limits.max_choices)
            return await tokenize_prompts(served, body.prompt)

        return await generations.start(request, COMPLETIONS, CompletionBody, tokenize)

    @router.post("/chat/completions")
    async def chat(request: Request) -> Response:
        async def tokenize(served: ServedModel, body: ChatBody) -> Sequence[TokenIds]:
            check_num_choices(body.n, 1, services.limits.max_choices)
            return [await tokenize_chat(served, body.messages)]

        return await generations.start(request, CHAT, ChatBody, tokenize)

    return router


class _Generations:
    """The steps that every generation request takes before its answer begins."""

    def __init__(self, services: GatewayServices) -> None:
        self._services = services
        self._authenticator = Authenticator(services.tenants_by_api_key)

    def authenticate(self, request: Request) -> str:
        """The request's tenant."""
        return self._authenticator.tenant(request.headers.get("authorization"))

    async def start(
        self,
        request: Request,
        endpoint: Endpoint,
        schema: type[BodyT],
        tokenize: Callable[[ServedModel, BodyT], Awaitable[Sequence[TokenIds]]],
    ) -> Response:
        record = record_of(request.scope)
        record.request_id = mint_request_id(endpoint.id_prefix)
        record.operation = endpoint.operation
        tenant = self.authenticate(request)
        tells_transfer = wants_transfer(request.headers)
        refuse_transfer_fields(request.headers, request.query_params)
        content = await read_body(request, self._services.limits.max_body_bytes)
        body = await in_thread_if(
            len(content) > INLINE_BODY_BYTES, lambda: parse_body(schema, parse_body_bytes(content))
        )
        served = self._services.served_model()
        _check_model(body.model, served.card)
        record.model = served.card.name
        started = self._services.clock()
        with self._services.observer.tokenizing():
            token_ids = await tokenize(served, body)
        prompts = Prompts(token_ids, self._services.clock() - started)
        asked = Asked(body, failure_options(request.headers, body, self._services.limits.max_retries), tenant)
        planned = plan(self._services, served, endpoint, asked, prompts, record, tells_transfer=tells_transfer)
        return GenerationResponse(planned)


def _check_model(asked: str, card: ModelCard) -> None:
    if asked != card.name:
        raise UnknownModel(f"model {quote(asked)} is not served here; the model is {card.name!r}", param="model")


def _card_json(card: ModelCard) -> Json:
    """Extensions: `max_model_len` is prompt and output tokens together; `exact` whether one request has one answer."""
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "twostroke",
        "max_model_len": card.max_model_len,
        "numerics": card.numerics,
        "exact": not card.inexact_reason,
        "inexact_reason": card.inexact_reason,
    }
