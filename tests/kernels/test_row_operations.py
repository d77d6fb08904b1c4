"""RMS norm, rotary positions and SwiGLU's product: values in double precision, and bits that no neighbour changes."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kernels.ops import Ops, select

CPU = torch.device("cpu")
FP32_ROUNDING = 2.0**-24


@pytest.fixture(params=["reference", "cpu"], scope="module")
def ops(request: pytest.FixtureRequest) -> Ops:
    return select(CPU, request.param)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [1, 15, 16, 64, 576, 1000])
def test_rms_norm(ops: Ops, width: int) -> None:
    x, weight = 3 * normal(5, width), normal(width, seed=1)
    exact = x.double()
    exact = exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    # a sum of `width` squares, at worst one rounding each (halved by the root), then four operations
    torch.testing.assert_close(
        ops.rms_norm(x, weight, 1e-5), exact.float(), rtol=(width / 2 + 6) * FP32_ROUNDING, atol=0
    )


def test_rms_norm_takes_heads_of_a_wider_row(ops: Ops) -> None:
    fused, weight = normal(4, 6 * 32), normal(32, seed=1)
    heads = fused.view(4, 6, 32)[:, 2:4]
    out = ops.rms_norm(heads, weight, 1e-6)
    assert out.shape == (4, 2, 32)
    assert out.equal(ops.rms_norm(heads.contiguous(), weight, 1e-6))


@pytest.mark.parametrize("head_dim", [2, 20, 64])
def test_rope(ops: Ops, head_dim: int) -> None:
    """A rotation of the pair (x[i], x[i + D / 2]) by the position's angle: the same as a complex product."""
    angles = np.random.default_rng(0).uniform(-3, 3, (7, 1, head_dim // 2))
    x = normal(7, 3, head_dim)
    pairs = x.double().numpy()
    turned = (pairs[..., : head_dim // 2] + 1j * pairs[..., head_dim // 2 :]) * np.exp(1j * angles)
    cos, sin = (torch.from_numpy(f(angles[:, 0]).astype(np.float32)) for f in (np.cos, np.sin))
    exact = torch.from_numpy(np.concatenate([turned.real, turned.imag], axis=-1).astype(np.float32))
    # cos and sin, two products and their sum are rounded
    torch.testing.assert_close(ops.rope(x, cos, sin), exact, rtol=0, atol=4 * FP32_ROUNDING * 2 * float(x.abs().max()))


@pytest.mark.parametrize("width", [1, 16, 33, 1536])
def test_silu_mul(ops: Ops, width: int) -> None:
    gate_up = 10 * normal(5, 2 * width)
    gate, up = gate_up.double().chunk(2, dim=-1)
    exact = (gate / (1 + torch.exp(-gate)) * up).float()
    torch.testing.assert_close(ops.silu_mul(gate_up), exact, rtol=8 * FP32_ROUNDING, atol=1e-30)


@pytest.mark.parametrize("gate", [-1e4, -100.0, -88.5, -87.0, -0.0, 0.0, 1e-30, 87.0, 1e4])
def test_silu_mul_far_out(ops: Ops, gate: float) -> None:
    """e^100 is not a number of fp32: below -87 the answer is near enough to nothing."""
    out = ops.silu_mul(torch.full((1, 34), gate))
    exact = gate * gate / (1 + np.exp(-gate)) if gate > -700 else 0.0
    torch.testing.assert_close(out, torch.full((1, 17), exact), rtol=8 * FP32_ROUNDING, atol=1e-30)


def test_silu_mul_of_a_row_that_is_not_a_number(ops: Ops) -> None:
    gate_up = normal(2, 40)
    gate_up[0, 3] = torch.nan
    out = ops.silu_mul(gate_up)
    assert out[0].isnan().tolist() == [i == 3 for i in range(20)]


@pytest.fixture
def helpers_always(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ops]:
    ops = select(CPU, "cpu")
    monkeypatch.setattr("kernels.cpu.ops._SERIAL_ELEMENTS", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield ops
    torch.set_num_threads(before)


@pytest.mark.parametrize("width", [48, 50])
def test_a_row_has_the_same_bits_in_any_company(helpers_always: Ops, width: int) -> None:
    ops = helpers_always
    x, weight, gate_up = normal(37, width), normal(width, seed=1), 5 * normal(37, 2 * width, seed=2)
    heads, cos, sin = normal(37, 3, width, seed=3), normal(37, width // 2, seed=4), normal(37, width // 2, seed=5)
    operations: list[Callable[[slice], torch.Tensor]] = [
        lambda rows: ops.rms_norm(x[rows], weight, 1e-5),
        lambda rows: ops.silu_mul(gate_up[rows]),
        lambda rows: ops.rope(heads[rows], cos[rows], sin[rows]),
    ]
    for operation in operations:
        together = operation(slice(0, 37))
        for row in range(37):
            assert operation(slice(row, row + 1))[0].equal(together[row])
        torch.set_num_threads(1)
        assert operation(slice(0, 37)).equal(together)
        torch.set_num_threads(2)


def test_no_rows(ops: Ops) -> None:
    assert ops.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5).shape == (0, 8)
    assert ops.silu_mul(torch.empty(0, 8)).shape == (0, 4)
    assert ops.rope(torch.empty(0, 2, 8), torch.empty(0, 4), torch.empty(0, 4)).shape == (0, 2, 8)
