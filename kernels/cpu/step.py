"""A model's forward pass as one compiled call: packs the weights, keeps the memory, hands addresses to the entry points.

A worker's step: this thread and helpers of the pool walk through the same phases; see `team`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.batch import KVLayerView
from kernels.cpu.attention_entry import first_bad_sequence
from kernels.cpu.int8_matmul import PackedWeight, pack_weight
from kernels.cpu.kv_write import first_bad_slot
from kernels.cpu.layer_fields import layer_fields
from kernels.cpu.pool import HelperPool
from kernels.cpu.step_entry import (
    IDLE,
    PHASE_NAMES,
    PHASES_PER_LAYER,
    attention_scratch_size,
    attention_slot_size,
    plan_step,
    run_step,
)
from kernels.cpu.step_fields import ALIGNMENT
from kernels.cpu.team import COUNTERS_PER_PHASE
from kernels.step import StepBatch, StepLayer, StepModel, StepProduct

_WHOLE_PHASES = len(PHASE_NAMES) - PHASES_PER_LAYER


class CompiledStep:
    """See `kernels.step.Step`. Uses torch.get_num_threads() threads; results do not depend on their number."""

    def __init__(self, model: StepModel, pool: HelperPool) -> None:
        self.ticks: NDArray[np.int64] | None = None
        self._model = model
        self._pool = pool
        self._windows = sorted({layer.window for layer in model.layers})
        self._keep_alive: list[object] = []
        self._head = self._product_fields(model.head)
        self._layers = np.array([self._layer_columns(layer) for layer in model.layers], np.int64)
        self._intermediate = model.layers[0].down.values.shape[1]
        self._bound: Sequence[KVLayerView] | None = None
        self._kv: tuple[int, ...] = ()
        self._memory: dict[str, NDArray[Any]] = {}

    def run(self, batch: StepBatch, layers: Sequence[KVLayerView], nonfinite: torch.Tensor) -> torch.Tensor:
        """See `kernels.step.Step`."""
        self._bind(layers)
        num_threads = torch.get_num_threads()
        logits = torch.empty((batch.logit_rows.shape[0], self._model.head.values.shape[0]))
        rows = _rows_fields(batch, nonfinite)
        self._check(batch, rows)
        shape = self._shape_fields(num_threads)
        plans, alive = self._plans(rows, shape, num_threads)
        counters = np.zeros((len(self._layers) * PHASES_PER_LAYER + _WHOLE_PHASES + 1) * COUNTERS_PER_PHASE, np.int64)
        scratch = self._floats("scratch", (num_threads, attention_scratch_size(self._kv, rows, shape)))
        ticks = np.empty(0, np.int64) if self.ticks is None else self.ticks
        arguments = (
            shape, rows, self._buffers(batch.token_ids.shape[0], logits), self._head, self._kv, self._model.eps,
            self._model.head_dim**-0.5, self._layers, plans, counters, scratch, ticks,
        )  # fmt: skip
        if num_threads == 1:
            run_step(*arguments)
        else:
            self._pool.run(lambda: run_step(*arguments), num_threads)
        del alive
        return logits

    def measure(self) -> None:
        """From now on `times` grows."""
        self.ticks = np.zeros(IDLE + 2, np.int64)

    def times(self) -> dict[str, int]:
        """Ticks of each phase since `measure`, as the thread saw them that came first; its waiting is in them."""
        assert self.ticks is not None, "measure() was not called"
        return dict(zip(PHASE_NAMES, self.ticks[1:].tolist(), strict=False))

    def _product_fields(self, product: StepProduct) -> tuple[int, ...]:
        packed = pack_weight(product.values, product.scales)
        self._keep_alive.extend((packed, product.bias))
        return (
            packed.values.data_ptr(), packed.corrections.data_ptr(), packed.scales.data_ptr(),
            _address(product.bias), packed.num_outputs, packed.padded_depth,
        )  # fmt: skip

    def _layer_columns(self, layer: StepLayer) -> list[int]:
        products = (layer.qkv, layer.output, layer.gate_up, layer.down)
        columns = [field for product in products for field in self._product_fields(product)]
        plan = self._windows.index(layer.window)
        return [*columns, _address(layer.q_norm), _address(layer.k_norm), plan, 0, 0, 0, 0]

    def _bind(self, layers: Sequence[KVLayerView]) -> None:
        if layers is self._bound:
            return
        fields = [layer_fields(layer) for layer in layers]
        self._kv = fields[0]
        for row, (k, v, *strides, k_scale, v_scale) in zip(
            self._layers, [(*one[:5], one[5], one[6]) for one in fields], strict=True
        ):
            assert tuple(strides) == self._kv[2:5], "all layers must be laid out alike"
            row[-4:] = k, v, k_scale, v_scale
        self._bound = layers

    def _check(self, batch: StepBatch, rows: tuple[int, ...]) -> None:
        num_blocks, block_size = self._kv[10], self._kv[11]
        slots = batch.attention.slot_mapping.numpy()
        bad = first_bad_slot(slots, num_blocks * block_size)
        if bad >= 0:
            raise IndexError(f"slot {slots[bad]} of new token {bad} is not among the pool's {num_blocks * block_size}")
        bad = first_bad_sequence(self._kv, 1.0, (0, 0, 1, 0, *rows[7:]))
        if bad >= 0:
            raise IndexError(f"sequence {bad}'s block table names a block that is not among {num_blocks}")

    def _shape_fields(self, num_threads: int) -> tuple[int, ...]:
        model = self._model
        return (
            num_threads, len(self._layers), model.embedding.shape[1], model.num_heads, model.num_kv_heads,
            model.head_dim, self._intermediate, model.hadamard_block, model.embedding.data_ptr(),
            model.cos.data_ptr(), model.sin.data_ptr(),
        )  # fmt: skip

    def _plans(
        self, rows: tuple[int, ...], shape: tuple[int, ...], num_threads: int
    ) -> tuple[NDArray[np.int64], list[object]]:
        """[windows, StepPlan] and what must live as long."""
        model = self._model
        group_size, alive, plans = model.num_heads // model.num_kv_heads, [], []
        for window in self._windows:
            units, tasks, num_slots = plan_step(rows, model.num_kv_heads, group_size, window, num_threads)
            size = num_slots * attention_slot_size(self._kv, rows, shape) if num_slots else 0
            slots = self._floats(f"slots of window {window}", (size,))
            alive.extend((units, tasks))
            plans.append(
                (window, units.ctypes.data, tasks.ctypes.data, len(tasks), len(units), slots.ctypes.data, num_slots)
            )
        return np.array(plans, np.int64), alive

    def _buffers(self, num_tokens: int, logits: torch.Tensor) -> tuple[int, ...]:
        model = self._model
        hidden, heads = model.embedding.shape[1], model.num_heads * model.head_dim
        widest = -(-max(hidden, heads, self._intermediate) // ALIGNMENT) * ALIGNMENT
        widths = {
            "residual": 4 * hidden,
            "quantized": widest,
            "row_scales": 4,
            "heads": 4 * (heads + 2 * model.num_kv_heads * model.head_dim),
            "queries": 4 * heads,
            "attended": 4 * heads,
            "gate_up": 8 * self._intermediate,
        }
        num_rows = max(num_tokens, logits.shape[0])
        addresses = (self._bytes(name, num_rows * width).ctypes.data for name, width in widths.items())
        return (*addresses, logits.data_ptr())

    def _floats(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        size = int(np.prod(shape))
        return self._bytes(name, 4 * size)[: 4 * size].view(np.float32).reshape(shape)

    def _bytes(self, name: str, size: int) -> NDArray[np.uint8]:
        """At least so many, kept from step to step."""
        memory = self._memory.get(name)
        if memory is None or memory.size < size:
            memory = self._memory[name] = np.zeros(size, np.uint8)
        return memory


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _rows_fields(batch: StepBatch, nonfinite: torch.Tensor) -> tuple[int, ...]:
    """As `kernels.cpu.step_fields.StepRows`."""
    attention = batch.attention
    for tensor in (batch.token_ids, batch.positions, batch.logit_rows, attention.slot_mapping):
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
    for tensor in (attention.query_start, attention.context_lens, attention.block_tables, nonfinite):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
    return (
        batch.token_ids.shape[0], batch.token_ids.data_ptr(), batch.positions.data_ptr(),
        attention.slot_mapping.data_ptr(), nonfinite.data_ptr(), batch.logit_rows.shape[0],
        batch.logit_rows.data_ptr(), attention.query_start.data_ptr(), attention.context_lens.data_ptr(),
        attention.block_tables.data_ptr(), attention.block_tables.stride(0), attention.num_sequences,
    )  # fmt: skip
