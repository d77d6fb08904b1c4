"""The seed of each choice of a request, derived from the request's one seed."""

import hashlib
import struct

MASK_63_BITS = 2**63 - 1


def choice_seed(seed: int, prompt_index: int, choice_index: int) -> int:
    """The seed of choice `choice_index` (of `n`) of prompt `prompt_index`.

    First the prompt's seed is derived from the request's, then the choice's from the prompt's. So the first choice of
    the first prompt has the request's own seed, and asking for one prompt with its derived seed gives its choices.
    """
    return _derive(_derive(seed, "prompt", prompt_index), "choice", choice_index)


def _derive(seed: int, kind: str, index: int) -> int:
    """Index 0: the seed itself. Else the low 63 bits of SHA-256("twostroke/" kind, seed u64, index u64), all little
    endian, the digest's first 8 bytes taken as an integer."""
    if index == 0:
        return seed
    digest = hashlib.sha256(f"twostroke/{kind}".encode() + struct.pack("<QQ", seed, index)).digest()
    return int(struct.unpack_from("<Q", digest)[0]) & MASK_63_BITS
