"""CPU attention: what each row sees, to the position; its values, against the reference; its bits, in any company."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kernels.cpu.plan
from kernels.batch import KVLayerView
from kernels.ops import Ops, select
from kernels.reference.ops import ReferenceOps
from tests.support.int8_attention_oracle import attend, stored
from tests.support.paged_kv import PagedKV

CPU = torch.device("cpu")
TILE, PARTITION = kernels.cpu.plan.TILE, kernels.cpu.plan.PARTITION
FP32_ROUNDING = 2.0**-24


@pytest.fixture(scope="module")
def ops() -> Ops:
    return select(CPU, "cpu")


@pytest.fixture
def helpers_always(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Even the smallest batch is shared between two threads."""
    monkeypatch.setattr("kernels.cpu.ops._SERIAL_ATTENTION_WORK", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def plain(layer: KVLayerView) -> KVLayerView:
    """The same values as an unquantized layer; poisoned scales become poisoned values."""
    assert layer.k_scale is not None
    assert layer.v_scale is not None
    return KVLayerView(
        layer.k.float() * layer.k_scale.float().unsqueeze(-1), layer.v.float() * layer.v_scale.float().unsqueeze(-1),
        None, None,
    )  # fmt: skip


def filled(num_kv_heads: int, head_dim: int, block_size: int, contexts: list[int], seed: int) -> PagedKV:
    paged = PagedKV(num_kv_heads, head_dim, block_size, contexts, seed)
    random = torch.Generator().manual_seed(seed)
    for sequence, context_len in enumerate(contexts):
        k, v = torch.randn(2, context_len, num_kv_heads, head_dim, generator=random)
        paged.write(sequence, 0, k, v)
    return paged


# (context length, query length): around a block, a tile and a partition; 64 queries of 3 heads fill a unit
SHAPES = [
    (1, 1),
    (17, 1),
    (TILE, 2),
    (TILE + 1, 5),
    (70, 70),
    (PARTITION, 1),
    (PARTITION + 1, 2),
    (PARTITION + 3, 66),
    (2 * PARTITION + 1, 1),
]


@pytest.mark.parametrize("head_dim", [20, 64])
@pytest.mark.parametrize("window", [0, 1, PARTITION + 10])
@pytest.mark.parametrize("is_quantized", [True, False])
def test_each_row_sees_its_positions_and_nothing_else(ops: Ops, is_quantized: bool, window: int, head_dim: int) -> None:
    """With a query of zeros every weight is 1, so with integers for V the output is an exact sum over a count: one
    position too few, too many or twice shows. What a sequence does not see is poison, NaN in its scales or values."""
    contexts = [context_len for context_len, _ in SHAPES]
    paged = PagedKV(num_kv_heads=1, head_dim=head_dim, block_size=16, capacities=contexts, seed=0)
    random = np.random.default_rng(1)
    expected = []
    for sequence, (context_len, query_len) in enumerate(SHAPES):
        values = random.integers(-63, 64, (context_len, 1, head_dim)).astype(np.float32)
        values[..., 0] = 127.0  # so that the scale is 1
        first_seen = max(context_len - query_len + 1 - window, 0) if window else 0
        v = torch.from_numpy(values[first_seen:])
        paged.write(sequence, first_seen, torch.randn(v.shape, generator=torch.Generator().manual_seed(2)), v)
        for position in range(context_len - query_len, context_len):
            seen = values[max(position + 1 - window, 0) if window else 0 : position + 1, 0]
            expected.append(seen.sum(0, dtype=np.float32) / np.float32(len(seen)))
    batch = paged.batch([(s, context_len, query_len) for s, (context_len, query_len) in enumerate(SHAPES)])
    layer = paged.layer if is_quantized else plain(paged.layer)
    out = ops.paged_attention(torch.zeros(len(expected), 3, head_dim), layer, batch, 1.0, window)
    # Quantized weights are 255 times a scale that is rounded once, as is their product's; then tiles are added.
    tolerance = 127.0 * 2 * FP32_ROUNDING * (max(contexts) // TILE + 3) if is_quantized else 0.0
    np.testing.assert_allclose(out.numpy(), np.repeat(np.stack(expected)[:, None], 3, axis=1), rtol=0, atol=tolerance)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, object]:
    num_sequences = draw(st.integers(1, 4))
    contexts = draw(st.lists(st.integers(1, 330), min_size=num_sequences, max_size=num_sequences))
    return {
        "contexts": contexts,
        "query_lens": [draw(st.integers(1, min(context_len, 40))) for context_len in contexts],
        "num_kv_heads": draw(st.integers(1, 3)),
        "group_size": draw(st.sampled_from([1, 2, 3, 4, 5, 7])),
        "head_dim": draw(st.sampled_from([8, 16, 64, 80, 128])),
        "block_size": draw(st.sampled_from([1, 5, 16, 32])),
        "window": draw(st.sampled_from([0, 1, 7, 64, 300])),
        "is_quantized": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_values_agree_with_the_reference(ops: Ops, helpers_always: None, case: dict) -> None:
    contexts, head_dim = case["contexts"], case["head_dim"]
    paged = filled(case["num_kv_heads"], head_dim, case["block_size"], contexts, case["seed"])
    rows = [(s, *shape) for s, shape in enumerate(zip(contexts, case["query_lens"], strict=True))]
    batch = paged.batch(rows)
    layer = paged.layer if case["is_quantized"] else plain(paged.layer)
    generator = torch.Generator().manual_seed(case["seed"] + 1)
    q = torch.randn(sum(case["query_lens"]), case["num_kv_heads"] * case["group_size"], head_dim, generator=generator)
    scale = head_dim**-0.5
    out = ops.paged_attention(q, layer, batch, scale, case["window"])
    if case["is_quantized"]:
        _check_some_rows(paged, rows, q.numpy(), out.numpy(), scale, case["window"], case["group_size"])
        return
    expected = ReferenceOps().paged_attention(q, layer, batch, scale, case["window"])
    # A score is a sum of head_dim products, each of them at most largest_q * largest_k * scale, with a rounding at
    # every step, and a few more for the scales; its error is the relative error of its weight. Both sides err, in the
    # weights and in their sum, and the output is a mean of values.
    largest_q, largest_k, largest_v = q.norm(dim=-1).max(), 5.0 * head_dim**0.5, 5.0
    score_error = (head_dim + 8) * FP32_ROUNDING * largest_q * largest_k * scale
    tolerance = float(largest_v * (4 * score_error + 2 * max(contexts) * FP32_ROUNDING))
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)


def _check_some_rows(
    paged: PagedKV, rows: list[tuple[int, int, int]], q: np.ndarray, out: np.ndarray, scale: float, window: int,
    group_size: int,
) -> None:  # fmt: skip
    """Bit for bit, the first and the last row of each sequence, one query head each."""
    token = 0
    for sequence, context_len, query_len in rows:
        for i in {0, query_len - 1}:
            head = (token + i) % q.shape[1]
            end = context_len - query_len + i + 1
            k, k_scale, v, v_scale = stored(paged, sequence, end, head // group_size)
            begin = max(end - window, 0) if window else 0
            expected = attend(q[token + i, head], k, k_scale, v, v_scale, scale, begin, end)
            assert np.array_equal(out[token + i, head].view(np.int32), expected.view(np.int32))
        token += query_len


def test_quantized_weights_stay_as_near_as_they_must(ops: Ops) -> None:
    """K, V and rounded queries are the same on both sides. A tile's weights, times V's scales, are off by at most
    1/255 of the tile's largest of each, as 255 stands for up to twice it; 2^x by 1.1e-4, here and in the mass."""
    context, scale = 330, 64**-0.5
    paged = filled(1, 64, 16, [context], seed=11)
    q = 3 * torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(12))
    out = ops.paged_attention(q, paged.layer, paged.batch([(0, context, 1)]), scale, 0)[0].double()
    k, k_scale, v, v_scale = (torch.from_numpy(part).double() for part in stored(paged, 0, context, 0))
    steps = q[0].double().abs().amax(1, keepdim=True) / 127
    weights = ((q[0].double() / steps).round() * steps * scale @ (k * k_scale[:, None]).T).softmax(dim=1)
    expected = weights @ (v * v_scale[:, None])
    bound = 2.5e-4 * weights @ (v.abs() * v_scale[:, None])
    for begin in range(0, context, TILE):
        tile = slice(begin, begin + TILE)
        bound += weights[:, tile].amax(1, keepdim=True) * v_scale[tile].amax() / 255 * v[tile].abs().sum(0)
    assert ((out - expected).abs() <= bound).all()


@pytest.mark.parametrize(
    ("head_dim", "block_size", "is_quantized", "window"),
    [(64, 16, True, 0), (64, 16, True, 300), (20, 5, True, 0), (128, 32, False, 0)],
)
def test_a_row_has_the_same_bits_in_any_company(
    ops: Ops, helpers_always: None, head_dim: int, block_size: int, is_quantized: bool, window: int
) -> None:
    """Alone, in chunks of any size, in a batch, on one thread or two: 40 rows across a boundary of partitions."""
    first, last = 2 * PARTITION - 20, 2 * PARTITION + 20
    paged = filled(2, head_dim, block_size, [last, 333, 90, 1], seed=5)
    layer = paged.layer if is_quantized else plain(paged.layer)
    q = torch.randn(last, 6, head_dim, generator=torch.Generator().manual_seed(6))

    def attend(rows: list[tuple[int, int, int]]) -> torch.Tensor:
        new = torch.cat([q[context_len - query_len : context_len] for _, context_len, query_len in rows])
        return ops.paged_attention(new, layer, paged.batch(rows), head_dim**-0.5, window)

    alone = torch.cat([attend([(0, position + 1, 1)]) for position in range(first, last)])
    for chunk in (3, 16, 40):
        ends = [*range(first + chunk, last, chunk), last]
        starts = [first, *ends[:-1]]
        chunks = [attend([(0, end, end - start)]) for start, end in zip(starts, ends, strict=True)]
        assert torch.cat(chunks).equal(alone), f"in chunks of {chunk}"
    in_company = [(1, 333, 7), (0, last, last - first), (2, 90, 90), (3, 1, 1)]
    assert attend(in_company)[7 : 7 + last - first].equal(alone)
    torch.set_num_threads(1)
    assert attend(in_company)[7 : 7 + last - first].equal(alone)
    assert attend([(0, last, last - first)]).equal(alone)


def test_a_row_that_is_not_a_number_spoils_no_other(ops: Ops) -> None:
    paged = filled(1, 64, 16, [100], seed=7)
    batch = paged.batch([(0, 100, 6)])
    q = torch.randn(6, 3, 64, generator=torch.Generator().manual_seed(8))
    expected = ops.paged_attention(q, paged.layer, batch, 0.125, 0)
    q[2, 1, 5] = torch.nan
    out = ops.paged_attention(q, paged.layer, batch, 0.125, 0)
    assert out[2, 1].isnan().all()
    out[2, 1] = expected[2, 1]
    assert out.equal(expected)


def test_scores_far_apart_neither_overflow_nor_vanish(ops: Ops) -> None:
    paged = filled(1, 64, 16, [100], seed=9)
    batch = paged.batch([(0, 100, 1)])
    q = 1e4 * torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(10))
    out = ops.paged_attention(q, paged.layer, batch, 1.0, 0)
    expected = ReferenceOps().paged_attention(q, paged.layer, batch, 1.0, 0)
    assert out.isfinite().all()
    # One position has all the weight: more than half of 255 times its share of the tile's largest scale, rounded.
    k, k_scale, _, v_scale = stored(paged, 0, 100, 0)
    first = int((k @ q[0, 0].numpy() * k_scale).argmax())
    tile = v_scale[first // TILE * TILE :][:TILE]
    torch.testing.assert_close(out, expected, rtol=float(tile.max() / v_scale[first] / 255), atol=5 * FP32_ROUNDING)


def test_a_block_that_is_not_in_the_pool_is_named(ops: Ops) -> None:
    paged = filled(1, 64, 16, [40, 40], seed=11)
    batch = paged.batch([(0, 40, 1), (1, 40, 1)])
    batch.block_tables[1, 2] = paged.layer.k.shape[0]
    with pytest.raises(IndexError, match="sequence 1"):
        ops.paged_attention(torch.randn(2, 1, 64), paged.layer, batch, 0.125, 0)
