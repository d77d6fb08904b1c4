"""Content names of blocks: H(parent hash, token ids), seeded by H(fingerprint, tenant salt).

Only full blocks of confirmed tokens have a name. BLAKE2b (RFC 7693) with 16-byte digests.
"""

import hmac
from collections.abc import Sequence
from hashlib import blake2b, sha256
from struct import pack

from common.ids import BlockHash

HASH_BYTES = 16
_ROOT_PERSON = b"twostroke-root"
_BLOCK_PERSON = b"twostroke-block"


def tenant_salt(server_secret: bytes, tenant: str) -> bytes:
    """32 bytes that keep one tenant's prefixes apart from another's; a client cannot choose it."""
    return hmac.digest(server_secret, tenant.encode(), sha256)


def root_hash(fingerprint: bytes, salt: bytes) -> BlockHash:
    """The parent of a sequence's first block."""
    data = pack("<I", len(fingerprint)) + fingerprint + salt
    return BlockHash(blake2b(data, digest_size=HASH_BYTES, person=_ROOT_PERSON).digest())


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The name of a full block whose predecessor is `parent`. Token ids are hashed as little-endian uint32."""
    data = parent + pack(f"<{len(token_ids)}I", *token_ids)
    return BlockHash(blake2b(data, digest_size=HASH_BYTES, person=_BLOCK_PERSON).digest())


def block_hashes(root: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Names of all full blocks of `token_ids`, in order; the partial tail has none."""
    hashes: list[BlockHash] = []
    parent = root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes
