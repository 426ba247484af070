"""What rooms share when they call kernels: small shapes of arrays, and streams of random numbers."""

import math
import zlib

import numpy as np

from packtrain import quant
from packtrain.dtypes import dtype_of

ABSENT = np.empty(0, np.float32)
ABSENT_IDS = np.empty(0, np.int32)


def rows(x):
    """x (..., C) as (N, C), without a copy."""
    return table(x, x.ndim - 1)


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
    """w as NumPy computes with it: what is not f32, or f64 in a check, is unpacked."""
    return w if w.dtype in (np.float32, np.float64) else quant.dequantize(w)


def packed(w):
    """ggml's number of the type of w (N, K), and its bytes by rows."""
    return dtype_of(w).number, w.view(np.uint8).reshape(len(w), -1)


def start_with(y, acc):
    """Make y start as acc; they may already be the same bytes."""
    # not __array_interface__: each look at it leaves a hole in the interpreter's table of names, and when that is full
    # of them it is made twice as large, in the middle of a run
    if y.ctypes.data != acc.ctypes.data:
        np.copyto(y, acc)


def noise(name: str) -> int:
    """The stream of random numbers of this tensor: by which its addition drops what it reads, or it is rounded."""
    return zlib.crc32(name.encode())
