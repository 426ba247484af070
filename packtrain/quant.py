"""Quantized arrays: `dequantize(array)` to f32 and `quantize(values, dtype)` back.

An array of a block type is a NumPy record array named after the type, its last axis counting blocks. It knows
no files and no models.
"""

from typing import Any

import numpy as np

from packtrain import kernels
from packtrain.dtypes import PACKED, READABLE, WRITABLE, Dtype, dtype_of
from packtrain.types.neighbours import neighbours


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

    Rows are whole blocks, values finite.
    weights  (width,) by which errors of each column count, if the type can weigh them; finite, not below zero
    All but q4_K to q6_K are packed bit for bit as ggml's reference; with weights all that use them.
    """
    return quantize_measured(values, dtype, weights)[0]


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
    given = np.ascontiguousarray(() if weights is None else weights, np.float32)
    if "snap" in dtype.code:
        compiled.snapping.rows(dtype.number, raw, sums, rows, given, neighbours(dtype))
    elif given.size and "weigh" in dtype.code:
        compiled.weighing.rows(dtype.number, raw, sums, rows, given)
    else:
        compiled.quantize.rows(dtype.number, raw, sums, rows)
    total, wrong = sums.sum(axis=1)
    return packed, float(total), float(wrong)
