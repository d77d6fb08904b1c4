"""Integer products: every kernel gives the bits of an exact sum, rounded once, then scaled, whatever the cut."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from common.config import cache_dir
from kernels.cpu.int8_pack import PackedWeight, PanelMemory, pack_weight
from kernels.cpu.setup import compiled_code_kept_in
from kernels.ops import select

OPS = select(torch.device("cpu"), "cpu")
with compiled_code_kept_in(cache_dir()):
    from kernels.cpu import int8_matmul
    from kernels.cpu.int8_ops import int8_product
    from kernels.cpu.int8_product import Product
    from kernels.cpu.pool import HelperPool

Multiply = Callable[..., torch.Tensor]

SHAPES = [(1, 4), (16, 64), (17, 60), (100, 64), (17, 576), (100, 1536), (49, 132), (200, 65)]
ROW_COUNTS = [*range(1, 41), 64, 100]


@pytest.fixture(params=list(int8_matmul.KERNELS), scope="module")
def multiply(request: pytest.FixtureRequest) -> Multiply:
    reason = int8_matmul.why_unusable(request.param)
    if reason is not None:
        pytest.skip(reason)
    with compiled_code_kept_in(cache_dir()):
        kernel = int8_matmul.load_kernel(request.param)
    return lambda *args: int8_product(lambda job, num_threads: job(), *args, kernel=kernel)


def make_case(num_outputs: int, depth: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random rows, weights and scales; the first channel and the last row hold the largest values there are."""
    generator = torch.Generator().manual_seed(num_outputs + depth + num_rows)
    values = torch.randint(-127, 128, (num_outputs, depth), generator=generator, dtype=torch.int8)
    rows = torch.randint(0, 256, (num_rows, depth), generator=generator, dtype=torch.uint8)
    values[0], rows[-1:] = 127, 255
    return rows, values, 0.5 + torch.rand(num_outputs, generator=generator)


def exact(rows: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """The specification: the sum in 64 bits, rounded to fp32 once, times the channel's scale."""
    sums = (rows.numpy().astype(np.int64) - 128) @ values.numpy().astype(np.int64).T
    return sums.astype(np.float32) * scales.numpy()


def same_bits(result: torch.Tensor, expected: np.ndarray) -> bool:
    return result.shape == expected.shape and np.array_equal(result.numpy().view(np.int32), expected.view(np.int32))


def test_the_packed_order() -> None:
    values = torch.arange(-100, 100, dtype=torch.int8).view(20, 10)
    weight = pack_weight(values, torch.ones(20))
    assert weight.values.shape == (2, 16, 16, 4)
    assert (weight.num_panels, weight.num_outputs, weight.depth, weight.padded_depth) == (2, 20, 10, 64)
    unpacked = weight.values.permute(0, 2, 1, 3).reshape(32, 64)
    assert unpacked[:20, :10].equal(values)
    assert unpacked[20:].count_nonzero() == unpacked[:, 10:].count_nonzero() == 0
    assert weight.corrections[:20].equal(-128 * values.sum(dim=1, dtype=torch.int32))
    assert weight.scales.tolist() == [1.0] * 20 + [0.0] * 12


def test_weights_of_one_memory_lie_one_after_the_other_in_whole_cache_lines() -> None:
    cases = [make_case(num_outputs, depth, 1) for num_outputs, depth in SHAPES]
    memory = PanelMemory([(values.shape[0], values.shape[1]) for _, values, _ in cases])
    together = [pack_weight(values, scales, memory) for _, values, scales in cases]
    ends = [weight.values.data_ptr() + weight.values.numel() for weight in together]
    assert [weight.values.data_ptr() for weight in together] == [together[0].values.data_ptr(), *ends[:-1]]
    assert together[0].values.data_ptr() % 64 == 0
    for (_, values, scales), weight in zip(cases, together, strict=True):
        assert torch.equal(weight.values, pack_weight(values, scales).values)
    with pytest.raises(AssertionError, match="not among the shapes"):
        pack_weight(cases[0][1], cases[0][2], memory)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_of_an_exact_sum(multiply: Multiply, shape: tuple[int, int]) -> None:
    rows, values, scales = make_case(*shape, max(ROW_COUNTS))
    weight = pack_weight(values, scales)
    expected = exact(rows, values, scales)
    for num_rows in ROW_COUNTS:
        first = max(ROW_COUNTS) - num_rows
        assert same_bits(multiply(rows[first:], weight), expected[first:]), num_rows


@pytest.mark.parametrize(("row", "channel"), [(255, 127), (255, -127), (0, 127), (0, -128)])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 16, 33])
def test_sums_beyond_what_fp32_counts_exactly(multiply: Multiply, row: int, channel: int, num_rows: int) -> None:
    """Of unsigned products up to 1.3e9, and of wanted ones 0.6e9: past 2^24 either rounds, and only one may."""
    rows = torch.full((num_rows, 40_000), row, dtype=torch.uint8)
    values = torch.full((2, 40_000), channel, dtype=torch.int8)
    rows[:, 7] = 77
    values[1, 7] = 5
    scales = torch.tensor([1.0, 0.3])
    assert same_bits(multiply(rows, pack_weight(values, scales)), exact(rows, values, scales))


def test_row_scales_bias_and_residual_in_this_order(multiply: Multiply) -> None:
    for num_rows in (1, 5, 20, 60):
        rows, values, scales = make_case(70, 100, num_rows)
        generator = torch.Generator().manual_seed(num_rows)
        row_scales, bias = torch.rand(num_rows, generator=generator), 1e4 * torch.randn(70, generator=generator)
        residual = 1e5 * torch.randn(num_rows, 70, generator=generator)
        weight, before = pack_weight(values, scales), residual.clone()
        scaled = exact(rows, values, scales) * row_scales.numpy()[:, None]
        assert same_bits(multiply(rows, weight, row_scales), scaled)
        assert same_bits(multiply(rows, weight, row_scales, bias), scaled + bias.numpy())
        assert same_bits(multiply(rows, weight, row_scales, None, residual), residual.numpy() + scaled)
        with_all = residual.numpy() + (scaled + bias.numpy())
        assert same_bits(multiply(rows, weight, row_scales, bias, residual), with_all)
        assert residual.equal(before)


@pytest.mark.skipif(int8_matmul.CHOSEN_GATED_KERNEL == 0, reason="no kernel for gated products here")
@pytest.mark.parametrize(("width", "depth"), [(16, 64), (80, 128), (304, 576)])
def test_a_gated_product_has_the_bits_of_product_and_gate(width: int, depth: int) -> None:
    for num_rows in (16, 17, 32, 47, 100):
        rows, values, scales = make_case(2 * width, depth, num_rows)
        weight = pack_weight(values, scales / 1e4)
        row_scales, bias = torch.rand(num_rows), torch.randn(2 * width)
        expected = OPS.silu_mul(int8_product(lambda job, _: job(), rows, weight, row_scales, bias))
        output = torch.zeros(num_rows, width + 8)
        product = Product(
            rows.data_ptr(), depth, row_scales.data_ptr(), num_rows, weight.values.data_ptr(),
            weight.corrections.data_ptr(), weight.scales.data_ptr(), 2 * width, depth, bias.data_ptr(),
            output.data_ptr(), output.stride(0), 0,
        )  # fmt: skip
        for task_panels in (1, 3, width // 16):
            counter = np.zeros(1, np.int64)
            kernel = int8_matmul.CHOSEN_GATED_KERNEL
            int8_matmul.run_product_tasks(kernel, tuple(product), width // 16, task_panels, counter)
            assert torch.equal(output[:, :width], expected), (num_rows, task_panels)
            assert output[:, width:].count_nonzero() == 0
            output[:, :width] = 0


def test_a_row_that_is_not_a_number_stays_alone(multiply: Multiply) -> None:
    rows, values, scales = make_case(40, 64, 20)
    row_scales = torch.ones(20)
    row_scales[13] = torch.nan
    result = multiply(rows, pack_weight(values, scales), row_scales)
    assert result[13].isnan().all()
    others = [row for row in range(20) if row != 13]
    assert same_bits(result[others], exact(rows, values, scales)[others])


@pytest.mark.parametrize("num_rows", [1, 30])
def test_what_padding_would_read_does_not_matter(multiply: Multiply, num_rows: int) -> None:
    """A caller's rows may be wider than the depth, and hold anything there."""
    rows, values, scales = make_case(20, 128, num_rows)
    narrow = values.clone()
    narrow[:, 70:] = 0
    expected = exact(rows, narrow, scales)
    packed = pack_weight(values[:, :70].contiguous(), scales)
    as_wide = PackedWeight(packed.values, packed.corrections, packed.scales, 20, depth=128)
    assert same_bits(multiply(rows, as_wide), expected)


@pytest.mark.parametrize("num_outputs", [16, 17, 400, 1000])
def test_helpers_change_nothing(num_outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.cpu.int8_ops._SERIAL_BYTES", 0)
    rows, values, scales = make_case(num_outputs, 192, 20)
    pool, used = HelperPool(), []

    def run(job: Callable[[], None], num_threads: int) -> None:
        used.append(num_threads)
        pool.run(job, num_threads)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        result = int8_product(run, rows, pack_weight(values, scales))
    finally:
        torch.set_num_threads(before)
    assert used == [2]
    assert same_bits(result, exact(rows, values, scales))


def test_the_operation_of_the_backend() -> None:
    rows, values, scales = make_case(100, 60, 3)
    assert same_bits(OPS.int8_product(rows, pack_weight(values, scales)), exact(rows, values, scales))
    assert OPS.int8_product(rows[:0], pack_weight(values, scales)).shape == (0, 100)
    assert OPS.product_description == int8_matmul.KERNELS[int8_matmul.CHOSEN]


def test_a_kernel_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_matmul, "linux_grants_amx", lambda: False)
    with pytest.raises(ValueError, match=r"'amx' cannot run: (no|Linux does not grant) AMX"):
        int8_matmul.load_kernel("amx")
