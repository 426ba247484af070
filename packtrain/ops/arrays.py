"""Helpers of ops: requirements of composed functions, flattened shapes of arrays, streams of random numbers."""

import math
import zlib

import numpy as np

from packtrain import quant
from packtrain.dtypes import dtype_of
from packtrain.tensor import GraphError, Tensor, refusal

ABSENT = np.empty(0, np.float32)
ABSENT_IDS = np.empty(0, np.int32)


def rows(x):
    """x (..., C) as (N, C), without a copy."""
    return x if x.ndim == 2 else table(x, x.ndim - 1)


def table(x, axes):
    """x with its first `axes` axes as rows and the others as columns; sizes may be zero."""
    return x.reshape(math.prod(x.shape[:axes]), math.prod(x.shape[axes:]))


def rows_or_absent(x):
    return ABSENT.reshape(0, 0) if x is None else rows(x)


def flat(x):
    return x.reshape(-1)


def flat_or_absent(x, absent=ABSENT):
    return absent if x is None else x.reshape(-1)


def floats(w):
    """w for NumPy: dequantized unless it is f32, or f64 in a check."""
    return w if w.dtype in (np.float32, np.float64) else quant.dequantize(w)


def packed(w):
    """ggml's type number of w (N, K), and its bytes by rows."""
    return dtype_of(w).number, w.view(np.uint8).reshape(len(w), -1)


def start_with(y, acc):
    """Copy acc to y, unless they share their bytes."""
    # not __array_interface__: each access leaves a tombstone in the interpreter's table of interned strings, which is
    # doubled when full, in the middle of a run
    if y.ctypes.data != acc.ctypes.data:
        np.copyto(y, acc)


def noise(name: str) -> int:
    """The stream of random numbers of this tensor, for LoRA dropout or stochastic rounding."""
    return zlib.crc32(name.encode())


def demand(function: str, holds: bool, fact: str, *inputs: Tensor) -> None:
    """State a requirement of a function that is composed of ops, as `want` does in a shape rule."""
    if not holds:
        raise GraphError(refusal(function, fact, inputs))
