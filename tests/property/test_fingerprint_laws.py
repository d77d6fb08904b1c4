"""Equal models have equal fingerprints, and models that differ anywhere that counts have different ones."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from common.kv.layout import KVFormat, KVLayout
from common.model.identity import fingerprint
from tests.support.prepared_models import fixed_prepared_model

FREQUENCY = st.floats(2**-20, 1, width=32)
IDENTITIES = st.fixed_dictionaries(
    {
        "weights_digest": st.binary(min_size=32, max_size=32),
        "tokenizer_digest": st.binary(min_size=32, max_size=32),
        "rope_inv_freq": st.lists(FREQUENCY, max_size=4).map(tuple),
        "rope_attention_scale": st.floats(0.5, 2),
        "layer_windows": st.lists(st.integers(0, 2**20), max_size=4).map(tuple),
        "rms_norm_eps": st.sampled_from([1e-6, 1e-5]),
        "numerics": st.text(max_size=8),
        "block_size": st.sampled_from([16, 32]),
        "format": st.sampled_from(KVFormat),
    }
)


def fingerprint_of(identity: dict[str, Any]) -> bytes:
    identity = dict(identity)
    layout = KVLayout(identity.pop("format"), identity.pop("block_size"), num_layers=2, num_kv_heads=2, head_dim=8)
    numerics = identity.pop("numerics")
    return fingerprint(fixed_prepared_model(**identity), layout, numerics)


@given(IDENTITIES, IDENTITIES)
def test_fingerprints_are_equal_exactly_when_the_models_are(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert (fingerprint_of(first) == fingerprint_of(second)) == (first == second)


@given(IDENTITIES, IDENTITIES, st.data())
def test_a_change_of_any_one_field_shows(first: dict[str, Any], second: dict[str, Any], data: st.DataObject) -> None:
    field = data.draw(st.sampled_from(sorted(first)))
    changed = first | {field: second[field]}
    assert (fingerprint_of(first) == fingerprint_of(changed)) == (first[field] == second[field])
