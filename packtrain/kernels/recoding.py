"""Quantized matrices plus low-rank ones, in the blocks and scales that they have. Kinds are ggml's type numbers."""

from numba import types

from packtrain.kernels import bits, codes, simd
from packtrain.kernels.call import kernel, part, spans, threads
from packtrain.kernels.dequantize import packed2, row
from packtrain.kernels.rooms import choice, explain, from_rooms
from packtrain.kernels.simd import LANES, address, fma, in1, in2, load, peek, scratch, store

i64, f32, void = types.int64, types.float32, types.void
COLUMNS = 256  # at a time: whole blocks of every type
LINE = 512  # their values, and by how much their codes are moved
PARTS = 1 << 12  # by which codes are moved, in turn; COLUMNS more repeat the first ones
TURN = 2654435761  # from row to row
bytes2 = types.Array(types.uint8, 2, "C")
explain(simd, bits, codes)
form = void(i64, i64, i64)
recode = choice(from_rooms("recode", part(form, forceinline=False)), form, blocks=True)


@part(i64(i64, i64))
def place(i, j):
    """Where the parts of row i lie, from column j on."""
    return ((i * TURN >> 8) + j) & (PARTS - 1)


@kernel(void(bytes2, packed2, i64, in2, in2, f32, in1, i64, i64, i64))
def some(y, w, kind, a, b, by, moved, first, start, stop):
    """Rows start … stop."""
    (rank, k), nbytes = a.shape, w.shape[1]
    line = scratch(LINE)
    for c in range(0, k, COLUMNS):
        width = min(k - c, COLUMNS)
        left, right = c * nbytes // k, (c + width) * nbytes // k
        for i in range(start, stop):
            for byte in range(left, right):
                y[i, byte] = w[i, byte]
            row(kind, line, w.ctypes.data + i * nbytes + left, width)
            values, at = address(b, i * rank), place(first + i, c)
            for j in range(0, width, 2 * LANES):
                first_half, second_half = load(line, j), load(line, j + LANES)
                for r in range(rank):
                    factor, column = by * peek(values, r), r * k + c + j
                    first_half = fma(load(a, column), factor, first_half)
                    second_half = fma(load(a, column + LANES), factor, second_half)
                store(line, j, first_half)
                store(line, j + LANES, second_half)
                store(line, COLUMNS + j, load(moved, at + j))
                store(line, COLUMNS + j + LANES, load(moved, at + j + LANES))
            recode(kind, y.ctypes.data + i * nbytes + left, line, width)


@kernel(void(bytes2, packed2, i64, in2, in2, f32, in1, i64))
def add(y, w, kind, a, b, by, moved, first):
    """y = w + by * b @ a in the blocks of w: its scales, and the nearest codes.

    w, y   (N, row bytes)      packed
    a      (R, K)              f32
    b      (N, R)              f32
    moved  (PARTS + COLUMNS,)  f32, by which part of a step codes are moved, see `place`
    first  the number of the first row of a larger matrix, of which w has some rows
    """
    n = len(w)
    spans(some, (y, w, kind, a, b, by, moved, first), n, -(-n // (threads() * LANES)) * LANES)
