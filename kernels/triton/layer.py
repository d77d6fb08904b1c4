"""How the kernels see a layer of the KV pool."""

from typing import Any, NamedTuple

from kernels.batch import KVLayerView


class Layer(NamedTuple):
    """Pointers and strides (in elements) of one layer: tensors and ints on the host, their Triton values in a kernel.

    K and V have the same strides, and so have their scales.
    """

    k: Any  # int8
    v: Any  # int8
    k_scale: Any  # fp16
    v_scale: Any  # fp16
    block_stride: Any
    head_stride: Any
    position_stride: Any
    scale_block_stride: Any
    scale_head_stride: Any
    scale_position_stride: Any


def layer_argument(view: KVLayerView) -> Layer:
    """Raises ValueError for an unquantized layer. Precondition: K and V are laid out alike, as the KV cache does it."""
    if view.k_scale is None or view.v_scale is None:
        raise ValueError(
            f"kernel backend 'triton' serves INT8 KV; this layer's KV is unquantized ({view.k.dtype}): "
            "choose the backend reference or cpu, or the KV format int8"
        )
    assert view.k.stride() == view.v.stride()
    assert view.k.stride(-1) == 1
    assert view.k_scale.stride() == view.v_scale.stride()
    return Layer(view.k, view.v, view.k_scale, view.v_scale, *view.k.stride()[:3], *view.k_scale.stride())
