"""Values of packed arrays: `dequantize(array)` to f32, for every element type that models are read in.

An array of a block type is a NumPy record array named after the type, its last axis counting blocks. It knows
no files and no models.
"""

from typing import Any

import numpy as np

from packtrain import kernels
from packtrain.dtypes import DTYPES, Dtype

READABLE: tuple[Dtype, ...] = tuple(
    DTYPES[name]
    for name in (
        "f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K",
        "iq4_nl", "iq4_xs", "mxfp4",
    )
)  # fmt: skip


def dequantize(array: np.ndarray) -> np.ndarray:
    """The values as f32, (..., width): bit for bit as ggml's reference reads them.

    Raises ValueError for an element type that is none of READABLE.
    """
    dtype = _dtype(array)
    if dtype not in READABLE:
        raise ValueError(f"{dtype} cannot be read; what can: {', '.join(map(str, READABLE))}")
    width = (array.shape[-1] if array.ndim else 1) * dtype.block
    values = np.empty((*array.shape[:-1], width), np.float32)
    if array.size:
        packed = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        rows = values.reshape(-1, width)
        compiled: Any = kernels.dequantize
        compiled.rows(compiled.KINDS[dtype.name], rows, packed.reshape(len(rows), -1))
    return values.reshape(array.shape) if array.ndim == 0 else values


def _dtype(array: np.ndarray) -> Dtype:
    if array.dtype.names:
        return DTYPES[array.dtype.names[0]]
    return next(d for d in DTYPES.values() if d.numpy == array.dtype)
