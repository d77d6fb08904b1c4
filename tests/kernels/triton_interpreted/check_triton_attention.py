"""Paged attention: what each row sees, to the position; its values, against the reference; its bits, in any batch."""

import numpy as np
import pytest
import torch

from common.kv.cache import KVCache
from common.kv.layout import KVFormat, KVLayout
from kernels.batch import AttentionBatch
from kernels.ops import Ops, select
from kernels.reference.ops import ReferenceOps
from kernels.triton import attention_kernels
from tests.support.paged_kv import PagedKV

CPU = torch.device("cpu")
PARTITION: int = attention_kernels.PARTITION.value
STEP: int = attention_kernels.STEP.value
TF32_ROUNDING = 2.0**-11  # half a unit in the last of 11 bits
FP32_ROUNDING = 2.0**-24


@pytest.fixture(scope="module")
def ops() -> Ops:
    return select(CPU, "triton")


# (context length, query length), around a block, a step and a partition; a tile holds 5 rows of 3 query heads.
SHORT = [(1, 1), (17, 1), (STEP, 2), (STEP + 1, 5), (40, 40)]
LONG = [(5, 2), (PARTITION, 1), (PARTITION + 1, 2), (PARTITION + 3, 7), (2 * PARTITION + 1, 1)]


@pytest.mark.parametrize(
    ("shapes", "window"),
    [(SHORT, 0), (SHORT, 1), (LONG, 0), (LONG, PARTITION + 10)],
    ids=["short", "short-window", "long", "long-window"],
)
def test_each_row_sees_its_positions_and_nothing_else(ops: Ops, shapes: list[tuple[int, int]], window: int) -> None:
    """With a query of zeros every weight is 1, so with integers for V the output is an exact sum over a count: one
    position too few, too many or twice shows. What no row of a sequence sees is poison, NaN in its scales."""
    contexts = [context_len for context_len, _ in shapes]
    paged = PagedKV(num_kv_heads=1, head_dim=20, block_size=16, capacities=contexts, seed=0)
    random = np.random.default_rng(1)
    expected = []
    for sequence, (context_len, query_len) in enumerate(shapes):
        values = random.integers(-63, 64, (context_len, 1, 20)).astype(np.float32)
        values[..., 0] = 127.0  # so that the scale is 1
        first_seen = max(context_len - query_len + 1 - window, 0) if window else 0
        v = torch.from_numpy(values[first_seen:])
        paged.write(sequence, first_seen, torch.randn(v.shape, generator=torch.Generator().manual_seed(2)), v)
        for position in range(context_len - query_len, context_len):
            seen = values[max(position + 1 - window, 0) if window else 0 : position + 1, 0]
            expected.append(seen.sum(0, dtype=np.float32) / np.float32(len(seen)))
    batch = paged.batch([(s, context_len, query_len) for s, (context_len, query_len) in enumerate(shapes)])
    q = torch.zeros(len(expected), 3, 20)
    out = ops.paged_attention(q, paged.layer, batch, 1.0, window)
    assert torch.equal(out, torch.from_numpy(np.array(expected))[:, None].expand(-1, 3, -1))


def error_bound(q: torch.Tensor, paged: PagedKV, batch: AttentionBatch, scale: float, window: int) -> torch.Tensor:
    """The most that our output may differ from the reference's, for each element of it.

    A weight times its scale is rounded to TF32: TF32_ROUNDING of the sum of weight * |v|. A score is a sum of D
    products in fp32, rounded at each, here of a query of 22 bits; an error e of all scores is at most 2e of the
    same sum, once for either side; folds and sums of weights round a few hundred times at most.
    """
    reference = ReferenceOps()
    layer = paged.layer
    magnitudes = type(layer)(layer.k.abs(), layer.v.abs(), layer.k_scale, layer.v_scale)
    of_values = type(layer)(layer.k, magnitudes.v, layer.k_scale, layer.v_scale)
    weighted = reference.paged_attention(q, of_values, batch, scale, window)
    assert layer.k_scale is not None
    largest_k = (magnitudes.k.float() * layer.k_scale.float()[..., None]).nan_to_num(0.0).amax()
    score = q.abs().sum(-1, keepdim=True) * largest_k * scale
    score_error = score * (q.shape[-1] + 8) * FP32_ROUNDING + score * 2.0**-22
    return weighted * (TF32_ROUNDING + 4 * score_error + 512 * FP32_ROUNDING)


@pytest.mark.parametrize(
    ("num_kv_heads", "group_size", "head_dim", "block_size", "window"),
    [(2, 3, 64, 16, 0), (1, 7, 24, 5, 33), (1, 20, 16, 16, 0)],
    ids=lambda value: str(value),
)
def test_values_equal_the_reference(
    ops: Ops, num_kv_heads: int, group_size: int, head_dim: int, block_size: int, window: int
) -> None:
    shapes = [(1, 1), (21, 8), (PARTITION + 14, 2)]
    capacities = [context_len for context_len, _ in shapes]
    paged = PagedKV(num_kv_heads, head_dim, block_size, capacities, seed=3)
    random = torch.Generator().manual_seed(4)
    for sequence, context_len in enumerate(capacities):
        k, v = torch.randn(2, context_len, num_kv_heads, head_dim, generator=random)
        paged.write(sequence, 0, k * torch.rand(context_len, 1, 1, generator=random) * 3, v)
    batch = paged.batch([(s, context_len, query_len) for s, (context_len, query_len) in enumerate(shapes)])
    qkv = torch.randn(11, num_kv_heads * (group_size + 2), head_dim, generator=random)
    q = qkv[:, : num_kv_heads * group_size]  # not contiguous
    scale = head_dim**-0.5
    out = ops.paged_attention(q, paged.layer, batch, scale, window)
    expected = ReferenceOps().paged_attention(q, paged.layer, batch, scale, window)
    bound = error_bound(q, paged, batch, scale, window)
    assert ((out - expected).abs() <= bound).all(), ((out - expected).abs() / bound).max()


@pytest.mark.parametrize("window", [0, 40])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(ops: Ops, window: int) -> None:
    """The last 6 rows of a sequence of two partitions: as one query (two tiles, no split), and cut up (split)."""
    num_rows, capacities = 6, [PARTITION + 5, 30, 2 * PARTITION + 1]
    paged = PagedKV(num_kv_heads=1, head_dim=64, block_size=16, capacities=capacities, seed=5)
    random = torch.Generator().manual_seed(6)
    for sequence, length in enumerate(capacities):
        k, v = torch.randn(2, length, 1, 64, generator=random)
        paged.write(sequence, 0, k * 2, v)
    q = torch.randn(num_rows, 3, 64, generator=random)

    def attend(start: int, end: int, others: list[tuple[int, int, int]]) -> torch.Tensor:
        """Rows start .. end - 1, after the rows of `others`."""
        num_others = sum(query_len for _, _, query_len in others)
        batch = paged.batch([*others, (0, capacities[0] - num_rows + end, end - start)])
        queries = torch.cat([torch.randn(num_others, 3, 64, generator=random), q[start:end]])
        return ops.paged_attention(queries, paged.layer, batch, 0.125, window)[num_others:]

    whole = attend(0, num_rows, [])
    alone = [(0, 1), (5, 6), (1, 6), (0, 4)]
    assert all(torch.equal(attend(start, end, []), whole[start:end]) for start, end in alone)
    assert torch.equal(attend(0, 6, [(1, 30, 3)]), whole)
    assert torch.equal(attend(1, 2, [(2, 2 * PARTITION + 1, 1), (1, 30, 3)]), whole[1:2])


# CUDA's own NaN has all bits of its mantissa set: rounding it like a number would carry into the sign.
NAN_OF_CUDA = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("value", [torch.tensor(float("inf")), NAN_OF_CUDA], ids=["inf", "nan"])
def test_what_is_not_finite_stays_in_its_row(ops: Ops, value: torch.Tensor) -> None:
    paged = PagedKV(num_kv_heads=1, head_dim=16, block_size=16, capacities=[20], seed=7)
    random = torch.Generator().manual_seed(8)
    k, v = torch.randn(2, 20, 1, 16, generator=random)
    paged.write(0, 0, k, v)
    q = torch.randn(3, 2, 16, generator=random)
    batch = paged.batch([(0, 20, 3)])
    clean = ops.paged_attention(q, paged.layer, batch, 0.25, 0)
    q[1, 0, 3] = value
    with np.errstate(invalid="ignore"):
        out = ops.paged_attention(q, paged.layer, batch, 0.25, 0)
    assert out[1, 0].isnan().all()
    others = torch.ones(3, 2, dtype=torch.bool)
    others[1, 0] = False
    assert torch.equal(out[others], clean[others])


def test_unquantized_layers_are_refused_by_name(ops: Ops) -> None:
    cache = KVCache(KVLayout(KVFormat.FP32, 16, 1, 1, 16), 1, CPU)
    batch = PagedKV(1, 16, 16, [1], seed=9).batch([(0, 1, 1)])
    with pytest.raises(ValueError, match=r"unquantized \(torch.float32\)"):
        ops.paged_attention(torch.ones(1, 1, 16), cache.layer(0), batch, 1.0, 0)
