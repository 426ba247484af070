"""The list of element types: scalars and GGUF's block types, each defined in a module beside this one."""

import numpy as np

from packtrain.dtypes import (
    floats, int8_dot, integers, iq, iq1, iq2, iq3, iq4, k, k_small, legacy, mx, recode, ternary, weighted_packing,
)  # fmt: skip
from packtrain.dtypes.element_type import DTYPES_BY_NAME, Dtype
from packtrain.dtypes.floats import bf16, f16, f32, f64
from packtrain.dtypes.integers import i32, i64, u8

__all__ = [
    "BLOCK_TYPES", "DTYPES", "DTYPES_BY_NUMPY", "MERGEABLE", "PACKABLE", "PRECISIONS", "READABLE", "RECODABLE",
    "ROUNDABLE", "TRAINABLE", "TYPE_MODULES", "WRITABLE", "Dtype", "bf16", "dtype_of", "f16", "f32", "f64", "i32",
    "i64", "u8",
]  # fmt: skip

TYPE_MODULES = (
    *(floats, integers, legacy, k, k_small, iq, mx, ternary, int8_dot, recode, weighted_packing),
    *(iq1, iq2, iq3, iq4),
)
BLOCKS = sorted((t for t in DTYPES_BY_NAME.values() if t.quantized), key=lambda t: t.number or 0)
BLOCK_TYPES = {t.name: t for t in BLOCKS}
DTYPES = {name: t for name, t in DTYPES_BY_NAME.items() if not t.quantized} | BLOCK_TYPES
READABLE = tuple(t for t in DTYPES.values() if "unpack" in t.code)
PACKABLE = tuple(t for t in DTYPES.values() if not {"pack", "snap"}.isdisjoint(t.code))
# types that are written without weights of columns, too
WRITABLE = tuple(t for t in PACKABLE if t.column_weights_need != "always")
MERGEABLE = tuple(t for t in WRITABLE if "pack" in t.code)  # types that tunes and merges write
ROUNDABLE = tuple(t for t in DTYPES.values() if "codes" in t.code)
RECODABLE = tuple(t for t in DTYPES.values() if "recode" in t.code)
TRAINABLE = (f32, bf16)  # types of weights with a gradient, which is f32
# precisions of the factors of products, see ops.matmul; sums are always f32
PRECISIONS = ("f32", "bf16", "bf16x3")
DTYPES_BY_NUMPY = {t.numpy: t for t in DTYPES.values()}


def dtype_of(array: np.ndarray) -> Dtype:
    """Return the element type of a NumPy array. Raises KeyError if it is not one of DTYPES."""
    return DTYPES_BY_NUMPY[array.dtype]
