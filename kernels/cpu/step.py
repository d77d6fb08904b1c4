"""A model's forward pass as one compiled call: packs weights, keeps memory, hands addresses to the entry points.

This thread and helpers of the pool walk through the same phases; see `team`.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.batch import KVLayerView
from kernels.cpu import step_fields as f
from kernels.cpu.attention_entry import first_bad_sequence
from kernels.cpu.attention_kernel import ATTEND, JOIN
from kernels.cpu.int8_matmul import CHOSEN_GATED_KERNEL, CHOSEN_KERNEL
from kernels.cpu.int8_pack import PANEL_OUTPUTS, PanelMemory, pack_weight
from kernels.cpu.kv_write import first_bad_slot
from kernels.cpu.layer_fields import layer_fields
from kernels.cpu.pool import HelperPool
from kernels.cpu.problem import Layer
from kernels.cpu.step_entry import KIND_NAMES, NUM_KINDS, PHASES_PER_LAYER, attention_sizes, plan_step, run_step
from kernels.cpu.team import COUNTERS_PER_PHASE
from kernels.step import StepBatch, StepLayer, StepModel, StepProduct

_WHOLE_PHASES = 3
_LEAST_BAND_ROWS = 64  # for each thread; with fewer, reading all weights takes longer than bands save
_MOST_BAND_ROWS = 128  # what a thread holds between products then fits its second cache


class CompiledStep:
    """See `kernels.step.Step`. Uses torch.get_num_threads() threads; results do not depend on their number."""

    def __init__(self, model: StepModel, pool: HelperPool) -> None:
        self._pool = pool
        self._alive: list[object] = []  # what addresses point to
        self._model = replace(model, layers=())  # their products are packed, and need not stay unpacked as well
        self._windows = sorted({layer.window for layer in model.layers})
        products = [product for layer in model.layers for product in _products(layer)] + [model.head]
        self._panels = PanelMemory([(product.values.shape[0], product.values.shape[1]) for product in products])
        self._layers = np.array([self._layer_columns(layer) for layer in model.layers], np.int64)
        self._head = np.array(self._product_columns(model.head), np.int64)
        self._intermediate = model.layers[0].down.values.shape[1]
        self._vocab_size = model.head.values.shape[0]
        self._kv = Layer(*[0] * len(Layer._fields))  # the first layer of the bound pool
        self._kv_fields = np.zeros(len(Layer._fields), np.int64)
        self._bound: Sequence[KVLayerView] | None = None
        self._memory: dict[str, NDArray[np.uint8]] = {}
        self._ticks = np.empty(0, np.int64)
        self._fields = self._model_fields()

    def run(self, batch: StepBatch, layers: Sequence[KVLayerView], nonfinite: torch.Tensor) -> torch.Tensor:
        """See `kernels.step.Step`."""
        self._bind(layers)
        self._check(batch)
        num_threads = torch.get_num_threads()
        logits = torch.empty((batch.logit_rows.shape[0], self._vocab_size))
        fields = self._fields
        fields[f.NUM_THREADS] = num_threads
        _set_batch(fields, batch, nonfinite)
        self._set_buffers(fields, batch.token_ids.shape[0], logits)
        scratch_size, slot_size = attention_sizes(fields)
        plans, alive = self._plans(fields, slot_size)
        fields[f.PLANS] = plans.ctypes.data
        counters = np.zeros((len(self._layers) * PHASES_PER_LAYER + _WHOLE_PHASES) * COUNTERS_PER_PHASE + 1, np.int64)
        scratch = self._floats("scratch", num_threads * scratch_size).reshape(num_threads, scratch_size)
        if num_threads == 1:
            run_step(fields, counters, scratch, self._ticks)
        else:
            self._pool.run(lambda: run_step(fields, counters, scratch, self._ticks), num_threads)
        del alive
        return logits

    def measure(self) -> None:
        """From now on `times` counts."""
        self._ticks = np.zeros(1 + NUM_KINDS, np.int64)

    def times(self) -> dict[str, int]:
        """The processor's ticks in each kind of phase since `measure`, as the thread saw them that came first: its
        waiting for others is in them."""
        times: dict[str, int] = dict.fromkeys(KIND_NAMES, 0)
        for name, ticks in zip(KIND_NAMES, self._ticks[1:].tolist(), strict=False):
            times[name] += ticks
        return times

    def _product_columns(self, product: StepProduct) -> list[int]:
        packed = pack_weight(product.values, product.scales, self._panels)
        bias = None if product.bias is None else _whole_panels(product.bias)
        self._alive.extend((packed, bias))
        return [
            packed.values.data_ptr(), packed.corrections.data_ptr(), packed.scales.data_ptr(),
            _address(bias), packed.num_outputs, packed.padded_depth,
        ]  # fmt: skip

    def _layer_columns(self, layer: StepLayer) -> list[int]:
        columns = [column for product in _products(layer) for column in self._product_columns(product)]
        vectors = (layer.q_norm, layer.k_norm, layer.key_offset, layer.attention_offset, layer.mlp_offset)
        self._alive.extend(vectors)
        return [*columns, *map(_address, vectors), self._windows.index(layer.window), *4 * [0]]

    def _model_fields(self) -> NDArray[np.int64]:
        model, fields = self._model, np.zeros(f.NUM_FIELDS, np.int64)
        fields[: f.KV] = (
            len(self._layers), model.embedding.shape[1], model.num_heads, model.num_kv_heads, model.head_dim,
            self._intermediate, model.hadamard_block, model.head_block, _fp32_bits(model.eps),
            _fp32_bits(model.head_dim**-0.5),
            model.embedding.data_ptr(), model.cos.data_ptr(), model.sin.data_ptr(), self._layers.ctypes.data,
            self._head.ctypes.data, _address(model.head_offset), CHOSEN_KERNEL,
            0 if self._intermediate % PANEL_OUTPUTS else CHOSEN_GATED_KERNEL, ATTEND, JOIN,
        )  # fmt: skip
        return fields

    def _bind(self, layers: Sequence[KVLayerView]) -> None:
        """Remembers where the layers of this pool lie."""
        if layers is self._bound:
            return
        of_layers = np.array([layer_fields(layer) for layer in layers], np.int64)
        addresses = [Layer._fields.index(name) for name in ("k", "v", "k_scale", "v_scale")]
        assert (np.delete(of_layers, addresses, axis=1) == np.delete(of_layers[0], addresses)).all()
        self._layers[:, f.KV_ADDRESSES :] = of_layers[:, addresses]
        self._kv = Layer(*of_layers[0].tolist())
        self._kv_fields[:] = self._kv
        self._fields[f.KV] = self._kv_fields.ctypes.data
        self._bound = layers

    def _check(self, batch: StepBatch) -> None:
        attention, num_blocks = batch.attention, self._kv.num_blocks
        num_slots = num_blocks * self._kv.block_size
        slots = attention.slot_mapping.numpy()
        bad = first_bad_slot(slots, num_slots)
        if bad >= 0:
            raise IndexError(f"slot {slots[bad]} of new token {bad} is not among the pool's {num_slots}")
        tables = attention.block_tables
        bad = first_bad_sequence(
            tuple(self._kv), 1.0,
            (0, 0, 1, 0, 0, attention.context_lens.data_ptr(), tables.data_ptr(), tables.stride(0),
             attention.num_sequences),
        )  # fmt: skip
        if bad >= 0:
            raise IndexError(f"sequence {bad}'s block table names a block that is not among {num_blocks}")

    def _plans(self, fields: NDArray[np.int64], slot_size: int) -> tuple[NDArray[np.int64], list[object]]:
        """[windows, PLAN_COLUMNS], and what must live as long."""
        alive: list[object] = []
        plans = []
        for window in self._windows:
            units, tasks, num_slots = plan_step(fields, window)
            slots = self._floats(f"slots of window {window}", num_slots * slot_size)
            alive.extend((units, tasks))
            plans.append(
                (window, units.ctypes.data, len(units), tasks.ctypes.data, len(tasks), slots.ctypes.data, num_slots)
            )
        return np.array(plans, np.int64), alive

    def _set_buffers(self, fields: NDArray[np.int64], num_tokens: int, logits: torch.Tensor) -> None:
        model, num_threads = self._model, int(fields[f.NUM_THREADS])
        hidden, heads = model.embedding.shape[1], model.num_heads * model.head_dim
        all_heads = heads + 2 * model.num_kv_heads * model.head_dim
        quantized = _aligned(max(hidden, heads, self._intermediate)) + f.ALIGNMENT
        num_bands = _num_bands(num_tokens, num_threads)
        num_rows = max(0 if num_bands else num_tokens, logits.shape[0])
        sizes = {
            f.RESIDUAL: num_tokens * 4 * hidden,
            f.QUANTIZED: num_rows * quantized,
            f.ROW_SCALES: num_rows * 4,
            f.HEADS: num_rows * 4 * all_heads,
            f.QUERIES: num_tokens * 4 * heads,
            f.ATTENDED: num_tokens * 4 * heads,
            f.GATE_UP: num_rows * 8 * self._intermediate,
        }
        for field, size in sizes.items():
            fields[field] = self._bytes(f"field {field}", size).ctypes.data
        fields[f.LOGITS] = logits.data_ptr()
        fields[f.NUM_BANDS] = num_bands
        if num_bands:
            band_rows = -(-num_tokens // num_bands)
            wide = max(all_heads, 2 * self._intermediate)
            size = band_rows * quantized + _aligned(4 * band_rows) + _aligned(4 * band_rows * wide)
            memory = self._bytes("bands", num_threads * size + f.ALIGNMENT).ctypes.data
            fields[f.BAND_MEMORY :] = _aligned(memory), size, quantized

    def _floats(self, name: str, size: int) -> NDArray[np.float32]:
        return self._bytes(name, 4 * size)[: 4 * size].view(np.float32)

    def _bytes(self, name: str, size: int) -> NDArray[np.uint8]:
        """At least so many, kept from step to step."""
        memory = self._memory.get(name)
        if memory is None or memory.size < size:
            memory = self._memory[name] = np.zeros(size, np.uint8)
        return memory


def _num_bands(num_rows: int, num_threads: int) -> int:
    """A multiple of the number of threads, so that all have as much to do; 0: too few rows for bands."""
    if num_rows < _LEAST_BAND_ROWS * num_threads:
        return 0
    return num_threads * -(-num_rows // (num_threads * _MOST_BAND_ROWS))


def _aligned(size: int) -> int:
    return -(-size // f.ALIGNMENT) * f.ALIGNMENT


def _set_batch(fields: NDArray[np.int64], batch: StepBatch, nonfinite: torch.Tensor) -> None:
    attention = batch.attention
    for tensor in (batch.token_ids, batch.positions, batch.logit_rows, attention.slot_mapping):
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
    for tensor in (attention.query_start, attention.context_lens, attention.block_tables, nonfinite):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
    fields[f.NUM_TOKENS : f.PLANS] = (
        batch.token_ids.shape[0], batch.token_ids.data_ptr(), batch.positions.data_ptr(),
        attention.slot_mapping.data_ptr(), nonfinite.data_ptr(), batch.logit_rows.shape[0],
        batch.logit_rows.data_ptr(), attention.query_start.data_ptr(), attention.context_lens.data_ptr(),
        attention.block_tables.data_ptr(), attention.block_tables.stride(0), attention.num_sequences,
    )  # fmt: skip


def _products(layer: StepLayer) -> tuple[StepProduct, ...]:
    return layer.qkv, layer.output, layer.gate_up, layer.down


def _whole_panels(bias: torch.Tensor) -> torch.Tensor:
    return torch.cat([bias, bias.new_zeros(-len(bias) % PANEL_OUTPUTS)])


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _fp32_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))
