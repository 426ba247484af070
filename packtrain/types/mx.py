"""MXFP4: blocks of four-bit floats with a shared exponent (microscaling). Format: ggml-common.h."""

import numpy as np

from packtrain.types.legacy import q5_0
from packtrain.types.room import packed
from packtrain.types.words import as_floats, byte_at, bytes_at, load, pick, spread_bits, store

# the sixteen values of a code, doubled
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
mxfp4, nvfp4 = packed("mxfp4", 39, 32, 17, instead=q5_0), packed("nvfp4", 40, 64, 36)


@mxfp4.unpack
def unpack_mxfp4(y, x, n):
    values = load(E2M1, 0)
    for b in range(n):
        at, out = x + b * 17, b * 32
        power, q = byte_at(at, 0), bytes_at(at, 1)
        # half of 2 ** (power - 127): denormal below 2
        d = as_floats(spread_bits(0x200000 << power if power < 2 else (power - 1) << 23))
        store(y, out, pick(values, q) * d)
        store(y, out + 16, pick(values, q >> 4) * d)
