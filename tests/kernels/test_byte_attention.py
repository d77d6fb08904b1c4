"""Attention over INT8 KV: bit for bit the arithmetic that is written down; exact products, by whatever instructions."""

from collections.abc import Iterator
from typing import Any

import numba
import numpy as np
import pytest
import torch

from common.config import cache_dir
from kernels.cpu.setup import compiled_code_kept_in
from kernels.ops import select
from tests.support.int8_attention_oracle import attend, stored
from tests.support.paged_kv import PagedKV

CPU = torch.device("cpu")
OPS = select(CPU, "cpu")
with compiled_code_kept_in(cache_dir()):
    from kernels.cpu import byte_amx, byte_products, simd, weights
    from kernels.cpu.amx import configure_tiles, linux_grants_amx, release_tiles


@pytest.fixture
def helpers_always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Even the smallest batch is shared between two threads."""
    monkeypatch.setattr("kernels.cpu.ops._SERIAL_ATTENTION_WORK", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("head_dim", "block_size", "group_size", "window"),
    [(64, 16, 3, 0), (64, 16, 3, 100), (64, 8, 1, 0), (20, 16, 5, 0), (80, 32, 2, 70), (128, 16, 4, 0)],
)
def test_every_bit_is_as_written_down(
    helpers_always: None, head_dim: int, block_size: int, group_size: int, window: int
) -> None:
    contexts, query_lens, scale = [300, 65, 1], [21, 2, 1], head_dim**-0.5
    paged = PagedKV(1, head_dim, block_size, contexts, seed=3)
    random = torch.Generator().manual_seed(4)
    for sequence, context_len in enumerate(contexts):
        sizes = torch.exp(torch.randn(context_len, 1, 1, generator=random))  # so that peaks move and scales differ
        paged.write(sequence, 0, *(torch.randn(2, context_len, 1, head_dim, generator=random) * sizes))
    q = torch.randn(sum(query_lens), group_size, head_dim, generator=random)
    rows = [(s, *shape) for s, shape in enumerate(zip(contexts, query_lens, strict=True))]
    out = OPS.paged_attention(q, paged.layer, paged.batch(rows), scale, window).numpy()
    expected, token = np.empty_like(out), 0
    for sequence, context_len, query_len in rows:
        values_of = stored(paged, sequence, context_len, 0)
        for position in range(context_len - query_len, context_len):
            begin = max(position + 1 - window, 0) if window else 0
            k, k_scale, v, v_scale = (values[: position + 1] for values in values_of)
            for head in range(group_size):
                row = q[token, head].numpy()
                expected[token, head] = attend(row, k, k_scale, v, v_scale, scale, begin, position + 1)
            token += 1
    assert np.array_equal(out.view(np.int32), expected.view(np.int32))


def test_a_score_too_large_for_fp32_spoils_its_row_only() -> None:
    paged = PagedKV(1, 64, 16, [70], seed=5)
    k, v = torch.randn(2, 70, 1, 64, generator=torch.Generator().manual_seed(6))
    paged.write(0, 0, k, v)
    q = torch.randn(20, 1, 64, generator=torch.Generator().manual_seed(7))
    batch = paged.batch([(0, 70, 20)])
    expected = OPS.paged_attention(q, paged.layer, batch, 1.0, 0)
    q[3] *= 3e38 / q[3].abs().max()
    out = OPS.paged_attention(q, paged.layer, batch, 1.0, 0)
    assert out[3].isnan().all()
    out[3] = expected[3]
    assert out.equal(expected)


_generic_keys = byte_products.byte_tile(3, 4, is_b_raised=True, add_fours=byte_products.add_fours_generically)
_generic_values = byte_products.byte_tile(3, 4, is_b_raised=False, add_fours=byte_products.add_fours_generically)


@numba.njit
def _multiply(way: int, y: Any, start: Any, a: Any, b: Any, rows: int) -> None:
    sums, starts = simd.ints32(y.ctypes.data), simd.ints32(start.ctypes.data)
    signed_a, unsigned_a = simd.bytes_signed(a.ctypes.data), simd.bytes_unsigned(a.ctypes.data)
    signed_b = simd.bytes_signed(b.ctypes.data)
    zero = simd.ints32(np.zeros(1, np.int32).ctypes.data)
    if way == 0:
        byte_products.key_product(rows, sums, 0, 64, starts, 0, 1, signed_a, 0, 64, signed_b, 16)
        byte_products.value_product(rows, 4, sums, 1024, 64, zero, unsigned_a, 0, 64, signed_b, 256, 16)
    elif way == 1:
        for r in range(0, rows - 2, 3):
            _generic_keys(sums, r * 64, 64, starts, r, 1, signed_a, r * 64, 64, signed_b, 0, 256, 16)
            at = 1024 + r * 64
            _generic_values(sums, at, 64, zero, 0, 0, unsigned_a, r * 64, 64, signed_b, 0, 256, 16)
    else:
        configure_tiles(16, 0)
        byte_amx.tiled_key_product(sums, 0, 64, signed_a, 0, 64, signed_b, 16)
        byte_amx.tiled_value_product(4, sums, 1024, 64, unsigned_a, 0, 64, signed_b, 256, 16)
        release_tiles()


def test_products_are_exact_by_every_instruction() -> None:
    random = np.random.default_rng(8)
    a = random.integers(0, 256, (16, 64), np.uint8)
    b = random.integers(0, 256, (16, 64, 4), np.uint8)  # steps, lanes, depth
    a[0], b[:, 0] = 127, 127  # the largest sums there are
    matrix = b.view(np.int8).transpose(0, 2, 1).reshape(64, 64).astype(np.int64)
    start = (-128 * a.view(np.int8).sum(axis=1, dtype=np.int64)).astype(np.int32)  # as attention's
    keys, values = a.view(np.int8).astype(np.int64) @ matrix, a.astype(np.int64) @ matrix
    expected = np.stack([keys, values]).astype(np.int32)
    ways = [(0, rows) for rows in range(1, 17)] + [(1, 15)]
    ways += [(2, 16)] if byte_amx.IS_COMPILED and linux_grants_amx() else []
    for way, rows in ways:
        sums = np.zeros((2, 16, 64), np.int32)
        _multiply(way, sums, start, a, b, rows)
        assert np.array_equal(sums[:, :rows], expected[:, :rows]), f"way {way}, {rows} rows"
        assert not sums[:, rows:].any()


_by_instruction, _generic = weights.weigh_rows(), weights.weigh_rows(by_instruction=False)
_PACKED = np.arange(64).reshape(4, 4, 4).transpose(1, 0, 2).reshape(64)  # positions, in the order of packed weights


@numba.njit
def _weigh(is_generic: bool, scores: Any, factors: Any, table: Any, ratios: Any, target: Any, mass: Any) -> None:
    """`factors` [3, rows]: slopes, starts and units."""
    rows = scores.shape[0]
    source, to, lanes = simd.floats(scores.ctypes.data), simd.bytes_unsigned(target.ctypes.data), mass.ctypes.data
    given, shorts = simd.floats(factors.ctypes.data), simd.halves(table.ctypes.data)
    per_position, sums = simd.halves(ratios.ctypes.data), simd.floats(lanes)
    if is_generic:
        _generic(
            rows, 64, source, 0, given, 0, given, rows, given, 2 * rows, sums, 0, shorts, per_position, 0, to, 0
        )  # fmt: skip
    else:
        _by_instruction(
            rows, 64, source, 0, given, 0, given, rows, given, 2 * rows, sums, 0, shorts, per_position, 0, to, 0
        )  # fmt: skip


def _weighed(is_generic: bool, scores: np.ndarray, slope: float, start: float, ratios: np.ndarray) -> Any:
    """W [rows, 64] and the masses' lanes [rows, 16], each row's unit being its number."""
    rows = len(scores)
    factors = np.stack([np.full(rows, slope), np.full(rows, start), np.arange(rows)]).astype(np.float32)
    table = np.array([*weights.POWERS, *[1] * 32], np.uint16)
    target, mass = np.empty((rows, 64), np.uint8), np.ones((rows, 16), np.float32)
    _weigh(is_generic, scores, factors, table, ratios, target, mass)
    return target, mass


@pytest.mark.parametrize(("slope", "start"), [(-32.0, 0.0), (-1.0, 0.5), (-3e38, 1e30), (-32.0, np.nan)])
def test_both_forms_of_weights_give_the_same_bits(slope: float, start: float) -> None:
    scores = np.linspace(-17, 0, 3 * 64, dtype=np.float32).reshape(3, 64)
    scores[1, [3, 9, 40]] = -np.inf, np.nan, -1e30
    ratios = np.arange(64, dtype=np.uint16) * 4 + 3
    (bytes_, mass), (generic_bytes, generic_mass) = (
        _weighed(is_generic, scores, slope, start, ratios) for is_generic in (False, True)
    )
    assert np.array_equal(bytes_, generic_bytes)
    assert np.array_equal(mass.view(np.int32), generic_mass.view(np.int32))


def test_weights_are_powers_of_two_within_what_is_written_down() -> None:
    distances = np.arange(15 << 5, dtype=np.float32)[: 7 * 64].reshape(7, 64)
    bytes_, mass = _weighed(False, distances, 1.0, 0.0, np.full(64, 255, np.uint16))
    w = np.exp2(15 - distances.astype(np.float64) / 32)
    # 1e-4 of the power of two; the shift rounds down; then W is rounded to the nearest
    error = 1e-4 * w + 1
    assert (np.abs(bytes_ - 255 * w[:, _PACKED] / (1 << 15)) <= 255 * error / (1 << 15) + 0.5).all()
    units = np.arange(7)
    assert (np.abs(mass.sum(axis=1) - 16 - units * w.sum(axis=1)) <= units * error.sum(axis=1)).all()
