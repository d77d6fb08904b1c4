from common.pb import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "transfer_id", "generation", "fingerprint", "token_ids", "sampling", "tenant_salt", "decode_address", "ticket", "num_held_blocks", "output_token_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    transfer_id: bytes
    generation: int
    fingerprint: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _types_pb2.SamplingParams
    tenant_salt: bytes
    decode_address: str
    ticket: bytes
    num_held_blocks: int
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., transfer_id: _Optional[bytes] = ..., generation: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., tenant_salt: _Optional[bytes] = ..., decode_address: _Optional[str] = ..., ticket: _Optional[bytes] = ..., num_held_blocks: _Optional[int] = ..., output_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("first_token", "handed_off", "progress")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HANDED_OFF_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    first_token: FirstToken
    handed_off: HandedOff
    progress: Progress
    def __init__(self, first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., handed_off: _Optional[_Union[HandedOff, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token", "finish_reason", "num_cached_tokens", "queue_s", "prefill_s")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    token: _types_pb2.OutputToken
    finish_reason: _types_pb2.FinishReason
    num_cached_tokens: int
    queue_s: float
    prefill_s: float
    def __init__(self, token: _Optional[_Union[_types_pb2.OutputToken, _Mapping]] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., num_cached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ...) -> None: ...

class HandedOff(_message.Message):
    __slots__ = ("num_blocks_pushed", "num_bytes_pushed", "exposed_transfer_s")
    NUM_BLOCKS_PUSHED_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_PUSHED_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    num_blocks_pushed: int
    num_bytes_pushed: int
    exposed_transfer_s: float
    def __init__(self, num_blocks_pushed: _Optional[int] = ..., num_bytes_pushed: _Optional[int] = ..., exposed_transfer_s: _Optional[float] = ...) -> None: ...
