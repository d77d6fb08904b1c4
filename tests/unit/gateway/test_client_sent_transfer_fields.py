"""A client cannot say where blocks go, come from or what they are: such fields are refused wherever they are sent."""

from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor

from common.pb import decode_pb2, prefill_pb2
from gateway.schemas import ChatBody, CompletionBody
from gateway.transfer_fields import TRANSFER_FIELDS
from tests.support.gateway_app import TestGateway, assert_refused, prompt_json
from tests.support.tiny_tokenizers import MODEL_NAME

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SERVED = {COMPLETIONS: CompletionBody, CHAT: ChatBody}
HELLO = {"role": "user", "content": "hi"}


def fields_of(message: Descriptor) -> set[str]:
    return {field.name for field in message.fields}


BETWEEN_SERVICES = sorted(
    {
        name
        for message in (
            prefill_pb2.PrefillRequest,
            decode_pb2.ReserveRequest,
            decode_pb2.Ticket,
            decode_pb2.PushFrame,
            decode_pb2.Commit,
            decode_pb2.GenerateRequest,
        )
        for name in fields_of(message.DESCRIPTOR)
    }
    | TRANSFER_FIELDS
)
"""Every field of every message that takes part in a hand-off, and what other systems call theirs."""


def body_of(path: str) -> dict[str, Any]:
    return prompt_json() if path == COMPLETIONS else {"model": MODEL_NAME, "messages": [HELLO]}


@pytest.mark.parametrize("path", SERVED)
@pytest.mark.parametrize("stream", [False, True])
async def test_no_field_of_the_hand_off_is_a_parameter(path: str, stream: bool) -> None:
    gateway = TestGateway()
    for name in BETWEEN_SERVICES:
        assert name not in SERVED[path].model_fields
        for value in ("10.0.0.1:50051", 1, {"remote_host": "10.0.0.1"}, None):
            response = await gateway.post(path, body_of(path) | {"stream": stream, name: value})
            assert_refused(response, 400, "unsupported_parameter", name, name)
    assert not gateway.dispatcher.generations


async def test_nor_is_it_one_deeper_inside() -> None:
    gateway = TestGateway()
    for name in BETWEEN_SERVICES:
        response = await gateway.post(CHAT, {"model": MODEL_NAME, "messages": [HELLO | {name: "x"}]})
        assert_refused(response, 400, "unsupported_parameter", f"messages.0.{name}", name)
        for path in SERVED:
            options = {"stream": True, "stream_options": {name: True}}
            response = await gateway.post(path, body_of(path) | options)
            assert_refused(response, 400, "unsupported_parameter", f"stream_options.{name}", name)
    assert not gateway.dispatcher.generations


@pytest.mark.parametrize("path", SERVED)
async def test_headers_and_queries_that_mean_to_steer_a_transfer_are_refused(path: str) -> None:
    gateway = TestGateway()
    for name in sorted(TRANSFER_FIELDS):
        dashed = name.replace("_", "-")
        for header in (f"x-twostroke-{dashed}", f"X-{dashed.title()}", dashed, f"x-{name}"):
            response = await gateway.post(path, body_of(path), {header: "10.0.0.1:50051"})
            assert_refused(response, 400, "invalid_value", header.lower(), "header", header.lower())
        response = await gateway.post(f"{path}?{name}=10.0.0.1:50051", body_of(path))
        assert_refused(response, 400, "invalid_value", name, "query parameter", name)
    assert not gateway.dispatcher.generations


async def test_what_an_answer_says_of_its_workers_cannot_be_sent_back_to_choose_them() -> None:
    gateway = TestGateway()
    response = await gateway.complete()
    sent_back = {name: value for name, value in response.headers.items() if "worker" in name or "placement" in name}
    assert sent_back, "the answer names its workers"
    for name, value in sent_back.items():
        assert (await gateway.complete({name: value})).status_code == 400


async def test_headers_that_proxies_and_tools_add_change_nothing() -> None:
    gateway = TestGateway()
    headers = {"x-request-id": "1", "x-forwarded-for": "10.0.0.1", "x-tenant": "other", "x-stainless-lang": "python"}
    assert (await gateway.complete(headers)).status_code == 200
    [generation] = gateway.dispatcher.generations
    assert generation.tenant == "default"
