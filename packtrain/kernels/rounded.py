"""Products of weights with activations that are rounded to 8 bits, 32 at a time, in integers.

Rounded values lie in the form that `dot_tile` names; n of them take `nbytes(n)`.
"""

import numpy as np
from numba import types

from packtrain.kernels import bits, dot_tile, octets, simd
from packtrain.kernels.bits import put_bytes, spread_bits, to_bits
from packtrain.kernels.call import kernel, part, spans, threads
from packtrain.kernels.codes import ROUND
from packtrain.kernels.dot_tile import CODES_FORM, LATER, LINE, RESTS, ROWS, SECOND, STEPS, VALUES
from packtrain.kernels.octets import add_starts, added, put_starts, sums_at
from packtrain.kernels.rooms import explain, from_rooms
from packtrain.kernels.simd import (
    LANES,
    absolute,
    address,
    f32x16,
    in1,
    in2,
    largest,
    load,
    maximum,
    out1,
    out2,
    poke,
    store,
    total,
)

i64, f32, void = types.int64, types.float32, types.void
BLOCK = 32
SMALL = 1 << 17  # below this many weights a parallel region does not pay
TINY = f32(1.1754944e-38)  # steps below are 0
OF_4, OF_2, OF_1 = (ROWS[m] for m in (4, 2, 1))
PANEL = 24  # rows of weights that all rows of x are multiplied with while they are in the cache
explain(octets, simd, bits)
packed2 = types.Array(types.uint8, 2, "C", readonly=True)
CODES = from_rooms("codes", part(CODES_FORM))
SCALES = from_rooms("scales", part(dot_tile.SCALES_FORM))
tile = dot_tile.tiles(CODES, SCALES)
LESS, SPLIT, OFFSETS = (np.zeros(64, np.int64) for _ in range(3))  # by kind
for dtype, less in ((t, t.code["codes"].less) for t in CODES):
    LESS[dtype.number], OFFSETS[dtype.number] = added(less), less == 0
    SPLIT[dtype.number] = dtype.layout is not None and dtype.layout.group < BLOCK


@part(i64(i64))
def nbytes(n):
    return (n + VALUES - 1) // VALUES * LINE


@part(f32(i64))
def step_of(x):
    """Of the codes of 32 values: the largest becomes 127. NaN if not all are finite."""
    a, b = load(x, 0), load(x, LANES)
    d = largest(maximum(absolute(a), absolute(b))) / f32(127)
    return (f32(0) if d < TINY else d) + total((a - a) + (b - b))


@part(f32x16(f32x16, f32))
def codes_of(v, d):
    """Rounded to nearest, ties to even."""
    return (v / d + ROUND) - ROUND if d != 0 else v * f32(0)


@kernel(void(i64, i64))
def put_rests(y, kind):
    """What follows the steps, by kind."""
    if OFFSETS[kind]:
        store(y + RESTS, 0, sums_at(y, y + SECOND) * load(y + STEPS, 0))
        return
    put_starts(y + RESTS, y, LESS[kind])
    put_starts(y + LATER, y + SECOND, LESS[kind])
    if not SPLIT[kind]:
        add_starts(y + RESTS, y + LATER)


@kernel(void(i64, i64, i64, i64))
def round_row(y, x, n, kind):
    """n f32 at x become rounded values at y, for products with weights of this kind."""
    for i in range(0, n, VALUES):
        for group in range(4):
            at, left = x + 4 * (i + group * BLOCK), n - i - group * BLOCK
            d, to = f32(0), y + group * LANES
            if left > 0:
                d = step_of(at)
                put_bytes(to, 0, to_bits(codes_of(load(at, 0), d)))
                put_bytes(to, SECOND, to_bits(codes_of(load(at, LANES), d)))
            else:
                put_bytes(to, 0, spread_bits(0))
                put_bytes(to, SECOND, spread_bits(0))
            for lane in range(4):
                poke(y + STEPS, group * 4 + lane, d)
        put_rests(y, kind)
        y += LINE


@kernel(void(out1, in1))
def rounded(y, x):
    """y = x, each 32 values rounded to multiples of their step."""
    for i in range(0, len(x), BLOCK):
        d = step_of(address(x, i))
        for j in range(i, i + BLOCK, LANES):
            store(y, j, codes_of(load(x, j), d) * d)


@kernel(void(*[i64] * 11))
def panel(m, n, k, kind, x, w, stride, y, add, start, stop):
    """Columns start … stop of y (m, n); y, the rounded x and w are addresses."""
    i, down = i64(0), 4 * n
    while i < m:
        left, at, row = m - i, x + i * nbytes(k), y + i * down
        if left >= 4:
            for j in range(start, stop, OF_4):
                to, some = row + 4 * j, min(OF_4, stop - j)
                tile(kind, 4, at, w + j * stride, stride, k, to, down, some, add)
            i += 4
        elif left >= 2:
            for j in range(start, stop, OF_2):
                to, some = row + 4 * j, min(OF_2, stop - j)
                tile(kind, 2, at, w + j * stride, stride, k, to, down, some, add)
            i += 2
        else:
            for j in range(start, stop, OF_1):
                to, some = row + 4 * j, min(OF_1, stop - j)
                tile(kind, 1, at, w + j * stride, stride, k, to, down, some, add)
            i += 1


@kernel(void(out2, i64, i64, i64, packed2, types.boolean, i64, i64))
def dots(y, x, k, kind, w, add, start, stop):
    """Columns start … stop: each row of w is in the cache for all rows of x."""
    m, n = y.shape
    for j in range(start, stop, PANEL):
        given = m, n, k, kind, x, w.ctypes.data, w.shape[1], address(y, 0), i64(add)
        panel(*given, j, min(j + PANEL, stop))


@kernel(void(out2, in2, i64, packed2, types.boolean, out1))
def product(y, x, kind, w, add, work):
    """y = rounded(x) @ w.T, or y + rounded(x) @ w.T.

    x     (M, K)           f32; K is a multiple of 32 and of the block
    w     (N, row bytes)   packed, of a kind in CODES
    y     (M, N)           f32
    work  (M * nbytes(K) / 4,)  f32
    """
    m, k = x.shape
    n = w.shape[0]
    for i in range(m):
        round_row(address(work, 0) + i * nbytes(k), address(x, i * k), k, kind)
    given = (y, address(work, 0), k, kind, w, add)
    if n * k * m < SMALL:
        dots(*given, 0, n)
    else:
        spans(dots, given, n, -(-n // (threads() * LANES)) * LANES)
