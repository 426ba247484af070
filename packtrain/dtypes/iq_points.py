"""Read and write the points, signs and scales of a block of the IQ types, for calibrated rounding.

A block has 256 values; a value is scale * sign * coordinate, or scale * (coordinate + shift). Formats: ggml-common.h.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from packtrain.dtypes.grids import IQ2_XS_GRID, IQ3_S_GRID, IQ3_XXS_GRID, ONE, TWO_S, TWO_XXS

f32 = np.float32
Bytes = np.ndarray  # u8 (rows, blocks, bytes of a block)
SEVEN_SIGNS = np.uint8(127)  # seven of eight signs are stored: the number of signs is even


@dataclass(frozen=True)
class GridPoints:
    """The points that a type's codes can name, and their places in a block.

    point_ids       numbers of the points as integers (int64), one byte for each of `width` coordinates
    group_size      values that share a scale
    read_scales     (raw) -> (R, blocks, 256 / group_size) f32
    write_points    (raw, numbers, signs): u16 (R, blocks, 256 / width); u8 (R, blocks, 32), a bit set for each negative
    has_even_signs  whether each eight values have an even number of signs
    read_shifts     (raw) -> (R, blocks, 32) f32, for each eight values; None: they have signs
    """

    point_ids: np.ndarray
    width: int
    group_size: int
    read_scales: Callable[[Bytes], np.ndarray]
    write_points: Callable[[Bytes, np.ndarray, np.ndarray], None]
    has_even_signs: bool = False
    read_shifts: Callable[[Bytes], np.ndarray] | None = None

    @cached_property
    def grid(self) -> np.ndarray:
        """The points' coordinates, f32 (points, width)."""
        return self.point_ids.view(np.uint8).reshape(-1, 8)[:, : self.width].astype(f32)


def read_words(raw: Bytes, start_byte: int, num_words: int, dtype: str) -> np.ndarray:
    """Return `num_words` integers from byte `start_byte` of each block on, a copy (R, blocks, num_words)."""
    nbytes = num_words * np.dtype(dtype).itemsize
    return np.ascontiguousarray(raw[..., start_byte : start_byte + nbytes]).view(dtype)


def write_words(raw: Bytes, start_byte: int, values: np.ndarray, dtype: str) -> None:
    """Write values as words of type `dtype` into the bytes of each block from start_byte on."""
    word_bytes = np.ascontiguousarray(values.astype(dtype)).view(np.uint8)
    raw[..., start_byte : start_byte + word_bytes.shape[-1]] = word_bytes


def pack_bits(bit_fields: np.ndarray, group_size: int, bits: int) -> np.ndarray:
    """Join each group_size neighbours on the last axis, `bits` bits each, to a u32, the first one lowest."""
    code_groups = bit_fields.astype(np.uint32).reshape(*bit_fields.shape[:-1], -1, group_size)
    return np.bitwise_or.reduce(
        code_groups << np.arange(0, bits * group_size, bits, dtype=np.uint32), -1
    )


def scaled_by_unit(by: np.ndarray, raw: Bytes, start_byte: int = 0) -> np.ndarray:
    """Return `by`, (rows, blocks, …), times the f16 unit at byte start_byte of each block."""
    return read_words(raw, start_byte, 1, "<f2").astype(f32) * by


def nibbles(raw: Bytes, start_byte: int, num_bytes: int) -> np.ndarray:
    """Return the four-bit codes in `num_bytes` bytes of each block as f32, the low one of a byte first."""
    part = raw[..., start_byte : start_byte + num_bytes]
    return np.stack([part & 15, part >> 4], -1).reshape(*part.shape[:-1], -1).astype(f32)


# ---- two bits --------------------------------------------------------------------------------------------------


def iq2_xxs_scales(raw: Bytes) -> np.ndarray:
    scale_codes = read_words(raw, 2, 16, "<u4")[..., 1::2] >> 28
    return scaled_by_unit((scale_codes.astype(f32) + f32(0.5)) * f32(0.25), raw)


def put_iq2_xxs(raw: Bytes, numbers: np.ndarray, signs: np.ndarray) -> None:
    both = read_words(raw, 2, 16, "<u4")
    both[..., ::2] = pack_bits(numbers, 4, 8)
    both[..., 1::2] = both[..., 1::2] & 0xF0000000 | pack_bits(signs & SEVEN_SIGNS, 4, 7)
    write_words(raw, 2, both, "<u4")


def iq2_xs_scales(raw: Bytes) -> np.ndarray:
    return scaled_by_unit((nibbles(raw, 66, 8) + f32(0.5)) * f32(0.25), raw)


def put_iq2_xs(raw: Bytes, numbers: np.ndarray, signs: np.ndarray) -> None:
    write_words(raw, 2, numbers | (signs & SEVEN_SIGNS).astype(np.uint16) << 9, "<u2")


def iq2_s_scales(raw: Bytes) -> np.ndarray:
    return scaled_by_unit((nibbles(raw, 74, 8) + f32(0.5)) * f32(0.25), raw)


def put_iq2_s(raw: Bytes, numbers: np.ndarray, signs: np.ndarray) -> None:
    raw[..., 2:34], raw[..., 34:66] = numbers & 255, signs
    raw[..., 66:74] = pack_bits(numbers >> 8, 4, 2)


# ---- three bits ------------------------------------------------------------------------------------------------


def iq3_xxs_scales(raw: Bytes) -> np.ndarray:
    scale_codes = read_words(raw, 66, 8, "<u4") >> 28
    return scaled_by_unit((scale_codes.astype(f32) + f32(0.5)) * f32(0.5), raw)


def put_iq3_xxs(raw: Bytes, numbers: np.ndarray, signs: np.ndarray) -> None:
    raw[..., 2:66] = numbers
    scales = read_words(raw, 66, 8, "<u4") & 0xF0000000
    write_words(raw, 66, scales | pack_bits(signs & SEVEN_SIGNS, 4, 7), "<u4")


def iq3_s_scales(raw: Bytes) -> np.ndarray:
    return scaled_by_unit(nibbles(raw, 106, 4) * 2 + 1, raw)


def put_iq3_s(raw: Bytes, numbers: np.ndarray, signs: np.ndarray) -> None:
    raw[..., 2:66], raw[..., 66:74] = numbers & 255, pack_bits(numbers >> 8, 8, 1)
    raw[..., 74:106] = signs


# ---- one bit: three levels and a shift -------------------------------------------------------------------------


def shifts_of_bits(bits: np.ndarray) -> np.ndarray:
    """Return the shifts of groups of values, -0.875 or -1.125, by a bit of each."""
    shifts: np.ndarray = f32(-0.875) - f32(0.25) * bits.astype(f32)
    return shifts


def iq1_s_scales(raw: Bytes) -> np.ndarray:
    return scaled_by_unit((read_words(raw, 34, 8, "<u2") >> 12 & 7).astype(f32) * 2 + 1, raw)


def iq1_s_shifts(raw: Bytes) -> np.ndarray:
    return shifts_of_bits(read_words(raw, 34, 8, "<u2") >> 15).repeat(4, -1)


def put_iq1_s(raw: Bytes, numbers: np.ndarray, signs: np.ndarray) -> None:
    raw[..., 2:34] = numbers & 255
    scale_bits = read_words(raw, 34, 8, "<u2") & 0xF000
    write_words(raw, 34, scale_bits | pack_bits(numbers >> 8, 4, 3), "<u2")


def iq1_m_scales(raw: Bytes) -> np.ndarray:
    """Return the scales of iq1_m: each of four words has four scales of three bits, then four bits of the unit."""
    scale_words = read_words(raw, 48, 4, "<u2")
    unit_scale = pack_bits(scale_words >> 12, 4, 4).astype(np.uint16).view(np.float16).astype(f32)
    scale_codes = scale_words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    return unit_scale * (scale_codes.reshape(*scale_words.shape[:-1], -1).astype(f32) * 2 + 1)


def iq1_m_shifts(raw: Bytes) -> np.ndarray:
    part = raw[..., 32:48]
    return shifts_of_bits(np.stack([part >> 3 & 1, part >> 7], -1).reshape(*part.shape[:-1], -1))


def put_iq1_m(raw: Bytes, numbers: np.ndarray, signs: np.ndarray) -> None:
    raw[..., :32] = numbers & 255
    raw[..., 32:48] = raw[..., 32:48] & 0x88 | pack_bits(numbers >> 8, 2, 4)


# by name of the type
POINTS = {
    "iq1_s": GridPoints(ONE, 8, 32, iq1_s_scales, put_iq1_s, read_shifts=iq1_s_shifts),
    "iq1_m": GridPoints(ONE, 8, 16, iq1_m_scales, put_iq1_m, read_shifts=iq1_m_shifts),
    "iq2_xxs": GridPoints(TWO_XXS, 8, 32, iq2_xxs_scales, put_iq2_xxs, has_even_signs=True),
    "iq2_xs": GridPoints(IQ2_XS_GRID, 8, 16, iq2_xs_scales, put_iq2_xs, has_even_signs=True),
    "iq2_s": GridPoints(TWO_S, 8, 16, iq2_s_scales, put_iq2_s),
    "iq3_xxs": GridPoints(IQ3_XXS_GRID, 4, 32, iq3_xxs_scales, put_iq3_xxs, has_even_signs=True),
    "iq3_s": GridPoints(IQ3_S_GRID, 4, 32, iq3_s_scales, put_iq3_s),
}
