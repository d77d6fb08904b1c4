"""The identity of a tokenizer: a digest over its files, by name and content."""

from collections.abc import Mapping
from hashlib import blake2b
from struct import pack

DIGEST_BYTES = 32
_PERSON = b"twostroke-tokens"


def tokenizer_digest(files: Mapping[str, bytes]) -> bytes:
    """BLAKE2b (32 bytes) over the files in the order of their names; each name and content is preceded by its length.

    Equal digests mean equal files: the lengths keep a byte from passing between a name and a content.
    """
    digest = blake2b(digest_size=DIGEST_BYTES, person=_PERSON)
    for name in sorted(files):
        for part in (name.encode(), files[name]):
            digest.update(pack("<Q", len(part)))
            digest.update(part)
    return digest.digest()
