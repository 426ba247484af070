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
    """x (..., C) as (N, C), without a copy."""
    return x if x.ndim == 2 else as_matrix(x, x.ndim - 1)


def as_matrix(x, num_row_axes):
    """x with its first `num_row_axes` axes as rows and the others as columns; sizes may be zero."""
    return x.reshape(math.prod(x.shape[:num_row_axes]), math.prod(x.shape[num_row_axes:]))


def rows_or_absent(x):
    return ABSENT.reshape(0, 0) if x is None else rows(x)


def flatten(x):
    return x.reshape(-1)


def flatten_or_absent(x, default_array=ABSENT):
    return default_array if x is None else x.reshape(-1)


def floats(w):
    """w for NumPy: dequantized unless it is f32, or f64 in a check."""
    return w if w.dtype in (np.float32, np.float64) else quantized_arrays.dequantize(w)


def check_precision(precision):
    require(
        precision in PRECISIONS,
        f"precision is {precision}; it must be one of {', '.join(PRECISIONS)}",
    )


def times(a, b, precision):
    """a @ b with factors of this precision."""
    return sum(x @ y for x, y in factor_pairs(a, b, precision, round_to_bf16))


def factor_pairs(a, b, precision, rounded):
    """Pairs whose products are summed; see `rounded`."""
    if precision == "f32":
        return ((a, b),)
    high, rounded_b = rounded(a), rounded(b)
    if precision == "bf16":
        return ((high, rounded_b),)
    return (high, rounded(b - rounded_b)), (rounded(a - high), rounded_b), (high, rounded_b)


def round_to_bf16(x):
    """f32 rounded to bf16, to even, and back; f64 stays."""
    if x.dtype != np.float32:
        return x
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded_bits = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return np.where(np.isnan(x), x, (rounded_bits & np.uint32(0xFFFF0000)).view(np.float32))


def num_bf16_terms(precision):
    """How many bf16 a factor of a product becomes, 0 for none, as kernels take it."""
    if precision == "bf16" and not kernels.panels.HALF:
        raise InputError("precision bf16: this CPU has no AVX512_BF16; use precision f32")
    if precision == "bf16x3" and not kernels.panels.AMX:
        raise InputError(
            "precision bf16x3: this CPU has no AMX, or Linux refuses it; use precision f32"
        )
    return PRECISIONS.index(precision)


def packed(w):
    """ggml's type number of w (N, K), and its bytes by rows."""
    return dtype_of(w).number, w.view(np.uint8).reshape(len(w), -1)


def assigned(function):
    """A kernel that assigns what the function gives."""

    def run_kernel(y, *args, **attrs):
        y[...] = function(*args, **attrs)

    return run_kernel


def run_replayable(function, *args, check=None):
    """Call it, and return the call: a kernel that returns this is run so from then on, while its arrays stay.

    check  is given what the function returns, which is negative where all is well
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
    """What x (..., K) takes as integers, as `kernels.dot_tile` has them: 128 of them by planes, and 3 * 16 values."""
    k = x.shape[-1]
    return Spec((x.spec.size // max(k, 1) * -(-k // 128) * (32 * num_planes + 48),))


def copy_acc(y, acc):
    """Copy acc to y, unless there is none or they share their bytes; whether nothing was copied."""
    if acc is None:
        return True
    # not __array_interface__: each access leaves a tombstone in the interpreter's table of interned strings, which is
    # doubled when full, in the middle of a run
    is_in_place = y.ctypes.data == acc.ctypes.data
    if not is_in_place:
        np.copyto(y, acc)
    return is_in_place


def noise_stream(name: str) -> int:
    """The stream of random numbers of this tensor, for LoRA dropout or stochastic rounding."""
    return zlib.crc32(name.encode())


def demand(function_name: str, condition: bool, message: str, *inputs: Tensor) -> None:
    """State a requirement of a function that is composed of ops, as `want` does in a shape rule."""
    if not condition:
        raise GraphError(refusal(function_name, message, inputs))
