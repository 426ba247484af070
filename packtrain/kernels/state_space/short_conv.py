"""Convolve along time with one short filter for each channel; rows of other sequences count as zeros."""

from packtrain.kernels.runtime.jit import each_task, parallel, part
from packtrain.kernels.runtime.kernel_types import i64
from packtrain.kernels.simd.simd_f32 import LANES, address, fma, load_part, splat, store_part

BLOCK = 1 << 14  # values of a task
CHANNELS = 64  # channels of a task of the gradient of filters
ROWS_PER_SUM = 128  # rows that are summed before they are added to the others


@part("boolean(ints1, i64, i64, i64)")
def in_same_sequence(seq, row, other_row, T):
    """Return whether two rows are in the same row of the batch, `T` tokens long, and of the same sequence."""
    if other_row < 0 or other_row // T != row // T:
        return False
    return seq.size == 0 or seq[other_row] == seq[row]


@parallel("out2, in2, in2, ints1, i64, i64", lambda x: x.shape, block=BLOCK)
def conv(y, x, w, seq, T, row_step, row_start, row_stop):
    """y[i] = sum over k of w[k] x[i + row_step (K - 1 - k)], of rows of the same sequence; each by channel.

    x, y      (N, C)     f32, N a multiple of `T`, the length of a row of the batch
    w         (K, C)     f32
    seq       (N,)       i32, or empty
    row_step  -1: of rows before, 1: of rows after
    """
    num_taps, C = w.shape
    for row in range(row_start, row_stop):
        for s in range(0, C, LANES):
            num_left, total = C - s, splat(0.0)
            for tap in range(num_taps):
                input_row = row + row_step * (num_taps - 1 - tap)
                if in_same_sequence(seq, row, input_row, T):
                    x_lanes = load_part(address(x, input_row * C), s, num_left)
                    total = fma(x_lanes, load_part(address(w, tap * C), s, num_left), total)
            store_part(address(y, row * C), s, total, num_left)


@each_task("out2, out2, in2, in2, ints1, i64", lambda dw: -(-dw.shape[1] // CHANNELS))
def conv_back_w(dw, partial_sums, dy, x, seq, T, task):
    """Compute dw, the gradient of conv over rows before, for w: dw and `partial_sums` (K, C), dy as y."""
    num_taps, C = dw.shape
    channel_start, last = task * CHANNELS, min(C, (task + 1) * CHANNELS)
    for tap in range(num_taps):
        for s in range(channel_start, last, LANES):
            store_part(address(dw, tap * C), s, splat(0.0), last - s)
    for row_start in range(0, len(x), ROWS_PER_SUM):
        for tap in range(num_taps):
            part_sum, dw_row = address(partial_sums, tap * C), address(dw, tap * C)
            for s in range(channel_start, last, LANES):
                store_part(part_sum, s, splat(0.0), last - s)
            for row in range(row_start, min(len(x), row_start + ROWS_PER_SUM)):
                input_row = row - (num_taps - 1 - tap)
                if in_same_sequence(seq, row, input_row, T):
                    dy_row, x_row = address(dy, row * C), address(x, input_row * C)
                    for s in range(channel_start, last, LANES):
                        num_left = last - s
                        factors = load_part(dy_row, s, num_left), load_part(x_row, s, num_left)
                        total = fma(factors[0], factors[1], load_part(part_sum, s, num_left))
                        store_part(part_sum, s, total, num_left)
            for s in range(channel_start, last, LANES):
                total = load_part(dw_row, s, last - s) + load_part(part_sum, s, last - s)
                store_part(dw_row, s, total, last - s)


@parallel("out2, in2, in2, ints1", lambda y: y.shape, block=BLOCK)
def conv_cells(y, x, w, cells, row_start, row_stop):
    """y[i] = sum over k of w[k] x[cells[i, k]]; negative cells are left out.

    x      (S, C)  f32
    y      (N, C)  f32
    w      (K, C)  f32
    cells  (N K,)  i32
    """
    num_taps, C = w.shape
    for row in range(row_start, row_stop):
        for s in range(0, C, LANES):
            num_left, total = C - s, splat(0.0)
            for tap in range(num_taps):
                cell = i64(cells[row * num_taps + tap])
                if cell >= 0:
                    x_lanes = load_part(address(x, cell * C), s, num_left)
                    total = fma(x_lanes, load_part(address(w, tap * C), s, num_left), total)
            store_part(address(y, row * C), s, total, num_left)
