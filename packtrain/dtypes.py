"""Element types: scalars and the block types of GGUF.

A block type packs `block` consecutive elements of a row into `block_nbytes` bytes; scalars have block 1.
Sizes are ggml's (ggml-common.h). Nothing here computes with values.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Dtype:
    """One element type: its name, elements per block, bytes per block, NumPy type if there is one."""

    name: str
    block: int
    block_nbytes: int
    numpy: np.dtype | None = None

    def row_nbytes(self, width: int) -> int:
        """Bytes of a row of `width` elements; `width` must be whole blocks."""
        return width // self.block * self.block_nbytes

    @property
    def quantized(self) -> bool:
        return self.block > 1

    def __str__(self) -> str:
        return self.name


def _scalar(name: str, numpy: str) -> Dtype:
    return Dtype(name, 1, np.dtype(numpy).itemsize, np.dtype(numpy))


f32, f64, f16 = _scalar("f32", "float32"), _scalar("f64", "float64"), _scalar("f16", "float16")
i32, i64, u8 = _scalar("i32", "int32"), _scalar("i64", "int64"), _scalar("u8", "uint8")
i8, i16 = _scalar("i8", "int8"), _scalar("i16", "int16")
bf16 = Dtype("bf16", 1, 2)

BLOCK_TYPES = {
    name: Dtype(name, block, nbytes)
    for name, block, nbytes in (
        ("q4_0", 32, 18), ("q4_1", 32, 20), ("q5_0", 32, 22), ("q5_1", 32, 24), ("q8_0", 32, 34),
        ("q2_K", 256, 84), ("q3_K", 256, 110), ("q4_K", 256, 144), ("q5_K", 256, 176), ("q6_K", 256, 210),
        ("iq1_s", 256, 50), ("iq1_m", 256, 56), ("iq2_xxs", 256, 66), ("iq2_xs", 256, 74), ("iq2_s", 256, 82),
        ("iq3_xxs", 256, 98), ("iq3_s", 256, 110), ("iq4_nl", 32, 18), ("iq4_xs", 256, 136), ("tq1_0", 256, 54),
        ("tq2_0", 256, 66), ("mxfp4", 32, 17), ("nvfp4", 64, 36), ("q1_0", 128, 18), ("q2_0", 64, 18),
    )
}  # fmt: skip
DTYPES = {t.name: t for t in (f32, f64, f16, bf16, i8, i16, i32, i64, u8)} | BLOCK_TYPES
