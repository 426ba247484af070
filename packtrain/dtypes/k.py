"""The K types: blocks of 256 values in groups, each with its own scale, which is quantized, too.

q4_K, q5_K and q6_K are written here by ggml's search, q2_K and q3_K in k_small: a group's scale (and offset) is the
weighted least-squares fit to the codes of trial scales, the best of about twenty. Then the scales are quantized, and
codes are chosen for the quantized scales. Formats: ggml-common.h.
"""

import numpy as np

from packtrain.dtypes import intrinsics
from packtrain.dtypes.element_type import Bytes, CodeLayout, block_dtype
from packtrain.dtypes.intrinsics import byte_at, bytes_at, half_at, load, peek, store, to_floats
from packtrain.dtypes.legacy import q4_0, q5_0, q5_1, q8_0

f32 = np.float32
SIXES, FOURS, LOW_2_BITS = 0x3F3F3F3F, 0x0F0F0F0F0F0F0F0F, 0x0303030303030303  # low bits of bytes
NUM_GROUPS = 8  # of 32 values; q6_K has twice as many of 16
NOTHING = 1e-15  # q6_K: a group without larger values is all zeros


def scales_and_mins(raw: Bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and lows (<= 0) of q4_K and q5_K, six bits each; the last four groups' upper bits stand apart."""
    scale_bytes, min_bytes, upper_bytes = (raw[..., at : at + 4] for at in (4, 8, 12))
    d = np.concatenate((scale_bytes & 63, (upper_bytes & 15) | (scale_bytes >> 6 << 4)), axis=-1)
    m = np.concatenate((min_bytes & 63, (upper_bytes >> 4) | (min_bytes >> 6 << 4)), axis=-1)
    return d.astype(f32), -m.astype(f32)


def q3_K_scales(raw: Bytes) -> tuple[np.ndarray]:
    """Return the scales of q3_K: see six_bit_scales."""
    low_bits = raw[..., 96:104]
    high_bits = raw[..., None, 104:108] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    low_bits = np.concatenate((low_bits & 15, low_bits >> 4), axis=-1)
    joined_bits = low_bits | (high_bits.reshape(low_bits.shape) & 3) << 4
    return (joined_bits.astype(f32) - f32(32),)


def four_bits(raw: Bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and lows (<= 0) of q2_K."""
    scale_min_bytes = raw[..., :16]
    return (scale_min_bytes & 15).astype(f32), -(scale_min_bytes >> 4).astype(f32)


def q6_K_scales(raw: Bytes) -> tuple[np.ndarray]:
    return (raw[..., 192:208].view(np.int8).astype(f32),)


q6_K_layout = CodeLayout(16, 64, -32, (208,), 0, runs=2, high=128, high_runs=2, scales=q6_K_scales)
q6_K = block_dtype("q6_K", 14, 256, 210, smaller=q8_0, layout=q6_K_layout)
q5_K_layout = CodeLayout(32, 32, None, (0, 2), 48, runs=4, high=16, scales=scales_and_mins)
q5_K = block_dtype("q5_K", 13, 256, 176, smaller=q5_1, layout=q5_K_layout)
q4_K_layout = CodeLayout(32, 16, None, (0, 2), 16, runs=4, scales=scales_and_mins)
q4_K = block_dtype("q4_K", 12, 256, 144, smaller=q5_0, richer=q5_K, layout=q4_K_layout)
q3_K_layout = CodeLayout(16, 8, -4, (108,), 32, runs=2, num_low_bits=2, high=0, scales=q3_K_scales)
q3_K = block_dtype("q3_K", 11, 256, 110, smaller=q4_0, richer=q5_K, layout=q3_K_layout)
q2_K_layout = CodeLayout(16, 4, None, (80, 82), 16, runs=2, num_low_bits=2, scales=four_bits)
q2_K = block_dtype("q2_K", 10, 256, 84, smaller=q4_0, richer=q5_K, layout=q2_K_layout)
q2_K.mix("Q2_K", 10, attn_v=q3_K, attn_v_grouped=q4_K, ffn_down=q3_K, attn_output=q3_K)
q3_K.mix("Q3_K_S", 11)
q3_K.mix("Q3_K_L", 13, attn_v=q5_K, ffn_down=q5_K, attn_output=q5_K)
q3_K.mix(
    "Q3_K_M", 12, attn_v=q4_K, ffn_down=q4_K, attn_output=q4_K, first_layers=q5_K, has_few_first=True,
)  # fmt: skip
q4_K.mix("Q4_K_S", 14, first_layers=q5_K)
q4_K.mix("Q4_K_M", 15, outer_layers=q6_K)
q5_K.mix("Q5_K_S", 16)
q5_K.mix("Q5_K_M", 17, outer_layers=q6_K)
q6_K.mix("Q6_K", 18)


@q2_K.unpack
def unpack_q2_K(y, block):
    d, m = half_at(block + 80, 0), half_at(block + 80, 1)
    for i in range(16):
        scale = byte_at(block, i)
        q = bytes_at(block, 16 + i // 8 * 32 + i % 2 * 16) >> (i % 8 // 2 * 2)
        store(y, i * 16, to_floats(q & 3) * (d * f32(scale & 15)) - m * f32(scale >> 4))


@q2_K.dot
def dot_q2_K(x, w, n):
    a, b, scales = intrinsics.splat(0.0), intrinsics.splat(0.0), intrinsics.scratch(16)
    mins = intrinsics.scratch(16)
    for p in range(0, n, 256):
        s = bytes_at(w, 0)
        store(scales, 0, to_floats(s & 15) * half_at(w, 40))
        store(mins, 0, to_floats(s >> 4) * -half_at(w, 41))
        for half_index in range(2):
            q, r = bytes_at(w, 16 + half_index * 32), bytes_at(w, 32 + half_index * 32)
            for i in range(half_index * 8, half_index * 8 + 8, 2):
                v = intrinsics.low_2(q, peek(scales, i), peek(mins, i))
                a = intrinsics.fma(v, load(x, p + i * 16), a)
                v = intrinsics.low_2(r, peek(scales, i + 1), peek(mins, i + 1))
                b = intrinsics.fma(v, load(x, p + i * 16 + 16), b)
                q, r = q >> 2, r >> 2
        w += 84
    return intrinsics.total(a + b)


@intrinsics.part
def six_bit_scales(w: int) -> intrinsics.I32x16:
    """Return the sixteen scales of a q3_K block: their low four bits are in eight bytes, the two above in four."""
    low = intrinsics.word_at(w + 96, 0) | (intrinsics.word_at(w + 100, 0) << 32)
    high_bits = intrinsics.word_at(w + 104, 0)
    first = (high_bits | ((high_bits >> 2) << 32)) & LOW_2_BITS
    second = ((high_bits >> 4) | ((high_bits >> 6) << 32)) & LOW_2_BITS
    return (
        intrinsics.bytes_of((low & FOURS) | (first << 4), ((low >> 4) & FOURS) | (second << 4)) - 32
    )


@q3_K.dot
def dot_q3_K(x, w, n):
    a, b, scales = intrinsics.splat(0.0), intrinsics.splat(0.0), intrinsics.scratch(16)
    for p in range(0, n, 256):
        store(scales, 0, to_floats(six_bit_scales(w)) * half_at(w, 54))
        top, over = bytes_at(w, 0), bytes_at(w, 16)
        for half_index in range(2):
            q, r = bytes_at(w, 32 + half_index * 32), bytes_at(w, 48 + half_index * 32)
            for i in range(half_index * 8, half_index * 8 + 8, 2):
                d, e = peek(scales, i), peek(scales, i + 1)
                low, high = intrinsics.low_2(q, d, d * f32(-4)), intrinsics.low_2(q, d, f32(0))
                v = intrinsics.put_where(low, intrinsics.set_lanes(top & 1), high)
                a = intrinsics.fma(v, load(x, p + i * 16), a)
                low, high = intrinsics.low_2(r, e, e * f32(-4)), intrinsics.low_2(r, e, f32(0))
                v = intrinsics.put_where(low, intrinsics.set_lanes(over & 1), high)
                b = intrinsics.fma(v, load(x, p + i * 16 + 16), b)
                q, r, top, over = q >> 2, r >> 2, top >> 1, over >> 1
        w += 110
    return intrinsics.total(a + b)


@q3_K.unpack
def unpack_q3_K(y, at):
    d = half_at(at + 108, 0)
    for i in range(16):
        low_bits = byte_at(at, 96 + i % 8) >> (i // 8 * 4)
        high_bits = byte_at(at, 104 + i % 4) >> (i // 4 * 2)
        scale = ((low_bits & 15) | ((high_bits & 3) << 4)) - 32
        q = (bytes_at(at, 32 + i // 8 * 32 + i % 2 * 16) >> (i % 8 // 2 * 2)) & 3
        top_bits = (bytes_at(at, i % 2 * 16) >> (i // 2)) & 1  # set where nothing is subtracted
        store(y, i * 16, to_floats((q | (top_bits << 2)) - 4) * (d * f32(scale)))


@intrinsics.part
def scale_and_min(block: int, i: int) -> tuple[f32, f32]:
    """Return scale and offset of the i-th 32 of a q4_K or q5_K block: six bits each, the last four's in two bytes."""
    d, m = half_at(block, 0), half_at(block, 1)
    if i < 4:
        scale, min_code = byte_at(block, 4 + i) & 63, byte_at(block, 8 + i) & 63
    else:
        low_bits = byte_at(block, 8 + i)
        scale = (low_bits & 15) | (byte_at(block, i) >> 6 << 4)
        min_code = (low_bits >> 4) | (byte_at(block, 4 + i) >> 6 << 4)
    return d * f32(scale), m * f32(min_code)


@q4_K.unpack
def unpack_q4_K(y, block):
    for i in range(8):
        d, m = scale_and_min(block, i)
        for half_index in range(0, 32, 16):
            q = (bytes_at(block, 16 + i // 2 * 32 + half_index) >> (i % 2 * 4)) & 15
            store(y, i * 32 + half_index, to_floats(q) * d - m)


@intrinsics.part
def scales_then_mins(w: int) -> intrinsics.F32x16:
    """Return eight scales and eight negative offsets of a q4_K or q5_K block, as scale_and_min gives them by group."""
    first, second = intrinsics.word_at(w + 4, 0), intrinsics.word_at(w + 8, 0)
    upper_bits = intrinsics.word_at(w + 12, 0)
    top_bits = (((first >> 6) << 4) | ((second >> 6) << 36)) & (LOW_2_BITS << 4)
    low = (upper_bits & FOURS) | (top_bits & 0xFFFFFFFF)
    upper_mins = ((upper_bits >> 4) & 0x0F0F0F0F) | (top_bits >> 32)
    both = intrinsics.bytes_of((first & SIXES) | (low << 32), (second & SIXES) | (upper_mins << 32))
    d, min_unit = intrinsics.splat(half_at(w, 0)), intrinsics.splat(-half_at(w, 1))
    return to_floats(both) * intrinsics.keep_first(d, 8, min_unit)


@q5_K.unpack
def unpack_q5_K(y, block):
    for i in range(8):
        d, m = scale_and_min(block, i)
        for half_index in range(0, 32, 16):
            q = (bytes_at(block, 48 + i // 2 * 32 + half_index) >> (i % 2 * 4)) & 15
            top_bits = (bytes_at(block, 16 + half_index) >> i) & 1
            store(y, i * 32 + half_index, to_floats(q | (top_bits << 4)) * d - m)


@q6_K.unpack
def unpack_q6_K(y, block):
    d = half_at(block + 208, 0)
    for i in range(16):
        half, quarter, lane = i // 8, i % 8 // 2, i % 2 * 16
        q = (bytes_at(block, half * 64 + quarter % 2 * 32 + lane) >> (quarter // 2 * 4)) & 15
        top_bits = (bytes_at(block, 128 + half * 32 + lane) >> (quarter * 2)) & 3
        scale = d * f32(intrinsics.char_at(block, 192 + i))
        store(y, i * 16, to_floats((q | (top_bits << 4)) - 32) * scale)


# ---- codes of a block, which begin as 256 f32 at `codes` -----------------------------------------------------------


@intrinsics.part
def sixteen_codes(codes: int, i: int) -> intrinsics.I32x16:
    return intrinsics.to_bits(load(codes, i))


@intrinsics.compiled_function
def write_q4_K_codes(y: int, codes: int) -> None:
    for i in range(0, 256, 64):
        for lane in range(0, 32, 16):
            low, high = sixteen_codes(codes, i + lane), sixteen_codes(codes, i + 32 + lane)
            intrinsics.put_bytes(y + 16 + i // 2, lane, low | (high << 4))


@intrinsics.compiled_function
def write_q5_K_codes(y: int, codes: int) -> None:
    for lane in range(0, 32, 16):
        top_bits = intrinsics.spread_bits(0)
        for i in range(0, 8, 2):
            first = sixteen_codes(codes, i * 32 + lane)
            second = sixteen_codes(codes, i * 32 + 32 + lane)
            top_bits = top_bits | (first >> 4 << i) | (second >> 4 << (i + 1))
            intrinsics.put_bytes(y + 48 + i * 16, lane, (first & 15) | ((second & 15) << 4))
        intrinsics.put_bytes(y + 16, lane, top_bits)


@intrinsics.compiled_function
def write_q6_K_codes(y: int, codes: int) -> None:
    for half in range(2):
        for lane in range(0, 32, 16):
            i = half * 128 + lane
            c0, c1 = sixteen_codes(codes, i), sixteen_codes(codes, i + 32)
            c2, c3 = sixteen_codes(codes, i + 64), sixteen_codes(codes, i + 96)
            low, high = y + half * 64 + lane, y + 128 + half * 32 + lane
            intrinsics.put_bytes(low, 0, (c0 & 15) | ((c2 & 15) << 4))
            intrinsics.put_bytes(low, 32, (c1 & 15) | ((c3 & 15) << 4))
            top_bits = (c0 >> 4) | (c1 >> 4 << 2) | (c2 >> 4 << 4) | (c3 >> 4 << 6)
            intrinsics.put_bytes(high, 0, top_bits)


# ---- packing --------------------------------------------------------------------------------------------------


@intrinsics.part
def put_scale_bits(y: int, i: int, scale: int, offset: int, scale_4: int, offset_4: int) -> None:
    """Write scales and offsets, six bits each, of groups i and i + 4 to the q4_K or q5_K block at y."""
    intrinsics.put_byte(y, 4 + i, scale | (scale_4 >> 4 << 6))
    intrinsics.put_byte(y, 8 + i, offset | (offset_4 >> 4 << 6))
    intrinsics.put_byte(y, 12 + i, (scale_4 & 15) | ((offset_4 & 15) << 4))


@intrinsics.compiled_function
def put_scales_and_mins(y: int, x: int, max_code: f32, first_trial: f32, num_trials: int) -> None:
    """Write the first 16 bytes of a q4_K or q5_K block at y for 256 f32 at x: scales by codes.fit with these trials."""
    scales, mins = intrinsics.scratch(8), intrinsics.scratch(8)
    largest_scale, lowest_min = f32(0), f32(0)
    for i in range(NUM_GROUPS):
        scale, min_value = intrinsics.fit(x + i * 128, max_code, first_trial, num_trials)
        intrinsics.poke(scales, i, scale)
        intrinsics.poke(mins, i, min_value)
        largest_scale, lowest_min = max(largest_scale, scale), min(lowest_min, min_value)
    intrinsics.put_half(y, 0, largest_scale / f32(63))
    intrinsics.put_half(y, 1, -lowest_min / f32(63))
    inverse_scale = f32(63) / largest_scale if largest_scale > 0 else f32(0)
    inverse_min = f32(63) / lowest_min if lowest_min < 0 else f32(0)
    for i in range(NUM_GROUPS // 2):
        scale = intrinsics.rounded_int(inverse_scale * peek(scales, i), 63)
        min_code = intrinsics.rounded_int(inverse_min * peek(mins, i), 63)
        scale_4 = intrinsics.rounded_int(inverse_scale * peek(scales, i + 4), 63)
        min_code_4 = intrinsics.rounded_int(inverse_min * peek(mins, i + 4), 63)
        put_scale_bits(y, i, scale, min_code, scale_4, min_code_4)


@intrinsics.part
def put_group_codes(codes: int, y: int, x: int, max_code: f32) -> None:
    """Write to `codes`, as f32, codes 0 … max_code of 256 f32 at x by the scales of the q4_K or q5_K block at y."""
    for i in range(0, 256, 16):
        d, offset = scale_and_min(y, i // 32)
        d = d if d > 0 else f32(1)  # with a scale of 0 codes do not matter
        store(codes, i, intrinsics.rounded((load(x, i) + offset) / d, f32(0), max_code))


@q4_K.pack
def pack_q4_K(y, x):
    codes = intrinsics.scratch(256)
    put_scales_and_mins(y, x, f32(15), f32(-1), 20)
    put_group_codes(codes, y, x, f32(15))
    write_q4_K_codes(y, codes)


@q5_K.pack
def pack_q5_K(y, x):
    codes = intrinsics.scratch(256)
    put_scales_and_mins(y, x, f32(31), f32(-0.5), 15)
    put_group_codes(codes, y, x, f32(31))
    write_q5_K_codes(y, codes)


@intrinsics.compiled_function
def fit_symmetric_scale(x: int) -> f32:
    """Return the scale of 16 values as codes -32 … 31, by trials around 32 for the extreme; squares weight errors."""
    extreme_value, scale, best_score = intrinsics.extreme(x, 16), f32(0), f32(0)
    if abs(extreme_value) < NOTHING:
        return f32(0)
    v = load(x, 0)
    w = v * v
    for trial_index in range(-9, 10):
        inverse = -(f32(32) + f32(0.1) * f32(trial_index)) / extreme_value
        code = intrinsics.rounded(v * inverse, f32(-32), f32(31))
        sum_lx, sum_ll = intrinsics.total(w * v * code), intrinsics.total(w * code * code)
        if sum_lx * sum_lx > best_score * sum_ll:
            scale = sum_lx / sum_ll
            best_score = scale * sum_lx
    return scale


@intrinsics.compiled_function
def put_q6_K_scales(y: int, x: int) -> None:
    """Write the last 18 bytes of a q6_K block at y for 256 f32 at x: sixteen scales and their unit."""
    scales, extreme_scale = intrinsics.scratch(16), f32(0)
    for i in range(2 * NUM_GROUPS):
        intrinsics.poke(scales, i, fit_symmetric_scale(x + i * 64))
    extreme_scale = intrinsics.extreme(scales, 16)
    inverse = f32(-128) / extreme_scale if abs(extreme_scale) >= NOTHING else f32(0)
    intrinsics.put_half(y, 104, extreme_scale / f32(-128))
    for i in range(2 * NUM_GROUPS):
        intrinsics.put_byte(y, 192 + i, intrinsics.rounded_int(inverse * peek(scales, i), 127))


@q6_K.pack
def pack_q6_K(y, x):
    codes = intrinsics.scratch(256)
    put_q6_K_scales(y, x)
    for i in range(16):
        d = half_at(y, 104) * f32(intrinsics.char_at(y, 192 + i))
        v = load(x, i * 16) / (d if d != 0 else f32(1))
        store(codes, i * 16, intrinsics.rounded(v, f32(-32), f32(31)) + 32.0)
    write_q6_K_codes(y, codes)
