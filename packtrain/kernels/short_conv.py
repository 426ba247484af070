"""Short convolutions along time, one filter for each channel; rows of other sequences count as zeros."""

from numba import types

from packtrain.kernels import simd
from packtrain.kernels.call import each, kernel, part, spans
from packtrain.kernels.simd import LANES, address, ids1, in2, load_part, out2, splat, store_part

i64, void, flag = types.int64, types.void, types.boolean
BLOCK = 1 << 14  # values of a task
CHANNELS = 64  # of a task of the gradient of filters
SUMMED = 128  # rows that are summed before they are added to the others


@part(flag(ids1, i64, i64, i64))
def beside(seq, row, other, time):
    """Whether another row is in the same line of `time` rows, and of the same sequence."""
    if other < 0 or other // time != row // time:
        return False
    return seq.size == 0 or seq[other] == seq[row]


@kernel(void(out2, in2, in2, ids1, i64, i64, i64, i64))
def conv_rows(y, x, w, seq, time, step, start, stop):
    taps, channels = w.shape
    for row in range(start, stop):
        for s in range(0, channels, LANES):
            left, total = channels - s, splat(0.0)
            for k in range(taps):
                other = row + step * (taps - 1 - k)
                if beside(seq, row, other, time):
                    value = load_part(address(x, other * channels), s, left)
                    total = simd.fma(value, load_part(address(w, k * channels), s, left), total)
            store_part(address(y, row * channels), s, total, left)


@kernel(void(out2, in2, in2, ids1, i64, i64))
def conv(y, x, w, seq, time, step):
    """y[i] = sum over k of w[k] x[i + step (K - 1 - k)], of rows of the same line and sequence; each by channel.

    x, y  (N, C)     f32, N a multiple of `time`
    w     (K, C)     f32
    seq   (N,)       i32, or empty
    step  -1: of rows before, 1: of rows after
    """
    spans(conv_rows, (y, x, w, seq, time, step), len(x), BLOCK // max(1, x.shape[1]))


@kernel(void(out2, out2, in2, in2, ids1, i64, i64))
def filters(dw, partial_sums, dy, x, seq, time, number):
    taps, channels = dw.shape
    first, last = number * CHANNELS, min(channels, (number + 1) * CHANNELS)
    for k in range(taps):
        for s in range(first, last, LANES):
            store_part(address(dw, k * channels), s, splat(0.0), last - s)
    for start in range(0, len(x), SUMMED):
        for k in range(taps):
            part_sum, dw_row = address(partial_sums, k * channels), address(dw, k * channels)
            for s in range(first, last, LANES):
                store_part(part_sum, s, splat(0.0), last - s)
            for row in range(start, min(len(x), start + SUMMED)):
                other = row - (taps - 1 - k)
                if beside(seq, row, other, time):
                    of_y, of_x = address(dy, row * channels), address(x, other * channels)
                    for s in range(first, last, LANES):
                        left = last - s
                        factors = load_part(of_y, s, left), load_part(of_x, s, left)
                        total = simd.fma(factors[0], factors[1], load_part(part_sum, s, left))
                        store_part(part_sum, s, total, left)
            for s in range(first, last, LANES):
                total = load_part(dw_row, s, last - s) + load_part(part_sum, s, last - s)
                store_part(dw_row, s, total, last - s)


@kernel(void(out2, out2, in2, in2, ids1, i64))
def conv_back_w(dw, partial_sums, dy, x, seq, time):
    """The gradient of conv, of rows before, for w: dw and `partial_sums` (K, C), dy as y."""
    each(filters, (dw, partial_sums, dy, x, seq, time), -(-dw.shape[1] // CHANNELS))


@kernel(void(out2, in2, in2, ids1, i64, i64))
def cell_rows(y, x, w, cells, start, stop):
    taps, channels = w.shape
    for row in range(start, stop):
        for s in range(0, channels, LANES):
            left, total = channels - s, splat(0.0)
            for k in range(taps):
                cell = i64(cells[row * taps + k])
                if cell >= 0:
                    value = load_part(address(x, cell * channels), s, left)
                    total = simd.fma(value, load_part(address(w, k * channels), s, left), total)
            store_part(address(y, row * channels), s, total, left)


@kernel(void(out2, in2, in2, ids1))
def conv_cells(y, x, w, cells):
    """y[i] = sum over k of w[k] x[cells[i, k]], those of negative cells left out.

    x      (S, C)  f32
    y      (N, C)  f32
    w      (K, C)  f32
    cells  (N K,)  i32
    """
    spans(cell_rows, (y, x, w, cells), len(y), BLOCK // max(1, x.shape[1]))
