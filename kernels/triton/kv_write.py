"""The KV write: quantizes new K and V, one scale per token and head, into the slots of a layer."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (a kernel's arguments get their types from Triton, when it compiles for them)

import torch
import triton
import triton.language as tl

from kernels.batch import KVLayerView
from kernels.contract import QUANT_MAX, SCALE_FLOOR
from kernels.triton.layer import layer_argument

FP16_OVERFLOW = tl.constexpr(65520.0)
"""Half way between fp16's largest number and the next power of two: from here on, round-to-nearest gives infinity."""

ROUND_TO_INTEGER = tl.constexpr(1.5 * 2**23)
"""Adding it to |x| < 2^22 leaves no bit for a fraction, so the sum is rounded to the nearest integer, ties to even."""

LARGEST_QUANTIZED = tl.constexpr(float(QUANT_MAX))
SMALLEST_SCALE = tl.constexpr(SCALE_FLOOR)

WRITE_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def write_kv(
    k: torch.Tensor, v: torch.Tensor, layer: KVLayerView, slot_mapping: torch.Tensor, nonfinite: torch.Tensor
) -> None:
    """See `Ops.write_kv`. Raises ValueError for an unquantized layer."""
    assert k.stride(-1) == v.stride(-1) == 1
    num_tokens, num_heads, head_dim = k.shape
    write_kv_kernel[(num_tokens,)](
        k, v, layer_argument(layer), slot_mapping, nonfinite, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        **write_constants(num_heads, head_dim, layer.block_size), **WRITE_OPTIONS,
    )  # fmt: skip


def write_constants(num_heads: int, head_dim: int, block_size: int) -> dict[str, int]:
    """What the kernel is compiled for."""
    return {
        "num_heads": num_heads,
        "padded_heads": triton.next_power_of_2(num_heads),
        "head_dim": head_dim,
        "padded_dim": triton.next_power_of_2(head_dim),
        "block_size": block_size,
    }


@triton.jit
def write_kv_kernel(
    k_ptr, v_ptr, layer, slot_mapping_ptr, nonfinite_ptr, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    num_heads: tl.constexpr, padded_heads: tl.constexpr, head_dim: tl.constexpr, padded_dim: tl.constexpr,
    block_size: tl.constexpr,
):  # fmt: skip
    """One program per token: all heads of K and of V, so that it alone adds to the token's `nonfinite`."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    block, offset = slot // block_size, slot % block_size
    head = tl.arange(0, padded_heads)
    dim = tl.arange(0, padded_dim)
    is_head = head < num_heads
    is_value = is_head[:, None] & (dim < head_dim)[None, :]
    value_at = block * layer.block_stride + offset * layer.position_stride + head * layer.head_stride
    scale_at = block * layer.scale_block_stride + offset * layer.scale_position_stride + head * layer.scale_head_stride

    k_at = token * k_token_stride + head[:, None] * k_head_stride + dim[None, :]
    k, k_scale, k_is_bad = _quantize(tl.load(k_ptr + k_at, mask=is_value, other=0.0).to(tl.float32))
    tl.store(layer.k + value_at[:, None] + dim[None, :], k, mask=is_value)
    tl.store(layer.k_scale + scale_at, k_scale, mask=is_head)

    v_at = token * v_token_stride + head[:, None] * v_head_stride + dim[None, :]
    v, v_scale, v_is_bad = _quantize(tl.load(v_ptr + v_at, mask=is_value, other=0.0).to(tl.float32))
    tl.store(layer.v + value_at[:, None] + dim[None, :], v, mask=is_value)
    tl.store(layer.v_scale + scale_at, v_scale, mask=is_head)

    num_bad = tl.sum(k_is_bad.to(tl.int32) + v_is_bad.to(tl.int32), axis=0)
    tl.store(nonfinite_ptr + token, tl.load(nonfinite_ptr + token) + num_bad)


@triton.jit
def _quantize(values):
    """values [heads, dim] fp32 -> int8 values, fp16 scales [heads], and which heads were written as zeros.

    Divisions are IEEE's; the conversion to int8 truncates, so what it gets is an integer already.
    """
    magnitude = tl.abs(values)
    is_finite = magnitude < float("inf")  # false for NaN too; a maximum would lose a NaN
    largest = tl.max(tl.where(is_finite, magnitude, 0.0), axis=1)
    exact_scale = tl.div_rn(largest, LARGEST_QUANTIZED)
    is_bad = (tl.min(is_finite.to(tl.int32), axis=1) == 0) | (exact_scale >= FP16_OVERFLOW)
    scale = tl.where(is_bad, SMALLEST_SCALE, tl.maximum(exact_scale, SMALLEST_SCALE)).to(tl.float16)
    safe = tl.where(is_bad[:, None], 0.0, values)
    ratio = tl.div_rn(safe, tl.broadcast_to(scale.to(tl.float32)[:, None], safe.shape))
    rounded = (ratio + ROUND_TO_INTEGER) - ROUND_TO_INTEGER
    return tl.clamp(rounded, -LARGEST_QUANTIZED, LARGEST_QUANTIZED).to(tl.int8), scale, is_bad
