"""Quantized arrays: `dequantize(array)` to f32 and `quantize(values, dtype)` back.

An array of a block type is a NumPy record array named after the type, its last axis counting blocks. It knows
no files and no models.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from packtrain import kernels
from packtrain.common.errors import InputError
from packtrain.dtypes import PACKED, READABLE, WRITABLE, Dtype, dtype_of
from packtrain.dtypes.neighbours import neighbours


class Stored(NamedTuple):
    """Values that are quantized already: blocks, and what they stand for."""

    blocks: np.ndarray
    values: np.ndarray


class Weighed(NamedTuple):
    """Values whose rounding errors count by a weight of each column."""

    values: np.ndarray
    weights: np.ndarray


def dequantize(array: np.ndarray) -> np.ndarray:
    """The values as f32, (..., width): bit for bit as ggml's reference.

    Raises ValueError for an element type that is none of READABLE.
    """
    dtype = dtype_of(array)
    if dtype not in READABLE:
        raise ValueError(f"{dtype} cannot be read; supported are {', '.join(map(str, READABLE))}")
    values = np.empty(dtype.tensor_shape(array.shape), np.float32)
    unpack(values, array)
    return values


def unpack(values: np.ndarray, array: np.ndarray) -> None:
    """Write the values of an array of one of READABLE to a dense f32 array of its shape."""
    if array.size:
        packed = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        rows = values.reshape(-1, values.shape[-1] if array.ndim else 1)
        compiled: Any = kernels.dequantize
        compiled.rows(dtype_of(array).number, rows, packed.reshape(len(rows), -1))


def quantize(values: np.ndarray, dtype: Dtype, weights: np.ndarray | None = None) -> np.ndarray:
    """f32 values (..., width) as an array of `dtype`, one of WRITABLE, or of PACKED with weights.

    Rows are whole blocks, values finite: else ValueError, but for types of single values.
    weights  (width,) by which errors of each column count, if the type can weigh them; finite, not below zero
    All but q4_K to q6_K are packed bit for bit as ggml's reference; with weights all that use them.
    """
    packed, total, _ = quantize_measured(values, dtype, weights)
    if dtype.quantized and not math.isfinite(total):
        raise ValueError(f"values for {dtype} are not finite; a block holds finite ones only")
    return packed


def quantize_measured(
    values: np.ndarray, dtype: Dtype, weights: np.ndarray | None = None
) -> tuple[np.ndarray, float, float]:
    """The same, with the sums of squares of the values and of the errors.

    Rows that are not finite are not packed: the first sum shows them.
    """
    if dtype not in (WRITABLE if weights is None else PACKED):
        raise ValueError(
            f"{dtype} cannot be written{' without weights' if dtype in PACKED else ''}; supported are "
            + ", ".join(map(str, WRITABLE))
        )
    width = values.shape[-1]
    if width % dtype.block:
        raise ValueError(f"rows have {width} values; {dtype} packs {dtype.block} each")
    packed = np.empty(dtype.array_shape(values.shape), dtype.numpy)
    if not values.size:
        return packed, 0.0, 0.0
    rows = np.ascontiguousarray(values, np.float32).reshape(-1, width)
    sums = np.empty((2, len(rows)))
    compiled: Any = kernels
    raw = packed.reshape(-1).view(np.uint8).reshape(len(rows), -1)
    importance = np.ascontiguousarray(() if weights is None else weights, np.float32)
    if "snap" in dtype.code:
        compiled.snapping.rows(dtype.number, raw, sums, rows, importance, neighbours(dtype))
    elif importance.size and "weigh" in dtype.code:
        compiled.weighing.rows(dtype.number, raw, sums, rows, importance)
    else:
        compiled.quantize.rows(dtype.number, raw, sums, rows)
    total, wrong = sums.sum(axis=1)
    return packed, float(total), float(wrong)


def packed(
    location: str,
    parts: Iterable[np.ndarray | Stored | Weighed],
    dtype: Dtype,
    done: Callable[[float], None],
) -> Iterator[np.ndarray]:
    """Convert parts of a tensor from f32; calls `done` with the rounding error. Raises InputError for bad values."""
    wrong = total = 0.0
    for values in parts:
        if isinstance(values, Stored):
            part, size = values.blocks, squares(values.values)
            error = squares(dequantize(part) - values.values)
        elif isinstance(values, Weighed):
            part, size, error = quantize_measured(values.values, dtype, values.weights)
        else:
            part, size, error = quantize_measured(values, dtype)
        total += size
        if not math.isfinite(total):
            raise InputError(f"{location} has values that are not finite; they must be")
        wrong += error
        if not math.isfinite(wrong):
            raise InputError(f"{location} has values too large for {dtype}; use another type")
        yield part
    done(math.sqrt(wrong / total) if total else 0.0)


def squares(x: np.ndarray) -> float:
    """The sum of squares in f64, without a copy in f64."""
    flat = x.reshape(-1)
    return float(np.einsum("i,i->", flat, flat, dtype=np.float64))
