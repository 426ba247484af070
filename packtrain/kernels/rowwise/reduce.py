"""Sum arrays in a fixed order: short runs in f32 lanes, everything longer in f64."""

from packtrain.kernels.runtime.jit import each, kernel, parallel, spans
from packtrain.kernels.runtime.kernel_types import f32, f64
from packtrain.kernels.simd.simd_f32 import (
    LANES, address, load_part, peek, poke, scratch, splat, store_part, total,
)  # fmt: skip

VALUES_PER_RUN = 8 * LANES  # elements added in f32 lanes before they go to f64
NUM_PARTS = 64  # tasks of one sum
SERIAL = 1 << 15
COLUMNS = 64  # columns of one task
ROWS_PER_RUN = 64  # rows added in f32 before they go to the sum over all rows


@kernel("f64(i64, i64, i64, boolean)")
def span_sum(x, span_start, span_stop, use_squares):
    """Return the sum of f32 span_start … span_stop - 1 at address x, or if use_squares of their squares, in f64."""
    run_sum = f64(0.0)
    for run_start in range(span_start, span_stop, VALUES_PER_RUN):
        lane_sums = splat(0.0)
        for i in range(run_start, min(run_start + VALUES_PER_RUN, span_stop), LANES):
            v = load_part(x, i, span_stop - i)
            lane_sums += v * v if use_squares else v
        run_sum += f64(total(lane_sums))
    return run_sum


@kernel("i64, in1, i64, boolean, i64")
def reduce_part(parts_ptr, x, part_length, use_squares, t):
    """Write part t (part_length values) of a sum, or sum of squares, to parts_ptr: two f32, head and rest of an f64."""
    part_sum = span_sum(
        address(x, 0), t * part_length, min(x.size, (t + 1) * part_length), use_squares
    )
    poke(parts_ptr, 2 * t, f32(part_sum))
    poke(parts_ptr, 2 * t + 1, f32(part_sum - f64(f32(part_sum))))


@kernel("out1, in1, boolean")
def reduce_sum(y, x, use_squares):
    """y[0] = sum(x), or sum(x**2) if `use_squares`; x (N,) f32."""
    n = x.size
    if n <= SERIAL:
        y[0] = f32(span_sum(address(x, 0), 0, n, use_squares))
        return
    parts_ptr = scratch(128)
    part_length = -(-n // (NUM_PARTS * VALUES_PER_RUN)) * VALUES_PER_RUN
    each(reduce_part, (parts_ptr, x, part_length, use_squares), NUM_PARTS)
    total_sum = f64(0.0)
    for t in range(NUM_PARTS):
        total_sum += f64(peek(parts_ptr, 2 * t)) + f64(peek(parts_ptr, 2 * t + 1))
    y[0] = f32(total_sum)


@kernel("out1, in1, in1")
def sum_squares(y, x, acc):
    """y[0] = sum(x**2), plus acc[0] unless acc is (0,); x (N,), y and acc (1,) f32; y may be acc."""
    acc_value = acc[0] if acc.size else f32(0.0)
    reduce_sum(y, x, True)
    y[0] += acc_value


@parallel("out1, in2", lambda x: x.shape, serial=SERIAL)
def sum_rows(y, x, row_start, row_stop):
    """y[i] = sum(x[i]); x (N, C), y (N,) f32."""
    for row in range(row_start, row_stop):
        y[row] = f32(span_sum(address(x, row * x.shape[1]), 0, x.shape[1], False))


@kernel("out1, in2, i64, i64")
def sum_columns_span(y, x, start, stop):
    """Write the sums over rows of columns start … stop - 1 of x."""
    n, width = x.shape
    for i in range(start, stop, LANES):
        num_left = stop - i
        lane_sums = splat(0.0)
        for run_start in range(0, n, ROWS_PER_RUN):
            run_sums = splat(0.0)
            for row in range(run_start, min(n, run_start + ROWS_PER_RUN)):
                run_sums += load_part(x, row * width + i, num_left)
            lane_sums += run_sums
        store_part(y, i, lane_sums, num_left)


@kernel("out1, in2")
def sum_cols(y, x):
    """y[j] = sum(x[:, j]); x (N, C), y (C,) f32."""
    width = x.shape[1]
    spans(sum_columns_span, (y, x), width, COLUMNS if x.size > SERIAL else width)


@parallel("out2, in2, boolean", lambda x: x.shape, serial=SERIAL)
def running_sums(y, x, reverse, row_start, row_stop):
    """Write the running sums of each row of x, from its end if `reverse`; x, y (N, C) f32; y may be x."""
    width = x.shape[1]
    for row in range(row_start, row_stop):
        running_sum = f64(0.0)
        for i in range(width):
            offset = row * width + (width - 1 - i if reverse else i)
            running_sum += f64(peek(x, offset))
            poke(y, offset, f32(running_sum))
