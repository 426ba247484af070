"""Helpers of ops: requirements of composed functions, flattened shapes of arrays, streams of random numbers."""

import math
import zlib
from functools import partial

import numpy as np

from packtrain import kernels
from packtrain.common.errors import InputError
from packtrain.dtypes import PRECISIONS, dtype_of
from packtrain.engine.tensor import GraphError, Spec, Tensor, refusal, require
from packtrain.kernels import quantized_arrays

ABSENT = np.empty(0, np.float32)
ABSENT_IDS = np.empty(0, np.int32)


def rows(x):
    """Return x (..., C) as (N, C), without a copy."""
    return x if x.ndim == 2 else as_matrix(x, x.ndim - 1)


def as_matrix(x, num_row_axes):
    """Return x with its first `num_row_axes` axes as rows and the others as columns; sizes may be zero."""
    return x.reshape(math.prod(x.shape[:num_row_axes]), math.prod(x.shape[num_row_axes:]))


def rows_or_absent(x):
    return ABSENT.reshape(0, 0) if x is None else rows(x)


def flatten(x):
    return x.reshape(-1)


def flatten_or_absent(x, default_array=ABSENT):
    return default_array if x is None else x.reshape(-1)


def floats(w):
    """Return w as floats for NumPy: dequantized unless it is f32, or f64 in a check."""
    return w if w.dtype in (np.float32, np.float64) else quantized_arrays.dequantize(w)


def check_precision(precision):
    require(
        precision in PRECISIONS,
        f"precision is {precision}; it must be one of {', '.join(PRECISIONS)}",
    )


def times(a, b, precision):
    """Return a @ b with both factors in this precision: f32, bf16, or bf16x3 (sums of two bf16)."""
    return sum(x @ y for x, y in factor_pairs(a, b, precision, round_to_bf16))


def factor_pairs(a, b, precision, rounded):
    """Return pairs of factors whose products add up to a @ b in a precision; `rounded` rounds to bf16."""
    if precision == "f32":
        return ((a, b),)
    high, rounded_b = rounded(a), rounded(b)
    if precision == "bf16":
        return ((high, rounded_b),)
    return (high, rounded(b - rounded_b)), (rounded(a - high), rounded_b), (high, rounded_b)


def round_to_bf16(x):
    """Round f32 to bf16, to even, and back; f64 stays."""
    if x.dtype != np.float32:
        return x
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded_bits = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return np.where(np.isnan(x), x, (rounded_bits & np.uint32(0xFFFF0000)).view(np.float32))


def num_bf16_terms(precision):
    """Return the number of bf16 terms of a factor in kernels, 0 in f32; raise InputError if the CPU lacks them."""
    if precision == "bf16" and not kernels.panels.HALF:
        raise InputError("precision bf16: this CPU has no AVX512_BF16; use precision f32")
    if precision == "bf16x3" and not kernels.panels.AMX:
        raise InputError(
            "precision bf16x3: this CPU has no AMX, or Linux refuses it; use precision f32"
        )
    return PRECISIONS.index(precision)


def packed(w):
    """Return ggml's type number of w (N, K), and its bytes by rows."""
    return dtype_of(w).number, w.view(np.uint8).reshape(len(w), -1)


def assigned(function):
    """Return a kernel that assigns the function's result to y."""

    def run_kernel(y, *args, **attrs):
        y[...] = function(*args, **attrs)

    return run_kernel


def run_replayable(function, *args, check=None):
    """Call the function and return the bound call: a kernel that returns it is replaced by it in later runs.

    Arrays stay in place, so shapes and views are equal in every run. To find them again took 0.8 of 4.6 ms per token
    of `110m` in 4 bits: weights drive Python out of the cache.

    check  called with the function's result, which is negative where all is well
    """
    call = unchecked_call = partial(function, *args)
    if check is not None:
        call = partial(_run_checked, check, unchecked_call)
        call.unchecked = unchecked_call
    call()
    return call


def _run_checked(check, call):
    check(call())


def integers_of(x: Tensor, num_planes: int) -> Spec:
    """Return the workspace of x (..., K) as integers of `kernels.dot_tile`: per 128, their planes and 3 * 16 values."""
    k = x.shape[-1]
    return Spec((x.spec.size // max(k, 1) * -(-k // 128) * (32 * num_planes + 48),))


def copy_acc(y, acc):
    """Copy acc to y, unless it is None or shares their bytes; return True if nothing was copied."""
    if acc is None:
        return True
    # not __array_interface__: each access leaves a tombstone in the interpreter's table of interned strings, which is
    # doubled when full, in the middle of a run
    is_in_place = y.ctypes.data == acc.ctypes.data
    if not is_in_place:
        np.copyto(y, acc)
    return is_in_place


def noise_stream(name: str) -> int:
    """Return the number of the random stream of a tensor, for LoRA dropout or stochastic rounding."""
    return zlib.crc32(name.encode())


def demand(function_name: str, condition: bool, message: str, *inputs: Tensor) -> None:
    """Raise GraphError unless the condition holds; for functions composed of ops, as `require` for shape rules."""
    if not condition:
        raise GraphError(refusal(function_name, message, inputs))
