"""The integer product as an operation on tensors."""

from collections.abc import Callable

import numpy as np
import torch

from kernels.cpu.int8_matmul import CHOSEN_KERNEL, run_product_tasks
from kernels.cpu.int8_pack import PackedWeight
from kernels.cpu.int8_product import Product

# A task's panels are whole blocks of every kernel, so that none does work for panels that are not its own.
_BLOCK_PANELS = 12
_SERIAL_BYTES = 1 << 20  # of weights; as long as a helper takes to come
_ROWS_LIKE_ONE = 16  # up to here the weights' way from memory is the cost
_TASKS_PER_THREAD = 4


def int8_product(
    run: Callable[[Callable[[], None], int], None],
    rows: torch.Tensor,
    weight: PackedWeight,
    row_scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    kernel: int = CHOSEN_KERNEL,
) -> torch.Tensor:
    """rows [T, K] uint8, row_scales [T], bias [N], residual [T, N] fp32 ->
    fp32(sum over k of (rows - 128) * int8 weights) * weight.scales * row_scales + bias, added to residual: [T, N] fp32,
    each operation rounded in this order.

    `run` runs a job by up to so many threads at once.
    """
    num_rows, depth = rows.shape
    assert rows.dtype == torch.uint8
    assert depth == weight.depth
    rows = _padded(rows.contiguous(), weight.padded_depth)
    output = (
        torch.empty((num_rows, weight.num_outputs))
        if residual is None
        else residual.clone(memory_format=torch.contiguous_format)
    )
    if row_scales is not None:
        row_scales = row_scales.contiguous()
    if bias is not None:
        bias = _padded(bias, len(weight.scales))
    product = Product(
        rows=rows.data_ptr(),
        row_stride=rows.stride(0),
        row_scales=0 if row_scales is None else row_scales.data_ptr(),
        num_rows=num_rows,
        values=weight.values.data_ptr(),
        corrections=weight.corrections.data_ptr(),
        scales=weight.scales.data_ptr(),
        num_outputs=weight.num_outputs,
        padded_depth=weight.padded_depth,
        bias=0 if bias is None else bias.data_ptr(),
        output=output.data_ptr(),
        output_stride=output.stride(0),
        is_added=int(residual is not None),
    )
    work = weight.values.numel() * -(-num_rows // _ROWS_LIKE_ONE)
    num_threads = torch.get_num_threads() if work > _SERIAL_BYTES else 1
    task_panels = -(-weight.num_panels // (num_threads * _TASKS_PER_THREAD) // _BLOCK_PANELS) * _BLOCK_PANELS
    next_task = np.zeros(1, np.int64)
    run(lambda: run_product_tasks(kernel, tuple(product), weight.num_panels, task_panels, next_task), num_threads)
    return output


def _padded(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """The last dimension, made as wide; contiguous."""
    if tensor.shape[-1] == width:
        return tensor.contiguous()
    padded = tensor.new_zeros((*tensor.shape[:-1], width))
    padded[..., : tensor.shape[-1]] = tensor
    return padded
