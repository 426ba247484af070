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
from numba.extending import intrinsic

from packtrain.dtypes import DTYPES
from packtrain.dtypes.intrinsics import (
    PLACEHOLDERS,
    CompiledFunction,
    F32x16,
    I32x16,
    Placeholder,
    U8x64,
)
from packtrain.kernels.bits import i32x16
from packtrain.kernels.call import ensure_compiled, kernel, part
from packtrain.kernels.octets import codes64
from packtrain.kernels.simd import f32x16

I64 = ir.IntType(64)
i64, f32, void = types.int64, types.float32, types.void
MEANT: dict[Any, Any] = {int: i64, np.float32: f32, None: void, I32x16: i32x16, F32x16: f32x16}
MEANT[U8x64] = codes64
MEANT[tuple[np.float32, np.float32]] = types.UniTuple(f32, 2)


def bind_placeholders(*modules):
    """Bind the placeholders of dtypes/intrinsics.py to functions of these modules."""
    for module in modules:
        for name, function in vars(module).items():
            PLACEHOLDERS.setdefault(name, Placeholder()).meaning = partial(numba_type, function)


def numba_type(function):
    return cpu_target.typing_context.resolve_value_type(function)


def compile_role(role, decorator):
    """Compile the functions of a role, such as `unpack`, and all that they call; returns them by element type."""
    done = {}
    return {t: compiled(t.code[role], decorator, done) for t in DTYPES.values() if role in t.code}


def compiled(code, decorator, done):
    """Compile a function of dtypes/, after the functions that it calls; returns the compiled function."""
    if code not in done:
        for callee in map(code.function.__globals__.get, code.function.__code__.co_names):
            if isinstance(callee, CompiledFunction):
                *arg_types, result = (MEANT[t] for t in callee.function.__annotations__.values())
                compiled(callee, (part if callee.is_inlined else kernel)(result(*arg_types)), done)
        done[code] = decorator(code.function)
        code.meaning = partial(numba_type, done[code])
    return done[code]


def choice(functions, signature, *, count_blocks):
    """Return an intrinsic (qtype, *args, n) that calls the function of the type with that number with (*args, n).

    count_blocks  whether the functions count in blocks; n counts elements
    """

    def codegen(context, builder, sig, args):
        qtype, *call_args, n = args
        result_ptr = cgutils.alloca_once(builder, context.get_value_type(signature.return_type))
        end_block = builder.append_basic_block("chosen")
        switch = builder.switch(qtype, end_block)
        for dtype, function in functions.items():
            case_block = builder.append_basic_block(dtype.name)
            switch.add_case(I64(dtype.number), case_block)
            builder.position_at_end(case_block)
            ensure_compiled(function)
            implementation = context.get_function(types.Dispatcher(function), signature)
            context.add_linking_libs(getattr(implementation, "libs", ()))
            num_units = builder.udiv(n, I64(dtype.block)) if count_blocks else n
            builder.store(implementation(builder, (*call_args, num_units)), result_ptr)
            builder.branch(end_block)
        builder.position_at_end(end_block)
        return builder.load(result_ptr)

    typed_codegen = signature.return_type(i64, *signature.args), codegen
    if len(signature.args) == 5:
        return intrinsic(lambda typingctx, qtype, a, b, c, d, n: typed_codegen)
    if len(signature.args) == 4:
        return intrinsic(lambda typingctx, qtype, a, b, c, n: typed_codegen)
    return intrinsic(lambda typingctx, qtype, a, b, n: typed_codegen)
