"""The KV block's bytes and names, against numbers worked out apart from the code (tests/golden/kv_format.json).

A change here is a change of the wire format and of every name in every index: it needs a new fingerprint.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.ids import BlockHash
from common.kv.block_hash import HASH_BYTES, block_hash, block_hashes, root_hash, tenant_salt
from common.kv.layout import REGION_ALIGNMENT, SCALE_BYTES, KVFormat, KVLayout

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "kv_format.json").read_text())
SMOLLM2 = KVLayout(KVFormat.INT8, block_size=16, num_layers=30, num_kv_heads=3, head_dim=64)
SHAPE = ("block_size", "num_layers", "num_kv_heads", "head_dim")
OFFSETS = ("v_offset", "k_scale_offset", "v_scale_offset", "head_bytes", "layer_bytes", "block_bytes")


@pytest.mark.parametrize("name", GOLDEN["layouts"])
def test_every_offset_is_the_golden_one(name: str) -> None:
    golden: dict[str, Any] = GOLDEN["layouts"][name]
    layout = KVLayout(KVFormat(golden["format"]), **{field: golden[field] for field in SHAPE})
    assert layout.k_offset == 0
    assert {field: getattr(layout, field) for field in OFFSETS} == {field: golden[field] for field in OFFSETS}


def test_smollm2_has_11_880_bytes_a_token() -> None:
    assert SMOLLM2.block_bytes == 190_080
    assert SMOLLM2.block_bytes / SMOLLM2.block_size == 11_880
    bf16_bytes = 2 * 2 * 30 * 3 * 64
    assert round(bf16_bytes / 11_880, 2) == 1.94


@pytest.mark.parametrize("kv_format", list(KVFormat))
@pytest.mark.parametrize(("block_size", "head_dim"), [(1, 1), (3, 5), (16, 64), (16, 80), (32, 128)])
def test_regions_follow_one_another_without_overlap(kv_format: KVFormat, block_size: int, head_dim: int) -> None:
    layout = KVLayout(kv_format, block_size, num_layers=2, num_kv_heads=3, head_dim=head_dim)
    starts = [layout.k_offset, layout.v_offset]
    sizes = [layout.values_bytes, layout.values_bytes]
    if kv_format.has_scales:
        starts += [layout.k_scale_offset, layout.v_scale_offset]
        sizes += [block_size * SCALE_BYTES] * 2
    for (start, size), (following, _) in pairwise([*zip(starts, sizes, strict=True), (layout.head_bytes, 0)]):
        assert start + size <= following
    padding = layout.head_bytes - starts[-1] - sizes[-1]
    assert 0 <= padding < REGION_ALIGNMENT
    assert layout.head_bytes % REGION_ALIGNMENT == 0


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_that_hold_tokens(num_tokens: int, expected: int) -> None:
    assert SMOLLM2.num_blocks(num_tokens) == expected


@pytest.mark.parametrize("field", SHAPE)
@pytest.mark.parametrize("value", [0, -1])
def test_a_shape_that_is_none_is_named(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{field} is {value}"):
        KVLayout(KVFormat.INT8, **{**dict.fromkeys(SHAPE, 1), field: value})


def test_layouts_are_described_by_all_that_tells_them_apart() -> None:
    layouts = [
        KVLayout(kv_format, block_size, layers, heads, head_dim)
        for kv_format in KVFormat
        for block_size in (1, 11)
        for layers in (1, 11)
        for heads in (1, 11)
        for head_dim in (1, 11)
    ]
    assert len({layout.describe() for layout in layouts}) == len(layouts)


def test_every_hash_is_the_golden_one() -> None:
    golden = GOLDEN["hashes"]
    salt = tenant_salt(golden["server_secret"].encode(), golden["tenant"])
    assert salt.hex() == golden["salt"]
    root = root_hash(bytes.fromhex(golden["fingerprint"]), salt)
    assert root.hex() == golden["root"]
    hashes = block_hashes(root, golden["token_ids"], golden["block_size"])
    assert [name.hex() for name in hashes] == golden["blocks"]
    assert all(len(name) == HASH_BYTES for name in hashes)


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (15, 0), (16, 1), (31, 1), (32, 2), (33, 2)])
def test_only_full_blocks_have_names(num_tokens: int, expected: int) -> None:
    root = root_hash(b"f" * 32, b"s" * 32)
    assert len(block_hashes(root, range(num_tokens), 16)) == expected


def test_a_name_depends_on_everything_before_it() -> None:
    root = root_hash(b"f" * 32, b"s" * 32)
    names = {
        block_hashes(root, tokens, 2)[-1]
        for tokens in ([1, 2, 3, 4], [9, 2, 3, 4], [1, 9, 3, 4], [1, 2, 9, 4], [1, 2, 3, 9], [3, 4], [1, 2])
    }
    others = [root_hash(b"F" * 32, b"s" * 32), root_hash(b"f" * 32, b"S" * 32), root_hash(b"f" * 31, b"f" + b"s" * 32)]
    names |= {block_hash(other, [1, 2]) for other in others}
    assert len(names) == 10


@pytest.mark.parametrize("tenant", ["", "tenant-a", "tenant-b", "ä"])
def test_tenants_of_two_servers_have_salts_of_their_own(tenant: str) -> None:
    salts = {tenant_salt(secret, name) for secret in (b"one", b"two") for name in (tenant, tenant + "x")}
    assert len(salts) == 4
    assert {len(salt) for salt in salts} == {32}


def test_a_root_is_no_block() -> None:
    """Different personalizations: no token ids make a block's name out of a root's data."""
    assert root_hash(b"", b"") != block_hash(BlockHash(b""), [0])
