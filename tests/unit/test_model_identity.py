from dataclasses import fields, replace
from typing import Any

import pytest

from common.kv.layout import KVFormat, KVLayout
from common.model.config import Family, ModelConfig
from common.model.identity import fingerprint, narrower_fingerprints
from tests.support.prepared_models import CONFIG, fixed_prepared_model

LAYOUT = KVLayout(KVFormat.INT8, block_size=16, num_layers=2, num_kv_heads=2, head_dim=8)
NUMERICS = "reference"

GOLDEN = "09777b13770eeabd4a735590d6fea2ebbd42e37cea792a1ad3f84f23b9848fe1"
"""Computed once. Another value means that every worker of an older version is refused, and every cached prefix lost:
that may be right, and must not happen unawares."""

NOT_IN_KV = {"name": "other", "max_model_len": 2048, "eos_token_ids": (1, 2), "bos_token_id": None}
IN_KV: dict[str, Any] = {
    "family": Family.QWEN2,
    "vocab_size": 513,
    "hidden_size": 65,
    "intermediate_size": 97,
    "num_layers": 3,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "qk_norm": True,
    "rope_inv_freq": (1.0, 0.5, 0.25, 0.1250001),
    "rope_attention_scale": 1.0000001,
    "layer_windows": (16, 0),
}


def test_the_encoding_is_what_it_was() -> None:
    assert fingerprint(fixed_prepared_model(), LAYOUT, NUMERICS).hex() == GOLDEN


def test_every_field_of_the_configuration_is_accounted_for() -> None:
    assert {field.name for field in fields(ModelConfig)} == set(IN_KV) | set(NOT_IN_KV)


@pytest.mark.parametrize("field", IN_KV)
def test_what_the_values_depend_on_changes_it(field: str) -> None:
    assert IN_KV[field] != getattr(CONFIG, field)
    changed = fixed_prepared_model(**{field: IN_KV[field]})
    assert fingerprint(changed, LAYOUT, NUMERICS) != fingerprint(fixed_prepared_model(), LAYOUT, NUMERICS)


@pytest.mark.parametrize("field", NOT_IN_KV)
def test_what_they_do_not_depend_on_does_not(field: str) -> None:
    changed = fixed_prepared_model(**{field: NOT_IN_KV[field]})
    assert fingerprint(changed, LAYOUT, NUMERICS) == fingerprint(fixed_prepared_model(), LAYOUT, NUMERICS)


def test_a_wider_worker_has_the_fingerprint_that_a_narrower_one_would_have() -> None:
    base, wide = fixed_prepared_model(), replace(LAYOUT, format=KVFormat.FP32)
    assert narrower_fingerprints(base, wide, NUMERICS) == {KVFormat.INT8: fingerprint(base, LAYOUT, NUMERICS)}
    assert narrower_fingerprints(base, LAYOUT, NUMERICS) == {}


def test_weights_tokenizer_numerics_and_layout_change_it() -> None:
    base = fixed_prepared_model()
    variants = [
        fingerprint(base, LAYOUT, NUMERICS),
        fingerprint(fixed_prepared_model(weights_digest=bytes(32)), LAYOUT, NUMERICS),
        fingerprint(fixed_prepared_model(tokenizer_digest=bytes(32)), LAYOUT, NUMERICS),
        fingerprint(base, LAYOUT, "int8"),
        fingerprint(base, replace(LAYOUT, format=KVFormat.FP32), NUMERICS),
        fingerprint(base, replace(LAYOUT, block_size=32), NUMERICS),
    ]
    assert len(set(variants)) == len(variants)
    assert {len(value) for value in variants} == {32}
