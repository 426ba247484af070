"""The grid that packed rows stand on: value = code * step + low, with a step and a low for each group of a row.

Packed rows go in and codes, steps and lows come out; `put_codes` writes other codes into the same rows and leaves
their scales as they are. It knows no models.
"""

from dataclasses import dataclass

import numpy as np

from packtrain.dtypes import BLOCK_TYPES, Dtype, dtype_of

Bytes = np.ndarray  # u8 (rows, blocks, bytes of a block)


@dataclass(frozen=True, slots=True)
class Kind:
    """Where a block type keeps its parts, in bytes of a block.

    group   values that share a step and a low
    levels  of codes
    low     what code 0 stands for, in steps; None where the block has offsets of its own
    halves  places of its f16: what steps count in, and what lows count in
    quads   place of the low four bits of each code, in so many runs: of a run, the low half-bytes come first
    high    place of the bits above
    """

    group: int
    levels: int
    low: int | None
    halves: tuple[int, ...]
    quads: int
    runs: int = 1
    high: int = 0


KINDS = {
    BLOCK_TYPES[name]: kind
    for name, kind in (
        ("q4_0", Kind(32, 16, -8, (0,), 2)),
        ("q4_1", Kind(32, 16, None, (0, 2), 4)),
        ("q5_0", Kind(32, 32, -16, (0,), 6, high=2)),
        ("q5_1", Kind(32, 32, None, (0, 2), 8, high=4)),
        ("q8_0", Kind(32, 255, -127, (0,), 2)),
        ("q4_K", Kind(32, 16, None, (0, 2), 16, runs=4)),
        ("q5_K", Kind(32, 32, None, (0, 2), 48, runs=4, high=16)),
        ("q6_K", Kind(16, 64, -32, (208,), 0, runs=2, high=128)),
    )
}
PAIRS = np.array([0, 2, 4, 6], np.uint8)  # where pairs of bits begin
SCALES_K, SCALES_6 = 4, 192  # where blocks of 256 keep the scales of their groups


@dataclass(frozen=True, slots=True)
class Grid:
    """What rows of one type can be: codes 0 .. levels - 1 in groups.

    step, low  (rows, groups)  f32
    """

    step: np.ndarray
    low: np.ndarray
    group: int
    levels: int


def grid_of(rows: np.ndarray) -> Grid:
    """The grid of packed rows (R, blocks) of one of KINDS: with their codes it gives their values bit for bit."""
    kind, raw = _opened(rows)
    count = len(raw)
    scales = [_half(raw, at) for at in kind.halves]
    name = dtype_of(rows).name
    if name in ("q4_K", "q5_K"):
        d, m = _scales_and_lows(raw)
        step, low = scales[0] * d, -(scales[1] * m)
    elif name == "q6_K":
        step = scales[0] * raw[..., SCALES_6 : SCALES_6 + 16].view(np.int8).astype(np.float32)
        low = step * np.float32(kind.low or 0)
    else:
        step = scales[0]
        low = scales[1] if kind.low is None else step * np.float32(kind.low)
    step, low = (np.ascontiguousarray(part).reshape(count, -1) for part in (step, low))
    return Grid(step, low, kind.group, kind.levels)


def codes_of(rows: np.ndarray) -> np.ndarray:
    """The codes of packed rows, u8 (R, width)."""
    kind, raw = _opened(rows)
    dtype = dtype_of(rows)
    if dtype.name == "q8_0":
        return _flat(raw[..., kind.quads :].view(np.int8).astype(np.int16) + 127)
    quads = raw[..., kind.quads : kind.quads + dtype.block // 2]
    pairs = quads.reshape(*raw.shape[:2], kind.runs, -1)
    codes = np.stack((pairs & 15, pairs >> 4), axis=-2).reshape(*raw.shape[:2], dtype.block)
    if kind.levels > 16:
        codes |= _high(raw, dtype, kind) << 4
    return _flat(codes)


def put_codes(rows: np.ndarray, codes: np.ndarray) -> None:
    """Write codes, u8 (R, width), into packed rows."""
    kind, raw = _opened(rows)
    dtype = dtype_of(rows)
    codes = codes.reshape(*raw.shape[:2], dtype.block)
    if dtype.name == "q8_0":
        raw[..., kind.quads :] = (codes.astype(np.int16) - 127).astype(np.int8).view(np.uint8)
        return
    pairs = (codes & 15).reshape(*raw.shape[:2], kind.runs, 2, -1)
    quads = pairs[..., 0, :] | pairs[..., 1, :] << 4
    raw[..., kind.quads : kind.quads + dtype.block // 2] = quads.reshape(*raw.shape[:2], -1)
    if kind.levels > 16:
        _put_high(raw, dtype, kind, codes >> 4)


def _opened(rows: np.ndarray) -> tuple[Kind, Bytes]:
    """How these rows are packed, and their bytes, which share their memory."""
    dtype = dtype_of(rows)
    return KINDS[dtype], rows.view(np.uint8).reshape(*rows.shape, dtype.block_nbytes)


def _flat(codes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(codes, np.uint8).reshape(len(codes), -1)


def _half(raw: Bytes, at: int) -> np.ndarray:
    """f16 of each block as f32 (R, blocks, 1)."""
    return np.ascontiguousarray(raw[..., at : at + 2]).view(np.float16).astype(np.float32)


def _scales_and_lows(raw: Bytes) -> tuple[np.ndarray, np.ndarray]:
    """Of q4_K and q5_K, (R, blocks, 8) each: six bits, of which the last four groups' upper two stand apart."""
    first, second, rest = (raw[..., at : at + 4] for at in (SCALES_K, SCALES_K + 4, SCALES_K + 8))
    d = np.concatenate((first & 63, (rest & 15) | (first >> 6 << 4)), axis=-1)
    m = np.concatenate((second & 63, (rest >> 4) | (second >> 6 << 4)), axis=-1)
    return d.astype(np.float32), m.astype(np.float32)


def _high(raw: Bytes, dtype: Dtype, kind: Kind) -> np.ndarray:
    """The bits above the low four of each code."""
    shape = raw.shape[:2]
    if dtype.block == 32:
        bits = np.unpackbits(raw[..., kind.high : kind.high + 4], axis=-1, bitorder="little")
        return bits.reshape(*shape, 32)
    if kind.levels == 32:
        bits = raw[..., None, kind.high : kind.high + 32] >> np.arange(8, dtype=np.uint8)[:, None]
        return (bits & 1).reshape(*shape, 256)
    pairs = raw[..., kind.high : kind.high + 64].reshape(*shape, 2, 1, 32)
    two: np.ndarray = pairs >> PAIRS[:, None] & 3
    return two.reshape(*shape, 256)


def _put_high(raw: Bytes, dtype: Dtype, kind: Kind, bits: np.ndarray) -> None:
    shape = raw.shape[:2]
    if dtype.block == 32:
        packed = np.packbits(bits, axis=-1, bitorder="little")
    elif kind.levels == 32:
        by = np.arange(8, dtype=np.uint8)[:, None]
        packed = np.bitwise_or.reduce(bits.reshape(*shape, 8, 32) << by, axis=-2)
    else:
        by = PAIRS[:, None]
        packed = np.bitwise_or.reduce(bits.reshape(*shape, 2, 4, 32) << by, axis=-2)
        packed = packed.reshape(*shape, 64)
    raw[..., kind.high : kind.high + packed.shape[-1]] = packed
