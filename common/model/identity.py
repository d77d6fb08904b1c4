"""The model fingerprint: two workers may exchange KV blocks only when theirs are equal, or the sender's would be with
the receiver's narrower KV format."""

from dataclasses import asdict, replace
from hashlib import blake2b
from struct import pack

from common.kv.layout import KVFormat, KVLayout
from common.model.config import ModelConfig
from common.model.config_json import canonical_json
from common.model.prepared import PreparedModel

FINGERPRINT_BYTES = 32
_PERSON = b"twostroke-model"
_NOT_IN_KV = ("name", "max_model_len", "eos_token_ids", "bos_token_id")
"""Parts of ModelConfig that no value of K or V depends on."""
_OWN_FIELDS = ("rope_inv_freq", "rope_attention_scale", "layer_windows")


def fingerprint(prepared: PreparedModel, layout: KVLayout, numerics: str) -> bytes:
    """32 bytes that name everything the values in a KV block depend on, the token ids apart.

    BLAKE2b over (name, value) pairs in a fixed order, each preceded by its length as a little-endian uint64:
    no two different models encode alike.
    """
    digest = blake2b(digest_size=FINGERPRINT_BYTES, person=_PERSON)
    for name, value in _fields(prepared, layout, numerics):
        for part in (name.encode(), value):
            digest.update(pack("<Q", len(part)) + part)
    return digest.digest()


def narrower_fingerprints(prepared: PreparedModel, layout: KVLayout, numerics: str) -> dict[KVFormat, bytes]:
    """What the fingerprint would be with each narrower KV format that blocks of `layout` can be sent in."""
    narrower = (replace(layout, format=kv_format) for kv_format in KVFormat if kv_format is not layout.format)
    return {
        narrow.format: fingerprint(prepared, narrow, numerics) for narrow in narrower if layout.can_be_sent_as(narrow)
    }


def _fields(prepared: PreparedModel, layout: KVLayout, numerics: str) -> tuple[tuple[str, bytes], ...]:
    config = prepared.config
    return (
        ("weights", prepared.weights_digest),
        ("tokenizer", prepared.tokenizer_digest),
        ("adapter", b""),
        ("architecture", _architecture(config)),
        ("rope", pack(f"<{len(config.rope_inv_freq)}f d", *config.rope_inv_freq, config.rope_attention_scale)),
        ("mask", pack(f"<{len(config.layer_windows)}Q", *config.layer_windows)),
        ("numerics", numerics.encode()),
        ("layout", layout.describe().encode()),
    )


def _architecture(config: ModelConfig) -> bytes:
    """What is left of the configuration: a norm's epsilon or the number of heads is in no weight."""
    values = asdict(config)
    for name in (*_NOT_IN_KV, *_OWN_FIELDS):
        del values[name]
    return canonical_json(values)
