"""AMX: whether this process may use it, and its instructions. Registers hold tiles of 16 rows of 64 bytes or less.

Tile state belongs to a thread and makes its switches slower, so whoever configures tiles releases them soon after.
"""

import ctypes
import platform
import sys
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.compiling import intrinsic
from kernels.cpu.features import has_feature
from kernels.cpu.simd import I8, index

_SYS_ARCH_PRCTL = 158  # on x86-64
_REQUEST_PERMISSION = 0x1023
_TILE_DATA = 18

TILE_ROWS = 16
TILE_BYTES = 64  # of a row
_NUM_TILES = 8
_VOID = ir.VoidType()
_POINTER = I8.as_pointer()


def linux_grants_amx() -> bool:
    """Asks the kernel for this process's use of tiles; asking again changes nothing. Precondition: the CPU has AMX."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    arguments = (ctypes.c_long(_SYS_ARCH_PRCTL), ctypes.c_long(_REQUEST_PERMISSION), ctypes.c_long(_TILE_DATA))
    return bool(ctypes.CDLL(None, use_errno=True).syscall(*arguments) == 0)


@intrinsic
def configure_tiles(typing: Any, num_rows: Any, weight_tiles: Any) -> Any:
    """Tiles of `num_rows` rows, and of 16 rows where the bit of the tile's number is set in `weight_tiles`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        memory = cgutils.alloca_once(builder, ir.ArrayType(I8, 64))
        memory.align = 64
        builder.store(ir.Constant(memory.type.pointee, None), memory)
        builder.store(I8(1), builder.gep(memory, [index(0), index(0)]))  # the palette with eight tiles of 1 KiB
        rows = builder.trunc(args[0], I8)
        for tile in range(_NUM_TILES):
            bit = builder.trunc(builder.lshr(args[1], index(tile)), ir.IntType(1))
            builder.store(I8(TILE_BYTES), builder.gep(memory, [index(0), index(16 + 2 * tile)]))
            builder.store(builder.select(bit, I8(TILE_ROWS), rows), builder.gep(memory, [index(0), index(48 + tile)]))
        call(builder, "ldtilecfg", [builder.bitcast(memory, _POINTER)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def release_tiles(typing: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call(builder, "tilerelease", [])
        return context.get_dummy_value()

    return types.void(), emit


def call(builder: Any, name: str, args: list[Any]) -> None:
    """The instruction of that name. LLVM leaves the registers' numbers, and what they hold, to its caller.

    Nothing where the target has no AMX: LLVM could not compile it, though it stands behind a check that fails there.
    """
    if not has_feature("amx-int8"):
        return
    function_type = ir.FunctionType(_VOID, [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, function_type, f"llvm.x86.{name}"), args)


def zero(builder: Any, tile: int) -> None:
    call(builder, "tilezero", [I8(tile)])


def load(builder: Any, tile: int, pointer: Any, stride: Any) -> None:
    call(builder, "tileloadd64", [I8(tile), pointer, stride])


def store(builder: Any, tile: int, pointer: Any, stride: Any) -> None:
    call(builder, "tilestored64", [I8(tile), pointer, stride])


def add_products(builder: Any, sums: int, unsigned: int, signed: int) -> None:
    """sums[r, n] += the sum over k of unsigned[r, k] * signed[k // 4, n, k % 4], int32."""
    call(builder, "tdpbusd", [I8(sums), I8(unsigned), I8(signed)])
