"""Compiled quantization against the plain one: bit for bit, but for sums that may be rounded in another order."""

import pytest
import torch

from common.config import cache_dir
from kernels.ops import Ops, select
from kernels.quantized import ROW_SCALE_FLOOR, PlainRowQuantizer, QuantizedRows, RowQuantizer, hadamard, row_quantizer

CPU = torch.device("cpu")
SHAPES = [(1, 576), (5, 33), (64, 1536), (3, 96), (7, 100), (2, 7), (513, 64), (0, 48)]
NUMS_ROWS = (1, 2, 3, 5, 8, 16, 33, 128)


@pytest.fixture(scope="module")
def ops() -> Ops:
    return select(CPU, "cpu", cache_dir())


@pytest.fixture(scope="module")
def compiled(ops: Ops) -> RowQuantizer:
    quantizer = row_quantizer(ops)
    assert quantizer is ops
    return quantizer


@pytest.fixture(scope="module")
def plain(ops: Ops) -> RowQuantizer:
    """Between the same norm and SwiGLU, so that only quantization differs."""
    return PlainRowQuantizer(ops)


def random(*shape: int) -> torch.Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def assert_equal(actual: QuantizedRows, expected: QuantizedRows) -> None:
    assert torch.equal(actual.values, expected.values)
    torch.testing.assert_close(actual.scales, expected.scales, rtol=0, atol=0, equal_nan=True)


def assert_near(actual: QuantizedRows, expected: QuantizedRows) -> None:
    """A factor that is applied to the scale, not to each value, moves a scale by a few units in the last place, and a
    value that lies on the edge between two integers to the other one."""
    torch.testing.assert_close(actual.scales, expected.scales, rtol=5e-7, atol=0)
    differences = (actual.values.int() - expected.values.int()).abs()
    assert differences.numel() == 0 or int(differences.max()) <= 1
    assert int(differences.sum()) <= 1 + differences.numel() // 10_000


def test_on_the_edge_between_two_integers(compiled: RowQuantizer, plain: RowQuantizer) -> None:
    """Halves of a scale and their neighbours, for many scales, from the smallest to the largest."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.ldexp(
        1 + torch.rand(500, 1, generator=generator), torch.randint(-101, 119, (500, 1), generator=generator)
    )
    edges = torch.arange(-126.5, 127) * scales
    rows = [127 * scales]
    for direction in (-torch.inf, torch.inf):
        near = edges
        for _ in range(3):
            rows.append(near)
            near = torch.nextafter(near, torch.tensor(direction))
    x = torch.cat(rows, dim=1)
    assert_equal(compiled.quantize_rows(x), plain.quantize_rows(x))


@pytest.mark.parametrize("shape", SHAPES)
class TestAgainstPlain:
    def test_quantize(self, compiled: RowQuantizer, plain: RowQuantizer, shape: tuple[int, int]) -> None:
        x = random(*shape)
        assert_equal(compiled.quantize_rows(x), plain.quantize_rows(x))

    @pytest.mark.parametrize("has_offset", [True, False])
    def test_norm(self, compiled: RowQuantizer, plain: RowQuantizer, shape: tuple[int, int], has_offset: bool) -> None:
        x = random(*shape)
        offset = random(1, shape[1])[0] if has_offset else None
        assert_near(compiled.rms_norm_quantize(x, 1e-5, offset), plain.rms_norm_quantize(x, 1e-5, offset))

    @pytest.mark.parametrize("is_scaled", [True, False])
    def test_silu_mul(
        self, compiled: RowQuantizer, plain: RowQuantizer, shape: tuple[int, int], is_scaled: bool
    ) -> None:
        gate_up = random(shape[0], 2 * shape[1])
        scales = random(shape[0]).abs() if is_scaled else None
        for block in {min(shape[1] & -shape[1], 512), 1}:
            expected = plain.silu_mul_quantize(gate_up, scales, block)
            assert_near(compiled.silu_mul_quantize(gate_up, scales, block), expected)

    def test_add_scaled(self, compiled: RowQuantizer, plain: RowQuantizer, shape: tuple[int, int]) -> None:
        x, product, scales = random(*shape), random(*shape).flip(0), random(shape[0])
        assert torch.equal(compiled.add_scaled(x, product, scales), plain.add_scaled(x, product, scales))


@pytest.fixture(params=["compiled", "plain"])
def quantizer(request: pytest.FixtureRequest, compiled: RowQuantizer, plain: RowQuantizer) -> RowQuantizer:
    return compiled if request.param == "compiled" else plain


class TestContract:
    def test_ties_go_to_even_and_the_largest_is_127(self, quantizer: RowQuantizer) -> None:
        x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0, 126.5]])
        rows = quantizer.quantize_rows(x)
        assert (rows.values[0].int() - 128).tolist() == [127, 0, 2, 2, 0, -2, -127, 126]
        assert rows.scales.tolist() == [1.0]

    def test_a_row_of_zeros(self, quantizer: RowQuantizer) -> None:
        rows = quantizer.quantize_rows(torch.zeros(1, 20))
        assert rows.values.eq(128).all()
        assert rows.scales.tolist() == [ROW_SCALE_FLOOR]

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("at", [0, 15, 16, 19])
    def test_a_row_that_is_not_finite_has_no_scale(self, quantizer: RowQuantizer, value: float, at: int) -> None:
        x = random(3, 20)
        x[1, at] = value
        offset = random(1, 20)[0]
        for rows in (
            quantizer.quantize_rows(x),
            quantizer.rms_norm_quantize(x, 1e-5, None),
            quantizer.rms_norm_quantize(x, 1e-5, offset),
        ):
            assert rows.scales.isnan().tolist() == [False, True, False]
            assert rows.values[1].eq(128).all()

    def test_a_row_is_the_same_in_any_company(self, compiled: RowQuantizer) -> None:
        x, gate_up, scales = random(128, 96), random(128, 192), random(128)
        offset = random(1, 96)[0]
        norm, gated = compiled.rms_norm_quantize(x, 1e-5, offset), compiled.silu_mul_quantize(gate_up, scales, 32)
        for count in NUMS_ROWS:
            part = compiled.rms_norm_quantize(x[-count:], 1e-5, offset)
            assert_equal(part, QuantizedRows(norm.values[-count:], norm.scales[-count:]))
            part = compiled.silu_mul_quantize(gate_up[-count:], scales[-count:], 32)
            assert_equal(part, QuantizedRows(gated.values[-count:], gated.scales[-count:]))


class TestHadamard:
    @pytest.mark.parametrize("block", [1, 2, 8, 16, 64])
    def test_is_its_own_inverse_and_keeps_lengths(self, block: int) -> None:
        x = random(5, 192)
        y = hadamard(x, block)
        # six sums of fp32 values below 100
        torch.testing.assert_close(hadamard(y, block), x, rtol=0, atol=1e-4)
        torch.testing.assert_close(y.norm(dim=1), x.norm(dim=1), rtol=1e-5, atol=0)

    def test_is_the_matrix(self) -> None:
        expected = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
        assert torch.equal(hadamard(torch.eye(4), 4), expected)
