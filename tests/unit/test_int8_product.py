"""Integer products: both ways give the bits of an exact sum, and a oneDNN that saturates is never chosen."""

import hashlib
import os
import subprocess
import sys

import pytest
import torch

from common.model.int8_product import (
    Int8Product,
    exact_chunks,
    fp32_chunk,
    make_int8_product,
    onednn_chunk,
    onednn_is_exact,
    quantize_weight,
)
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
    expected = exact(values, scales, rows)
    assert torch.equal(Int8Product(values, scales, fp32_chunk)(rows), expected)
    if onednn_is_exact():
        assert torch.equal(Int8Product(values, scales, onednn_chunk)(rows), expected)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("num_rows", NUMS_ROWS)
def test_channels_of_one_sign(sign: int, num_rows: int) -> None:
    """Their sums of unsigned products are beyond fp32's integers where the wanted sums are not: the case in which
    oneDNN's kernels for few and for many rows round differently when all columns are one product."""
    values, scales, rows = make_case(64, 1536, num_rows)
    weight = sign * values.abs().clamp_min(60).float() * scales[:, None]
    values, scales = quantize_weight(weight)
    assert len(exact_chunks(values)) > 1
    assert torch.equal(make_int8_product(quantize_weight(weight))(rows), exact(values, scales, rows))


def test_chunks_are_few() -> None:
    values = torch.zeros((3, 1024), dtype=torch.int8)
    values[1] = 64  # 255 * 64 * 1024 is just below 2^24
    assert len(exact_chunks(values)) == 1
    values[2] = -65
    assert [chunk.shape for chunk in exact_chunks(values)] == [(3, 512), (3, 512)]
    assert torch.equal(torch.cat(exact_chunks(values), dim=1), values)


def test_weights_are_rounded_per_channel() -> None:
    values, scales = quantize_weight(
        torch.tensor([[127.0, 0.5, 1.5, -127.0], [0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]])
    )
    assert values.tolist() == [[127, 0, 2, -127], [0, 0, 0, 0], [32, 64, 95, 127]]
    assert scales[0] == 1.0
    assert scales[1] > 0


def digest_of_products() -> str:
    digest = hashlib.sha256()
    for shape in SHAPES:
        values, scales, rows = make_case(*shape, 5)
        product = make_int8_product(quantize_weight(values.float() * scales[:, None]))(rows)
        digest.update(product.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.skipif(not onednn_is_exact(), reason="oneDNN is not exact here in the first place")
def test_a_onednn_that_saturates_is_found_out_and_replaced() -> None:
    """As on a machine without VNNI: oneDNN then adds pairs of products in 16 bits. The bits stay the same."""
    script = (
        "import test_int8_product as t\n"
        "from common.model.int8_product import onednn_is_exact\n"
        "print(onednn_is_exact(), t.digest_of_products())"
    )
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", digest_of_products()]
