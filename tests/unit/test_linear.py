"""The linear layers' seam: what each numeric path computes, and what it promises."""

from collections.abc import Callable

import pytest
import torch

from common.config import cache_dir
from common.model.int8_product import quantize_weight
from common.model.linear import Linear, LinearMaker, LinearWeights, Norm, Numerics, exactness, linear_maker
from kernels.ops import Ops, select
from kernels.quantized import hadamard

CPU = torch.device("cpu")
NUMS_ROWS = (1, 2, 3, 5, 8, 16, 33, 128, 512)
HIDDEN, INNER = 48, 96


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=["cpu", "reference"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return select(CPU, request.param, cache_dir())


@pytest.fixture(params=[True, False], ids=["biases", "no biases"])
def has_bias(request: pytest.FixtureRequest) -> bool:
    return request.param


def weights(num_out: int, num_in: int, has_bias: bool) -> LinearWeights:
    return LinearWeights(random(num_out, num_in, seed=1), random(num_out, seed=2) if has_bias else None)


def norm() -> Norm:
    return Norm(1 + 0.1 * random(HIDDEN, seed=3), 1e-5)


MAKERS: dict[str, Callable[[LinearMaker, bool], Linear]] = {
    "linear": lambda maker, has_bias: maker.linear(weights(31, HIDDEN, has_bias)),
    "norm_linear": lambda maker, has_bias: maker.norm_linear(norm(), weights(31, HIDDEN, has_bias)),
    "mlp": lambda maker, has_bias: maker.mlp(
        norm(), weights(2 * INNER, HIDDEN, has_bias), weights(HIDDEN, INNER, has_bias), 32
    ),
}


@pytest.fixture(params=MAKERS.values(), ids=MAKERS.keys())
def make(request: pytest.FixtureRequest) -> Callable[[LinearMaker, bool], Linear]:
    return request.param


class TestReference:
    def test_linear_is_the_plain_product(self, ops: Ops, has_bias: bool) -> None:
        x, expected = random(5, HIDDEN), weights(31, HIDDEN, has_bias)
        y = linear_maker(Numerics.REFERENCE, ops).linear(expected)(x)
        assert torch.equal(y, torch.nn.functional.linear(x, expected.weight, expected.bias))

    def test_mlp(self, ops: Ops, has_bias: bool) -> None:
        x = random(5, HIDDEN)
        gate_up, down = weights(2 * INNER, HIDDEN, has_bias), weights(HIDDEN, INNER, has_bias)
        y = linear_maker(Numerics.REFERENCE, ops).mlp(norm(), gate_up, down, 32)(x)
        normed = x / (x.pow(2).mean(1, keepdim=True) + 1e-5).sqrt() * norm().weight
        gate, up = torch.nn.functional.linear(normed, gate_up.weight, gate_up.bias).chunk(2, dim=1)
        inner = hadamard(torch.nn.functional.silu(gate) * up, 32)
        # fp32 sums of up to 96 products below 100 in another order
        torch.testing.assert_close(
            y, x + torch.nn.functional.linear(inner, down.weight, down.bias), rtol=1e-5, atol=1e-3
        )


class TestInt8:
    def test_is_near_the_reference(self, ops: Ops, make: Callable[[LinearMaker, bool], Linear], has_bias: bool) -> None:
        x = random(64, HIDDEN)
        expected = make(linear_maker(Numerics.REFERENCE, ops), has_bias)(x)
        y = make(linear_maker(Numerics.INT8, ops), has_bias)(x)
        # Each of two quantizations has an error of at most 1/254 of its largest value, about a third of that in the
        # mean; the largest values are some 3 times the usual ones, and the MLP has two products in a row.
        assert (y - expected).norm() < 0.03 * expected.norm()

    @pytest.mark.parametrize("ops", ["cpu"], indirect=True)  # what exact backends promise
    def test_a_row_is_the_same_in_any_company(
        self, ops: Ops, make: Callable[[LinearMaker, bool], Linear], has_bias: bool
    ) -> None:
        assert exactness(Numerics.INT8, ops.name) == (True, "")
        linear = make(linear_maker(Numerics.INT8, ops), has_bias)
        x = random(max(NUMS_ROWS), HIDDEN)
        whole = linear(x)
        for num_rows in NUMS_ROWS:
            for at in range(0, len(x), max(num_rows, 101)):
                assert torch.equal(linear(x[at : at + num_rows]), whole[at : at + num_rows]), (num_rows, at)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_what_is_not_finite_stays_in_its_row_and_shows(
        self, ops: Ops, make: Callable[[LinearMaker, bool], Linear], has_bias: bool, value: float
    ) -> None:
        linear = make(linear_maker(Numerics.INT8, ops), has_bias)
        x = random(4, HIDDEN)
        good = linear(x)
        x[2, 7] = value
        y = linear(x)
        assert not y[2].isfinite().any()
        assert torch.equal(y[[0, 1, 3]], good[[0, 1, 3]])

    def test_no_rows(self, ops: Ops, make: Callable[[LinearMaker, bool], Linear], has_bias: bool) -> None:
        linear = make(linear_maker(Numerics.INT8, ops), has_bias)
        assert linear(torch.empty(0, HIDDEN)).shape == linear(torch.ones(1, HIDDEN))[:0].shape

    def test_a_channel_that_is_not_finite_shows(self) -> None:
        weight = random(3, HIDDEN)
        weight[1, 5] = float("nan")
        values, scales = quantize_weight(weight)
        assert scales.isfinite().tolist() == [True, False, True]
        assert values[1].eq(0).all()


@pytest.mark.parametrize("numerics", Numerics)
@pytest.mark.parametrize("backend", ["cpu", "reference", "triton"])
def test_a_path_that_is_not_exact_says_why(numerics: Numerics, backend: str) -> None:
    is_exact, reason = exactness(numerics, backend)
    assert is_exact == (reason == "")
    assert is_exact == (numerics is Numerics.INT8 and backend == "cpu")
    if numerics is Numerics.INT8 and not is_exact:
        assert backend in reason
