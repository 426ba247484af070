"""Packing iq4_nl and iq4_xs, whose codes index a table of sixteen values: bit for bit as ggml.

quantize_row_iq4_nl_impl of ggml-quants.c. Its sixteen trials of a scale are made at once, one in each lane; each sums
in ggml's order.
"""

import numpy as np

from packtrain.dtypes import intrinsics
from packtrain.dtypes.intrinsics import (
    Floats,
    Ints,
    code,
    load,
    part,
    peek,
    pick,
    poke,
    scratch,
    store,
)
from packtrain.dtypes.iq import NL, iq4_nl, iq4_xs
from packtrain.dtypes.weighted_packing import sum_of_squares, weigh

f32 = np.float32
NOTHING = f32(1e-15)  # a group without larger values is all zeros
MIDDLES = np.append((NL[:-1] + NL[1:]) / 2, np.inf).astype(f32)  # between neighbours of the table
TRIALS = 16


@part
def nearest(v: Floats) -> Ints:
    """Codes of the values of the table that are nearest, of two as near the upper one: how many middles are passed."""
    middles = load(MIDDLES, 0)
    at = intrinsics.select_less(v, peek(MIDDLES, 7), 0.0, 8.0)
    at = at + intrinsics.select_less(v, pick(middles, intrinsics.to_bits(at) + 3), 0.0, 4.0)
    at = at + intrinsics.select_less(v, pick(middles, intrinsics.to_bits(at) + 1), 0.0, 2.0)
    return intrinsics.to_bits(
        at + intrinsics.select_less(v, pick(middles, intrinsics.to_bits(at)), 0.0, 1.0)
    )


@code
def put_weights(to: int, x: int, w: int, spread: f32) -> None:
    """Of 32 values: their squares, or if columns have weights, those times a size."""
    if w != 0:
        weigh(to, x, w, 32, spread)
    else:
        for i in range(0, 32, 16):
            store(to, i, load(x, i) * load(x, i))


@code
def fit_table(x: int, w: int) -> f32:
    """The scale of 32 values with weights: the extreme is mapped to 127, then to -134 .. -120, the best is kept."""
    furthest, values, inverses = intrinsics.extreme(x, 32), load(NL, 0), scratch(16)
    if abs(furthest) < NOTHING:
        return f32(0)
    poke(inverses, 0, f32(1) / (-furthest / f32(-127)))
    for trial in range(1, TRIALS):
        poke(inverses, trial, f32(trial - 135) / furthest)
    inverse, lx, ll = load(inverses, 0), intrinsics.splat(0.0), intrinsics.splat(0.0)
    for i in range(32):
        value = pick(values, nearest(inverse * peek(x, i)))
        weighed = value * peek(w, i)
        lx = lx + weighed * peek(x, i)
        ll = ll + weighed * value
    store(inverses, 0, lx)
    sums = scratch(16)
    store(sums, 0, ll)
    scale, best = f32(0), f32(0)
    for trial in range(TRIALS):
        sum_lx, sum_ll = peek(inverses, trial), peek(sums, trial)
        if sum_ll > 0 and (trial == 0 or sum_lx * sum_lx > best * sum_ll):
            scale = sum_lx / sum_ll
            best = scale * sum_lx
    return scale


@part
def put_table(y: int, x: int, scale: f32) -> None:
    """32 codes."""
    inverse = f32(1) / scale if scale != 0 else f32(0)
    intrinsics.put_bytes(
        y, 0, nearest(load(x, 0) * inverse) | (nearest(load(x, 16) * inverse) << 4)
    )


@code
def put_nl(y: int, x: int, w: int) -> None:
    """A block of iq4_nl; w is 0 if columns have no weights."""
    weights = scratch(32)
    put_weights(weights, x, w, f32(2) * sum_of_squares(x, 32) / f32(32))
    scale = fit_table(x, weights)
    intrinsics.put_half(y, 0, scale)
    put_table(y + 2, x, scale)


@code
def put_xs(y: int, x: int, w: int) -> None:
    """A block of iq4_xs, whose eight scales have six bits each."""
    weights, scales, high = scratch(32), scratch(16), 0
    spread = f32(2) * sum_of_squares(x, 256) / f32(256)
    store(scales, 0, intrinsics.splat(0.0))
    for i in range(8):
        put_weights(weights, x + i * 128, w + i * 128 if w != 0 else 0, spread)
        poke(scales, i, fit_table(x + i * 128, weights))
    d = -intrinsics.extreme(scales, 16) / f32(32)
    inverse = f32(1) / d if d != 0 else f32(0)
    intrinsics.put_half(y, 0, d)
    for i in range(8):
        scale = max(intrinsics.whole(inverse * peek(scales, i), 31), -32)
        put_table(y + 8 + i * 16, x + i * 128, d * f32(scale))
        poke(scales, i, f32(scale + 32))
        high |= (scale + 32) >> 4 << (2 * i)
    intrinsics.put_short(y, 1, high)
    for i in range(4):
        low, upper = int(peek(scales, 2 * i)) & 15, int(peek(scales, 2 * i + 1)) & 15
        intrinsics.put_byte(y, 4 + i, low | (upper << 4))


@iq4_nl.pack
def pack_iq4_nl(y, x, n):
    for b in range(n):
        put_nl(y + b * 18, x + b * 128, 0)


@iq4_nl.weigh
def weigh_iq4_nl(y, x, w, n):
    for b in range(n):
        put_nl(y + b * 18, x + b * 128, w + b * 128)


@iq4_xs.pack
def pack_iq4_xs(y, x, n):
    for b in range(n):
        put_xs(y + b * 136, x + b * 1024, 0)


@iq4_xs.weigh
def weigh_iq4_xs(y, x, w, n):
    for b in range(n):
        put_xs(y + b * 136, x + b * 1024, w + b * 1024)
