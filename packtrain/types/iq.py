"""The IQ types: codes index tables of values. Formats: ggml-common.h."""

import numpy as np

from packtrain.types.k import q4_K
from packtrain.types.legacy import q5_0
from packtrain.types.room import packed
from packtrain.types.words import (
    byte_at,
    bytes_at,
    bytes_of,
    fma,
    half_at,
    lane_numbers,
    load,
    neg,
    part,
    peek,
    pick,
    put_where,
    put_word,
    scratch,
    short_at,
    splat,
    spread_bits,
    store,
    to_floats,
    total,
    word_at,
)

f32 = np.float32
# the sixteen values of iq4_nl and iq4_xs
NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], f32)
# the values of iq3_s's 512 indices: four odd values from 1 to 15 each, of which the upper three bits are written
BITS_S = np.unpackbits(np.frombuffer(bytes.fromhex(
    "000200400a00e00040240440840c40080280a806c0100500b00f003407401805803c09c0fc0008208408808048248a48"
    "088688e882c8ac8908388b885c8010210a10e10050650c50290a900d08d0510b10f103507501d07d0618258a58098498"
    "2d86d8cd8918158558f983d8bd8020660e602a08a04e01207203601e04288280a84a8ca86e8328b28f28da87e8c30270"
    "6702f05703f00384388380b84b8cb86f8178978001201401801041241641a41e410814812c18c1cc1941d413815c1009"
    "209609c090498492890c96c93091495491c9dc9011451a51e510918914d1111711b511915d1219819e19059659299e99"
    "0d98d93195991d9621a214618612e16e1521d211619612290696692a90e94e93690b18b1eb1931d312396390794792b9"
    "af93395b91f9002202602a02e02042442842c42282682e820c24c2302702b02142542f821c27c2bc200a40a04a64ae4a"
    "48aa8a2ca8ca50a34a212812e122926920d2ed2312752f523d29d201a41aa1a25a49a89a2da6da51a15ad9a222e220a2"
    "6a24e2ae23225e2be282a26a4aaeea12a76a1ea032432e322b2b723b2a3a27acba0fa73a17a403243643a43e434832c3"
    "6c3ac3503903f033437833c320b60ba0b84b28b68b10b18b5cbdcb0134530934d38d315321b05b85b29b69be9b0db31b"
    "71bf1bb5b7db623263c634a32e35631a39a322b06b46baab4eb92bd6b7ebc7333323b63b0bb4bbafb004804444084884"
    "e844c43041441c440ce0c24c64c48c0ccacc70c34cb4c214614054a542946d4114f545941d481c25c65c09c49c2dcadc"
    "0244248a4ee41243e4a2ce2c2ac5ac6748f41b407ca7c0fc73c37c405045845485105905f05545d859c520d60da0d44d"
    "28d4cd5cd0152556950d5cd575541de1d05de9d91d35db9d7dd2258250a54e5d2546dcad36d76d53543d83d4bd246646"
    "a462c66c618600e08ee8e98e4568d6516b565961d601e85e29e11eaa67265a602e62e8ee1aea3613627e67e007807e07"
    "087487cc710794758740f24f88f70fb0f217817057c572970d735741f4dfadf75f227a276670a71674af52f4372f703f"
), np.uint8)).reshape(-1, 3)  # fmt: skip
FOURS_S = np.array(BITS_S @ (8, 4, 2) + 1, np.uint8).view("<u4")
iq1_s, iq1_m = packed("iq1_s", 19, 256, 50), packed("iq1_m", 29, 256, 56)
iq2_xxs, iq2_xs, iq2_s = (
    packed("iq2_xxs", 16, 256, 66),
    packed("iq2_xs", 17, 256, 74),
    packed("iq2_s", 22, 256, 82),
)
iq3_xxs, iq3_s = packed("iq3_xxs", 18, 256, 98), packed("iq3_s", 21, 256, 110, instead=q4_K)
iq4_nl = packed("iq4_nl", 20, 32, 18, instead=q5_0)
iq4_xs = packed("iq4_xs", 23, 256, 136, instead=q4_K)


@iq3_s.unpack
def unpack_iq3_s(y, x, n):
    values = scratch(4)
    for b in range(n):
        at, out = x + b * 110, b * 256
        d = half_at(at, 0)
        for i in range(16):
            ninth = byte_at(at, 66 + i // 2) >> (i % 2 * 4)
            for four in range(4):
                index = byte_at(at, 2 + i * 4 + four) | ((ninth >> four & 1) << 8)
                put_word(values, four, FOURS_S[index])
            signs = (spread_bits(short_at(at + 74, i)) >> lane_numbers()) & 1
            scale = d * f32((byte_at(at, 106 + i // 4) >> (i // 2 % 2 * 4) & 15) * 2 + 1)
            v = to_floats(bytes_at(values, 0)) * scale
            store(y, out + i * 16, v * (to_floats(signs) * -2.0 + 1.0))


@part
def eight_of(at: int, ninth: int) -> int:
    """The eight values, as bytes, of two indices: low bytes at `at`, their upper bits the lowest of `ninth`."""
    first = byte_at(at, 0) | ((ninth & 1) << 8)
    second = byte_at(at, 1) | ((ninth & 2) << 7)
    return FOURS_S[first] | (FOURS_S[second] << 32)


@iq3_s.dot
def dot_iq3_s(x, w, n):
    a = splat(0.0)
    for b in range(0, n, 256):
        d = half_at(w, 0)
        for i in range(16):
            ninth = byte_at(w, 66 + i // 2) >> (i % 2 * 4)
            at = w + 2 + i * 4
            v = to_floats(bytes_of(eight_of(at, ninth), eight_of(at + 2, ninth >> 2)))
            scale = d * f32((byte_at(w, 106 + i // 4) >> (i // 2 % 2 * 4) & 15) * 2 + 1)
            v = v * scale
            a = fma(put_where(v, short_at(w + 74, i), neg(v)), load(x, b + i * 16), a)
        w += 110
    return total(a)


@iq4_nl.unpack
def unpack_iq4_nl(y, x, n):
    values = load(NL, 0)
    for b in range(n):
        at, out = x + b * 18, b * 32
        d, q = half_at(at, 0), bytes_at(at, 2)
        store(y, out, pick(values, q) * d)
        store(y, out + 16, pick(values, q >> 4) * d)


@iq4_nl.dot
def dot_iq4_nl(x, w, n):
    values, every = load(NL, 0), splat(0.0)
    for p in range(0, n, 256):
        a, b = splat(0.0), splat(0.0)
        for i in range(p, min(p + 256, n), 32):
            d, q = half_at(w, 0), bytes_at(w, 2)
            a = fma(pick(values, q) * d, load(x, i), a)
            b = fma(pick(values, q >> 4) * d, load(x, i + 16), b)
            w += 18
        every += a + b
    return total(every)


@iq4_xs.unpack
def unpack_iq4_xs(y, x, n):
    values = load(NL, 0)
    for b in range(n):
        at, out = x + b * 136, b * 256
        d, high = half_at(at, 0), short_at(at, 1)
        for i in range(8):
            low = byte_at(at, 4 + i // 2) >> (i % 2 * 4)
            scale = d * f32(((low & 15) | ((high >> (i * 2) & 3) << 4)) - 32)
            q = bytes_at(at, 8 + i * 16)
            store(y, out + i * 32, pick(values, q) * scale)
            store(y, out + i * 32 + 16, pick(values, q >> 4) * scale)


@iq4_xs.dot
def dot_iq4_xs(x, w, n):
    values, a, b, scales = load(NL, 0), splat(0.0), splat(0.0), scratch(16)
    for p in range(0, n, 256):
        group = lane_numbers() & 7
        low = (spread_bits(word_at(w + 4, 0)) >> (group << 2)) & 15
        high = (spread_bits(short_at(w, 1)) >> (group << 1)) & 3
        store(scales, 0, to_floats((low | (high << 4)) - 32) * half_at(w, 0))
        for i in range(8):
            v, q = values * peek(scales, i), bytes_at(w, 8 + i * 16)
            a = fma(pick(v, q), load(x, p + i * 32), a)
            b = fma(pick(v, q >> 4), load(x, p + i * 32 + 16), b)
        w += 136
    return total(a + b)
