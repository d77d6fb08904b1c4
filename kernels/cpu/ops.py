"""The CPU backend: numba kernels run by this process's own helper threads. Importing it compiles or loads them."""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch

from kernels.batch import AttentionBatch, KVLayerView
from kernels.cpu.attention_entry import (
    finish_split_units,
    first_bad_sequence,
    plan_attention,
    run_attention_tasks,
)
from kernels.cpu.attention_kernel import ATTEND, JOIN
from kernels.cpu.features import has_feature
from kernels.cpu.int8_matmul import CHOSEN, KERNELS
from kernels.cpu.int8_ops import int8_product
from kernels.cpu.int8_pack import PackedWeight, pack_weight
from kernels.cpu.kv_write import first_bad_slot, write_kv_rows
from kernels.cpu.layer_fields import layer_fields
from kernels.cpu.pool import HelperPool
from kernels.cpu.quantize import add_scaled_rows, quantize_rows, rms_norm_quantize_rows, silu_mul_quantize_rows
from kernels.cpu.rows import rms_norm_rows, rope_rows, silu_mul_rows
from kernels.cpu.step import CompiledStep
from kernels.quantized import QuantizedRows
from kernels.step import Step, StepModel

# Below these a helper costs more than it saves: it takes about 50 microseconds to come.
_SERIAL_ATTENTION_WORK = 1 << 14  # query rows x positions
_SERIAL_ELEMENTS = 1 << 18
_PARTS_PER_THREAD = 4

_NAMED_FEATURES = ("avx2", "avx512f", "avx512vnni", "avx512bf16", "amx-int8", "neon", "dotprod", "i8mm", "sve")


class CpuOps:
    """See `kernels.contract.Ops`, `kernels.quantized` (`RowQuantizer`, `IntegerProducts`), `kernels.step.StepCompiler`.

    Uses torch.get_num_threads() threads; results do not depend on their number.
    """

    name = "cpu"

    def __init__(self) -> None:
        named = [feature for feature in _NAMED_FEATURES if has_feature(feature)] or ["baseline"]
        self.description = f"cpu numba {numba.__version__} ({', '.join(named)}, {torch.get_num_threads()} threads)"
        self.product_description = KERNELS[CHOSEN]
        self._pool = HelperPool()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty_like(rows)
        self._run_rows(rms_norm_rows, (_array(rows), _array(weight), eps, _array(out)), rows)
        return out.view(x.shape)

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        self._run_rows(rope_rows, (_array(x), _array(cos.contiguous()), _array(sin.contiguous()), _array(out)), x)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2))
        self._run_rows(silu_mul_rows, (_array(gate_up), _array(out)), gate_up)
        return out

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, layer: KVLayerView, slot_mapping: torch.Tensor, nonfinite: torch.Tensor
    ) -> None:
        k, v = k.contiguous(), v.contiguous()
        slots = _array(slot_mapping)
        num_slots = layer.k.shape[0] * layer.block_size
        bad = first_bad_slot(slots, num_slots)
        if bad >= 0:
            raise IndexError(f"slot {slots[bad]} of new token {bad} is not among the pool's {num_slots}")
        self._run_rows(write_kv_rows, (_array(k), _array(v), layer_fields(layer), slots, _array(nonfinite)), k)

    def paged_attention(
        self, q: torch.Tensor, layer: KVLayerView, batch: AttentionBatch, scale: float, window: int
    ) -> torch.Tensor:
        q = q.contiguous()
        output = torch.empty_like(q)
        problem = (layer_fields(layer), scale, _batch_fields(q, output, layer, batch, window))
        bad = first_bad_sequence(*problem)
        if bad >= 0:
            raise IndexError(f"sequence {bad}'s block table names a block that is not among {layer.k.shape[0]}")
        num_threads = torch.get_num_threads()
        units, tasks, slots, work = plan_attention(*problem, num_threads)
        next_task = np.zeros(1, np.int64)

        def run_tasks() -> None:
            run_attention_tasks(ATTEND, *problem, units, tasks, slots, next_task)

        self._run(run_tasks, num_threads if work > _SERIAL_ATTENTION_WORK else 1)
        if slots.size:
            finish_split_units(JOIN, *problem, units, slots)
        return output

    def quantize_rows(self, x: torch.Tensor) -> QuantizedRows:
        x = x.contiguous()
        out = _empty_rows(x.shape[0], x.shape[1])
        self._run_rows(quantize_rows, (_array(x), _array(out.values), _array(out.scales)), x)
        return out

    def rms_norm_quantize(self, x: torch.Tensor, eps: float, offset: torch.Tensor | None) -> QuantizedRows:
        x = x.contiguous()
        out = _empty_rows(x.shape[0], x.shape[1])
        shift = np.empty(0, np.float32) if offset is None else _array(offset)
        self._run_rows(rms_norm_quantize_rows, (_array(x), eps, shift, _array(out.values), _array(out.scales)), x)
        return out

    def silu_mul_quantize(self, gate_up: torch.Tensor, row_scales: torch.Tensor | None, block: int) -> QuantizedRows:
        gate_up = gate_up.contiguous()
        scales = np.empty(0, np.float32) if row_scales is None else _array(row_scales)
        out = _empty_rows(gate_up.shape[0], gate_up.shape[1] // 2)
        arrays = (_array(gate_up), scales, block, _array(out.values), _array(out.scales))
        self._run_rows(silu_mul_quantize_rows, arrays, gate_up)
        return out

    def add_scaled(self, x: torch.Tensor, product: torch.Tensor, row_scales: torch.Tensor) -> torch.Tensor:
        x, product = x.contiguous(), product.contiguous()
        out = torch.empty_like(x)
        self._run_rows(add_scaled_rows, (_array(x), _array(product), _array(row_scales), _array(out)), x)
        return out

    def compile_step(self, model: StepModel) -> Step:
        return CompiledStep(model, self._pool)

    def make_integer_product(
        self, values: torch.Tensor, scales: torch.Tensor
    ) -> Callable[[QuantizedRows], torch.Tensor]:
        packed = pack_weight(values, scales)
        return lambda rows: self.int8_product(rows.values, packed)

    def int8_product(
        self,
        rows: torch.Tensor,
        weight: PackedWeight,
        row_scales: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `kernels.cpu.int8_ops.int8_product`."""
        return int8_product(self._run, rows, weight, row_scales, bias, residual)

    def _run_rows(self, kernel: Callable[..., None], args: tuple[Any, ...], rows: torch.Tensor) -> None:
        num_threads = torch.get_num_threads() if rows.numel() > _SERIAL_ELEMENTS else 1
        part_rows = max(1, rows.shape[0] // (num_threads * _PARTS_PER_THREAD)) if num_threads > 1 else rows.shape[0]
        next_part = np.zeros(1, np.int64)
        self._run(lambda: kernel(*args, part_rows, next_part), num_threads)

    def _run(self, job: Callable[[], None], num_threads: int) -> None:
        if num_threads == 1:
            job()
        else:
            self._pool.run(job, num_threads)


def _empty_rows(num_rows: int, width: int) -> QuantizedRows:
    return QuantizedRows(torch.empty((num_rows, width), dtype=torch.uint8), torch.empty(num_rows))


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().numpy()


def _batch_fields(
    q: torch.Tensor, output: torch.Tensor, layer: KVLayerView, batch: AttentionBatch, window: int
) -> tuple[int, ...]:
    """As `kernels.cpu.problem.Problem` from `queries` on."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = layer.k.shape[1]
    assert q.dtype == torch.float32
    assert head_dim == layer.k.shape[3]
    assert num_heads % num_kv_heads == 0
    for tensor in (batch.query_start, batch.context_lens, batch.block_tables):
        assert tensor.dtype == torch.int32
        assert tensor.stride(-1) == 1
    assert int(batch.query_start[-1]) == num_tokens
    return (
        q.data_ptr(),
        output.data_ptr(),
        num_heads // num_kv_heads,
        window,
        batch.query_start.data_ptr(),
        batch.context_lens.data_ptr(),
        batch.block_tables.data_ptr(),
        batch.block_tables.stride(0),
        batch.num_sequences,
    )
