"""Floating-point types: f32, f64, f16 and bf16."""

from packtrain.types.room import packed, scalar
from packtrain.types.words import (
    as_floats,
    fma,
    half_at,
    halves_at,
    load,
    load_part,
    peek,
    poke,
    put_half,
    put_short,
    short_at,
    shorts_at,
    splat,
    spread_bits,
    store,
    store_part,
    total,
    word_at,
)

f32, f64, f16 = (
    scalar("f32", 0, "float32"),
    scalar("f64", 28, "float64"),
    scalar("f16", 1, "float16"),
)
bf16 = packed("bf16", 30, 1, 2)
f32.mix("F32", 0)
f16.mix("F16", 1)
bf16.mix("BF16", 32)


@f32.unpack
@f32.pack
def copy_f32(y, x, n):
    for i in range(0, n, 16):
        store_part(y, i, load_part(x, i, n - i), n - i)


@f16.unpack
def unpack_f16(y, x, n):
    for i in range(0, n - 15, 16):
        store(y, i, halves_at(x, i))
    for i in range(n // 16 * 16, n):
        poke(y, i, half_at(x, i))


@f16.dot
def dot_f16(x, w, n):
    a, b = splat(0.0), splat(0.0)
    for i in range(0, n, 32):
        a = fma(halves_at(w, i), load(x, i), a)
        b = fma(halves_at(w, i + 16), load(x, i + 16), b)
    return total(a + b)


@f16.pack
def pack_f16(y, x, n):
    for i in range(n):
        put_half(y, i, peek(x, i))


@bf16.unpack
def unpack_bf16(y, x, n):
    for i in range(0, n - 15, 16):
        store(y, i, as_floats(shorts_at(x, i) << 16))
    for i in range(n // 16 * 16, n):
        store_part(y, i, as_floats(spread_bits(short_at(x, i)) << 16), 1)


@bf16.dot
def dot_bf16(x, w, n):
    a, b = splat(0.0), splat(0.0)
    for i in range(0, n, 32):
        a = fma(as_floats(shorts_at(w, i) << 16), load(x, i), a)
        b = fma(as_floats(shorts_at(w, i + 16) << 16), load(x, i + 16), b)
    return total(a + b)


@bf16.pack
def pack_bf16(y, x, n):
    for i in range(n):
        word = word_at(x, i)
        # round to nearest, ties to even
        put_short(y, i, (word + 0x7FFF + ((word >> 16) & 1)) >> 16)
