"""MXFP4: blocks of four-bit floats with a shared exponent (microscaling). Format: ggml-common.h."""

import numpy as np

from packtrain.dtypes import intrinsics
from packtrain.dtypes.element_type import packed
from packtrain.dtypes.intrinsics import (
    Floats,
    as_floats,
    byte_at,
    bytes_at,
    fma,
    load,
    part,
    pick,
    store,
)
from packtrain.dtypes.legacy import q5_0

# the sixteen values of a code, doubled
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
mxfp4, nvfp4 = packed("mxfp4", 39, 32, 17, instead=q5_0), packed("nvfp4", 40, 64, 36)


@part
def unit(power: int) -> Floats:
    """Half of 2 ** (power - 127), in every lane: denormal below 2."""
    small = (power < 2) * (0x200000 << (power & 1))
    return as_floats(intrinsics.spread_bits(small | (power >= 2) * (power - 1) << 23))


@mxfp4.unpack
def unpack_mxfp4(y, x, n):
    values = load(E2M1, 0)
    for b in range(n):
        at, out = x + b * 17, b * 32
        d, q = unit(byte_at(at, 0)), bytes_at(at, 1)
        store(y, out, pick(values, q) * d)
        store(y, out + 16, pick(values, q >> 4) * d)


@mxfp4.dot
def dot_mxfp4(x, w, n):
    values, a = load(E2M1, 0), intrinsics.splat(0.0)
    for i in range(0, n, 32):
        q = bytes_at(w, 1)
        v = pick(values, q) * load(x, i)
        a = fma(fma(pick(values, q >> 4), load(x, i + 16), v), unit(byte_at(w, 0)), a)
        w += 17
    return intrinsics.total(a)
