"""Element types: scalars and the block types of GGUF.

A block type packs `block` consecutive elements of a row into `block_nbytes` bytes; scalars have block 1.
In NumPy a block is a record of one field named after its type, so an array of blocks knows what it holds.
Sizes are ggml's (ggml-common.h). Nothing here computes with values.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Dtype:
    """One element type: its name, elements per block, bytes per block, and the NumPy type of a block.

    There is one of each, also for what was pickled: they compare by identity.
    """

    name: str
    block: int
    block_nbytes: int
    numpy: np.dtype

    def row_nbytes(self, width: int) -> int:
        """Bytes of a row of `width` elements; `width` must be whole blocks."""
        return width // self.block * self.block_nbytes

    def array_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the NumPy array that holds a tensor of `shape`: its last axis counts blocks."""
        return (*shape[:-1], shape[-1] // self.block) if shape else ()

    def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The inverse of array_shape."""
        return (*shape[:-1], shape[-1] * self.block) if shape else ()

    @property
    def quantized(self) -> bool:
        return self.block > 1

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return _named, (self.name,)


def _scalar(name: str, numpy: str) -> Dtype:
    return Dtype(name, 1, np.dtype(numpy).itemsize, np.dtype(numpy))


def _packed(name: str, block: int, nbytes: int) -> Dtype:
    return Dtype(name, block, nbytes, np.dtype([(name, f"V{nbytes}")]))


f32, f64, f16 = _scalar("f32", "float32"), _scalar("f64", "float64"), _scalar("f16", "float16")
i32, i64, u8 = _scalar("i32", "int32"), _scalar("i64", "int64"), _scalar("u8", "uint8")
i8, i16 = _scalar("i8", "int8"), _scalar("i16", "int16")
bf16 = _packed("bf16", 1, 2)
TRAINABLE = (f32, bf16)  # what weights with a gradient can be; the gradient is f32

BLOCK_TYPES = {
    name: _packed(name, block, nbytes)
    for name, block, nbytes in (
        ("q4_0", 32, 18), ("q4_1", 32, 20), ("q5_0", 32, 22), ("q5_1", 32, 24), ("q8_0", 32, 34),
        ("q2_K", 256, 84), ("q3_K", 256, 110), ("q4_K", 256, 144), ("q5_K", 256, 176), ("q6_K", 256, 210),
        ("iq1_s", 256, 50), ("iq1_m", 256, 56), ("iq2_xxs", 256, 66), ("iq2_xs", 256, 74), ("iq2_s", 256, 82),
        ("iq3_xxs", 256, 98), ("iq3_s", 256, 110), ("iq4_nl", 32, 18), ("iq4_xs", 256, 136), ("tq1_0", 256, 54),
        ("tq2_0", 256, 66), ("mxfp4", 32, 17), ("nvfp4", 64, 36), ("q1_0", 128, 18), ("q2_0", 64, 18),
    )
}  # fmt: skip
DTYPES = {t.name: t for t in (f32, f64, f16, bf16, i8, i16, i32, i64, u8)} | BLOCK_TYPES


def _named(name: str) -> Dtype:
    return DTYPES[name]


NUMPY = {t.numpy: t for t in DTYPES.values()}


def dtype_of(array: np.ndarray) -> Dtype:
    """What a NumPy array holds. Raises KeyError for an element type that is none of DTYPES."""
    return NUMPY[array.dtype]
