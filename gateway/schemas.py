"""The bodies of generation requests, checked: strict types, known fields alone, nothing that is ignored.

What concerns the model (its name, its vocabulary, its length) is checked later, in `gateway.prompts`.
"""

from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from common.errors import BadRequest, UnsupportedParameter
from common.sampling import MAX_LOGPROBS
from gateway.parameters import (
    HARMLESS_IN_CHAT,
    HARMLESS_IN_COMPLETIONS,
    HARMLESS_IN_MESSAGES,
    Harmless,
    without_unsupported,
)
from gateway.quote import quote, shorten
from gateway.values import Prompt, join_text_parts, parse_logit_bias, parse_prompts, parse_stop

MAX_N = 128


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str


class GenerationBody(_Strict):
    """The fields that both endpoints share. A null is the same as leaving the field out."""

    harmless: ClassVar[Harmless] = {}

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_N)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(parse_stop)] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Annotated[dict[int, float], PlainValidator(parse_logit_bias)] = Field(default_factory=dict)
    ignore_eos: bool = False
    speculation: bool = True
    on_failure: Literal["fail", "recompute", "retry_other"] | None = None  # None: as the gateway is configured
    max_retries: int | None = Field(None, ge=0)
    user: str | None = None  # names the client's user; nothing here depends on it

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options needs stream: true", param="stream_options")
        return self

    @model_validator(mode="after")
    def _check_max_tokens(self) -> Self:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise BadRequest(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens}; "
                "they mean the same: send one",
                param="max_completion_tokens",
            )
        return self

    @property
    def requested_tokens(self) -> int | None:
        """The most output tokens that the client asked for, if it did."""
        return self.max_tokens or self.max_completion_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token; 0: the chosen token alone; None: no log probabilities."""
        raise NotImplementedError


class CompletionBody(GenerationBody):
    harmless: ClassVar[Harmless] = HARMLESS_IN_COMPLETIONS

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(parse_prompts)]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = None

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of is not None and self.best_of != self.n:
            raise UnsupportedParameter(
                f"best_of is {self.best_of}; choosing among more than n={self.n} is not supported: leave it out",
                param="best_of",
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class ChatBody(GenerationBody):
    harmless: ClassVar[Harmless] = HARMLESS_IN_CHAT

    messages: Annotated[list[ChatMessage], FailFast(), Field(min_length=1)]
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    safety_identifier: str | None = None  # as `user`

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest(f"top_logprobs is {self.top_logprobs}; it needs logprobs: true", param="top_logprobs")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


BodyT = TypeVar("BodyT", bound=GenerationBody)


def parse_body(schema: type[BodyT], fields: dict[str, Any]) -> BodyT:
    """Raises BadRequest or UnsupportedParameter, naming the field and its value."""
    supported = without_unsupported(fields, schema.harmless)
    if isinstance(supported.get("messages"), list):
        supported["messages"] = [_message_fields(index, item) for index, item in enumerate(supported["messages"])]
    for name in supported:
        if name not in schema.model_fields:
            raise _unknown(name)
    given = {name: value for name, value in supported.items() if value is not None}
    try:
        return schema.model_validate(given)
    except ValidationError as error:
        raise _as_bad_request(error) from None


def _message_fields(index: int, message: Any) -> Any:
    """The message with its content as one text, and without the fields of an answer sent back that say nothing."""
    if not isinstance(message, dict):
        return message
    path = f"messages.{index}."
    fields = without_unsupported(message, HARMLESS_IN_MESSAGES, path)
    if "content" in fields:
        fields["content"] = join_text_parts(fields["content"], f"{path}content")
    return fields


def _as_bad_request(error: ValidationError) -> BadRequest:
    first = error.errors(include_url=False, include_context=False)[0]
    path = shorten(".".join(map(str, first["loc"])))
    if first["type"] == "extra_forbidden":
        return _unknown(path)
    if first["type"] == "missing":
        return BadRequest(f"{path} is missing", param=path)
    return BadRequest(f"{path} is {quote(first['input'])}: {first['msg']}", param=path)


def _unknown(name: str) -> UnsupportedParameter:
    name = shorten(name)
    return UnsupportedParameter(f"{name} is not a parameter of this endpoint; leave it out", param=name)
