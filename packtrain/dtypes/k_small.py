"""Packing q2_K and q3_K, by ggml's search: bit for bit as its reference."""

import numpy as np

from packtrain.dtypes import intrinsics
from packtrain.dtypes.intrinsics import (
    code,
    half_at,
    load,
    peek,
    poke,
    put_byte,
    scratch,
    store,
    to_bits,
)
from packtrain.dtypes.k import q2_K, q3_K, six_bit_scales

f32 = np.float32


@code
def settle(codes: int, x: int, d: f32, least: f32, low: f32, high: f32) -> None:
    """Codes of 16 values for their stored scale, low becomes 0; with a scale of 0 those of the search stay."""
    if d != 0:
        store(codes, 0, intrinsics.rounded((load(x, 0) + least) / d, low, high) - low)


@code
def put_2(y: int, x: int, codes: int) -> None:
    """The codes of a q2_K block, for the scales that it has."""
    for i in range(16):
        scale = intrinsics.byte_at(y, i)
        d, offset = half_at(y, 40) * f32(scale & 15), half_at(y, 41) * f32(scale >> 4)
        settle(codes + i * 64, x + i * 64, d, offset, f32(0), f32(3))
    for half in range(2):
        for lane in range(0, 32, 16):
            at = codes + half * 512 + lane * 4
            low = to_bits(load(at, 0)) | (to_bits(load(at, 32)) << 2)
            high = to_bits(load(at, 64)) | (to_bits(load(at, 96)) << 2)
            intrinsics.put_bytes(y + 16 + half * 32, lane, low | (high << 4))


@q2_K.pack
def pack_q2_K(y, x, n):
    codes, w, scales, lows = scratch(256), scratch(16), scratch(16), scratch(16)
    for b in range(n):
        to, at, largest_scale, lowest = y + b * 84, x + b * 1024, f32(0), f32(0)
        for i in range(16):
            store(w, 0, intrinsics.absolute(load(at, i * 16)))
            group = codes + i * 64
            scale, low = intrinsics.sloped(at + i * 64, w, 16, 3, group, f32(-0.5), f32(0.1), 15, 1)
            poke(scales, i, scale)
            poke(lows, i, low)
            largest_scale, lowest = max(largest_scale, scale), min(lowest, low)
        intrinsics.put_half(to, 40, largest_scale / f32(15))
        intrinsics.put_half(to, 41, -lowest / f32(15) if lowest < 0 else f32(0))
        by_scale = f32(15) / largest_scale if largest_scale > 0 else f32(0)
        by_low = f32(15) / lowest if lowest < 0 else f32(0)
        for i in range(16):
            low_code = intrinsics.whole(by_low * peek(lows, i), 15)
            put_byte(to, i, intrinsics.whole(by_scale * peek(scales, i), 15) | (low_code << 4))
        put_2(to, at, codes)


@code
def put_six_bits(y: int, scales: int) -> None:
    """The sixteen scales of a q3_K block, 0 .. 63; see six_bit_scales, which reads them."""
    for i in range(8):
        low, high = int(peek(scales, i)), int(peek(scales, i + 8))
        put_byte(y, 96 + i, (low & 15) | ((high & 15) << 4))
    for i in range(4):
        low = (int(peek(scales, i)) >> 4) | (int(peek(scales, i + 4)) >> 4 << 2)
        high = (int(peek(scales, i + 8)) >> 4) | (int(peek(scales, i + 12)) >> 4 << 2)
        put_byte(y, 104 + i, low | (high << 4))


@code
def put_3(y: int, x: int, codes: int) -> None:
    """The codes of a q3_K block, for the scales that it has."""
    scales = scratch(16)
    store(scales, 0, intrinsics.to_floats(six_bit_scales(y)) * half_at(y, 54))
    for i in range(16):
        settle(codes + i * 64, x + i * 64, peek(scales, i), f32(0), f32(-4), f32(3))
    for lane in range(0, 32, 16):
        top = intrinsics.spread_bits(0)
        for half in range(2):
            low = intrinsics.spread_bits(0)
            for k in range(4):
                c = to_bits(load(codes, half * 128 + k * 32 + lane))
                low = low | ((c & 3) << (2 * k))
                top = top | ((c >> 2) << (half * 4 + k))
            intrinsics.put_bytes(y + 32 + half * 32, lane, low)
        intrinsics.put_bytes(y, lane, top)


@q3_K.pack
def pack_q3_K(y, x, n):
    codes, w, scales = scratch(256), scratch(16), scratch(16)
    for b in range(n):
        to, at = y + b * 110, x + b * 1024
        for i in range(16):
            v = load(at, i * 16)
            store(w, 0, v * v)
            poke(scales, i, intrinsics.even_by_turns(at + i * 64, w, 16, 4, codes + i * 64))
        furthest = intrinsics.extreme(scales, 16)
        inverse = f32(-32) / furthest
        intrinsics.put_half(to, 54, f32(1) / inverse if furthest != 0 else f32(0))
        for i in range(16):
            scale = max(intrinsics.whole(inverse * peek(scales, i), 31), -32) + 32
            poke(scales, i, f32(scale if furthest != 0 else 0))
        put_six_bits(to, scales)
        put_3(to, at, codes)
