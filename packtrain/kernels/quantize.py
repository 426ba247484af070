"""Rows of f32 to scalars and blocks of 32, bit for bit as ggml's reference packs them.

A function per type takes (target, source, n): n blocks, of 32 f32 at `source`, become bytes at `target`; scalars
take elements. Values must be finite; a scale too small for f16 makes zeros.
"""

from numba import types

from packtrain.kernels.bits import (
    put_bytes,
    put_half,
    put_short,
    put_word,
    set_lanes,
    to_bits,
    word_at,
)
from packtrain.kernels.call import each, kernel, part
from packtrain.kernels.dequantize import (
    BF16,
    F16,
    F32,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    f32_copy,
)
from packtrain.kernels.quantize_k import extreme, q4_K, q5_K, q6_K
from packtrain.kernels.simd import (
    absolute,
    address,
    copysign,
    in2,
    lanewise,
    largest,
    load,
    maximum,
    named,
    neg,
    peek,
    select_less,
)

i64, f32, void = types.int64, types.float32, types.void
KINDS = (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K)
SMALLEST = 2.9387359e-39  # the reciprocal of what is smaller is infinite
packer = kernel(void(i64, i64, i64))
floor = lanewise(named("floor"), 1)


@packer
def f16(y, x, n):
    for i in range(n):
        put_half(y, i, peek(x, i))


@packer
def bf16(y, x, n):
    for i in range(n):
        word = word_at(x, i)
        put_short(y, i, (word + 0x7FFF + ((word >> 16) & 1)) >> 16)  # to the nearest, ties to even


@part(f32(f32))
def reciprocal(d):
    return f32(1) / d if abs(d) > SMALLEST else f32(0)


@part(types.UniTuple(f32, 2)(i64))
def bounds(x):
    """The least and the greatest of 32 values."""
    a, b = load(x, 0), load(x, 16)
    return -largest(maximum(neg(a), neg(b))), largest(maximum(a, b))


@kernel(i64(i64, i64, f32, f32, f32, f32))
def put_codes(y, x, low, inverse, offset, most):
    """32 values as codes, (x - low) * inverse + offset towards zero, at most `most`: four bits each go to y.

    Returns the fifth bits.
    """
    a = (load(x, 0) - low) * inverse + offset
    b = (load(x, 16) - low) * inverse + offset
    first = to_bits(select_less(most, a, most, a))
    second = to_bits(select_less(most, b, most, b))
    put_bytes(y, 0, (first & 15) | ((second & 15) << 4))
    return set_lanes(first & 16) | (set_lanes(second & 16) << 16)


@packer
def q4_0(y, x, n):
    for b in range(n):
        to, at = y + b * 18, x + b * 128
        d = extreme(at, 32) / f32(-8)
        put_half(to, 0, d)
        put_codes(to + 2, at, f32(0), reciprocal(d), f32(8.5), f32(15))


@packer
def q4_1(y, x, n):
    for b in range(n):
        to, at = y + b * 20, x + b * 128
        low, high = bounds(at)
        d = (high - low) / f32(15)
        put_half(to, 0, d)
        put_half(to, 1, low)
        put_codes(to + 4, at, low, reciprocal(d), f32(0.5), f32(15))


@packer
def q5_0(y, x, n):
    for b in range(n):
        to, at = y + b * 22, x + b * 128
        d = extreme(at, 32) / f32(-16)
        put_half(to, 0, d)
        put_word(to + 2, 0, put_codes(to + 6, at, f32(0), reciprocal(d), f32(16.5), f32(31)))


@packer
def q5_1(y, x, n):
    for b in range(n):
        to, at = y + b * 24, x + b * 128
        low, high = bounds(at)
        d = (high - low) / f32(31)
        put_half(to, 0, d)
        put_half(to, 1, low)
        put_word(to + 4, 0, put_codes(to + 8, at, low, reciprocal(d), f32(0.5), f32(31)))


@part(void(i64, i64, f32))
def put_rounded(y, x, inverse):
    """16 values by `inverse` to the nearest, halves away from zero."""
    v = load(x, 0) * inverse
    size = absolute(v)
    whole = floor(size)
    put_bytes(y, 0, to_bits(copysign(whole + floor((size - whole) * 2.0), v)))


@packer
def q8_0(y, x, n):
    for b in range(n):
        to, at = y + b * 34, x + b * 128
        d = largest(maximum(absolute(load(at, 0)), absolute(load(at, 16)))) / f32(127)
        put_half(to, 0, d)
        put_rounded(to + 2, at, reciprocal(d))
        put_rounded(to + 18, at + 64, reciprocal(d))


@kernel(void(i64, i64, i64, i64))
def row(kind, target, source, count):
    """The packed bytes of `count` f32, whole blocks, at `source`."""
    if kind == F16:
        f16(target, source, count)
    elif kind == BF16:
        bf16(target, source, count)
    elif kind == Q4_0:
        q4_0(target, source, count // 32)
    elif kind == Q4_1:
        q4_1(target, source, count // 32)
    elif kind == Q5_0:
        q5_0(target, source, count // 32)
    elif kind == Q5_1:
        q5_1(target, source, count // 32)
    elif kind == Q8_0:
        q8_0(target, source, count // 32)
    elif kind == Q4_K:
        q4_K(target, source, count // 256)
    elif kind == Q5_K:
        q5_K(target, source, count // 256)
    elif kind == Q6_K:
        q6_K(target, source, count // 256)
    else:
        f32_copy(target, source, count)


@kernel(void(i64, types.Array(types.uint8, 2, "C"), in2, i64))
def row_of(kind, y, x, i):
    width = x.shape[1]
    row(kind, y.ctypes.data + i * y.shape[1], address(x, i * width), width)


@kernel(void(i64, types.Array(types.uint8, 2, "C"), in2))
def rows(kind, y, x):
    """Every row of an array.

    x  (N, width)      f32
    y  (N, row bytes)  u8
    """
    each(row_of, (kind, y, x), len(x))
