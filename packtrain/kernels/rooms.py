"""Compiles the functions of dtypes/, and dispatches between them by type number.

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
from packtrain.dtypes.intrinsics import ASKED, Code, Codes, Floats, Ints, Word
from packtrain.kernels.bits import i32x16
from packtrain.kernels.call import kernel, part, settle
from packtrain.kernels.octets import codes64
from packtrain.kernels.simd import f32x16

I64 = ir.IntType(64)
i64, f32, void = types.int64, types.float32, types.void
MEANT: dict[Any, Any] = {int: i64, np.float32: f32, None: void, Ints: i32x16, Floats: f32x16}
MEANT[Codes] = codes64
MEANT[tuple[np.float32, np.float32]] = types.UniTuple(f32, 2)


def explain(*modules):
    """Bind the placeholders of dtypes/intrinsics.py to functions of these modules."""
    for module in modules:
        for name, value in vars(module).items():
            ASKED.setdefault(name, Word()).meaning = partial(numba_type, value)


def numba_type(value):
    return cpu_target.typing_context.resolve_value_type(value)


def from_rooms(role, decorator):
    """The functions of a role by type, compiled for the calling module, with all that they call."""
    done = {}
    return {t: compiled(t.code[role], decorator, done) for t in DTYPES.values() if role in t.code}


def compiled(code, decorator, done):
    """Compile a function of dtypes/, and first those that it calls."""
    if code not in done:
        for other in map(code.function.__globals__.get, code.function.__code__.co_names):
            if isinstance(other, Code):
                *arg_types, result = (MEANT[t] for t in other.function.__annotations__.values())
                compiled(other, (part if other.inlined else kernel)(result(*arg_types)), done)
        done[code] = decorator(code.function)
        code.meaning = partial(numba_type, done[code])
    return done[code]


def choice(functions, signature, *, blocks):
    """An intrinsic (kind, given values, n): the function of the type of that number, for (given values, n).

    blocks  whether they count in blocks; n counts elements
    """

    def codegen(context, builder, sig, args):
        kind, *call_args, n = args
        result = cgutils.alloca_once(builder, context.get_value_type(signature.return_type))
        end = builder.append_basic_block("chosen")
        switch = builder.switch(kind, end)
        for dtype, function in functions.items():
            case = builder.append_basic_block(dtype.name)
            switch.add_case(I64(dtype.number), case)
            builder.position_at_end(case)
            settle(function)
            implementation = context.get_function(types.Dispatcher(function), signature)
            context.add_linking_libs(getattr(implementation, "libs", ()))
            count = builder.udiv(n, I64(dtype.block)) if blocks else n
            builder.store(implementation(builder, (*call_args, count)), result)
            builder.branch(end)
        builder.position_at_end(end)
        return builder.load(result)

    typed = signature.return_type(i64, *signature.args), codegen
    if len(signature.args) == 5:
        return intrinsic(lambda typingctx, kind, a, b, c, d, n: typed)
    if len(signature.args) == 4:
        return intrinsic(lambda typingctx, kind, a, b, c, n: typed)
    return intrinsic(lambda typingctx, kind, a, b, n: typed)
