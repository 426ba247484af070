"""Add low-rank matrices to quantized ones in the blocks and scales that these have. `qtype` is ggml's type number."""

from packtrain.kernels.quant import codes
from packtrain.kernels.quant.dequantize import row
from packtrain.kernels.quant.type_dispatch import bind_placeholders, blocks_by_type, compile_blocks
from packtrain.kernels.runtime.jit import kernel, part, spans, threads
from packtrain.kernels.simd.simd_f32 import LANES, address, fma, load, peek, scratch, store

CHUNK_COLUMNS = 256  # columns at a time: whole blocks of every type
CHUNK_BUFFER = 512  # f32 of their values and of the noise on their codes
NOISE_PERIOD = 1 << 12  # noise values, used in turn; CHUNK_COLUMNS more repeat the first ones
ROW_HASH = 2654435761  # moves the noise from row to row
bind_placeholders(codes)
recode = blocks_by_type("recode", compile_blocks("recode"))


@part("i64(i64, i64)")
def noise_offset(row, column):
    """Return where in `noise` the values for `row` begin, from `column` on."""
    return ((row * ROW_HASH >> 8) + column) & (NOISE_PERIOD - 1)


@kernel("out_bytes2, bytes2, i64, in2, in2, f32, in1, i64, i64, i64")
def add_rows(y, w, qtype, a, b, by, noise, first, row_start, row_stop):
    """Compute rows row_start … row_stop - 1 of y = w + by * b @ a for `add`, which says the other arguments."""
    (rank, k), row_nbytes = a.shape, w.shape[1]
    chunk_ptr = scratch(CHUNK_BUFFER)
    for c in range(0, k, CHUNK_COLUMNS):
        width = min(k - c, CHUNK_COLUMNS)
        byte_start, byte_stop = c * row_nbytes // k, (c + width) * row_nbytes // k
        for i in range(row_start, row_stop):
            for byte_index in range(byte_start, byte_stop):
                y[i, byte_index] = w[i, byte_index]
            row(qtype, chunk_ptr, w.ctypes.data + i * row_nbytes + byte_start, width)
            b_row, noise_start = address(b, i * rank), noise_offset(first + i, c)
            for j in range(0, width, 2 * LANES):
                first_half, second_half = load(chunk_ptr, j), load(chunk_ptr, j + LANES)
                for r in range(rank):
                    row_factor, column = by * peek(b_row, r), r * k + c + j
                    first_half = fma(load(a, column), row_factor, first_half)
                    second_half = fma(load(a, column + LANES), row_factor, second_half)
                store(chunk_ptr, j, first_half)
                store(chunk_ptr, j + LANES, second_half)
                store(chunk_ptr, CHUNK_COLUMNS + j, load(noise, noise_start + j))
                store(chunk_ptr, CHUNK_COLUMNS + j + LANES, load(noise, noise_start + j + LANES))
            recode(qtype, y.ctypes.data + i * row_nbytes + byte_start, chunk_ptr, width)


@kernel("out_bytes2, bytes2, i64, in2, in2, f32, in1, i64")
def add(y, w, qtype, a, b, by, noise, first):
    """y = w + by * b @ a in the blocks of w: scales stay, each value gets the nearest code.

    w, y   (N, row bytes)                    packed
    a      (R, K)                            f32
    b      (N, R)                            f32
    noise  (NOISE_PERIOD + CHUNK_COLUMNS,)   f32, parts of a step added to codes before rounding, see `noise_offset`
    first  the number of w's first row in the matrix of which w has some rows
    """
    n = len(w)
    spans(add_rows, (y, w, qtype, a, b, by, noise, first), n, -(-n // (threads() * LANES)) * LANES)
