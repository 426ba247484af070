"""Products of weights with activations that are integers, 32 of them with a step.

With one plane, activations are rounded to 8 bits; with three, to 24 bits: as exact as sums in f32, and up to eight rows
need less time than there. Integers lie as `dot_tile` says; those of n values take `nbytes(n, planes)`.
"""

import numpy as np
from numba import types

from packtrain.kernels import bits, code_panels, dot_tile, octets, simd
from packtrain.kernels.bits import as_floats, i32x16, put_bytes, spread_bits, to_bits, to_floats
from packtrain.kernels.call import each, kernel, part, part_of, spans, tasks_of, threads, words2
from packtrain.kernels.code_panels import HIGH, WIDE
from packtrain.kernels.codes import ROUND
from packtrain.kernels.dot_tile import CODES_FORM, LARGEST, MORE, ROWS, VALUES, is_parted, share_of
from packtrain.kernels.gemm import even
from packtrain.kernels.octets import arranged_by_4, arranged_by_8, arranged_by_16, sums_at
from packtrain.kernels.panels import turn16
from packtrain.kernels.rooms import explain, from_rooms
from packtrain.kernels.simd import LANES, address, f32x16, in1, in2, load, out1, out2, poke, store

i64, f32, void = types.int64, types.float32, types.void
BLOCK = 32
SMALL = 1 << 17  # below this many weights a parallel region does not pay
SERIAL = 1 << 12  # below this many activations, either
TINY = f32(1.1754944e-38)  # steps below are 0
MOST_1, MOST_3 = f32(127), f32(LARGEST)
OF_8, OF_4, OF_2, OF_1 = (ROWS[m] for m in (8, 4, 2, 1))
TASKS = 8  # of each thread
PANEL = 24  # rows of weights that all rows of x are multiplied with while they are in the cache
explain(octets, simd, bits)
packed2 = types.Array(types.uint8, 2, "C", readonly=True)
CODES = from_rooms("codes", part(CODES_FORM))
SCALES = from_rooms("scales", part(dot_tile.SCALES_FORM))
tile, panel_tile = dot_tile.tiles(CODES, SCALES), code_panels.tiles(CODES)
line = code_panels.lines(CODES, SCALES)
DEEP, WIDEST = 1024, 256  # values of rows of a panel, and of the longest chunk
LINE = (WIDEST + MORE) // 4  # f32 of one with its scales
LINES, PANEL_SIZE = LANES * LINE, WIDE * LANES * DEEP // VALUES * (VALUES + MORE) // 4
LESS, PARTED, WIDTH, SHARE, CHUNK = (np.zeros(64, np.int64) for _ in range(5))  # by kind
for dtype in CODES:
    CHUNK[dtype.number] = dtype.block_nbytes * max(1, VALUES // dtype.block)
    LESS[dtype.number], PARTED[dtype.number] = dtype.code["codes"].less, is_parted(dtype, 3)
    WIDTH[dtype.number], SHARE[dtype.number] = dot_tile.width_of(dtype), share_of(dtype)


@part(i64(i64, i64))
def nbytes(n, planes):
    """Of n integers; lines that are longer take less."""
    return (n + VALUES - 1) // VALUES * (VALUES * planes + 3 * MORE)


@part(f32(i64, f32))
def step_of(x, most):
    """Of 32 values: the largest becomes `most`. NaN if not all are finite."""
    a, b = load(x, 0), load(x, LANES)
    d = simd.largest(simd.maximum(simd.absolute(a), simd.absolute(b))) / most
    return (f32(0) if d < TINY else d) + simd.total((a - a) + (b - b))


@part(f32x16(f32x16, f32))
def codes_of(v, d):
    """Rounded to nearest, ties to even."""
    return (v / d + ROUND) - ROUND if d != 0 else v * f32(0)


@part(i32x16(f32x16, f32))
def integers_of(v, d):
    """The same for more bits, ties away from zero."""
    if d != 0:
        q = v / d
        return to_bits(q + simd.copysign(simd.splat(0.5), q))
    return spread_bits(0)


@part(void(i64, i64, f32, i64, i64))
def put_integers(y, x, d, planes, width):
    """Of 16 values, by planes at y."""
    if planes == 1:
        put_bytes(y, 0, to_bits(codes_of(load(x, 0), d)))
        return
    left = integers_of(load(x, 0), d)
    for p in range(planes - 1, 0, -1):
        low = ((left + 128) & 255) - 128
        put_bytes(y, width * p, low)
        left = (left - low) >> 8
    put_bytes(y, 0, left)


@part(i32x16(i64, i64, i64, i64))
def lane_sums(y, width, first, last):
    """Sums by lane of a sum of integers of some planes."""
    sums = spread_bits(0)
    for p in range(first, last):
        sums = sums << 8
        for at in range(width * p, width * (p + 1), LANES * 4):
            sums = sums + sums_at(y + at)
    return sums


@part(void(i64, i32x16, i64))
def sum_groups(y, v, lanes):
    """In the first lane of each group the sum of all; as f32 they are exact."""
    store(y, 0, to_floats(v))
    for first in range(0, LANES, lanes):
        s = f32(0)
        for lane in range(first, first + lanes):
            s += simd.peek(y, lane)
        poke(y, first, s)
    store(y, 0, as_floats(to_bits(load(y, 0))))


@kernel(void(i64, i64, i64))
def put_rests(y, kind, planes):
    """What follows the steps of a line, by kind."""
    width, bias = WIDTH[kind], LESS[kind]
    steps = y + width * planes
    rest, later = steps + MORE, steps + 2 * MORE
    lanes = SHARE[kind] // 4
    groups = LANES // lanes
    if bias == 0:
        store(rest, 0, simd.splat(0.0))
        store(later, 0, to_floats(lane_sums(y, width, 0, planes)) * load(steps, 0))
        for group in range(groups):
            s = f32(0)
            for lane in range(group * lanes, (group + 1) * lanes):
                s += simd.peek(later, lane)
            poke(rest, groups + group, s)
        return
    high = planes - 1 if planes > 1 and PARTED[kind] else planes
    store(rest, 0, as_floats(lane_sums(y, width, 0, high) * -bias))
    if planes == 1:
        sum_groups(later, lane_sums(y, width, 0, 1) * -bias, lanes)
        return
    store(later, 0, as_floats(lane_sums(y, width, high, planes) * -bias))


@part(void(i64, i64, i64, i64))
def arrange(y, width, share, planes):
    """Integers of groups in the order in which codes of theirs come."""
    for at in range(y, y + width * planes, width):
        if share == 16:
            arranged_by_16(at)
        elif share == 8:
            arranged_by_8(at)
        else:
            arranged_by_4(at)


@kernel(void(i64, i64, i64, i64, i64))
def round_row(y, x, n, kind, planes):
    """n f32 at x become integers at y, for products with weights of this kind."""
    max_code, width = MOST_1 if planes == 1 else MOST_3, WIDTH[kind]
    lanes = LANES * BLOCK // width
    for i in range(0, n, width):
        for group in range(width // BLOCK):
            at, d = x + 4 * (i + group * BLOCK), f32(0)
            if i + group * BLOCK < n:
                d = step_of(at, max_code)
                for half in range(0, BLOCK, LANES):
                    put_integers(y + group * BLOCK + half, at + 4 * half, d, planes, width)
            else:
                for place in range(group * BLOCK, width * planes, width):
                    put_bytes(y + place, 0, spread_bits(0))
                    put_bytes(y + place, LANES, spread_bits(0))
            for lane in range(group * lanes, (group + 1) * lanes):
                poke(y + width * planes, lane, d)
        arrange(y, width, SHARE[kind], planes)
        put_rests(y, kind, planes)
        y += width * planes + 3 * MORE


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
        if left >= 8:
            for j in range(start, stop, OF_8):
                to, tile_columns = row + 4 * j, min(OF_8, stop - j)
                tile(8, kind, planes, at, w + j * stride, stride, k, to, down, tile_columns, add)
            i += 8
        elif left >= 4:
            for j in range(start, stop, OF_4):
                to, tile_columns = row + 4 * j, min(OF_4, stop - j)
                tile(4, kind, planes, at, w + j * stride, stride, k, to, down, tile_columns, add)
            i += 4
        elif left >= 2:
            for j in range(start, stop, OF_2):
                to, tile_columns = row + 4 * j, min(OF_2, stop - j)
                tile(2, kind, planes, at, w + j * stride, stride, k, to, down, tile_columns, add)
            i += 2
        else:
            for j in range(start, stop, OF_1):
                to, tile_columns = row + 4 * j, min(OF_1, stop - j)
                tile(1, kind, planes, at, w + j * stride, stride, k, to, down, tile_columns, add)
            i += 1


@kernel(void(*[i64] * 12))
def dots(m, n, k, kind, planes, x, w, stride, y, add, start, stop):
    """Columns start … stop: each row of w is in the cache for all rows of x; y, the integers x and w are addresses."""
    for j in range(start, stop, PANEL):
        end = min(j + PANEL, stop)
        panel(m, n, k, kind, planes, x, w, stride, y, add, j, end)


@kernel(void(in2, i64, i64, i64, i64, i64))
def round_rows(x, y, kind, planes, start, stop):
    k = x.shape[1]
    for i in range(start, stop):
        round_row(y + i * nbytes(k, planes), address(x, i * k), k, kind, planes)


@kernel(void(in2, i64, i64, i64))
def round_all(x, y, kind, planes):
    m, k = x.shape
    if m * k < SERIAL or m == 1:
        round_rows(x, y, kind, planes, 0, m)
    else:
        spans(round_rows, (x, y, kind, planes), m, -(-m // threads()))


@part(i64(i64))
def share(n):
    """How many of n columns make a task: threads that come late must not be waited for."""
    return -(-n // (threads() * TASKS * PANEL)) * PANEL


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
    round_all(x, integers, kind, planes)
    task_args = m, n, k, kind, planes, integers, w.ctypes.data, w.shape[1], address(y, 0), i64(add)
    if n * k * m < SMALL:
        dots(*task_args, 0, n)
    else:
        spans(dots, task_args, n, share(n))


@kernel(void(words2, i64, i64, i64, i64, i64, i64, i64))
def some_dots(every, m, k, kind, planes, x, step, task):
    """Up to `step` columns of one of the products."""
    i, start = part_of(every, step, task)
    y, n, w, stride, add = every[i, 0], every[i, 1], every[i, 2], every[i, 3], every[i, 4]
    dots(m, n, k, kind, planes, x, w, stride, y, add, start, min(start + step, n))


@kernel(void(words2, in2, i64, i64, out1))
def products(every, x, kind, planes, work):
    """`product` with several weights of one kind.

    every  of each the address of y, N, the address of w, the bytes of a row, and add
    """
    m, k = x.shape
    integers = address(work, 0)
    round_all(x, integers, kind, planes)
    step = share(tasks_of(every, 1))
    each(some_dots, (every, m, k, kind, planes, integers, step), tasks_of(every, step))


@part(i64(i64, i64, i64, i64))
def whole_chunk(room, w, left, size):
    """The address of `size` bytes at w, or where only `left` are a row's, of those with zeros behind them."""
    if left >= size:
        return w
    for i in range(size):
        bits.put_byte(room, i, bits.byte_at(w, i) if i < left else 0)
    return room


@kernel(void(*[i64] * 8))
def pack_panel(panel, kind, w, stride, first, count, num_rows, wide):
    """Lines of `num_rows` rows at w, of `count` chunks from the `first` on, turned: see code_panels."""
    lines_of, room = simd.scratch(LINES), simd.scratch(LINE)
    per, chunk = (WIDTH[kind] + MORE) // 4, CHUNK[kind]
    for c in range(count):
        at = (first + c) * chunk
        for column in range(0, num_rows, LANES):
            rows = min(num_rows - column, LANES)
            for r in range(rows):
                source = w + (column + r) * stride + at
                line(
                    kind, address(lines_of, r * per), whole_chunk(room, source, stride - at, chunk)
                )
            for i in range(0, per, LANES):
                target = address(panel, ((c * per + i) * wide + column // LANES) * LANES)
                turn16(address(lines_of, i), per, rows - 1, LANES, target, wide * LANES)


@kernel(void(*[i64] * 11))
def panels(m, n, k, kind, x, w, stride, y, add, start, stop):
    """Columns start … stop of y (m, n) for many rows; y, the integers x and w are addresses."""
    panel, width = simd.scratch(PANEL_SIZE), WIDTH[kind]
    row_stride, size = nbytes(k, 1), width + 3 * MORE
    step = even(k, DEEP, WIDEST)
    for j in range(start, stop, WIDE * LANES):
        num_columns = min(stop - j, WIDE * LANES)
        wide = -(-num_columns // LANES)
        for p in range(0, k, step):
            first, count = p // width, -(-min(k - p, step) // width)
            pack_panel(panel, kind, w + j * stride, stride, first, count, num_columns, wide)
            keep = f32(1) if add or p else f32(0)
            for i in range(0, m, HIGH):
                to, at, rows = (
                    y + 4 * (i * n + j),
                    x + i * row_stride + first * size,
                    min(m - i, HIGH),
                )
                down = 4 * n
                if wide == 3:
                    panel_tile(
                        3, kind, at, row_stride, panel, count, to, keep, down, rows, num_columns
                    )
                elif wide == 2:
                    panel_tile(
                        2, kind, at, row_stride, panel, count, to, keep, down, rows, num_columns
                    )
                else:
                    panel_tile(
                        1, kind, at, row_stride, panel, count, to, keep, down, rows, num_columns
                    )


@kernel(void(out2, i64, i64, i64, packed2, types.boolean, i64, i64))
def columns(y, x, k, kind, w, add, start, stop):
    m, n = y.shape
    panels(m, n, k, kind, x, w.ctypes.data, w.shape[1], address(y, 0), i64(add), start, stop)


@kernel(void(out2, in2, i64, packed2, types.boolean, out1))
def product_of_many(y, x, kind, w, add, work):
    """The same as `product` with one plane, for many rows: weights are taken out of their blocks once for all."""
    m, k = x.shape
    n, integers = w.shape[0], address(work, 0)
    spans(round_rows, (x, integers, kind, 1), m, -(-m // threads()))
    spans(columns, (y, integers, k, kind, w, add), n, -(-n // (threads() * LANES)) * LANES)
