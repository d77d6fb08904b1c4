from common.pb import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReserveRequest(_message.Message):
    __slots__ = ("request_id", "transfer_id", "generation", "fingerprint", "layout", "num_prompt_tokens", "block_hashes")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    transfer_id: bytes
    generation: int
    fingerprint: bytes
    layout: _types_pb2.KVLayout
    num_prompt_tokens: int
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, request_id: _Optional[str] = ..., transfer_id: _Optional[bytes] = ..., generation: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., layout: _Optional[_Union[_types_pb2.KVLayout, _Mapping]] = ..., num_prompt_tokens: _Optional[int] = ..., block_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("ticket", "num_held_blocks", "lease_s")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    num_held_blocks: int
    lease_s: float
    def __init__(self, ticket: _Optional[bytes] = ..., num_held_blocks: _Optional[int] = ..., lease_s: _Optional[float] = ...) -> None: ...

class PushFrame(_message.Message):
    __slots__ = ("sequence_number", "ticket", "first_block", "num_blocks", "payload", "crc32c", "commit")
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    sequence_number: int
    ticket: bytes
    first_block: int
    num_blocks: int
    payload: bytes
    crc32c: int
    commit: Commit
    def __init__(self, sequence_number: _Optional[int] = ..., ticket: _Optional[bytes] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., payload: _Optional[bytes] = ..., crc32c: _Optional[int] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("first_token", "num_prompt_tokens", "num_blocks", "num_cached_tokens")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    first_token: _types_pb2.OutputToken
    num_prompt_tokens: int
    num_blocks: int
    num_cached_tokens: int
    def __init__(self, first_token: _Optional[_Union[_types_pb2.OutputToken, _Mapping]] = ..., num_prompt_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class BlockRange(_message.Message):
    __slots__ = ("first_block", "num_blocks")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    num_blocks: int
    def __init__(self, first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class PushAck(_message.Message):
    __slots__ = ("sequence_number", "committed", "missing", "damaged")
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    sequence_number: int
    committed: bool
    missing: _containers.RepeatedCompositeFieldContainer[BlockRange]
    damaged: BlockRange
    def __init__(self, sequence_number: _Optional[int] = ..., committed: _Optional[bool] = ..., missing: _Optional[_Iterable[_Union[BlockRange, _Mapping]]] = ..., damaged: _Optional[_Union[BlockRange, _Mapping]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "ticket", "token_ids", "output_token_ids", "sampling", "tenant_salt", "fingerprint", "transfer_id", "generation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    ticket: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _types_pb2.SamplingParams
    tenant_salt: bytes
    fingerprint: bytes
    transfer_id: bytes
    generation: int
    def __init__(self, request_id: _Optional[str] = ..., ticket: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., tenant_salt: _Optional[bytes] = ..., fingerprint: _Optional[bytes] = ..., transfer_id: _Optional[bytes] = ..., generation: _Optional[int] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("tokens", "finish_reason", "stats", "first_position")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[_types_pb2.OutputToken]
    finish_reason: _types_pb2.FinishReason
    stats: GenerateStats
    first_position: int
    def __init__(self, tokens: _Optional[_Iterable[_Union[_types_pb2.OutputToken, _Mapping]]] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., stats: _Optional[_Union[GenerateStats, _Mapping]] = ..., first_position: _Optional[int] = ...) -> None: ...

class GenerateStats(_message.Message):
    __slots__ = ("num_cached_tokens", "num_computed_prompt_tokens", "queue_s", "prefill_s", "num_preemptions", "num_draft_tokens", "num_accepted_tokens", "num_target_passes", "num_refetched_blocks")
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGET_PASSES_FIELD_NUMBER: _ClassVar[int]
    NUM_REFETCHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    num_computed_prompt_tokens: int
    queue_s: float
    prefill_s: float
    num_preemptions: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_target_passes: int
    num_refetched_blocks: int
    def __init__(self, num_cached_tokens: _Optional[int] = ..., num_computed_prompt_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., num_preemptions: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., num_target_passes: _Optional[int] = ..., num_refetched_blocks: _Optional[int] = ...) -> None: ...
