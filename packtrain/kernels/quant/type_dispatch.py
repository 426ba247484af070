"""Compile the functions of dtypes/, and dispatch between them by type number.

The placeholders in dtypes/intrinsics.py get their meaning here.
"""

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target

from packtrain.dtypes import DTYPES
from packtrain.dtypes.intrinsics import (
    PLACEHOLDERS, CompiledFunction, F32x16, I32x16, Placeholder, U8x64,
)  # fmt: skip
from packtrain.kernels.runtime.jit import ensure_compiled, kernel, part
from packtrain.kernels.runtime.kernel_types import UniTuple, f32, i64, void
from packtrain.kernels.simd import simd_f32, simd_i32, simd_u8
from packtrain.kernels.simd.simd_f32 import emit_switch, f32x16, intrinsic_of
from packtrain.kernels.simd.simd_i32 import i32x16
from packtrain.kernels.simd.simd_u8 import codes64

I64 = ir.IntType(64)
separate_part = partial(part, forceinline=False)
SMALL_BLOCK = 64  # values of blocks that take less time than a call
# arguments of functions by role: addresses of the block, of its values, of their weights (or 0); what all blocks share
ARGUMENTS = {
    "unpack": ("values", "blocks"), "pack": ("blocks", "values"), "recode": ("blocks", "values"),
    "weigh": ("blocks", "values", "weights", "spread"), "snap": ("blocks", "values", "weights", "table"),
}  # fmt: skip
MEANT: dict[Any, Any] = {int: i64, np.float32: f32, None: void, I32x16: i32x16, F32x16: f32x16}
MEANT[U8x64] = codes64
MEANT[tuple[np.float32, np.float32]] = UniTuple(f32, 2)


def bind_placeholders(*modules):
    """Bind the placeholders of dtypes/intrinsics.py to functions of these modules."""
    for module in modules:
        for name, function in vars(module).items():
            PLACEHOLDERS.setdefault(name, Placeholder()).meaning = partial(numba_type, function)


def numba_type(function):
    """Return numba's type of a compiled function, by which compiled code can call it."""
    return cpu_target.typing_context.resolve_value_type(function)


def compile_role(role, decorator):
    """Compile all types' functions of a role, such as "unpack", and what they call; returns them by Dtype."""
    done = {}
    return {t: compiled(t.code[role], decorator, done) for t in DTYPES.values() if role in t.code}


def compile_blocks(role, decorator=separate_part):
    """Compile a role in ARGUMENTS: small blocks inlined, others by decorator(signature); returns them by Dtype."""
    done = {}
    return {
        t: compiled(
            t.code[role], (part if t.block <= SMALL_BLOCK else decorator)(form(role, t)), done
        )
        for t in DTYPES.values()
        if role in t.code
    }


def form(role, dtype):
    """Return the numba signature of a type's function of this role: for a block, or for a number of single values."""
    kinds = [f32 if name == "spread" else i64 for name in ARGUMENTS[role]]
    return void(*kinds, *[i64] * (dtype.block == 1))


def compiled(code, decorator, done):
    """Compile a CompiledFunction and those it calls, unless `done` has them, which gets all; returns the result."""
    if code not in done:
        for callee in map(code.function.__globals__.get, code.function.__code__.co_names):
            if isinstance(callee, CompiledFunction):
                *arg_types, result = (MEANT[t] for t in callee.function.__annotations__.values())
                compiled(callee, (part if callee.is_inlined else kernel)(result(*arg_types)), done)
        done[code] = decorator(code.function)
        code.meaning = partial(numba_type, done[code])
    return done[code]


def emit_call(context, builder, function, signature, args):
    """Emit LLVM code that calls a compiled function of dtypes/ with the values `args`; returns its result."""
    ensure_compiled(function)
    implementation = context.get_function(types.Dispatcher(function), signature)
    context.add_linking_libs(getattr(implementation, "libs", ()))
    return implementation(builder, args)


def emit_blocks(context, builder, role, dtype, function, args, n):
    """Emit calls of a type's compiled function for n values: block by block, or all at once if blocks are 1 value."""
    signature = form(role, dtype)
    if dtype.block == 1:
        emit_call(context, builder, function, signature, (*args, n))
        return
    steps = {"blocks": dtype.block_nbytes, "values": 4 * dtype.block, "weights": 4 * dtype.block}
    with cgutils.for_range(builder, builder.udiv(n, I64(dtype.block)), intp=I64) as loop:
        block_args = []
        for name, arg in zip(ARGUMENTS[role], args, strict=True):
            moved = arg
            if name in steps:
                moved = builder.add(arg, builder.mul(loop.index, I64(steps[name])))
            if name == "weights":  # an address, or 0
                moved = builder.select(builder.icmp_signed("==", arg, I64(0)), arg, moved)
            block_args.append(moved)
        emit_call(context, builder, function, signature, block_args)


def blocks_of(role, dtype, function):
    """Return an intrinsic (*addresses, n): `function`, a Dtype's, compiled for this role, on n values."""

    def codegen(context, builder, sig, args):
        emit_blocks(context, builder, role, dtype, function, args[:-1], args[-1])
        return context.get_dummy_value()

    kinds = form(role, dtype).args[: len(ARGUMENTS[role])]
    return intrinsic_of(1 + len(kinds), lambda typingctx, *_: (void(*kinds, i64), codegen))


def blocks_by_type(role, functions):
    """Return an intrinsic (qtype, *addresses, n): functions[the Dtype numbered qtype] on n values."""

    def emit(context, builder, dtype, args):
        emit_blocks(context, builder, role, dtype, functions[dtype], args[:-1], args[-1])

    kinds = form(role, DTYPES["q4_0"]).args
    return choice(functions, void(*kinds, i64), emit)


def choice(functions, signature, emit):
    """Return an intrinsic (qtype, *args) that runs emit(context, builder, dtype, args) for the Dtype numbered qtype."""

    def codegen(context, builder, sig, args):
        result_ptr = cgutils.alloca_once(builder, context.get_value_type(signature.return_type))

        def emit_case(dtype):
            value = emit(context, builder, dtype, args[1:])
            if value is not None:
                builder.store(value, result_ptr)

        cases = {dtype.number: partial(emit_case, dtype) for dtype in functions}
        emit_switch(builder, args[0], cases)
        return builder.load(result_ptr)

    result = signature.return_type(i64, *signature.args), codegen
    return intrinsic_of(1 + len(signature.args), lambda typingctx, *_: result)


bind_placeholders(simd_u8, simd_f32, simd_i32)
