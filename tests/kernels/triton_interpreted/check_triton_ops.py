"""How the backend is chosen and named, and the operations that need no KV."""

import pytest
import torch

from kernels.ops import Ops, select
from kernels.reference.ops import ReferenceOps

CPU = torch.device("cpu")


@pytest.fixture
def ops() -> Ops:
    return select(CPU, "triton")


def test_the_interpreter_is_named(ops: Ops) -> None:
    assert ops.name == "triton"
    assert "interpreter on cpu" in ops.description


@pytest.mark.parametrize("shape", [(3, 576), (2, 5, 20)])
def test_rms_norm(ops: Ops, shape: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(0)
    x, weight = torch.randn(shape, generator=random) * 5, torch.randn(shape[-1], generator=random)
    out = ops.rms_norm(x, weight, 1e-5)
    # The mean of squares is all positive terms: at most D roundings of 2^-24 in either order, halved by the root.
    torch.testing.assert_close(out, ReferenceOps().rms_norm(x, weight, 1e-5), rtol=shape[-1] * 2.0**-24, atol=0)
    assert torch.equal(ops.rms_norm(x[1:2], weight, 1e-5), out[1:2])


def test_rope_and_silu_mul(ops: Ops) -> None:
    random = torch.Generator().manual_seed(1)
    x, angles = torch.randn(4, 3, 20, generator=random), torch.randn(4, 10, generator=random)
    reference = ReferenceOps()
    assert torch.equal(ops.rope(x, angles.cos(), angles.sin()), reference.rope(x, angles.cos(), angles.sin()))
    # Torch's exp on a CPU may differ by some units in the last place with where an element stands in its vector.
    gate_up = x.view(4, 60)
    torch.testing.assert_close(ops.silu_mul(gate_up), reference.silu_mul(gate_up), rtol=2.0**-21, atol=0)
