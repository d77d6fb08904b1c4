"""Our types <-> protobuf messages. The only place that spells a message's fields for both sides."""

from common.errors import BadRequest
from common.kv.layout import KVFormat, KVLayout
from common.pb import types_pb2
from common.sampling import FinishReason, OutputToken, SamplingParams

_FINISH_TO_PB = {
    None: types_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
}
_FINISH_FROM_PB = {value: key for key, value in _FINISH_TO_PB.items()}


def sampling_to_pb(params: SamplingParams) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(
        seed=params.seed,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=dict(params.logit_bias),
        stop_token_ids=sorted(params.stop_token_ids),
        num_logprobs=params.num_logprobs,
        speculation=params.speculation,
    )


def sampling_from_pb(message: types_pb2.SamplingParams) -> SamplingParams:
    """Raises BadRequest where a value is outside its range."""
    return SamplingParams(
        seed=message.seed,
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=dict(message.logit_bias),
        stop_token_ids=frozenset(message.stop_token_ids),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        speculation=message.speculation,
    )


def token_to_pb(token: OutputToken) -> types_pb2.OutputToken:
    return types_pb2.OutputToken(
        token_id=token.token_id,
        logprob=token.logprob,
        top_logprobs=[
            types_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in token.top_logprobs
        ],
    )


def token_from_pb(message: types_pb2.OutputToken) -> OutputToken:
    return OutputToken(
        token_id=message.token_id,
        logprob=message.logprob if message.HasField("logprob") else None,
        top_logprobs=tuple((entry.token_id, entry.logprob) for entry in message.top_logprobs),
    )


def finish_to_pb(reason: FinishReason | None) -> types_pb2.FinishReason:
    return _FINISH_TO_PB[reason]


def finish_from_pb(value: types_pb2.FinishReason) -> FinishReason | None:
    return _FINISH_FROM_PB[value]


def layout_to_pb(layout: KVLayout) -> types_pb2.KVLayout:
    return types_pb2.KVLayout(
        format=layout.format,
        block_size=layout.block_size,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
    )


def layout_from_pb(message: types_pb2.KVLayout) -> KVLayout:
    """Raises BadRequest for a format that this version does not know."""
    if message.format not in set(KVFormat):
        raise BadRequest(
            f"KV format {message.format!r} is unknown; known: {', '.join(KVFormat)}", param="layout.format"
        )
    return KVLayout(
        format=KVFormat(message.format),
        block_size=message.block_size,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
    )
