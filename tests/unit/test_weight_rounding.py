"""Rounding that minimizes the output error: never worse than nearest on the inputs it saw, and always the same."""

from collections.abc import Iterator

import pytest
import torch

from common.config import cache_dir
from common.model.int8_product import quantize_weight
from common.model.weight_rounding import WeightRounder, second_moments
from kernels.ops import select
from kernels.quantized import ZERO_POINT, QuantizedRows
from tests.support.output_error import squared_error

CPU = torch.device("cpu")
REFERENCE = select(CPU, "reference")


@pytest.fixture(autouse=True)
def _threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def correlated_rows(num_rows: int, width: int, seed: int = 0) -> QuantizedRows:
    """Inputs that go together, as those of a model do: a few directions carry most of them."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(max(1, width // 8), width, generator=generator)
    x = torch.randn(num_rows, directions.shape[0], generator=generator) @ directions
    x += 0.3 * torch.randn(num_rows, width, generator=generator)
    scales = x.abs().amax(dim=1) / 127
    return QuantizedRows(((x / scales[:, None]).round() + ZERO_POINT).to(torch.uint8), scales)


def random_weight(num_out: int, width: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(num_out, width, generator=torch.Generator().manual_seed(seed))


def moments_of(rows: QuantizedRows) -> torch.Tensor:
    moments = second_moments(rows, REFERENCE)
    assert moments is not None
    return moments


@pytest.mark.parametrize(("num_out", "width", "num_rows"), [(1, 1, 1), (5, 33, 64), (40, 96, 2000), (9000, 16, 300)])
def test_outputs_err_less_than_rounded_to_nearest(num_out: int, width: int, num_rows: int) -> None:
    moments, weight = moments_of(correlated_rows(num_rows, width)), random_weight(num_out, width)
    rounded, nearest = WeightRounder(moments).quantize(weight), quantize_weight(weight)
    assert torch.equal(rounded.scales, nearest.scales)
    assert rounded.values.dtype == torch.int8
    assert int(rounded.values.abs().max()) <= 127
    errors = squared_error(weight, rounded, moments), squared_error(weight, nearest, moments)
    assert errors[0] <= errors[1]
    if width > 8:
        assert errors[0] < 0.5 * errors[1]


def test_each_column_makes_up_for_the_errors_before_it() -> None:
    """Against the recursion written down as it reads: a column's target is its weight and what its predecessors'
    errors, in the outputs, would be mended by."""
    moments, weight = moments_of(correlated_rows(500, 150)), random_weight(3, 150)
    nearest = quantize_weight(weight)
    steps = weight.double() / nearest.scales.double()[:, None]
    damped = moments + 0.01 * moments.diagonal().mean() * torch.eye(150, dtype=torch.float64)
    left = steps.clone()
    expected = torch.empty_like(steps)
    for column in range(150):
        expected[:, column] = left[:, column].round().clamp(-127, 127)
        if column < 149:
            # The best change of the columns still free, given this one's error.
            error = left[:, column] - expected[:, column]
            later = slice(column + 1, None)
            left[:, later] += torch.outer(error, torch.linalg.solve(damped[later, later], damped[later, column]))
    assert torch.equal(WeightRounder(moments).quantize(weight).values.double(), expected)


def test_moments_are_sums_of_exact_integers_whatever_the_threads_and_the_order() -> None:
    rows = correlated_rows(5000, 48)
    found = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        moments = moments_of(rows)
        found.append(moments)
        assert torch.equal(moments, moments.round())
        assert torch.equal(moments, moments.T)
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(2))
    found.append(moments_of(QuantizedRows(rows.values[order], rows.scales[order])))
    assert all(torch.equal(moments, found[0]) for moments in found)


def test_every_backend_finds_the_same_moments() -> None:
    rows = correlated_rows(2500, 70)
    assert torch.equal(moments_of(rows), second_moments(rows, select(CPU, "cpu", cache_dir())))


def test_moments_are_those_of_the_rows() -> None:
    rows = correlated_rows(400, 24)
    values = (rows.values.double() - ZERO_POINT) * rows.scales.clamp_max(rows.scales.sort().values[359])[:, None]
    expected = values.T @ values
    moments = moments_of(rows)
    factor = float(expected.trace() / moments.trace())
    torch.testing.assert_close(moments * factor, expected, rtol=0, atol=0.01 * float(expected.diagonal().mean()))


def test_a_row_of_huge_scale_weighs_no_more_than_others() -> None:
    rows = correlated_rows(400, 24)
    scales = rows.scales.clone()
    scales[7] = 1e6
    torch.testing.assert_close(moments_of(QuantizedRows(rows.values, scales)), moments_of(rows), rtol=0.2, atol=1e5)


def test_rows_that_are_not_finite_are_left_out() -> None:
    rows = correlated_rows(100, 24)
    scales = rows.scales.clone()
    scales[3] = torch.nan
    kept = torch.arange(100) != 3
    expected = moments_of(QuantizedRows(rows.values[kept], rows.scales[kept]))
    assert torch.equal(moments_of(QuantizedRows(rows.values, scales)), expected)
    assert second_moments(QuantizedRows(rows.values, torch.full((100,), torch.nan)), REFERENCE) is None


def test_inputs_that_are_always_zero_are_rounded_to_nearest() -> None:
    moments = torch.zeros(16, 16, dtype=torch.float64)
    weight = random_weight(4, 16)
    assert torch.equal(WeightRounder(moments).quantize(weight).values, quantize_weight(weight).values)


def test_a_channel_that_is_not_finite_keeps_its_scale_and_spoils_no_other() -> None:
    moments, weight = moments_of(correlated_rows(200, 32)), random_weight(4, 32)
    expected = WeightRounder(moments).quantize(weight)
    weight[2, 5] = torch.inf
    rounded = WeightRounder(moments).quantize(weight)
    assert torch.equal(rounded.values[[0, 1, 3]], expected.values[[0, 1, 3]])
    assert not rounded.scales[2].isfinite()


def test_the_number_of_threads_changes_no_integer() -> None:
    moments, weight = moments_of(correlated_rows(3000, 160)), random_weight(300, 160)
    found = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        found.append(WeightRounder(moments).quantize(weight).values)
    assert torch.equal(*found)
