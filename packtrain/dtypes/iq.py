"""The IQ types: codes index tables of values. Formats: ggml-common.h."""

from typing import Any

import numpy as np

from packtrain.dtypes import intrinsics
from packtrain.dtypes.element_type import Bytes, CodeLayout, Dtype, block_dtype
from packtrain.dtypes.grids import IQ2_XS_GRID, IQ3_S_GRID, IQ3_XXS_GRID, ONE, TWO_S, TWO_XXS
from packtrain.dtypes.intrinsics import F32x16, byte_at, half_at, load, part, short_at, store
from packtrain.dtypes.iq_points import POINTS
from packtrain.dtypes.k import q2_K, q3_K, q4_K, q5_K

f32 = np.float32
# the sixteen values of iq4_nl and iq4_xs
NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], f32)
# the eighth sign of seven makes the number of set bits even
EVEN_SIGNS = np.array([i | (i.bit_count() % 2) << 7 for i in range(128)], np.int64)


def iq4_xs_scales(raw: Bytes) -> tuple[np.ndarray]:
    """Return (scales,) of iq4_xs, f32 (rows, blocks, 8): four low bits of each, and two stored before them, - 32."""
    groups = np.arange(8, dtype=np.uint8)
    low_bits = raw[..., 4 + groups // 2] >> groups % 2 * 4
    high_bits = raw[..., 2 + groups // 4] >> groups % 4 * 2
    return (((low_bits & 15) | (high_bits & 3) << 4).astype(f32) - f32(32),)


iq4_nl_layout = CodeLayout(32, 16, 0, (0,), 2, table=NL)
iq4_nl = block_dtype(*("iq4_nl", 20, 32, 18), richer=q5_K, layout=iq4_nl_layout)
iq4_xs_layout = CodeLayout(32, 16, 0, (0,), 8, runs=8, scales=iq4_xs_scales, table=NL)
iq4_xs = block_dtype("iq4_xs", 23, 256, 136, smaller=iq4_nl, richer=q5_K, layout=iq4_xs_layout)


def on_grid(
    name: str, number: int, nbytes: int, merge_dtype: Dtype, column_weights_need: str = ""
) -> Dtype:
    """Define a type of 256 values whose codes name points of a grid, POINTS[name]; arguments are fields of Dtype."""
    options: dict[str, Any] = {
        "smaller": iq4_nl, "richer": q5_K, "merge_dtype": merge_dtype, "column_weights_need": column_weights_need,
    }  # fmt: skip
    options["points"] = POINTS[name]
    return block_dtype(name, number, 256, nbytes, **options)


iq1_s, iq1_m = on_grid("iq1_s", 19, 50, q2_K, "always"), on_grid("iq1_m", 29, 56, q2_K, "always")
iq2_xxs = on_grid("iq2_xxs", 16, 66, q2_K, "always")
iq2_xs = on_grid("iq2_xs", 17, 74, q2_K, "always")
iq2_s = on_grid("iq2_s", 22, 82, q2_K, "blocks")
iq3_xxs, iq3_s = on_grid("iq3_xxs", 18, 98, q3_K, "blocks"), on_grid("iq3_s", 21, 110, q4_K)
iq4_nl.mix("IQ4_NL", 25, attn_v_grouped=q5_K, first_ffn_down_unweighted=q5_K)
iq4_xs.mix("IQ4_XS", 30, attn_v_grouped=q5_K, first_ffn_down_unweighted=q5_K)
iq3_xxs.mix(
    "IQ3_XXS", 23, attn_v_grouped=q4_K, attn_qk=iq2_s, attn_output=iq3_s, token_embd=iq3_s, output_head=q5_K,
)  # fmt: skip
iq3_s.mix("IQ3_XS", 22, attn_v_grouped=q4_K, attn_qk=iq3_xxs, ffn_gate_up_middle=iq3_xxs)
iq3_s.mix(
    "IQ3_M", 27, attn_v=q4_K, attn_output=q4_K, first_ffn_down_weighted=q4_K,
    first_ffn_down_unweighted=q4_K, ffn_down_8_experts=q4_K,
)  # fmt: skip
iq3_s.mix("IQ3_S", 26, attn_v_grouped=q4_K)
SMALL_MIX: dict[str, Any] = {"is_smallest": True, "output_head": q5_K}
MIXED_TENSORS = "attn_v", "token_embd", "first_ffn_down_weighted"
RICHER_MIX = dict.fromkeys(("attn_output", *MIXED_TENSORS), iq3_s) | SMALL_MIX
POORER_MIX = dict.fromkeys(MIXED_TENSORS, q2_K) | SMALL_MIX
iq2_xs.mix("IQ2_S", 28, **RICHER_MIX)
iq2_s.mix("IQ2_M", 29, **RICHER_MIX)
iq2_xxs.mix("IQ2_XXS", 19, **POORER_MIX)
iq2_xs.mix("IQ2_XS", 20, **POORER_MIX)
iq1_s.mix("IQ1_S", 24, attn_output=iq2_xxs, **POORER_MIX)
iq1_m.mix("IQ1_M", 31, attn_output=iq2_xxs, **POORER_MIX)


@part
def signed(v: F32x16, bits: int) -> F32x16:
    """Return v, negated in each lane i where bit i is set."""
    return intrinsics.put_where(v, bits, intrinsics.neg(v))


@part
def two_signs(bits: int) -> int:
    """Return 16 bits, the signs of two eights, from seven stored bits each; the eighth makes their number even."""
    return EVEN_SIGNS[bits & 127] | (EVEN_SIGNS[bits >> 7 & 127] << 8)


@part
def level_shifts(first_bit: int, second_bit: int) -> F32x16:
    """Return the shifts of iq1's levels 0 to 2: -7/8, or -9/8 if the bit of the first or second eight is set."""
    first = intrinsics.splat(f32(-0.875) - f32(0.25) * f32(first_bit & 1))
    second = intrinsics.splat(f32(-0.875) - f32(0.25) * f32(second_bit & 1))
    return intrinsics.put_where(first, 0xFF00, second)


@iq1_s.unpack
def unpack_iq1_s(y, block):
    for i in range(16):
        high_bits = short_at(block + 34, i // 2)
        scale = half_at(block, 0) * f32((high_bits >> 12 & 7) * 2 + 1)
        index_bits = high_bits >> (i % 2 * 6)
        first = ONE[byte_at(block, 2 + 2 * i) | ((index_bits & 7) << 8)]
        second = ONE[byte_at(block, 3 + 2 * i) | ((index_bits >> 3 & 7) << 8)]
        shift = level_shifts(high_bits >> 15, high_bits >> 15)
        store(y, i * 16, (intrinsics.to_floats(intrinsics.bytes_of(first, second)) + shift) * scale)


@iq1_m.unpack
def unpack_iq1_m(y, at):
    unit_half = intrinsics.scratch(1)
    for i in range(4):  # each has four bits of the unit in front of its scales
        top_bits = short_at(at, 24 + i) >> 12 << 12
        intrinsics.put_short(unit_half, 0, (short_at(unit_half, 0) >> 4) | top_bits)
    for i in range(16):
        scale_bits = short_at(at, 24 + i // 4) >> (i % 4 * 3) & 7
        scale, high_bits = half_at(unit_half, 0) * f32(scale_bits * 2 + 1), byte_at(at, 32 + i)
        first = ONE[byte_at(at, 2 * i) | ((high_bits & 7) << 8)]
        second = ONE[byte_at(at, 2 * i + 1) | ((high_bits >> 4 & 7) << 8)]
        shift = level_shifts(high_bits >> 3, high_bits >> 7)
        store(y, i * 16, (intrinsics.to_floats(intrinsics.bytes_of(first, second)) + shift) * scale)


@iq2_xxs.unpack
def unpack_iq2_xxs(y, block):
    for i in range(16):
        indices = block + 2 + i // 2 * 8 + i % 2 * 2
        word = intrinsics.word_at(block + 2 + i // 2 * 8, 1)
        scale = half_at(block, 0) * (f32(word >> 28) + f32(0.5)) * f32(0.25)
        v = intrinsics.bytes_of(TWO_XXS[byte_at(indices, 0)], TWO_XXS[byte_at(indices, 1)])
        store(y, i * 16, signed(intrinsics.to_floats(v) * scale, two_signs(word >> (i % 2 * 14))))


@iq2_xs.unpack
def unpack_iq2_xs(y, block):
    for i in range(16):
        first_point, second_point = short_at(block, 1 + 2 * i), short_at(block, 2 + 2 * i)
        scale = byte_at(block, 66 + i // 2) >> (i % 2 * 4) & 15
        scale = half_at(block, 0) * (f32(scale) + f32(0.5)) * f32(0.25)
        v = intrinsics.bytes_of(IQ2_XS_GRID[first_point & 511], IQ2_XS_GRID[second_point & 511])
        signs = two_signs((first_point >> 9) | (second_point >> 9 << 7))
        store(y, i * 16, signed(intrinsics.to_floats(v) * scale, signs))


@iq2_s.unpack
def unpack_iq2_s(y, block):
    for i in range(16):
        high_bits = byte_at(block, 66 + i // 2) >> (i % 2 * 4)
        first_point = TWO_S[byte_at(block, 2 + 2 * i) | ((high_bits & 3) << 8)]
        second_point = TWO_S[byte_at(block, 3 + 2 * i) | ((high_bits >> 2 & 3) << 8)]
        nibble = byte_at(block, 74 + i // 2) >> (i % 2 * 4) & 15
        scale = half_at(block, 0) * (f32(nibble) + f32(0.5)) * f32(0.25)
        v = intrinsics.to_floats(intrinsics.bytes_of(first_point, second_point)) * scale
        store(y, i * 16, signed(v, short_at(block, 17 + i)))


@iq3_xxs.unpack
def unpack_iq3_xxs(y, block):
    for i in range(16):
        indices, word = block + 2 + i * 4, intrinsics.word_at(block + 66, i // 2)
        scale = half_at(block, 0) * (f32(word >> 28) + f32(0.5)) * f32(0.5)
        first = IQ3_XXS_GRID[byte_at(indices, 0)] | (IQ3_XXS_GRID[byte_at(indices, 1)] << 32)
        second = IQ3_XXS_GRID[byte_at(indices, 2)] | (IQ3_XXS_GRID[byte_at(indices, 3)] << 32)
        v = intrinsics.to_floats(intrinsics.bytes_of(first, second)) * scale
        store(y, i * 16, signed(v, two_signs(word >> (i % 2 * 14))))


@iq3_s.unpack
def unpack_iq3_s(y, at):
    code_values = intrinsics.scratch(4)
    d = half_at(at, 0)
    for i in range(16):
        ninth_bits = byte_at(at, 66 + i // 2) >> (i % 2 * 4)
        for four in range(4):
            index = byte_at(at, 2 + i * 4 + four) | ((ninth_bits >> four & 1) << 8)
            intrinsics.put_word(code_values, four, IQ3_S_GRID[index])
        signs = (intrinsics.spread_bits(short_at(at + 74, i)) >> intrinsics.lane_numbers()) & 1
        scale = d * f32((byte_at(at, 106 + i // 4) >> (i // 2 % 2 * 4) & 15) * 2 + 1)
        v = intrinsics.to_floats(intrinsics.bytes_at(code_values, 0)) * scale
        store(y, i * 16, v * (intrinsics.to_floats(signs) * -2.0 + 1.0))


@part
def eight_of(indices: int, ninth_bits: int) -> int:
    """Return eight bytes, the values of two points: low bytes of their numbers at `indices`, bit 8 in ninth_bits."""
    first_index = byte_at(indices, 0) | ((ninth_bits & 1) << 8)
    second_index = byte_at(indices, 1) | ((ninth_bits & 2) << 7)
    return IQ3_S_GRID[first_index] | (IQ3_S_GRID[second_index] << 32)


@iq3_s.dot
def dot_iq3_s(x, w, n):
    a = intrinsics.splat(0.0)
    for b in range(0, n, 256):
        d = half_at(w, 0)
        for i in range(16):
            ninth = byte_at(w, 66 + i // 2) >> (i % 2 * 4)
            at = w + 2 + i * 4
            points = intrinsics.bytes_of(eight_of(at, ninth), eight_of(at + 2, ninth >> 2))
            scale = d * f32((byte_at(w, 106 + i // 4) >> (i // 2 % 2 * 4) & 15) * 2 + 1)
            v = intrinsics.to_floats(points) * scale
            v = intrinsics.put_where(v, short_at(w + 74, i), intrinsics.neg(v))
            a = intrinsics.fma(v, load(x, b + i * 16), a)
        w += 110
    return intrinsics.total(a)


@iq4_nl.unpack
def unpack_iq4_nl(y, block):
    code_values = load(NL, 0)
    d, q = half_at(block, 0), intrinsics.bytes_at(block, 2)
    store(y, 0, intrinsics.pick(code_values, q) * d)
    store(y, 16, intrinsics.pick(code_values, q >> 4) * d)


@iq4_nl.dot
def dot_iq4_nl(x, w, n):
    code_values, total_sums = load(NL, 0), intrinsics.splat(0.0)
    for p in range(0, n, 256):
        a, b = intrinsics.splat(0.0), intrinsics.splat(0.0)
        for i in range(p, min(p + 256, n), 32):
            d, q = half_at(w, 0), intrinsics.bytes_at(w, 2)
            a = intrinsics.fma(intrinsics.pick(code_values, q) * d, load(x, i), a)
            b = intrinsics.fma(intrinsics.pick(code_values, q >> 4) * d, load(x, i + 16), b)
            w += 18
        total_sums += a + b
    return intrinsics.total(total_sums)


@iq4_xs.unpack
def unpack_iq4_xs(y, block):
    code_values = load(NL, 0)
    d, high_bits = half_at(block, 0), short_at(block, 1)
    for i in range(8):
        low_bits = byte_at(block, 4 + i // 2) >> (i % 2 * 4)
        scale = d * f32(((low_bits & 15) | ((high_bits >> (i * 2) & 3) << 4)) - 32)
        q = intrinsics.bytes_at(block, 8 + i * 16)
        store(y, i * 32, intrinsics.pick(code_values, q) * scale)
        store(y, i * 32 + 16, intrinsics.pick(code_values, q >> 4) * scale)


@iq4_xs.dot
def dot_iq4_xs(x, w, n):
    code_values, a, b = load(NL, 0), intrinsics.splat(0.0), intrinsics.splat(0.0)
    scales = intrinsics.scratch(16)
    for p in range(0, n, 256):
        group = intrinsics.lane_numbers() & 7
        low_bits = (intrinsics.spread_bits(intrinsics.word_at(w + 4, 0)) >> (group << 2)) & 15
        high_bits = (intrinsics.spread_bits(short_at(w, 1)) >> (group << 1)) & 3
        store(scales, 0, intrinsics.to_floats((low_bits | (high_bits << 4)) - 32) * half_at(w, 0))
        for i in range(8):
            v, q = code_values * intrinsics.peek(scales, i), intrinsics.bytes_at(w, 8 + i * 16)
            a = intrinsics.fma(intrinsics.pick(v, q), load(x, p + i * 32), a)
            b = intrinsics.fma(intrinsics.pick(v, q >> 4), load(x, p + i * 32 + 16), b)
        w += 136
    return intrinsics.total(a + b)
