"""The linear layers' seam: what a product is, and what each numeric path promises."""

import pytest
import torch

from common.model.linear import Numerics, exactness, make_linear


@pytest.mark.parametrize("has_bias", [True, False])
def test_reference_is_the_plain_product(has_bias: bool) -> None:
    weight, x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([[1.0, 10.0], [0.5, 0.0]])
    bias = torch.tensor([100.0, 200.0, 300.0]) if has_bias else None
    expected = torch.tensor([[21.0, 43.0, 65.0], [0.5, 1.5, 2.5]]) + (bias if bias is not None else 0.0)
    assert torch.equal(make_linear(weight, bias, Numerics.REFERENCE)(x), expected)


@pytest.mark.parametrize("numerics", Numerics)
def test_a_path_that_is_not_exact_says_why(numerics: Numerics) -> None:
    is_exact, reason = exactness(numerics)
    assert is_exact == (reason == "")


def test_reference_is_not_exact() -> None:
    assert exactness(Numerics.REFERENCE) == (
        False,
        "fp32 matrix products round differently for different numbers of rows",
    )
