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
from packtrain.dtypes import PACKABLE, READABLE, WRITABLE, Dtype, dtype_of
from packtrain.dtypes.neighbours import neighbour_table


class QuantizedBlocks(NamedTuple):
    """Blocks that are quantized already, and the values that they stand for."""

    blocks: np.ndarray
    values: np.ndarray


class WeightedValues(NamedTuple):
    """Values whose rounding errors count by a weight of each column."""

    values: np.ndarray
    weights: np.ndarray


def dequantize(array: np.ndarray) -> np.ndarray:
    """Return the values of an array of blocks as f32, (..., width): bit for bit as ggml's reference.

    The array's NumPy dtype is an element type's, as in READABLE. Raises ValueError for any other.
    """
    dtype = dtype_of(array)
    if dtype not in READABLE:
        raise ValueError(f"{dtype} cannot be read; supported are {', '.join(map(str, READABLE))}")
    values = np.empty(dtype.tensor_shape(array.shape), np.float32)
    unpack_into(values, array)
    return values


def unpack_into(values: np.ndarray, array: np.ndarray) -> None:
    """Write the values of an array of one of READABLE to a dense f32 array of its shape."""
    if array.size:
        packed = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        value_rows = values.reshape(-1, values.shape[-1] if array.ndim else 1)
        kernel_module: Any = kernels.dequantize
        kernel_module.rows(dtype_of(array).number, value_rows, packed.reshape(len(value_rows), -1))


def quantize(values: np.ndarray, dtype: Dtype, weights: np.ndarray | None = None) -> np.ndarray:
    """Return f32 values (..., width) as an array of `dtype`, one of WRITABLE, or of PACKABLE with weights.

    Rows are whole blocks, values finite: else ValueError, but for types of single values.
    weights  (width,) by which errors of each column count, if the type can weigh them; finite, not below zero
    All but q4_K to q6_K are packed bit for bit as ggml's reference; with weights all that use them.
    """
    packed_array, square_sum, _ = quantize_measured(values, dtype, weights)
    if dtype.quantized and not math.isfinite(square_sum):
        raise ValueError(f"values for {dtype} are not finite; a block holds finite ones only")
    return packed_array


def quantize_measured(
    values: np.ndarray, dtype: Dtype, weights: np.ndarray | None = None
) -> tuple[np.ndarray, float, float]:
    """Return the array that `quantize` returns, and the sums of squares of the values and of the rounding errors.

    Rows that are not finite are not packed: the first sum shows them.
    """
    if dtype not in (WRITABLE if weights is None else PACKABLE):
        raise ValueError(
            f"{dtype} cannot be written{' without weights' if dtype in PACKABLE else ''}; supported are "
            + ", ".join(map(str, WRITABLE))
        )
    width = values.shape[-1]
    if width % dtype.block:
        raise ValueError(f"rows have {width} values; {dtype} packs {dtype.block} each")
    packed_array = np.empty(dtype.array_shape(values.shape), dtype.numpy)
    if not values.size:
        return packed_array, 0.0, 0.0
    rows = np.ascontiguousarray(values, np.float32).reshape(-1, width)
    sums = np.empty((2, len(rows)))
    compiled: Any = kernels
    raw = packed_array.reshape(-1).view(np.uint8).reshape(len(rows), -1)
    importance = np.ascontiguousarray(() if weights is None else weights, np.float32)
    args = dtype.number, raw, sums, rows
    if "snap" in dtype.code:
        compiled.grid_quantize.rows(*args, importance, neighbour_table(dtype))
    elif importance.size and "weigh" in dtype.code:
        compiled.weighted_quantize.rows(*args, importance)
    else:
        compiled.quantize.rows(*args)
    square_sum, error_sum = sums.sum(axis=1)
    return packed_array, float(square_sum), float(error_sum)


def packed(
    tensor_name: str, tensor_parts: Iterable[np.ndarray | QuantizedBlocks | WeightedValues], dtype: Dtype,
    report_error: Callable[[float], None],
) -> Iterator[np.ndarray]:  # fmt: skip
    """Yield parts as `dtype`, then report the relative RMS error. Raises InputError at `location` for bad values."""
    error_sum = square_sum = 0.0
    for part_values in tensor_parts:
        if isinstance(part_values, QuantizedBlocks):
            part, size = part_values.blocks, sum_of_squares(part_values.values)
            error = sum_of_squares(dequantize(part) - part_values.values)
        elif isinstance(part_values, WeightedValues):
            part, size, error = quantize_measured(part_values.values, dtype, part_values.weights)
        else:
            part, size, error = quantize_measured(part_values, dtype)
        square_sum += size
        if not math.isfinite(square_sum):
            raise InputError(f"{tensor_name} has values that are not finite; they must be")
        error_sum += error
        if not math.isfinite(error_sum):
            raise InputError(f"{tensor_name} has values too large for {dtype}; use another type")
        yield part
    report_error(math.sqrt(error_sum / square_sum) if square_sum else 0.0)


def sum_of_squares(x: np.ndarray) -> float:
    """Return the sum of squares in f64, without a copy in f64."""
    flat_values = x.reshape(-1)
    return float(np.einsum("i,i->", flat_values, flat_values, dtype=np.float64))
