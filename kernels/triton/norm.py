"""RMS norm, one program per row. Torch's reduction on CUDA is cut by the number of rows; this one is not."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (a kernel's arguments get their types from Triton, when it compiles for them)

import torch
import triton
import triton.language as tl

NORM_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `Ops.rms_norm`."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    rms_norm_kernel[(rows.shape[0],)](rows, weight, out, eps, **norm_constants(rows.shape[1]), **NORM_OPTIONS)
    return out.view(x.shape)


def norm_constants(size: int) -> dict[str, int]:
    """What the kernel is compiled for."""
    return {"size": size, "padded_size": triton.next_power_of_2(size)}


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, out_ptr, eps, size: tl.constexpr, padded_size: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, padded_size)
    is_column = column < size
    x = tl.load(x_ptr + start + column, mask=is_column, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    mean_square = tl.sum(x * x, axis=0) / size
    tl.store(out_ptr + start + column, x * tl.rsqrt(mean_square + eps) * weight, mask=is_column)
