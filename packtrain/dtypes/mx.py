"""MXFP4: blocks of four-bit floats with a shared exponent (microscaling). Format: ggml-common.h."""

import numpy as np

from packtrain.dtypes import intrinsics
from packtrain.dtypes.element_type import block_dtype
from packtrain.dtypes.intrinsics import F32x16, byte_at, bytes_at, fma, load, part, pick, store
from packtrain.dtypes.legacy import q5_0

# the sixteen values of a code, doubled
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
mxfp4, nvfp4 = block_dtype("mxfp4", 39, 32, 17, merge_dtype=q5_0), block_dtype("nvfp4", 40, 64, 36)


@part
def unit(power: int) -> F32x16:
    """Return half of 2 ** (power - 127) in every lane: denormal below power 2."""
    denormal_bits = (power < 2) * (0x200000 << (power & 1))
    exponent_bits = (power >= 2) * (power - 1) << 23
    return intrinsics.as_floats(intrinsics.spread_bits(denormal_bits | exponent_bits))


@mxfp4.unpack
def unpack_mxfp4(y, block):
    code_values = load(E2M1, 0)
    d, q = unit(byte_at(block, 0)), bytes_at(block, 1)
    store(y, 0, pick(code_values, q) * d)
    store(y, 16, pick(code_values, q >> 4) * d)


@mxfp4.dot
def dot_mxfp4(x, w, n):
    code_values, a = load(E2M1, 0), intrinsics.splat(0.0)
    for i in range(0, n, 32):
        q = bytes_at(w, 1)
        v = pick(code_values, q) * load(x, i)
        a = fma(fma(pick(code_values, q >> 4), load(x, i + 16), v), unit(byte_at(w, 0)), a)
        w += 17
    return intrinsics.total(a)
