"""Rows less their mean, and biases that make up for it: the same products, in finer steps."""

import torch

from common.model.calibration.offsets import biases_with, centred
from kernels.ops import select
from kernels.quantized import PlainRowQuantizer, QuantizedRows, RowQuantizer

CPU = torch.device("cpu")
QUANTIZER: RowQuantizer = PlainRowQuantizer(select(CPU, "reference"))


def rows_with_a_mean(seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(40, 24, generator=random) + 3 * torch.randn(24, generator=random)


def values_of(rows: QuantizedRows) -> torch.Tensor:
    return (rows.values.double() - 128) * rows.scales.double()[:, None]


def test_what_is_left_has_no_mean_and_finer_steps() -> None:
    rows = QUANTIZER.quantize_rows(rows_with_a_mean(0))
    made = centred(rows, QUANTIZER)
    assert made is not None
    left = values_of(rows) - made.offset.double()
    # the mean is of values rounded to 2^-15 of the largest, and is rounded to fp32
    assert left.mean(0).abs().max() <= 2**-15 * values_of(rows).abs().max()
    # half a step; differences and quotients, at most 127 steps of fp32 values, add a few 2^-24 of those
    assert (values_of(made.rows) - left).abs().max() <= (0.5 + 4 * 127 * 2**-24) * made.rows.scales.max()
    assert made.rows.scales.mean() < 0.7 * rows.scales.mean()


def test_products_stay() -> None:
    x, random = rows_with_a_mean(1), torch.Generator().manual_seed(2)
    weight, bias, offset = torch.randn(5, 24, generator=random), torch.randn(5, generator=random), x.mean(0)
    weights = {"a.weight": weight, "b.weight": weight, "b.bias": bias}
    biases = biases_with(offset, weights, ("a", "b"))
    assert set(biases) == {"a.bias", "b.bias"}
    left = x.double() - offset.double()
    expected = x.double() @ weight.double().T
    # biases are rounded to fp32
    tolerance = 2**-23 * float((weight.abs() @ offset.abs() + bias.abs()).max())
    torch.testing.assert_close(left @ weight.double().T + biases["a.bias"], expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(left @ weight.double().T + biases["b.bias"], expected + bias, rtol=0, atol=tolerance)


def test_rows_that_are_not_finite_do_not_count() -> None:
    x = rows_with_a_mean(3)
    bad = torch.cat((x, torch.full((2, 24), torch.nan)))
    expected, made = (centred(QUANTIZER.quantize_rows(rows), QUANTIZER) for rows in (x, bad))
    assert expected is not None
    assert made is not None
    assert torch.equal(made.offset, expected.offset)
    assert made.rows.scales.isnan().tolist() == [False] * 40 + [True] * 2
    assert centred(QUANTIZER.quantize_rows(bad[40:]), QUANTIZER) is None
