"""Names of things that cross process borders, and how they are minted."""

import secrets
from typing import NewType

from common.errors import BadRequest

BlockHash = NewType("BlockHash", bytes)
"""16 bytes; the only name of a block outside its worker."""

BlockId = NewType("BlockId", int)
"""Index of a block in one worker's pool; never leaves the worker."""

TransferId = NewType("TransferId", bytes)
"""16 random bytes; one hand-off."""

TRANSFER_ID_BYTES = 16

Incarnation = NewType("Incarnation", bytes)
"""16 random bytes per worker start; what an earlier start left behind is ignored."""

RequestId = NewType("RequestId", str)


def mint_transfer_id() -> TransferId:
    return TransferId(secrets.token_bytes(TRANSFER_ID_BYTES))


def transfer_id_of(raw: bytes) -> TransferId:
    """A transfer id that came over the wire. Raises BadRequest where it is none."""
    if len(raw) != TRANSFER_ID_BYTES:
        raise BadRequest(f"the transfer id has {len(raw)} bytes; it needs {TRANSFER_ID_BYTES}", param="transfer_id")
    return TransferId(raw)


def mint_incarnation() -> Incarnation:
    return Incarnation(secrets.token_bytes(16))


def mint_request_id(prefix: str) -> RequestId:
    """An id such as `cmpl-3f…`; `prefix` is `cmpl` or `chatcmpl`."""
    return RequestId(f"{prefix}-{secrets.token_hex(12)}")


def mint_seed() -> int:
    """A seed for a request that brought none: 53 bits, so that a client whose numbers are doubles keeps every digit."""
    return secrets.randbits(53)
