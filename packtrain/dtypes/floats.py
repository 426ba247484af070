"""Floating-point types: f32, f64, f16 and bf16."""

from packtrain.dtypes import intrinsics
from packtrain.dtypes.element_type import block_dtype, scalar_dtype

f32 = scalar_dtype("f32", 0, "float32")
f64 = scalar_dtype("f64", 28, "float64")
f16 = scalar_dtype("f16", 1, "float16")
bf16 = block_dtype("bf16", 30, 1, 2)
f32.mix("F32", 0)
f16.mix("F16", 1)
bf16.mix("BF16", 32)


@f32.unpack
@f32.pack
def copy_f32(y, x, n):
    for i in range(0, n, 16):
        intrinsics.store_part(y, i, intrinsics.load_part(x, i, n - i), n - i)


@f16.unpack
def unpack_f16(y, x, n):
    for i in range(0, n - 15, 16):
        intrinsics.store(y, i, intrinsics.halves_at(x, i))
    for i in range(n // 16 * 16, n):
        intrinsics.poke(y, i, intrinsics.half_at(x, i))


@f16.dot
def dot_f16(x, w, n):
    a, b = intrinsics.splat(0.0), intrinsics.splat(0.0)
    for i in range(0, n, 32):
        a = intrinsics.fma(intrinsics.halves_at(w, i), intrinsics.load(x, i), a)
        b = intrinsics.fma(intrinsics.halves_at(w, i + 16), intrinsics.load(x, i + 16), b)
    return intrinsics.total(a + b)


@f16.pack
def pack_f16(y, x, n):
    for i in range(n):
        intrinsics.put_half(y, i, intrinsics.peek(x, i))


@bf16.unpack
def unpack_bf16(y, x, n):
    for i in range(0, n - 15, 16):
        intrinsics.store(y, i, intrinsics.as_floats(intrinsics.shorts_at(x, i) << 16))
    for i in range(n // 16 * 16, n):
        intrinsics.store_part(
            y, i, intrinsics.as_floats(intrinsics.spread_bits(intrinsics.short_at(x, i)) << 16), 1
        )


@bf16.dot
def dot_bf16(x, w, n):
    a, b = intrinsics.splat(0.0), intrinsics.splat(0.0)
    for i in range(0, n, 32):
        a = intrinsics.fma(
            intrinsics.as_floats(intrinsics.shorts_at(w, i) << 16), intrinsics.load(x, i), a
        )
        b = intrinsics.fma(
            intrinsics.as_floats(intrinsics.shorts_at(w, i + 16) << 16), intrinsics.load(x, i + 16), b,
        )  # fmt: skip
    return intrinsics.total(a + b)


@bf16.pack
def pack_bf16(y, x, n):
    for i in range(n):
        float_bits = intrinsics.word_at(x, i)
        # round to nearest, ties to even
        intrinsics.put_short(y, i, (float_bits + 0x7FFF + ((float_bits >> 16) & 1)) >> 16)
