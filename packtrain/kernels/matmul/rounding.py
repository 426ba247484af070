"""Round activations to integers, 32 of them with one step, in lines as `dot_tile` reads them.

With one plane they have 8 bits, with three 24; n values take `rounded_row_nbytes(n, planes)`.
"""

import numpy as np

from packtrain.dtypes import ROUNDABLE
from packtrain.kernels.matmul import dot_tile
from packtrain.kernels.matmul.dot_tile import LANES_NBYTES, MAX_INTEGER, VALUES
from packtrain.kernels.quant.codes import ROUND
from packtrain.kernels.runtime.jit import kernel, part, spans, threads
from packtrain.kernels.runtime.kernel_types import f32
from packtrain.kernels.simd.simd_f32 import (
    LANES, absolute, address, copysign, largest, load, maximum, peek, poke, splat, store, total,
)  # fmt: skip
from packtrain.kernels.simd.simd_i32 import as_floats, put_bytes, spread_bits, to_bits, to_floats
from packtrain.kernels.simd.simd_u8 import reorder_by_4, reorder_by_8, reorder_by_16, sum_fours_at

BLOCK = 32
MIN_PARALLEL_VALUES = 1 << 12  # activations below which a region does not pay
MIN_STEP = f32(1.1754944e-38)  # smaller steps become 0
MAX_INT_1, MAX_INT_3 = f32(127), f32(MAX_INTEGER)
CODE_BIAS, IS_SPLIT, WIDTH, SHARE = (np.zeros(64, np.int64) for _ in range(4))  # by qtype
for dtype in ROUNDABLE:
    CODE_BIAS[dtype.number] = dtype.code["codes"].code_offset
    IS_SPLIT[dtype.number] = dot_tile.needs_split_sums(dtype, 3)
    WIDTH[dtype.number] = dot_tile.width_of(dtype)
    SHARE[dtype.number] = dot_tile.codes_per_group(dtype)


@part("i64(i64, i64)")
def nbytes(n, planes):
    """Return the bytes that round_row writes for n values in `planes` planes; types with longer lines need less."""
    return (n + VALUES - 1) // VALUES * (VALUES * planes + 3 * LANES_NBYTES)


@part("f32(i64, f32)")
def block_step(x, max_integer):
    """Return the step that makes the largest of 32 f32 at address x max_integer; NaN if not all of them are finite."""
    a, b = load(x, 0), load(x, LANES)
    d = largest(maximum(absolute(a), absolute(b))) / max_integer
    return (f32(0) if d < MIN_STEP else d) + total((a - a) + (b - b))


@part("f32x16(f32x16, f32)")
def rounded_codes(v, step):
    """Return v / step rounded to nearest, ties to even, as f32; zeros if the step is 0."""
    return (v / step + ROUND) - ROUND if step != 0 else v * f32(0)


@part("i32x16(f32x16, f32)")
def rounded_integers(v, step):
    """Return v / step rounded to nearest, ties away from zero, as i32; zeros if the step is 0."""
    if step != 0:
        q = v / step
        return to_bits(q + copysign(splat(0.5), q))
    return spread_bits(0)


@part("i64, i64, f32, i64, i64")
def put_integers(y, x, step, planes, width):
    """Round 16 f32 at x to multiples of `step`: integers at y, a byte each, or three in planes `width` bytes apart."""
    if planes == 1:
        put_bytes(y, 0, to_bits(rounded_codes(load(x, 0), step)))
        return
    remainder = rounded_integers(load(x, 0), step)
    for p in range(planes - 1, 0, -1):
        low_byte = ((remainder + 128) & 255) - 128
        put_bytes(y, width * p, low_byte)
        remainder = (remainder - low_byte) >> 8
    put_bytes(y, 0, remainder)


@part("i32x16(i64, i64, i64, i64)")
def lane_sums(y, width, first_plane, plane_stop):
    """Return sums by lane of `width` integers at address y, put together from planes first_plane … plane_stop - 1."""
    sums = spread_bits(0)
    for p in range(first_plane, plane_stop):
        sums = sums << 8
        for byte_offset in range(width * p, width * (p + 1), LANES * 4):
            sums = sums + sum_fours_at(y + byte_offset)
    return sums


@part("i64, i32x16, i64")
def sum_groups(y, v, lanes_per_group):
    """Write i32 v to address y: each group of lanes as its sum, in its first lane. As f32, the sums are exact."""
    store(y, 0, to_floats(v))
    for first_lane in range(0, LANES, lanes_per_group):
        s = f32(0)
        for lane in range(first_lane, first_lane + lanes_per_group):
            s += peek(y, lane)
        poke(y, first_lane, s)
    store(y, 0, as_floats(to_bits(load(y, 0))))


@kernel("i64, i64, i64")
def put_corrections(y, qtype, planes):
    """Write, after the steps of the line at address y, sums by which `dot_tile` corrects for code biases or offsets."""
    width, bias = WIDTH[qtype], CODE_BIAS[qtype]
    steps_ptr = y + width * planes
    corrections, more_corrections = steps_ptr + LANES_NBYTES, steps_ptr + 2 * LANES_NBYTES
    lanes_per_group = SHARE[qtype] // 4
    num_groups = LANES // lanes_per_group
    if bias == 0:
        store(corrections, 0, splat(0.0))
        store(more_corrections, 0, to_floats(lane_sums(y, width, 0, planes)) * load(steps_ptr, 0))
        for group in range(num_groups):
            s = f32(0)
            for lane in range(group * lanes_per_group, (group + 1) * lanes_per_group):
                s += peek(more_corrections, lane)
            poke(corrections, num_groups + group, s)
        return
    num_high_planes = planes - 1 if planes > 1 and IS_SPLIT[qtype] else planes
    store(corrections, 0, as_floats(lane_sums(y, width, 0, num_high_planes) * -bias))
    if planes == 1:
        sum_groups(more_corrections, lane_sums(y, width, 0, 1) * -bias, lanes_per_group)
        return
    store(more_corrections, 0, as_floats(lane_sums(y, width, num_high_planes, planes) * -bias))


@part("i64, i64, i64, i64")
def reorder_groups(y, width, group_codes, planes):
    """Reorder `width` integers of each plane at y as `dot_tile` reads codes: group_codes of each group in turn."""
    for plane_ptr in range(y, y + width * planes, width):
        if group_codes == 16:
            reorder_by_16(plane_ptr)
        elif group_codes == 8:
            reorder_by_8(plane_ptr)
        else:
            reorder_by_4(plane_ptr)


@kernel("i64, i64, i64, i64, i64")
def round_row(y, x, n, qtype, planes):
    """Round n f32 at address x to integers at y in 1 or 3 `planes`, as products with type number `qtype` read them."""
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


@kernel("in2, i64, i64, i64, i64, i64")
def round_rows(x, y, qtype, planes, row_start, row_stop):
    """Round rows row_start … row_stop - 1 of x to lines of integers at address y; see round_row."""
    k = x.shape[1]
    for i in range(row_start, row_stop):
        round_row(y + i * nbytes(k, planes), address(x, i * k), k, qtype, planes)


@kernel("in2, i64, i64, i64")
def round_all(x, y, qtype, planes):
    """Round all rows of x, on the threads if they are many, to lines of integers at address y; see round_row."""
    m, k = x.shape
    if m * k < MIN_PARALLEL_VALUES or m == 1:
        round_rows(x, y, qtype, planes, 0, m)
    else:
        spans(round_rows, (x, y, qtype, planes), m, -(-m // threads()))
