"""Pack iq4_nl and iq4_xs, whose codes index a table of sixteen values: bit for bit as ggml.

quantize_row_iq4_nl_impl of ggml-quants.c. Its sixteen trials of a scale run at once, one a lane, summed in ggml's
order.
"""

import numpy as np

from packtrain.dtypes import intrinsics
from packtrain.dtypes.intrinsics import compiled_function, load, peek, pick, poke, scratch, store
from packtrain.dtypes.iq import NL, iq4_nl, iq4_xs
from packtrain.dtypes.lattice import put_point_weights
from packtrain.dtypes.weighted_packing import sum_of_squares

f32 = np.float32
NOTHING = f32(1e-15)  # a group without larger values is all zeros
MIDDLES = np.append((NL[:-1] + NL[1:]) / 2, np.inf).astype(f32)  # between neighbours of the table
NUM_TRIALS = 16


@intrinsics.part
def nearest_codes(v: intrinsics.F32x16) -> intrinsics.I32x16:
    """Return the codes of the nearest table values, of two as near the upper one: how many middles are passed."""
    midpoints = load(MIDDLES, 0)
    at = intrinsics.select_less(v, peek(MIDDLES, 7), 0.0, 8.0)
    at = at + intrinsics.select_less(v, pick(midpoints, intrinsics.to_bits(at) + 3), 0.0, 4.0)
    at = at + intrinsics.select_less(v, pick(midpoints, intrinsics.to_bits(at) + 1), 0.0, 2.0)
    at = at + intrinsics.select_less(v, pick(midpoints, intrinsics.to_bits(at)), 0.0, 1.0)
    return intrinsics.to_bits(at)


@compiled_function
def fit_table_scale(x: int, w: int) -> f32:
    """Return the scale of 32 f32 at x, weighted by w: the best that maps their extreme to 127, or to -134 … -120."""
    extreme_value, code_values, inverses = intrinsics.extreme(x, 32), load(NL, 0), scratch(16)
    if abs(extreme_value) < NOTHING:
        return f32(0)
    poke(inverses, 0, f32(1) / (-extreme_value / f32(-127)))
    for trial_index in range(1, NUM_TRIALS):
        poke(inverses, trial_index, f32(trial_index - 135) / extreme_value)
    inverse, lx, ll = load(inverses, 0), intrinsics.splat(0.0), intrinsics.splat(0.0)
    for i in range(32):
        value = pick(code_values, nearest_codes(inverse * peek(x, i)))
        weighted_value = value * peek(w, i)
        lx = lx + weighted_value * peek(x, i)
        ll = ll + weighted_value * value
    store(inverses, 0, lx)
    sums = scratch(16)
    store(sums, 0, ll)
    scale, best_score = f32(0), f32(0)
    for trial_index in range(NUM_TRIALS):
        sum_lx, sum_ll = peek(inverses, trial_index), peek(sums, trial_index)
        if sum_ll > 0 and (trial_index == 0 or sum_lx * sum_lx > best_score * sum_ll):
            scale = sum_lx / sum_ll
            best_score = scale * sum_lx
    return scale


@intrinsics.part
def put_table_codes(y: int, x: int, scale: f32) -> None:
    """Write the table codes of 32 f32 at x, with this scale, to 16 bytes at y."""
    inverse = f32(1) / scale if scale != 0 else f32(0)
    low, high = nearest_codes(load(x, 0) * inverse), nearest_codes(load(x, 16) * inverse)
    intrinsics.put_bytes(y, 0, low | (high << 4))


@compiled_function
def put_iq4_nl_block(y: int, x: int, w: int) -> None:
    """Write 32 f32 at x as a block of iq4_nl at y; w: address of the columns' weights, or 0."""
    weights = scratch(32)
    put_point_weights(weights, x, w, 32, f32(2) * sum_of_squares(x, 32) / f32(32))
    scale = fit_table_scale(x, weights)
    intrinsics.put_half(y, 0, scale)
    put_table_codes(y + 2, x, scale)


@compiled_function
def put_iq4_xs_block(y: int, x: int, w: int) -> None:
    """Write 256 f32 at x as a block of iq4_xs, with eight scales of six bits, at y; w: columns' weights, or 0."""
    weights, scales, high_bits = scratch(32), scratch(16), 0
    spread = f32(2) * sum_of_squares(x, 256) / f32(256)
    store(scales, 0, intrinsics.splat(0.0))
    for i in range(8):
        put_point_weights(weights, x + i * 128, w + i * 128 if w != 0 else 0, 32, spread)
        poke(scales, i, fit_table_scale(x + i * 128, weights))
    d = -intrinsics.extreme(scales, 16) / f32(32)
    inverse = f32(1) / d if d != 0 else f32(0)
    intrinsics.put_half(y, 0, d)
    for i in range(8):
        scale = max(intrinsics.rounded_int(inverse * peek(scales, i), 31), -32)
        put_table_codes(y + 8 + i * 16, x + i * 128, d * f32(scale))
        poke(scales, i, f32(scale + 32))
        high_bits |= (scale + 32) >> 4 << (2 * i)
    intrinsics.put_short(y, 1, high_bits)
    for i in range(4):
        low_code, high_code = int(peek(scales, 2 * i)) & 15, int(peek(scales, 2 * i + 1)) & 15
        intrinsics.put_byte(y, 4 + i, low_code | (high_code << 4))


@iq4_nl.pack
def pack_iq4_nl(y, x):
    put_iq4_nl_block(y, x, 0)


@iq4_nl.weigh
def weigh_iq4_nl(y, x, w, _):
    put_iq4_nl_block(y, x, w)


@iq4_xs.pack
def pack_iq4_xs(y, x):
    put_iq4_xs_block(y, x, 0)


@iq4_xs.weigh
def weigh_iq4_xs(y, x, w, _):
    put_iq4_xs_block(y, x, w)
