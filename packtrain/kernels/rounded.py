"""Products of weights with activations that are integers, 32 of them with a step.

With one plane, activations are rounded to 8 bits; with three, to 24 bits: as exact as sums in f32, and up to eight rows
need less time than there. Integers lie as `dot_tile` says; those of n values take `nbytes(n, planes)`.
"""

import numpy as np
from numba import types

from packtrain.kernels import bits, dot_tile, octets, simd
from packtrain.kernels.bits import as_floats, i32x16, put_bytes, spread_bits, to_bits, to_floats
from packtrain.kernels.call import kernel, part, spans, threads
from packtrain.kernels.codes import ROUND
from packtrain.kernels.dot_tile import CODES_FORM, MORE, ROWS, SECOND, VALUES
from packtrain.kernels.octets import sums_at
from packtrain.kernels.rooms import explain, from_rooms
from packtrain.kernels.simd import (
    LANES,
    absolute,
    address,
    copysign,
    f32x16,
    in1,
    in2,
    largest,
    load,
    maximum,
    out1,
    out2,
    peek,
    poke,
    splat,
    store,
    total,
)

i64, f32, void = types.int64, types.float32, types.void
BLOCK = 32
SMALL = 1 << 17  # below this many weights a parallel region does not pay
SERIAL = 1 << 12  # below this many activations, either
TINY = f32(1.1754944e-38)  # steps below are 0
MOST_1, MOST_3 = f32(127), f32(8355000)  # largest integers; of three planes a little less than fits
OF_4, OF_2, OF_1 = (ROWS[m] for m in (4, 2, 1))
PANEL = 24  # rows of weights that all rows of x are multiplied with while they are in the cache
explain(octets, simd, bits)
packed2 = types.Array(types.uint8, 2, "C", readonly=True)
CODES = from_rooms("codes", part(CODES_FORM))
SCALES = from_rooms("scales", part(dot_tile.SCALES_FORM))
tile = dot_tile.tiles(CODES, SCALES)
LESS, OFFSETS, PARTED, SPLIT, LINES = (np.zeros(64, np.int64) for _ in range(5))  # by kind
for dtype, code in ((t, t.code["codes"]) for t in CODES):
    LESS[dtype.number], OFFSETS[dtype.number] = code.less, code.less == 0
    PARTED[dtype.number] = code.signed
    LINES[dtype.number] = max(1, dtype.block // VALUES)  # of a chunk
    SPLIT[dtype.number] = dtype.layout is not None and dtype.layout.group < BLOCK


@part(i64(i64))
def line(planes):
    return VALUES * planes + 3 * MORE


@part(i64(i64, i64))
def nbytes(n, planes):
    return (n + VALUES - 1) // VALUES * line(planes)


@part(f32(i64, f32))
def step_of(x, most):
    """Of 32 values: the largest becomes `most`. NaN if not all are finite."""
    a, b = load(x, 0), load(x, LANES)
    d = largest(maximum(absolute(a), absolute(b))) / most
    return (f32(0) if d < TINY else d) + total((a - a) + (b - b))


@part(f32x16(f32x16, f32))
def codes_of(v, d):
    """Rounded to nearest, ties to even."""
    return (v / d + ROUND) - ROUND if d != 0 else v * f32(0)


@part(i32x16(f32x16, f32))
def integers_of(v, d):
    """The same for more bits, ties away from zero."""
    if d != 0:
        q = v / d
        return to_bits(q + copysign(splat(0.5), q))
    return spread_bits(0)


@part(void(i64, i64, f32, i64))
def put_integers(y, x, d, planes):
    """Of 16 values, by planes at y."""
    if planes == 1:
        put_bytes(y, 0, to_bits(codes_of(load(x, 0), d)))
        return
    left = integers_of(load(x, 0), d)
    for p in range(planes - 1, 0, -1):
        low = ((left + 128) & 255) - 128
        put_bytes(y, VALUES * p, low)
        left = (left - low) >> 8
    put_bytes(y, 0, left)


@part(i32x16(i64, i64, i64))
def lane_sums(y, first, last):
    """Sums by fours of integers of some planes of 64 values."""
    sums = sums_at(y + VALUES * first)
    for p in range(first + 1, last):
        sums = (sums << 8) + sums_at(y + VALUES * p)
    return sums


@part(void(i64, i64, i64, i64))
def put_sums(y, sums, lines, place):
    """The sums of four groups, of which `sums` has four parts each, for the offsets of a chunk whose rests are at y."""
    if place == 0:
        store(y, 0, splat(0.0))
    for group in range(4):
        s = (peek(sums, 4 * group) + peek(sums, 4 * group + 1)) + (
            peek(sums, 4 * group + 2) + peek(sums, 4 * group + 3)
        )
        poke(y, 4 * (lines + place) + group, s)


@kernel(void(i64, i64, i64, i64))
def put_rests(y, kind, planes, number):
    """What follows the steps of a line, by kind."""
    steps = y + VALUES * planes
    rest, later, second = steps + MORE, steps + 2 * MORE, y + SECOND
    if SPLIT[kind]:
        a, b = lane_sums(y, 0, planes), lane_sums(second, 0, planes)
    elif PARTED[kind] and planes > 1:
        a = lane_sums(y, 0, planes - 1) + lane_sums(second, 0, planes - 1)
        b = lane_sums(y, planes - 1, planes) + lane_sums(second, planes - 1, planes)
    else:
        a = lane_sums(y, 0, planes) + lane_sums(second, 0, planes)
        b = a
    if OFFSETS[kind]:
        place = number % LINES[kind]
        store(later, 0, to_floats(a) * load(steps, 0))
        put_sums(rest - place * line(planes), later, LINES[kind], place)
        return
    store(rest, 0, as_floats(a * -LESS[kind]))
    store(later, 0, as_floats(b * -LESS[kind]))


@kernel(void(i64, i64, i64, i64, i64))
def round_row(y, x, n, kind, planes):
    """n f32 at x become integers at y, for products with weights of this kind."""
    most = MOST_1 if planes == 1 else MOST_3
    for i in range(0, n, VALUES):
        for group in range(4):
            at, left = x + 4 * (i + group * BLOCK), n - i - group * BLOCK
            d, to = f32(0), y + group * LANES
            if left > 0:
                d = step_of(at, most)
                put_integers(to, at, d, planes)
                put_integers(to + SECOND, at + 4 * LANES, d, planes)
            else:
                for place in range(0, VALUES * planes, SECOND):
                    put_bytes(to + place, 0, spread_bits(0))
            for lane in range(4):
                poke(y + VALUES * planes, group * 4 + lane, d)
        put_rests(y, kind, planes, i // VALUES)
        y += line(planes)


@kernel(void(out1, in1))
def rounded(y, x):
    """y = x, each 32 values rounded to multiples of their step."""
    for i in range(0, len(x), BLOCK):
        d = step_of(address(x, i), MOST_1)
        for j in range(i, i + BLOCK, LANES):
            store(y, j, codes_of(load(x, j), d) * d)


@kernel(void(*[i64] * 12))
def panel(m, n, k, kind, planes, x, w, stride, y, add, start, stop):
    """Columns start … stop of y (m, n); y, the integers x and w are addresses."""
    i, down = i64(0), 4 * n
    while i < m:
        left, at, row = m - i, x + i * nbytes(k, planes), y + i * down
        if left >= 4:
            for j in range(start, stop, OF_4):
                to, some = row + 4 * j, min(OF_4, stop - j)
                tile(4, kind, planes, at, w + j * stride, stride, k, to, down, some, add)
            i += 4
        elif left >= 2:
            for j in range(start, stop, OF_2):
                to, some = row + 4 * j, min(OF_2, stop - j)
                tile(2, kind, planes, at, w + j * stride, stride, k, to, down, some, add)
            i += 2
        else:
            for j in range(start, stop, OF_1):
                to, some = row + 4 * j, min(OF_1, stop - j)
                tile(1, kind, planes, at, w + j * stride, stride, k, to, down, some, add)
            i += 1


@kernel(void(out2, i64, i64, i64, i64, packed2, types.boolean, i64, i64))
def dots(y, x, k, kind, planes, w, add, start, stop):
    """Columns start … stop: each row of w is in the cache for all rows of x."""
    m, n = y.shape
    for j in range(start, stop, PANEL):
        given = m, n, k, kind, planes, x, w.ctypes.data, w.shape[1], address(y, 0), i64(add)
        panel(*given, j, min(j + PANEL, stop))


@kernel(void(in2, i64, i64, i64, i64, i64))
def round_rows(x, y, kind, planes, start, stop):
    k = x.shape[1]
    for i in range(start, stop):
        round_row(y + i * nbytes(k, planes), address(x, i * k), k, kind, planes)


@kernel(void(out2, in2, i64, packed2, types.boolean, i64, out1))
def product(y, x, kind, w, add, planes, work):
    """y = rounded(x) @ w.T, or y + rounded(x) @ w.T.

    x       (M, K)          f32; K is a multiple of 32 and of the block
    w       (N, row bytes)  packed, of a kind in CODES
    y       (M, N)          f32
    planes  1 or 3
    work    (M * nbytes(K, planes) / 4,)  f32
    """
    m, k = x.shape
    n, integers = w.shape[0], address(work, 0)
    if m * k < SERIAL or m == 1:
        round_rows(x, integers, kind, planes, 0, m)
    else:
        spans(round_rows, (x, integers, kind, planes), m, -(-m // threads()))
    given = (y, integers, k, kind, planes, w, add)
    if n * k * m < SMALL:
        dots(*given, 0, n)
    else:
        spans(dots, given, n, -(-n // (threads() * LANES)) * LANES)
