"""Calls of compiled functions by their address: code on disk then holds no copy of what it calls, nor a choice."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.compiling import intrinsic
from kernels.cpu.simd import I64, index


def _emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    num_fields = len(signature.args[1])
    memory = cgutils.alloca_once(builder, ir.ArrayType(I64, num_fields))
    for at, field in enumerate(cgutils.unpack_tuple(builder, args[1], num_fields)):
        builder.store(field, builder.gep(memory, [index(0), index(at)]))
    others = args[2:]
    kind = ir.FunctionType(ir.VoidType(), [I64] * (1 + len(others)))
    builder.call(builder.inttoptr(args[0], kind.as_pointer()), [builder.ptrtoint(memory, I64), *others])
    return context.get_dummy_value()


@intrinsic
def call_with_fields_2(typing: Any, function: Any, fields: Any, a: Any, b: Any) -> Any:
    """Calls void(address of int64 fields, a, b) at the address `function`; `fields` is a tuple of int64."""
    i = types.int64
    return types.void(i, fields, i, i), _emit


@intrinsic
def call_with_fields_6(typing: Any, function: Any, fields: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
    """As `call_with_fields_2`, with six more arguments."""
    i = types.int64
    return types.void(i, fields, i, i, i, i, i, i), _emit
