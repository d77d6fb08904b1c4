"""A layer of the KV pool as compiled code takes it."""

import torch

from kernels.batch import KVLayerView

MAX_HEAD_DIM = 1024
"""Of an INT8 layer. Up to here the sum of a score's products, at most 1024 * 127^2 < 2^24, is exact in fp32, too."""


def layer_fields(layer: KVLayerView) -> tuple[int, ...]:
    """As `kernels.cpu.problem.Layer`."""
    num_blocks, num_kv_heads, block_size, head_dim = layer.k.shape
    strides = layer.k.stride()
    assert layer.v.stride() == strides, "K and V must be laid out alike"
    assert strides[3] == 1, "a vector's dimensions must lie side by side"
    if layer.k_scale is None or layer.v_scale is None:
        assert layer.k.dtype == layer.v.dtype == torch.float32
        scales = (0, 0, 0, 0, 0)
    else:
        assert layer.k.dtype == layer.v.dtype == torch.int8
        assert head_dim <= MAX_HEAD_DIM, f"heads of {head_dim}: sums of products could be too large for fp32"
        assert layer.k_scale.dtype == layer.v_scale.dtype == torch.float16
        assert layer.v_scale.stride() == layer.k_scale.stride(), "the scales of K and V must be laid out alike"
        scales = (layer.k_scale.data_ptr(), layer.v_scale.data_ptr(), *layer.k_scale.stride())
    values = (layer.k.data_ptr(), layer.v.data_ptr(), *strides[:3])
    return (*values, *scales, num_blocks, block_size, num_kv_heads, head_dim)
