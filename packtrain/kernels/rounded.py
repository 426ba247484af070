"""Products of weights with activations that are rounded to 8 bits, 32 at a time, in integers.

Of n rounded values lie at an address: n codes; for every 32 of them 8 sums of four codes, i32; their steps; and their
steps times the sums of their codes, f32. That is `nbytes(n)`.
"""

from numba import types

from packtrain.kernels import bits, octets, simd
from packtrain.kernels.bits import put_bytes, to_bits
from packtrain.kernels.call import kernel, part, spans, threads
from packtrain.kernels.codes import ROUND
from packtrain.kernels.octets import sum_codes
from packtrain.kernels.rooms import choice, explain, from_rooms
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
    peek,
    poke,
    store,
    total,
)

i64, f32, void = types.int64, types.float32, types.void
BLOCK = 32
SMALL = 1 << 17  # below this many weights a parallel region does not pay
TINY = f32(1.1754944e-38)  # steps below are 0
explain(octets, simd, bits)
packed2 = types.Array(types.uint8, 2, "C", readonly=True)
form = f32(i64, i64, i64)
DOTS = from_rooms("dot_rounded", part(form, forceinline=False))
dot = choice(DOTS, form, blocks=False)


@part(i64(i64))
def nbytes(n):
    return n * 9 // 4


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


@kernel(void(i64, i64, i64))
def round_row(y, x, n):
    """n f32 at x become rounded values at y, in the form above."""
    for i in range(0, n, BLOCK):
        at = x + 4 * i
        d = step_of(at)
        put_bytes(y, i, to_bits(codes_of(load(at, 0), d)))
        put_bytes(y, i + LANES, to_bits(codes_of(load(at, LANES), d)))
        poke(y + 2 * n, i // BLOCK, d)
        poke(y + 2 * n + n // 8, i // BLOCK, d * sum_codes(y, n, i))


@kernel(void(out1, in1))
def rounded(y, x):
    """y = x, each 32 values rounded to multiples of their step."""
    for i in range(0, len(x), BLOCK):
        d = step_of(address(x, i))
        for j in range(i, i + BLOCK, LANES):
            store(y, j, codes_of(load(x, j), d) * d)


@kernel(void(out2, i64, i64, i64, packed2, types.boolean, i64, i64))
def dots(y, x, k, kind, w, add, start, stop):
    m, n = y.shape
    for j in range(start, stop):
        for i in range(m):
            s = dot(kind, x + i * nbytes(k), w.ctypes.data + j * w.shape[1], k)
            poke(y, i * n + j, peek(y, i * n + j) + s if add else s)


@kernel(void(out2, in2, i64, packed2, types.boolean, out1))
def product(y, x, kind, w, add, work):
    """y = rounded(x) @ w.T, or y + rounded(x) @ w.T.

    x     (M, K)           f32; K is a multiple of 32 and of the block
    w     (N, row bytes)   packed, of a kind in DOTS
    y     (M, N)           f32
    work  (M * nbytes(K) / 4,)  f32
    """
    m, k = x.shape
    n = w.shape[0]
    for i in range(m):
        round_row(address(work, 0) + i * nbytes(k), address(x, i * k), k)
    given = (y, address(work, 0), k, kind, w, add)
    if n * k * m < SMALL:
        dots(*given, 0, n)
    else:
        spans(dots, given, n, -(-n // (threads() * LANES)) * LANES)
