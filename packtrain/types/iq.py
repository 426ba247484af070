"""The I types: codes choose from tables instead of counting steps. Formats: ggml-common.h."""

import numpy as np

from packtrain.types.k import q4_K
from packtrain.types.legacy import q5_0
from packtrain.types.room import packed
from packtrain.types.words import byte_at, bytes_at, half_at, load, pick, short_at, store

f32 = np.float32
# the sixteen values that iq4_nl and iq4_xs choose from
NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], f32)
iq1_s, iq1_m = packed("iq1_s", 19, 256, 50), packed("iq1_m", 29, 256, 56)
iq2_xxs, iq2_xs, iq2_s = (
    packed("iq2_xxs", 16, 256, 66),
    packed("iq2_xs", 17, 256, 74),
    packed("iq2_s", 22, 256, 82),
)
iq3_xxs, iq3_s = packed("iq3_xxs", 18, 256, 98), packed("iq3_s", 21, 256, 110)
iq4_nl = packed("iq4_nl", 20, 32, 18, instead=q5_0)
iq4_xs = packed("iq4_xs", 23, 256, 136, instead=q4_K)


@iq4_nl.unpack
def unpack_iq4_nl(y, x, n):
    values = load(NL, 0)
    for b in range(n):
        at, out = x + b * 18, b * 32
        d, q = half_at(at, 0), bytes_at(at, 2)
        store(y, out, pick(values, q) * d)
        store(y, out + 16, pick(values, q >> 4) * d)


@iq4_xs.unpack
def unpack_iq4_xs(y, x, n):
    values = load(NL, 0)
    for b in range(n):
        at, out = x + b * 136, b * 256
        d, high = half_at(at, 0), short_at(at, 1)
        for i in range(8):
            low = byte_at(at, 4 + i // 2) >> (i % 2 * 4)
            scale = d * f32(((low & 15) | ((high >> (i * 2) & 3) << 4)) - 32)
            q = bytes_at(at, 8 + i * 16)
            store(y, out + i * 32, pick(values, q) * scale)
            store(y, out + i * 32 + 16, pick(values, q >> 4) * scale)
