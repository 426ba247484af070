"""Pack iq3_xxs and iq3_s: points of four values. quantize_row_iq3_xxs_impl and quantize_row_iq3_s_impl of ggml.

After a group of zeros in iq3_s, ggml 0.25 leaves the places of later groups unchanged: they are read with each other's
codes, with errors above 100 %. packtrain writes each group where it is read.
"""

import numpy as np

from packtrain.dtypes import intrinsics
from packtrain.dtypes.intrinsics import byte_at, put_bytes, put_word, scratch, shorts_at, word_at
from packtrain.dtypes.iq import iq3_s, iq3_xxs
from packtrain.dtypes.lattice import ANY, OFF, fit_block, put_nibbles, put_scales, sevens

f32 = np.float32


@iq3_xxs.snap
def snap_iq3_xxs(block, src, w, table):
    point_numbers, signs, scales, levels = scratch(32), scratch(8), scratch(16), scratch(4)
    max_scale = fit_block(
        point_numbers, signs, scales, src, w, table, 32, 4, 1, f32(1e-8), 15, f32(0.2), OFF
    )
    put_scales(block, levels, scales, max_scale, f32(1.0125))
    for i in range(4):
        put_bytes(block + 2, i * 16, shorts_at(point_numbers, i * 16))
    for i in range(8):
        put_word(block + 66, i, sevens(word_at(signs, i)) | (byte_at(levels, i) << 28))


@iq3_s.snap
def snap_iq3_s(to, src, w, table):
    numbers, signs, scales, levels = scratch(32), scratch(8), scratch(16), scratch(4)
    highest = fit_block(numbers, signs, scales, src, w, table, 32, 4, 0, f32(0), 9, f32(0.2), ANY)
    put_scales(to, levels, scales, highest, f32(1.033))
    put_nibbles(to + 106, levels, 8)
    for i in range(4):
        put_bytes(to + 2, i * 16, shorts_at(numbers, i * 16))
        intrinsics.put_short(to + 66, i, intrinsics.set_lanes(shorts_at(numbers, i * 16) >> 8))
    for i in range(8):
        put_word(to + 74, i, word_at(signs, i))
