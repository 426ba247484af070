"""Pack q2_K and q3_K by ggml's search: bit for bit as its reference."""

import numpy as np

from packtrain.dtypes import intrinsics
from packtrain.dtypes.intrinsics import compiled_function, load, peek, poke, scratch, store, to_bits
from packtrain.dtypes.k import q2_K, q3_K, six_bit_scales

f32 = np.float32


@compiled_function
def requantize(codes: int, x: int, d: f32, offset: f32, low: f32, max_code: f32) -> None:
    """Write (x + offset) / d of 16 f32 at x, rounded within low … max_code, less low, to codes; if d is 0, none."""
    if d != 0:
        store(codes, 0, intrinsics.rounded((load(x, 0) + offset) / d, low, max_code) - low)


@compiled_function
def write_q2_K_codes(y: int, codes: int) -> None:
    """Write 256 codes, f32 at `codes`, to the q2_K block at y."""
    for half_index in range(2):
        for lane in range(0, 32, 16):
            half_codes = codes + half_index * 512 + lane * 4
            low_codes = to_bits(load(half_codes, 0)) | (to_bits(load(half_codes, 32)) << 2)
            high_codes = to_bits(load(half_codes, 64)) | (to_bits(load(half_codes, 96)) << 2)
            intrinsics.put_bytes(y + 16 + half_index * 32, lane, low_codes | (high_codes << 4))


@compiled_function
def put_q2_K_codes(y: int, x: int, codes: int) -> None:
    """Write to the q2_K block at y codes of 256 f32 at x by its stored scales; `codes`: the search's, overwritten."""
    for i in range(16):
        scale = intrinsics.byte_at(y, i)
        d = intrinsics.half_at(y, 40) * f32(scale & 15)
        offset = intrinsics.half_at(y, 41) * f32(scale >> 4)
        requantize(codes + i * 64, x + i * 64, d, offset, f32(0), f32(3))
    write_q2_K_codes(y, codes)


@q2_K.pack
def pack_q2_K(block, at):
    codes, w, scales, mins = scratch(256), scratch(16), scratch(16), scratch(16)
    largest_scale, lowest_min = f32(0), f32(0)
    for i in range(16):
        store(w, 0, intrinsics.absolute(load(at, i * 16)))
        group = codes + i * 64
        scale, low = intrinsics.sloped(at + i * 64, w, 16, 3, group, f32(-0.5), f32(0.1), 15, 1)
        poke(scales, i, scale)
        poke(mins, i, low)
        largest_scale, lowest_min = max(largest_scale, scale), min(lowest_min, low)
    intrinsics.put_half(block, 40, largest_scale / f32(15))
    intrinsics.put_half(block, 41, -lowest_min / f32(15) if lowest_min < 0 else f32(0))
    by_scale = f32(15) / largest_scale if largest_scale > 0 else f32(0)
    inverse_min = f32(15) / lowest_min if lowest_min < 0 else f32(0)
    for i in range(16):
        min_code = intrinsics.rounded_int(inverse_min * peek(mins, i), 15)
        scale_code = intrinsics.rounded_int(by_scale * peek(scales, i), 15)
        intrinsics.put_byte(block, i, scale_code | (min_code << 4))
    put_q2_K_codes(block, at, codes)


@compiled_function
def put_q3_K_scales(y: int, scales: int) -> None:
    """Write sixteen scales, f32 0 … 63 at `scales`, to the q3_K block at y, from which six_bit_scales reads them."""
    for i in range(8):
        low_bits, high_bits = int(peek(scales, i)), int(peek(scales, i + 8))
        intrinsics.put_byte(y, 96 + i, (low_bits & 15) | ((high_bits & 15) << 4))
    for i in range(4):
        low_bits = (int(peek(scales, i)) >> 4) | (int(peek(scales, i + 4)) >> 4 << 2)
        high_bits = (int(peek(scales, i + 8)) >> 4) | (int(peek(scales, i + 12)) >> 4 << 2)
        intrinsics.put_byte(y, 104 + i, low_bits | (high_bits << 4))


@compiled_function
def write_q3_K_codes(y: int, codes: int) -> None:
    """Write 256 codes, f32 at `codes`, to the q3_K block at y."""
    for lane in range(0, 32, 16):
        top_bits = intrinsics.spread_bits(0)
        for half_index in range(2):
            low_codes = intrinsics.spread_bits(0)
            for k in range(4):
                c = to_bits(load(codes, half_index * 128 + k * 32 + lane))
                low_codes = low_codes | ((c & 3) << (2 * k))
                top_bits = top_bits | ((c >> 2) << (half_index * 4 + k))
            intrinsics.put_bytes(y + 32 + half_index * 32, lane, low_codes)
        intrinsics.put_bytes(y, lane, top_bits)


@compiled_function
def put_q3_K_codes(y: int, x: int, codes: int) -> None:
    """Write to the q3_K block at y codes of 256 f32 at x by its stored scales; `codes`: the search's, overwritten."""
    scales = scratch(16)
    store(scales, 0, intrinsics.to_floats(six_bit_scales(y)) * intrinsics.half_at(y, 54))
    for i in range(16):
        requantize(codes + i * 64, x + i * 64, peek(scales, i), f32(0), f32(-4), f32(3))
    write_q3_K_codes(y, codes)


@q3_K.pack
def pack_q3_K(block, src):
    codes, w, scales = scratch(256), scratch(16), scratch(16)
    for i in range(16):
        v = load(src, i * 16)
        store(w, 0, v * v)
        poke(scales, i, intrinsics.even_by_turns(src + i * 64, w, 16, 4, codes + i * 64))
    extreme_scale = intrinsics.extreme(scales, 16)
    inverse = f32(-32) / extreme_scale
    intrinsics.put_half(block, 54, f32(1) / inverse if extreme_scale != 0 else f32(0))
    for i in range(16):
        scale = max(intrinsics.rounded_int(inverse * peek(scales, i), 31), -32) + 32
        poke(scales, i, f32(scale if extreme_scale != 0 else 0))
    put_q3_K_scales(block, scales)
    put_q3_K_codes(block, src, codes)
