"""Multiply quantized weights by activations that are rounded to integers, 32 of them with one step.

With one plane, activations are rounded to 8 bits; with three, to 24 bits: errors are at most 1.4e-6 of the mean result
(0.7e-6 for sums in f32), and up to eight rows need less time than in f32. A token of `110m` in Q4_0 or Q4_K_M took 6.3
or 6.1 ms with codes as f32, now 3.2 or 3.6 ms. Integers lie as `dot_tile` says; n values take `nbytes(n, planes)`.
"""

import numpy as np
from numba import types

from packtrain.kernels import bits, code_panels, dot_tile, octets, simd
from packtrain.kernels.bits import as_floats, i32x16, put_bytes, spread_bits, to_bits, to_floats
from packtrain.kernels.call import each, kernel, part, part_of, spans, tasks_of, threads, words2
from packtrain.kernels.code_panels import HIGH, WIDE
from packtrain.kernels.codes import ROUND
from packtrain.kernels.dot_tile import (
    CODES_FORM,
    LANES_NBYTES,
    MAX_INTEGER,
    ROWS,
    VALUES,
    codes_per_group,
    needs_split_sums,
)
from packtrain.kernels.gemm import even_parts
from packtrain.kernels.octets import reorder_by_4, reorder_by_8, reorder_by_16, sum_fours_at
from packtrain.kernels.panels import transpose16
from packtrain.kernels.rooms import bind_placeholders, compile_role
from packtrain.kernels.simd import LANES, address, f32x16, in1, in2, load, out1, out2, poke, store

i64, f32, void = types.int64, types.float32, types.void
BLOCK = 32
# Below this many weights a region does not pay; above, it costs 2 of the 60 µs of a 768 x 768 product.
MIN_PARALLEL_WEIGHTS = 1 << 17
MIN_PARALLEL_VALUES = 1 << 12  # below this many activations, either
MIN_STEP = f32(1.1754944e-38)  # smaller steps become 0
MAX_INT_1, MAX_INT_3 = f32(127), f32(MAX_INTEGER)
COLUMNS_OF_8, COLUMNS_OF_4, COLUMNS_OF_2, COLUMNS_OF_1 = (ROWS[m] for m in (8, 4, 2, 1))
TASKS_PER_THREAD = 8
PANEL = 24  # rows of weights that all rows of x are multiplied with while they are in the cache
bind_placeholders(octets, simd, bits)
packed2 = types.Array(types.uint8, 2, "C", readonly=True)
CODES = compile_role("codes", part(CODES_FORM))
SCALE_FUNCTIONS = compile_role("scales", part(dot_tile.SCALES_FORM))
row_tile, chunk_tile = dot_tile.dot_tiles(CODES, SCALE_FUNCTIONS), code_panels.panel_tiles(CODES)
emit_weight_line = code_panels.weight_lines(CODES, SCALE_FUNCTIONS)
DEEP, MAX_CHUNK = 1024, 256  # values of a row in a panel, and of the longest chunk
LINE_SIZE = (MAX_CHUNK + LANES_NBYTES) // 4  # f32 of a line: a chunk and its scales
LINES, PANEL_SIZE = LANES * LINE_SIZE, WIDE * LANES * DEEP // VALUES * (VALUES + LANES_NBYTES) // 4
CODE_BIAS, IS_SPLIT, WIDTH, SHARE, CHUNK = (np.zeros(64, np.int64) for _ in range(5))  # by qtype
for dtype in CODES:
    CHUNK[dtype.number] = dtype.block_nbytes * max(1, VALUES // dtype.block)
    CODE_BIAS[dtype.number], IS_SPLIT[dtype.number] = (
        dtype.code["codes"].code_offset,
        needs_split_sums(dtype, 3),
    )
    WIDTH[dtype.number], SHARE[dtype.number] = dot_tile.width_of(dtype), codes_per_group(dtype)


@part(i64(i64, i64))
def nbytes(n, planes):
    """Return the bytes of n rounded integers with their steps and corrections; types with longer lines need less."""
    return (n + VALUES - 1) // VALUES * (VALUES * planes + 3 * LANES_NBYTES)


@part(f32(i64, f32))
def block_step(x, max_code):
    """Return the step that makes the largest of 32 values `max_code`; NaN if not all values are finite."""
    a, b = load(x, 0), load(x, LANES)
    d = simd.largest(simd.maximum(simd.absolute(a), simd.absolute(b))) / max_code
    return (f32(0) if d < MIN_STEP else d) + simd.total((a - a) + (b - b))


@part(f32x16(f32x16, f32))
def rounded_codes(v, d):
    """Return v / d rounded to nearest, ties to even, as f32; zeros if the step d is 0."""
    return (v / d + ROUND) - ROUND if d != 0 else v * f32(0)


@part(i32x16(f32x16, f32))
def rounded_integers(v, d):
    """Return v / d rounded to nearest, ties away from zero, as i32; zeros if the step d is 0."""
    if d != 0:
        q = v / d
        return to_bits(q + simd.copysign(simd.splat(0.5), q))
    return spread_bits(0)


@part(void(i64, i64, f32, i64, i64))
def put_integers(y, x, d, planes, width):
    """Round 16 values and write the integers to y: a byte each, or three bytes in planes `width` bytes apart."""
    if planes == 1:
        put_bytes(y, 0, to_bits(rounded_codes(load(x, 0), d)))
        return
    remainder = rounded_integers(load(x, 0), d)
    for p in range(planes - 1, 0, -1):
        low_byte = ((remainder + 128) & 255) - 128
        put_bytes(y, width * p, low_byte)
        remainder = (remainder - low_byte) >> 8
    put_bytes(y, 0, remainder)


@part(i32x16(i64, i64, i64, i64))
def lane_sums(y, width, first_plane, plane_stop):
    """Return the sums by lane of the integers of a line, put together from some of their planes."""
    sums = spread_bits(0)
    for p in range(first_plane, plane_stop):
        sums = sums << 8
        for byte_offset in range(width * p, width * (p + 1), LANES * 4):
            sums = sums + sum_fours_at(y + byte_offset)
    return sums


@part(void(i64, i32x16, i64))
def sum_groups(y, v, lanes):
    """Write the sum of each group of `lanes` lanes of v to the group's first lane at y; as f32 the sums are exact."""
    store(y, 0, to_floats(v))
    for first_lane in range(0, LANES, lanes):
        s = f32(0)
        for lane in range(first_lane, first_lane + lanes):
            s += simd.peek(y, lane)
        poke(y, first_lane, s)
    store(y, 0, as_floats(to_bits(load(y, 0))))


@kernel(void(i64, i64, i64))
def put_corrections(y, qtype, planes):
    """Write, after a line's steps, the sums with which `dot_tile` corrects products for code biases or offsets."""
    width, bias = WIDTH[qtype], CODE_BIAS[qtype]
    steps_ptr = y + width * planes
    corrections, more_corrections = steps_ptr + LANES_NBYTES, steps_ptr + 2 * LANES_NBYTES
    lanes_per_group = SHARE[qtype] // 4
    num_groups = LANES // lanes_per_group
    if bias == 0:
        store(corrections, 0, simd.splat(0.0))
        store(more_corrections, 0, to_floats(lane_sums(y, width, 0, planes)) * load(steps_ptr, 0))
        for group in range(num_groups):
            s = f32(0)
            for lane in range(group * lanes_per_group, (group + 1) * lanes_per_group):
                s += simd.peek(more_corrections, lane)
            poke(corrections, num_groups + group, s)
        return
    num_high_planes = planes - 1 if planes > 1 and IS_SPLIT[qtype] else planes
    store(corrections, 0, as_floats(lane_sums(y, width, 0, num_high_planes) * -bias))
    if planes == 1:
        sum_groups(more_corrections, lane_sums(y, width, 0, 1) * -bias, lanes_per_group)
        return
    store(more_corrections, 0, as_floats(lane_sums(y, width, num_high_planes, planes) * -bias))


@part(void(i64, i64, i64, i64))
def reorder_groups(y, width, group_codes, planes):
    """Reorder the integers of each plane at y as `dot_tile` reads the codes of their groups."""
    for plane_ptr in range(y, y + width * planes, width):
        if group_codes == 16:
            reorder_by_16(plane_ptr)
        elif group_codes == 8:
            reorder_by_8(plane_ptr)
        else:
            reorder_by_4(plane_ptr)


@kernel(void(i64, i64, i64, i64, i64))
def round_row(y, x, n, qtype, planes):
    """Round n f32 at x to integers at y, as products with weights of type `qtype` read them."""
    max_code, width = MAX_INT_1 if planes == 1 else MAX_INT_3, WIDTH[qtype]
    lanes_per_group = LANES * BLOCK // width
    for i in range(0, n, width):
        for group in range(width // BLOCK):
            block_ptr, d = x + 4 * (i + group * BLOCK), f32(0)
            if i + group * BLOCK < n:
                d = block_step(block_ptr, max_code)
                for half in range(0, BLOCK, LANES):
                    put_integers(y + group * BLOCK + half, block_ptr + 4 * half, d, planes, width)
            else:
                for byte_offset in range(group * BLOCK, width * planes, width):
                    put_bytes(y + byte_offset, 0, spread_bits(0))
                    put_bytes(y + byte_offset, LANES, spread_bits(0))
            for lane in range(group * lanes_per_group, (group + 1) * lanes_per_group):
                poke(y + width * planes, lane, d)
        reorder_groups(y, width, SHARE[qtype], planes)
        put_corrections(y, qtype, planes)
        y += width * planes + 3 * LANES_NBYTES


@kernel(void(out1, in1))
def rounded(y, x):
    """y = x, each 32 values rounded to multiples of their 8-bit step."""
    for i in range(0, len(x), BLOCK):
        d = block_step(address(x, i), MAX_INT_1)
        for j in range(i, i + BLOCK, LANES):
            store(y, j, rounded_codes(load(x, j), d) * d)


@kernel(void(*[i64] * 12))
def product_panel(m, n, k, qtype, planes, x, w, ldw, y, add, start, stop):
    """Compute columns start … stop - 1 of y (m, n) = x @ w.T by tiles; y, the integers x and w are addresses."""
    i, ldy = i64(0), 4 * n
    while i < m:
        num_left, x_at, y_at = m - i, x + i * nbytes(k, planes), y + i * ldy
        if num_left >= 8:
            for j in range(start, stop, COLUMNS_OF_8):
                to, tile_columns = y_at + 4 * j, min(COLUMNS_OF_8, stop - j)
                row_tile(8, qtype, planes, x_at, w + j * ldw, ldw, k, to, ldy, tile_columns, add)
            i += 8
        elif num_left >= 4:
            for j in range(start, stop, COLUMNS_OF_4):
                to, tile_columns = y_at + 4 * j, min(COLUMNS_OF_4, stop - j)
                row_tile(4, qtype, planes, x_at, w + j * ldw, ldw, k, to, ldy, tile_columns, add)
            i += 4
        elif num_left >= 2:
            for j in range(start, stop, COLUMNS_OF_2):
                to, tile_columns = y_at + 4 * j, min(COLUMNS_OF_2, stop - j)
                row_tile(2, qtype, planes, x_at, w + j * ldw, ldw, k, to, ldy, tile_columns, add)
            i += 2
        else:
            for j in range(start, stop, COLUMNS_OF_1):
                to, tile_columns = y_at + 4 * j, min(COLUMNS_OF_1, stop - j)
                row_tile(1, qtype, planes, x_at, w + j * ldw, ldw, k, to, ldy, tile_columns, add)
            i += 1


@kernel(void(*[i64] * 12))
def dots(m, n, k, qtype, planes, x, w, ldw, y, add, start, stop):
    """Compute columns start … stop - 1 of y = x @ w.T by panels of w, which stay in the cache for all rows of x."""
    for j in range(start, stop, PANEL):
        panel_stop = min(j + PANEL, stop)
        product_panel(m, n, k, qtype, planes, x, w, ldw, y, add, j, panel_stop)


@kernel(void(in2, i64, i64, i64, i64, i64))
def round_rows(x, y, qtype, planes, row_start, row_stop):
    k = x.shape[1]
    for i in range(row_start, row_stop):
        round_row(y + i * nbytes(k, planes), address(x, i * k), k, qtype, planes)


@kernel(void(in2, i64, i64, i64))
def round_all(x, y, qtype, planes):
    m, k = x.shape
    if m * k < MIN_PARALLEL_VALUES or m == 1:
        round_rows(x, y, qtype, planes, 0, m)
    else:
        spans(round_rows, (x, y, qtype, planes), m, -(-m // threads()))


@part(i64(i64))
def columns_per_task(n):
    """Return how many of n columns make a task: so few that nobody waits for a late thread."""
    return -(-n // (threads() * TASKS_PER_THREAD * PANEL)) * PANEL


@kernel(void(out2, in2, i64, packed2, types.boolean, i64, out1))
def product(y, x, qtype, w, add, planes, workspace):
    """y = rounded(x) @ w.T, plus y if `add`.

    x          (M, K)          f32; K is a multiple of 32 and of the block
    w          (N, row bytes)  packed, of a type in CODES
    y          (M, N)          f32
    planes     1 or 3
    workspace  (M * nbytes(K, planes) / 4,)  f32
    """
    m, k = x.shape
    n, integers = w.shape[0], address(workspace, 0)
    round_all(x, integers, qtype, planes)
    task_args = m, n, k, qtype, planes, integers, w.ctypes.data, w.shape[1], address(y, 0), i64(add)
    if n * k * m < MIN_PARALLEL_WEIGHTS:
        dots(*task_args, 0, n)
    else:
        spans(dots, task_args, n, columns_per_task(n))


@kernel(void(words2, i64, i64, i64, i64, i64, i64, i64))
def product_task(every, m, k, qtype, planes, x, columns_per_part, task):
    """Compute up to `columns_per_part` columns of one of several products (rows of `every`) with the same x."""
    i, col_start = part_of(every, columns_per_part, task)
    y, n, w, ldw, add = every[i, 0], every[i, 1], every[i, 2], every[i, 3], every[i, 4]
    dots(m, n, k, qtype, planes, x, w, ldw, y, add, col_start, min(col_start + columns_per_part, n))


@kernel(void(words2, in2, i64, i64, out1))
def products(every, x, qtype, planes, workspace):
    """Compute `product` of the same rows with several weights of one type.

    every  of each product the address of y, N, the address of w, the bytes of a row of w, and add
    """
    m, k = x.shape
    integers = address(workspace, 0)
    round_all(x, integers, qtype, planes)
    step = columns_per_task(tasks_of(every, 1))
    each(product_task, (every, m, k, qtype, planes, integers, step), tasks_of(every, step))


@part(i64(i64, i64, i64, i64))
def padded_chunk(buffer, w, left, chunk_nbytes):
    """Return w, or if only `left` of `chunk_nbytes` bytes belong to the row, `buffer` with these and zeros behind."""
    if left >= chunk_nbytes:
        return w
    for i in range(chunk_nbytes):
        bits.put_byte(buffer, i, bits.byte_at(w, i) if i < left else 0)
    return buffer


@kernel(void(*[i64] * 8))
def pack_panel(panel_ptr, qtype, w, ldw, first_chunk, count, num_rows, wide):
    """Write `count` chunks of `num_rows` rows at w as a panel of transposed lines: see code_panels."""
    lines_ptr, room = simd.scratch(LINES), simd.scratch(LINE_SIZE)
    per, chunk = (WIDTH[qtype] + LANES_NBYTES) // 4, CHUNK[qtype]
    for c in range(count):
        at = (first_chunk + c) * chunk
        for column in range(0, num_rows, LANES):
            lines_here = min(num_rows - column, LANES)
            for r in range(lines_here):
                source = w + (column + r) * ldw + at
                emit_weight_line(
                    qtype, address(lines_ptr, r * per), padded_chunk(room, source, ldw - at, chunk)
                )
            for i in range(0, per, LANES):
                target = address(panel_ptr, ((c * per + i) * wide + column // LANES) * LANES)
                transpose16(address(lines_ptr, i), per, lines_here - 1, LANES, target, wide * LANES)


@kernel(void(*[i64] * 11))
def panels(m, n, k, qtype, x, w, ldw, y, add, start, stop):
    """Compute columns start … stop - 1 of y (m, n) = x @ w.T for many rows; y, the integers x and w are addresses."""
    panel, width = simd.scratch(PANEL_SIZE), WIDTH[qtype]
    x_stride, line_nbytes = nbytes(k, 1), width + 3 * LANES_NBYTES
    depth_step = even_parts(k, DEEP, MAX_CHUNK)
    for j in range(start, stop, WIDE * LANES):
        num_columns = min(stop - j, WIDE * LANES)
        wide = -(-num_columns // LANES)
        for p in range(0, k, depth_step):
            first_chunk, chunks = p // width, -(-min(k - p, depth_step) // width)
            pack_panel(panel, qtype, w + j * ldw, ldw, first_chunk, chunks, num_columns, wide)
            beta = f32(1) if add or p else f32(0)
            for i in range(0, m, HIGH):
                to, x_at, m_rows = (
                    y + 4 * (i * n + j),
                    x + i * x_stride + first_chunk * line_nbytes,
                    min(m - i, HIGH),
                )
                ldy = 4 * n
                if wide == 3:
                    chunk_tile(
                        3, qtype, x_at, x_stride, panel, chunks, to, beta, ldy, m_rows, num_columns
                    )
                elif wide == 2:
                    chunk_tile(
                        2, qtype, x_at, x_stride, panel, chunks, to, beta, ldy, m_rows, num_columns
                    )
                else:
                    chunk_tile(
                        1, qtype, x_at, x_stride, panel, chunks, to, beta, ldy, m_rows, num_columns
                    )


@kernel(void(out2, i64, i64, i64, packed2, types.boolean, i64, i64))
def columns(y, x, k, qtype, w, add, start, stop):
    m, n = y.shape
    panels(m, n, k, qtype, x, w.ctypes.data, w.shape[1], address(y, 0), i64(add), start, stop)


@kernel(void(out2, in2, i64, packed2, types.boolean, out1))
def product_of_many(y, x, qtype, w, add, workspace):
    """Compute `product` with one plane for many rows: weights are taken out of their blocks once for all rows."""
    m, k = x.shape
    n, integers = w.shape[0], address(workspace, 0)
    spans(round_rows, (x, integers, qtype, 1), m, -(-m // threads()))
    spans(columns, (y, integers, k, qtype, w, add), n, -(-n // (threads() * LANES)) * LANES)
