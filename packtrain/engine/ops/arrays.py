"""Helpers of ops: requirements of composed functions, flattened shapes of arrays, streams of random numbers."""

import math
import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np

from packtrain import kernels
from packtrain.common.errors import InputError
from packtrain.dtypes import PRECISIONS, dtype_of, f32
from packtrain.engine.tensor import GraphError, Op, Spec, Tensor, input, refusal, require
from packtrain.kernels.quant import quantized_arrays

ABSENT = np.empty(0, np.float32)
ABSENT_IDS = np.empty(0, np.int32)


def rows(x):
    """Return x (..., C) as (N, C), without a copy."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), math.prod(x.shape[-1:]))


def as_matrix(x, num_row_axes):
    """Return x as a matrix: its first `num_row_axes` axes become rows, the others columns; sizes may be zero."""
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


def f32_rows(x: Tensor, name: str = "x") -> Spec:
    """Return the spec of x after checking, for a shape rule, that it is f32 with at least one axis."""
    is_valid = x.dtype == f32 and len(x.shape) > 0
    require(is_valid, f"{name} is {x.spec}; it must be f32 with at least one axis")
    return x.spec


def check_precision(precision):
    fact = f"precision is {precision}; it must be one of {', '.join(PRECISIONS)}"
    require(precision in PRECISIONS, fact)


def times(a, b, precision):
    """Return a @ b with both factors in this precision: f32, bf16, or bf16x3 (sums of two bf16)."""
    return sum(x @ y for x, y in factor_pairs(a, b, precision, round_to_bf16))


def factor_pairs(a, b, precision, rounded):
    """Return pairs of factors whose products add up to a @ b in a precision; `rounded` rounds an array to bf16."""
    if precision == "f32":
        return ((a, b),)
    high, rounded_b = rounded(a), rounded(b)
    if precision == "bf16":
        return ((high, rounded_b),)
    return (high, rounded(b - rounded_b)), (rounded(a - high), rounded_b), (high, rounded_b)


def round_to_bf16(x):
    """Round f32 to bf16, to even, and back; f64 stays. For NumPy and PyTorch."""
    if x.dtype.itemsize != 4:
        return x
    if not isinstance(x, np.ndarray):
        return x.bfloat16().float()
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded_bits = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return np.where(np.isnan(x), x, (rounded_bits & np.uint32(0xFFFF0000)).view(np.float32))


@cache
def num_bf16_terms(precision):
    """Return how many bf16 numbers stand for an f32 factor in kernels, 0 in f32; InputError if the CPU lacks them."""
    if precision == "bf16" and not kernels.panels.HALF:
        raise InputError("precision bf16: this CPU has no AVX512_BF16; use precision f32")
    if precision == "bf16x3" and not kernels.panels.AMX:
        fact = "precision bf16x3: this CPU has no AMX, or Linux refuses it; use precision f32"
        raise InputError(fact)
    return PRECISIONS.index(precision)


def packed(w):
    """Return ggml's type number of a weight w (N, K), and its bytes, u8 (N, bytes of a row)."""
    return dtype_of(w).number, w.view(np.uint8).reshape(len(w), -1)


def assigned(function):
    """Return a kernel that assigns the function's result to y; for NumPy and PyTorch."""

    def run_kernel(y, *args, **attrs):
        y[...] = function(*args, **attrs)

    return run_kernel


def compiled(path, *layouts):
    """Return a replayable kernel that calls a compiled function, named as in `norm.rms_norm`.

    layouts  functions that lay out results and inputs in turn, such as `rows`, then names of attributes
    """
    module_name, function_name = path.split(".")

    def run_kernel(out, *inputs, **attrs):
        arrays = *(out if isinstance(out, tuple) else (out,)), *inputs
        values = [layout(a) for layout, a in zip(layouts, arrays, strict=False)]
        values += [attrs[name] for name in layouts[len(arrays) :]]
        return run_replayable(getattr(getattr(kernels, module_name), function_name), *values)

    return run_kernel


def run_replayable(function, *args, before=None, check=None):
    """Call the function and return the bound call, which the executor makes in later runs instead of the kernel.

    Arrays stay in place, so shapes and views are equal in every run. To find them again took 0.8 of 4.6 ms per token of
    `110m` in 4 bits: weights drive Python out of the cache.

    before  called before the function in each run
    check   called with the function's result, which is negative where all is well
    """
    if before is not None:
        before()
    call = unchecked_call = partial(function, *args)
    if check is not None:
        call = partial(_call_then_check, check, unchecked_call)
        call.unchecked = unchecked_call
    call()
    return call if before is None else replay_after(before, call)


def _call_then_check(check, call):
    """Run a call and its check of the result; a later run of the same call does so, too."""
    check(call())


def integers_of(x: Tensor, num_planes: int) -> Spec:
    """Return the f32 workspace for x (..., K) as integers (dot_tile): per 128 values num_planes bytes, 48 numbers."""
    k = x.shape[-1]
    return Spec((x.spec.size // max(k, 1) * -(-k // 128) * (32 * num_planes + 48),))


def copy_acc(y, acc):
    """Copy acc to y, unless it is None or has y's bytes; return a function that copies it again, or None."""
    # not __array_interface__: each access leaves a tombstone in the interpreter's table of interned strings, which is
    # doubled when full, in the middle of a run
    if acc is None or y.ctypes.data == acc.ctypes.data:
        return None
    np.copyto(y, acc)
    return partial(np.copyto, y, acc)


def replay_after(preparation, call):
    """Return a function for later runs: calls `preparation`, unless it is None, and then `call`, which return None."""
    return call if preparation is None else lambda: preparation() or call()


def copy_acc_or_zero(y, acc):
    """Copy acc to y, unless they share their bytes; without acc, fill y with zeros. For NumPy and PyTorch."""
    if acc is None:
        y[...] = 0
    elif isinstance(y, np.ndarray):
        copy_acc(y, acc)
    elif y.data_ptr() != acc.data_ptr():
        y.copy_(acc)


def noise_stream(name: str) -> int:
    """Return the number of a tensor's own random stream, for LoRA dropout or stochastic rounding."""
    return zlib.crc32(name.encode())


def gradient_samples(
    forward: Op[..., Any], backward: Op[..., Any]
) -> Callable[[], Iterator[Tensor]]:
    """Return a function that yields samples of `backward`, its calls in the gradients of samples of `forward`."""

    def samples() -> Iterator[Tensor]:
        assert forward.sample_rule is not None and forward.vjp_rule is not None
        for y in forward.sample_rule():
            call = y.call
            if call is None or call.op is not forward:
                continue
            dy = tuple(input("dy", t.shape) if t is y else None for t in call.results)
            pair = (dy, call.results) if call.returns_tuple else (dy[0], y)
            for grad in forward.vjp_rule(*pair, *call.inputs, **call.attrs):
                if grad is not None and grad.call is not None and grad.call.op is backward:
                    yield grad

    return samples


HOST_READS = {"times": 0}  # how often kernels have read values, see on_host


def on_host(x):
    """Whether the host can read values of x: not on `meta`. A kernel that calls this is never recorded."""
    HOST_READS["times"] += 1
    return not x.is_meta


def check_ids(name, ids, num_rows, *, min_id=None, valid_range=None):
    """Raise IndexError for the first id that is not below `num_rows`, or below `min_id`; for NumPy and PyTorch."""
    is_invalid = ids >= num_rows if min_id is None else (ids >= num_rows) | (ids < min_id)
    any_invalid = is_invalid.any()
    if (isinstance(ids, np.ndarray) or on_host(ids)) and any_invalid:
        at = is_invalid.reshape(-1).tolist().index(True)
        raise invalid_id(name, ids, at, num_rows, min_id, valid_range)


def check_targets(name, targets, num_classes):
    """Raise IndexError for the first target that is no class; a negative one is ignored."""
    check_ids(name, targets, num_classes, valid_range=f"the {num_classes} classes")


def invalid_id(name, ids, at, num_rows, min_id=None, valid_range=None):
    """Return the IndexError for the id at position `at`; `valid_range` says, for targets, where they must be."""
    id_range = f"the {num_rows} rows" if min_id is None else f"{min_id} to {num_rows - 1}"
    noun, valid_ids = ("index", id_range) if valid_range is None else ("target", valid_range)
    return IndexError(
        f"{name}: {noun} {ids.reshape(-1)[at]} at position {at} is outside {valid_ids}"
    )


def demand(function_name: str, condition: bool, message: str, *inputs: Tensor) -> None:
    """Raise GraphError unless the condition holds; for functions composed of ops, as `require` for shape rules."""
    if not condition:
        raise GraphError(refusal(function_name, message, inputs))
