"""y += a @ b for a few rows: each element of y is one chain of fused multiply-adds, the same in every variant."""

from typing import Any

from numba import types

from kernels.cpu.compiling import compiled, intrinsic
from kernels.cpu.simd import I64, LANES, VECTOR, fma_function, index, lanes_at, splatted

MAX_ROWS = 4
_MAX_COLUMNS = 4  # 4 x 4 vectors of sums fill half of AVX-512's registers


def _fma_tile(rows: int, columns: int) -> Any:
    """An intrinsic of `rows` rows and `columns` vectors; for each row r and lane n, with k from 0 to depth - 1:
    y[r * y_stride + n] = fma(a[r * a_stride + k], b[k * b_stride + n], y[r * y_stride + n]).

    Arguments: pointer, first element and stride of y, a and b; depth >= 1. Offsets and strides are in elements.
    """

    @intrinsic
    def fma_tile(
        typing: Any, y: Any, y_at: Any, y_stride: Any, a: Any, a_at: Any, a_stride: Any, b: Any, b_at: Any,
        b_stride: Any, depth: Any,
    ) -> Any:  # fmt: skip
        i = types.int64
        return types.void(y, i, i, a, i, i, b, i, i, i), lambda context, builder, signature, args: _emit(
            context, builder, args, rows, columns
        )

    return fma_tile


def _emit(context: Any, builder: Any, args: Any, rows: int, columns: int) -> Any:
    y, y_at, y_stride, a, a_at, a_stride, b, b_at, b_stride, depth = args
    places = [(r, c) for r in range(rows) for c in range(columns)]
    y_rows = [builder.add(y_at, builder.mul(y_stride, index(r))) for r in range(rows)]
    a_rows = [builder.add(a_at, builder.mul(a_stride, index(r))) for r in range(rows)]
    targets = {(r, c): lanes_at(builder, y, y_rows[r], LANES * c) for r, c in places}
    initial = {place: builder.load(target, align=4) for place, target in targets.items()}

    before, loop, after = builder.block, builder.append_basic_block("depth"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    k = builder.phi(I64)
    sums = {place: builder.phi(VECTOR) for place in places}
    b_row = builder.add(b_at, builder.mul(k, b_stride))
    b_lanes = [builder.load(lanes_at(builder, b, b_row, LANES * c), align=4) for c in range(columns)]
    factors = [splatted(builder, builder.load(builder.gep(a, [builder.add(row, k)]))) for row in a_rows]
    fma = fma_function(builder, VECTOR)
    results = {(r, c): builder.call(fma, [factors[r], b_lanes[c], sums[r, c]]) for r, c in places}
    k_next = builder.add(k, index(1))
    builder.cbranch(builder.icmp_signed("<", k_next, depth), loop, after)
    for phi, start, step in [(k, index(0), k_next), *((sums[p], initial[p], results[p]) for p in places)]:
        phi.add_incoming(start, before)
        phi.add_incoming(step, loop)

    builder.position_at_end(after)
    for place in places:
        builder.store(results[place], targets[place], align=4)
    return context.get_dummy_value()


_tile_1x1 = _fma_tile(1, 1)
_tile_1x4 = _fma_tile(1, _MAX_COLUMNS)
_tile_2x4 = _fma_tile(2, _MAX_COLUMNS)
_tile_3x4 = _fma_tile(3, _MAX_COLUMNS)
_tile_4x4 = _fma_tile(4, _MAX_COLUMNS)


@compiled
def add_product(
    rows: int, columns: int, y: Any, y_at: int, y_stride: int, a: Any, a_at: int, a_stride: int,
    b: Any, b_at: int, b_stride: int, depth: int,
) -> None:  # fmt: skip
    """y[rows, 16 * columns] += a[rows, depth] @ b[depth, 16 * columns], 1 <= rows <= MAX_ROWS, depth >= 1.

    Each is given by a pointer, its first element's offset and the stride of its rows.
    """
    done = 0
    while columns - done >= _MAX_COLUMNS:
        at = done * LANES
        if rows == 4:
            _tile_4x4(y, y_at + at, y_stride, a, a_at, a_stride, b, b_at + at, b_stride, depth)
        elif rows == 3:
            _tile_3x4(y, y_at + at, y_stride, a, a_at, a_stride, b, b_at + at, b_stride, depth)
        elif rows == 2:
            _tile_2x4(y, y_at + at, y_stride, a, a_at, a_stride, b, b_at + at, b_stride, depth)
        else:
            _tile_1x4(y, y_at + at, y_stride, a, a_at, a_stride, b, b_at + at, b_stride, depth)
        done += _MAX_COLUMNS
    while done < columns:
        for r in range(rows):
            at = done * LANES
            _tile_1x1(y, y_at + r * y_stride + at, 0, a, a_at + r * a_stride, 0, b, b_at + at, b_stride, depth)
        done += 1
