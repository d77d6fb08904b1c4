"""From a checked body and its token ids to everything that is decided before the first token is asked for."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from common.errors import BadRequest
from common.ids import RequestId, mint_seed
from common.tokenizer import StopStrings, Tokenizer
from gateway.answer import PlannedRequest
from gateway.chat_format import ChatFormat
from gateway.choice_text import ChoiceText
from gateway.choices import ChoiceRunner
from gateway.completion_format import CompletionFormat
from gateway.failure_options import FailureOptions
from gateway.generation import Generation, RequestTimes
from gateway.prompts import TokenIds, sampling_for
from gateway.record import Choice, RequestRecord
from gateway.response_format import Envelope, ResponseFormat
from gateway.schemas import GenerationBody
from gateway.seeds import choice_seed
from gateway.served_model import ServedModel
from gateway.services import GatewayServices


class MakeFormat(Protocol):
    def __call__(self, tokenizer: Tokenizer, *, has_logprobs: bool) -> ResponseFormat: ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What tells the two generation endpoints apart, beside their bodies and prompts."""

    operation: str  # as the GenAI conventions name it
    id_prefix: str
    default_max_tokens: int | None  # None: as many as fit
    make_format: MakeFormat


COMPLETIONS = Endpoint("text_completion", "cmpl", 16, CompletionFormat)
CHAT = Endpoint("chat", "chatcmpl", None, ChatFormat)


@dataclass(frozen=True, slots=True)
class Prompts:
    """All prompts of one request, as token ids, and how long that took."""

    token_ids: Sequence[TokenIds]
    tokenize_s: float


@dataclass(frozen=True, slots=True)
class Asked:
    """What the client said, checked, and who it is."""

    body: GenerationBody
    failure: FailureOptions
    tenant: str


def check_num_choices(n: int, num_prompts: int, max_choices: int) -> None:
    if n * num_prompts > max_choices:
        raise BadRequest(
            f"n is {n} and there are {num_prompts} prompts, together {n * num_prompts} choices; "
            f"the limit is {max_choices}",
            param="n",
        )


def plan(
    services: GatewayServices,
    served: ServedModel,
    endpoint: Endpoint,
    asked: Asked,
    prompts: Prompts,
    record: RequestRecord,
    *,
    tells_transfer: bool = False,
) -> PlannedRequest:
    """Fills in the record. Raises BadRequest or ContextLengthExceeded for what the model cannot do."""
    assert record.request_id is not None
    body = asked.body
    seed = mint_seed() if body.seed is None else body.seed
    choices = _make_choices(served, endpoint, asked, prompts, record, seed)
    record.choices = choices
    record.is_streamed = body.stream
    stops = StopStrings(body.stop)
    has_logprobs = body.num_logprobs is not None

    def make_text() -> ChoiceText:
        return ChoiceText(served.tokenizer, stops, keeps_tokens=has_logprobs)

    return PlannedRequest(
        record=record,
        choices=choices,
        runner=ChoiceRunner(services.dispatcher, make_text, services.clock),
        envelope=Envelope(record.request_id, int(time.time()), served.card.name, seed),
        answer=endpoint.make_format(served.tokenizer, has_logprobs=has_logprobs),
        clock=services.clock,
        include_usage=body.include_usage,
        tells_transfer=tells_transfer,
    )


def _make_choices(
    served: ServedModel,
    endpoint: Endpoint,
    asked: Asked,
    prompts: Prompts,
    record: RequestRecord,
    seed: int,
) -> list[Choice]:
    """Choices are numbered prompt by prompt, `n` for each."""
    choices: list[Choice] = []
    for prompt_index, token_ids in enumerate(prompts.token_ids):
        sampling = sampling_for(asked.body, served, len(token_ids), endpoint.default_max_tokens, seed)
        for choice_index in range(asked.body.n):
            index = len(choices)
            generation = Generation(
                request_id=_choice_id(record.request_id, index),
                token_ids=token_ids,
                sampling=replace(sampling, seed=choice_seed(seed, prompt_index, choice_index)),
                tenant=asked.tenant,
                on_failure=asked.failure.on_failure,
                max_retries=asked.failure.max_retries,
                times=RequestTimes(received=record.received, tokenize_s=prompts.tokenize_s),
            )
            choices.append(Choice(index, prompt_index, generation))
    return choices


def _choice_id(request_id: RequestId | None, index: int) -> RequestId:
    """Unique per choice on the workers' side; the first one has the request's own."""
    assert request_id is not None
    return request_id if index == 0 else RequestId(f"{request_id}-{index}")
