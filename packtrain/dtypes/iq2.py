"""Pack iq2_xxs, iq2_xs and iq2_s: points of eight values. quantize_row_iq2_xxs_impl and its siblings of ggml."""

import numpy as np

from packtrain.dtypes import intrinsics
from packtrain.dtypes.intrinsics import byte_at, put_byte, put_word, scratch, short_at, word_at
from packtrain.dtypes.iq import iq2_s, iq2_xs, iq2_xxs
from packtrain.dtypes.lattice import ALL, OFF, fit_block, put_nibbles, put_scales, sevens

f32 = np.float32
NOTHING = f32(1e-15)


@iq2_xxs.snap
def snap_iq2_xxs(block, src, w, table):
    numbers, signs, scales, levels = scratch(32), scratch(8), scratch(16), scratch(4)
    highest = fit_block(numbers, signs, scales, src, w, table, 32, 8, 1, NOTHING, 6, f32(0.1), ALL)
    put_scales(block, levels, scales, highest, f32(1))
    for i in range(8):
        for k in range(4):
            put_byte(block + 2, i * 8 + k, byte_at(numbers, 2 * (i * 4 + k)))
        put_word(block + 6, 2 * i, sevens(word_at(signs, i)) | (byte_at(levels, i) << 28))


@iq2_xs.snap
def snap_iq2_xs(to, src, w, table):
    numbers, signs, scales, levels = scratch(32), scratch(8), scratch(16), scratch(4)
    highest = fit_block(numbers, signs, scales, src, w, table, 16, 8, 1, NOTHING, 9, f32(0.1), OFF)
    put_scales(to, levels, scales, highest, f32(1))
    put_nibbles(to + 66, levels, 16)
    for i in range(32):
        intrinsics.put_short(to + 2, i, short_at(numbers, i) | ((byte_at(signs, i) & 127) << 9))


@iq2_s.snap
def snap_iq2_s(block, src, w, table):
    point_numbers, signs, scales, levels = scratch(32), scratch(8), scratch(16), scratch(4)
    max_scale = fit_block(
        point_numbers, signs, scales, src, w, table, 16, 8, 0, f32(1e-8), 9, f32(0.1), OFF
    )
    put_scales(block, levels, scales, max_scale, f32(0.9875))
    put_nibbles(block + 74, levels, 16)
    for i in range(2):
        intrinsics.put_bytes(block + 2, i * 16, intrinsics.shorts_at(point_numbers, i * 16))
    for i in range(8):
        put_word(block + 34, i, word_at(signs, i))
        high_bits = 0
        for k in range(4):
            high_bits |= short_at(point_numbers, i * 4 + k) >> 8 << (2 * k)
        put_byte(block + 66, i, high_bits)
