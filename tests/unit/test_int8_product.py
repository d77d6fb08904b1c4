"""Integer products in plain torch give the bits of an exact sum."""

import pytest
import torch

from common.model.int8_product import Int8Product, QuantizedWeight, exact_chunks, quantize_weight
from kernels.quantized import QuantizedRows

SHAPES = [(960, 576), (576, 1536), (7, 33), (16, 3000), (1, 1)]
NUMS_ROWS = (0, 1, 2, 3, 5, 8, 16, 33, 128, 512)


def make_case(num_out: int, num_in: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, QuantizedRows]:
    """Random values, and rows and channels of the largest ones, whose sums are the largest."""
    generator = torch.Generator().manual_seed(num_out + num_in + num_rows)
    values = torch.randint(-127, 128, (num_out, num_in), generator=generator, dtype=torch.int8)
    rows = torch.randint(1, 256, (num_rows, num_in), generator=generator, dtype=torch.uint8)
    values[0], rows[-1:] = 127, 255
    scales = 0.5 + torch.rand(num_out, generator=generator)
    return values, scales, QuantizedRows(rows, torch.ones(num_rows))


def exact(values: torch.Tensor, scales: torch.Tensor, rows: QuantizedRows) -> torch.Tensor:
    return ((rows.values.long() - 128) @ values.long().T).float() * scales


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", NUMS_ROWS)
def test_the_bits_of_an_exact_sum(shape: tuple[int, int], num_rows: int) -> None:
    values, scales, rows = make_case(*shape, num_rows)
    assert torch.equal(Int8Product(QuantizedWeight(values, scales))(rows), exact(values, scales, rows))


@pytest.mark.parametrize("sign", [1, -1])
def test_sums_beyond_the_integers_of_fp32(sign: int) -> None:
    """As large as they can be, and odd, so that a sum in fp32 alone would have to round."""
    values = torch.full((2, 3001), sign * 127, dtype=torch.int8)
    scales, rows = torch.ones(2), QuantizedRows(torch.full((3, 3001), 255, dtype=torch.uint8), torch.ones(3))
    assert len(exact_chunks(values)) > 1
    assert torch.equal(Int8Product(QuantizedWeight(values, scales))(rows), exact(values, scales, rows))


def test_chunks_are_few() -> None:
    values = torch.zeros((3, 1024), dtype=torch.int8)
    values[1], values[1, :512] = 127, -127  # 127 * 127 * 1024 is just below 2^24
    assert len(exact_chunks(values)) == 1
    values = torch.nn.functional.pad(values, (0, 32), value=127)
    assert [chunk.shape for chunk in exact_chunks(values)] == [(3, 528), (3, 528)]
    assert torch.equal(torch.cat(exact_chunks(values), dim=1), values)


def test_weights_are_rounded_per_channel() -> None:
    values, scales = quantize_weight(
        torch.tensor([[127.0, 0.5, 1.5, -127.0], [0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]])
    )
    assert values.tolist() == [[127, 0, 2, -127], [0, 0, 0, 0], [32, 64, 95, 127]]
    assert scales[0] == 1.0
    assert scales[1] > 0
