"""A long batch's way through a layer, band by band: all that one thread does for a run of rows between two layers'
attention, in memory of its own that stays in its cache. The same operations as `step_work`'s phases, for each row.

A band reads all weights, and a phase's thread only its share of them: bands are for many rows to a thread.
"""

from typing import Any, NamedTuple

import numpy as np

from kernels.cpu import step_fields as f
from kernels.cpu import step_work as work
from kernels.cpu.compiling import compiled
from kernels.cpu.int8_pack import PANEL_OUTPUTS
from kernels.cpu.int8_product import multiply_panels

_ONE = np.float32(1.0)


class _Band(NamedTuple):
    """Rows [begin, end) of the batch, and a thread's memory for them, by address."""

    begin: int
    end: int
    rows: work.QuantizedRows
    wide: int  # [end - begin, what is widest between two products] fp32


@compiled
def _band(task: int, step: Any, thread: int) -> _Band:
    num_bands, num_rows = step[f.NUM_BANDS], step[f.NUM_TOKENS]
    values = step[f.BAND_MEMORY] + thread * step[f.BAND_BYTES]
    most_rows = -(-num_rows // num_bands)
    scales = values + most_rows * step[f.BAND_ROW_BYTES]
    wide = scales + work.padded(4 * most_rows)
    begin, end = task * num_rows // num_bands, (task + 1) * num_rows // num_bands
    return _Band(begin, end, work.QuantizedRows(values, scales), wide)


@compiled
def _multiply(step: Any, layer: int, product: int, band: _Band, width: int, output: int, adds: int) -> None:
    columns = f.at(step, f.LAYERS, layer * f.LAYER_COLUMNS + product)
    num_outputs, num_rows = columns[f.NUM_OUTPUTS], band.end - band.begin
    whole = work.product_of(columns, band.rows, num_rows, width, output, num_outputs, adds)
    multiply_panels(step[f.PRODUCT_KERNEL], whole, 0, -(-num_outputs // PANEL_OUTPUTS))


@compiled
def _norm(step: Any, layer: int, offset: int, band: _Band) -> None:
    """`offset`: the column of the layer that names the offset's address."""
    hidden, shift = step[f.HIDDEN], f.at(step, f.LAYERS, layer * f.LAYER_COLUMNS)[offset]
    for row in range(band.begin, band.end):
        residual = work.float_row(step[f.RESIDUAL], row, hidden)
        work.norm_and_quantize_row(step, residual, shift, band.rows, row - band.begin)


@compiled
def _before_attention(step: Any, layer: int, band: _Band) -> None:
    _norm(step, layer, f.ATTENTION_OFFSET, band)
    _multiply(step, layer, f.QKV, band, step[f.HIDDEN], band.wide, 0)
    width = (step[f.NUM_HEADS] + 2 * step[f.NUM_KV_HEADS]) * step[f.HEAD_DIM]
    for row in range(band.begin, band.end):
        work.rotate_and_write_row(step, layer, row, band.wide + 4 * (row - band.begin) * width)


@compiled
def _gate(step: Any, layer: int, band: _Band) -> None:
    if step[f.GATED_KERNEL]:
        _gate_in_product(step, layer, band)
        return
    _multiply(step, layer, f.GATE_AND_UP, band, step[f.HIDDEN], band.wide, 0)
    for row in range(band.end - band.begin):
        gate_up = work.float_row(band.wide, row, 2 * step[f.INTERMEDIATE])
        work.gate_and_quantize_row(step, gate_up, band.rows, row)


@compiled
def _gate_in_product(step: Any, layer: int, band: _Band) -> None:
    width, num_rows = step[f.INTERMEDIATE], band.end - band.begin
    # Rows that lie apart by many times a power of two would share few lines of the first cache.
    stride = width + PANEL_OUTPUTS
    columns = f.at(step, f.LAYERS, layer * f.LAYER_COLUMNS + f.GATE_AND_UP)
    product = work.product_of(columns, band.rows, num_rows, step[f.HIDDEN], band.wide, stride, 0)
    multiply_panels(step[f.GATED_KERNEL], product, 0, width // PANEL_OUTPUTS)
    for row in range(num_rows):
        work.mix_and_quantize_row(step, work.float_row(band.wide, row, stride), band.rows, row)


@compiled
def _after_attention(step: Any, layer: int, band: _Band) -> None:
    hidden, width = step[f.HIDDEN], step[f.NUM_HEADS] * step[f.HEAD_DIM]
    residual = step[f.RESIDUAL] + 4 * band.begin * hidden
    for row in range(band.begin, band.end):
        work.quantize(work.float_row(step[f.ATTENDED], row, width), width, _ONE, band.rows, row - band.begin)
    _multiply(step, layer, f.OUTPUT, band, width, residual, 1)
    _norm(step, layer, f.MLP_OFFSET, band)
    _gate(step, layer, band)
    _multiply(step, layer, f.DOWN, band, step[f.INTERMEDIATE], residual, 1)


@compiled
def run_band(task: int, step: Any, layer: int, thread: int, is_between: int) -> None:
    """From the layer's attention, or the beginning, to the next attention, or the end."""
    band = _band(task, step, thread)
    if not is_between:
        _before_attention(step, layer, band)
        return
    _after_attention(step, layer, band)
    if layer + 1 < step[f.NUM_LAYERS]:
        _before_attention(step, layer + 1, band)
