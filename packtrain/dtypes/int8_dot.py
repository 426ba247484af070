"""Unpack codes and scales of types whose products with rounded values are summed in integers, see `kernels.rounded`.

Codes are taken 128 or 256 at a time, in groups of 32, or of 16 where each 16 have a scale. `codes` gives 64 of them: of
each group, in turn, 16, 8 or 4, as many as make 64. `scales` gives the groups' scales, then their offsets.
"""

import numpy as np

from packtrain.dtypes import intrinsics
from packtrain.dtypes.element_type import DtypeFamily
from packtrain.dtypes.intrinsics import U8x64, bit_by_eight, fours, halves, part, short_at, sixteens
from packtrain.dtypes.iq import NL, iq4_nl
from packtrain.dtypes.k import q4_K, q5_K, q6_K, scales_then_mins
from packtrain.dtypes.legacy import q4_0, q4_1, q5_0, q5_1, q8_0

# the table of iq4_nl as bytes of two words, 128 added
IQ4_LOW_WORD, IQ4_HIGH_WORD = map(int, (NL + 128).astype(np.uint8).view("<i8"))


@part
def fifth_bits(w: int, nbytes: int, i: int) -> U8x64:
    """Return bit 4 of the i-th 64 codes of four blocks `nbytes` apart, in place; w: the first block's fifth bits."""
    at = w + 2 * i
    low_bits = short_at(at, 0) | (short_at(at + nbytes, 0) << 16)
    high_bits = short_at(at + 2 * nbytes, 0) | (short_at(at + 3 * nbytes, 0) << 16)
    return intrinsics.codes_where(low_bits | (high_bits << 32), 16)


def codes_of_32(dtype):
    """Return the function `codes`, (w, i) -> U8x64, of a type of blocks of 32 with four or five bits for each code."""
    codes_at, fifth_at, nbytes = dtype.layout.quads, dtype.layout.high, dtype.block_nbytes

    def codes(w, i):
        q = sixteens(w, codes_at, nbytes)
        low_bits = q & 15 if i == 0 else q >> 4
        return low_bits | fifth_bits(w + fifth_at, nbytes, i) if fifth_at else low_bits

    codes.__name__ = codes.__qualname__ = f"codes_{dtype.name}"
    return codes


q4_0.codes(8, code_offset=8)(codes_of_32(q4_0))
q4_1.codes(15)(codes_of_32(q4_1))
q5_0.codes(16, code_offset=16)(codes_of_32(q5_0))
q5_1.codes(31)(codes_of_32(q5_1))
SCALED_BY_HALVES = DtypeFamily((q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl))


@SCALED_BY_HALVES.scales
def scales(dtype):
    """Return a function of the address of four blocks that reads their scales, and offsets if they have them."""
    nbytes, has_offset = dtype.block_nbytes, dtype.layout.low is None

    def scales_of_four(w):
        d = halves(w, 0, nbytes)
        return fours(d, halves(w, 2, nbytes)) if has_offset else d

    return scales_of_four


@q8_0.codes(128, code_offset=128)
def codes_q8_0(w, i):
    q = sixteens(w, 2, 34) if i == 0 else sixteens(w, 18, 34)
    return q ^ 128


@iq4_nl.codes(128, code_offset=128)
def codes_iq4_nl(w, i):
    q = sixteens(w, 2, 18)
    return intrinsics.look_up(q & 15 if i == 0 else q >> 4, IQ4_LOW_WORD, IQ4_HIGH_WORD)


@part
def nibbles_of_eight(w: int, i: int) -> U8x64:
    """Return the low four bits of codes 8 i … 8 i + 7 of all eight groups of a q4_K or q5_K block, which lie at w."""
    return intrinsics.low_and_high(intrinsics.twice_of_four(w + 8 * i)) & 15


@q4_K.codes(15)
def codes_q4_K(w, i):
    return nibbles_of_eight(w + 16, i)


@q5_K.codes(31)
def codes_q5_K(w, i):
    return nibbles_of_eight(w + 48, i) | (bit_by_eight(intrinsics.eight_times(w + 16 + 8 * i)) & 16)


@q4_K.scales
@q5_K.scales
def scales_k(w):
    return scales_then_mins(w)


@q6_K.codes(32, code_offset=32)
def codes_q6_K(w, i):
    low, high = intrinsics.low_of_sixteen(w + 4 * i), intrinsics.high_of_sixteen(w + 128 + 4 * i)
    return (low & 15) | (high & 48)


@q6_K.scales
def scales_q6_K(w):
    return intrinsics.to_floats(intrinsics.chars_at(w, 192)) * intrinsics.half_at(w, 104)
