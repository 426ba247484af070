"""The grid of quantized rows: value = code * step + low, with a step and a low for each group of a row.

Extracts codes, steps and lows from quantized rows; `put_codes` writes new codes and keeps the scales. The layout of a
block is defined with its type, in dtypes/. It knows no models.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from packtrain.dtypes import Dtype, dtype_of
from packtrain.dtypes.element_type import Bytes, Layout

BYTE = 64  # from this many levels on a code is a byte


@dataclass(frozen=True, slots=True)
class Grid:
    """The values that rows of a type can take: codes 0 .. levels - 1 in groups.

    step, low  (rows, groups)  f32
    table      (levels,)       f32, what codes stand for; None: themselves
    """

    step: np.ndarray
    low: np.ndarray
    group: int
    levels: int
    table: np.ndarray | None = None

    def nearest(self, steps: np.ndarray) -> np.ndarray:
        """The nearest codes of values in steps, f32 or integers."""
        if self.table is None:
            codes: np.ndarray = np.clip(np.rint(steps), 0, np.float32(self.levels - 1))
        else:
            codes = np.searchsorted((self.table[1:] + self.table[:-1]) / 2, steps, "right")
        return codes

    def steps(self, codes: np.ndarray) -> np.ndarray:
        """Codes u8 as values in steps, a new array f32."""
        return codes.astype(np.float32) if self.table is None else self.table[codes]


class OnGrid:
    """Codes for quantized rows (R, blocks), whose steps and lows stay."""

    unit = 1

    def __init__(self, rows: np.ndarray) -> None:
        self.grid = grid_of(rows)
        self.codes = np.empty((self.grid.step.shape[1] * self.grid.group, len(rows)), np.uint8)
        self._step, self._low = (np.ascontiguousarray(x.T) for x in (self.grid.step, self.grid.low))
        with np.errstate(divide="ignore"):
            self._inverse = np.where(self._step != 0, 1 / self._step, np.float32(0))

    def choose(self, columns: np.ndarray, aim: np.ndarray, factor: np.ndarray) -> np.ndarray:
        """Values (1, R) for targets (1, R): the nearest."""
        (at,), group = columns, columns[0] // self.grid.group
        step, low = self._step[group], self._low[group]
        self.codes[at] = self.grid.nearest((aim[0] - low) * self._inverse[group])
        values = self.grid.steps(self.codes[at])
        values *= step
        values += low
        return values[None]

    def put(self, rows: np.ndarray) -> None:
        """Write the codes that were chosen."""
        put_codes(rows, np.ascontiguousarray(self.codes.T))


def grid_of(rows: np.ndarray) -> Grid:
    """The grid of quantized rows (R, blocks); with their codes it reproduces their values bit for bit."""
    _, layout, raw = _opened(rows)
    parts = [_half(raw, at) for at in layout.halves]
    if layout.scales:
        parts = [half * by for half, by in zip(parts, layout.scales(raw), strict=True)]
    step = parts[0]
    low = parts[1] if layout.low is None else step * np.float32(layout.low)
    step, low = (np.ascontiguousarray(part).reshape(len(raw), -1) for part in (step, low))
    return Grid(step, low, layout.group, layout.levels, layout.table)


def codes_of(rows: np.ndarray) -> np.ndarray:
    """The codes of packed rows, u8 (R, width)."""
    dtype, layout, raw = _opened(rows)
    if layout.levels > BYTE:
        signed = raw[..., layout.quads : layout.quads + dtype.block].view(np.int8)
        return _flat(signed.astype(np.int16) - (layout.low or 0))
    codes = np.zeros((*raw.shape[:2], dtype.block), np.uint8)
    for run, shift, bits in _runs(dtype, layout, raw):
        by = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
        run_codes = run[..., None, :] >> by & ((1 << bits) - 1)
        codes |= run_codes.reshape(codes.shape) << shift
    return _flat(codes)


def put_codes(rows: np.ndarray, codes: np.ndarray) -> None:
    """Write codes, u8 (R, width), into packed rows."""
    dtype, layout, raw = _opened(rows)
    codes = codes.reshape(*raw.shape[:2], dtype.block)
    if layout.levels > BYTE:
        signed = (codes.astype(np.int16) + (layout.low or 0)).astype(np.int8)
        raw[..., layout.quads : layout.quads + dtype.block] = signed.view(np.uint8)
        return
    for run, shift, bits in _runs(dtype, layout, raw):
        by = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
        part = (codes >> shift & ((1 << bits) - 1)).reshape(*run.shape[:-1], len(by), -1)
        run[...] = np.bitwise_or.reduce(part << by, axis=-2)


def _opened(rows: np.ndarray) -> tuple[Dtype, Layout, Bytes]:
    """The type and layout of rows, and a view of their bytes."""
    dtype = dtype_of(rows)
    assert dtype.layout is not None, f"codes of {dtype} are not known"
    return dtype, dtype.layout, rows.view(np.uint8).reshape(*rows.shape, dtype.block_nbytes)


def _flat(codes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(codes, np.uint8).reshape(len(codes), -1)


def _half(raw: Bytes, at: int) -> np.ndarray:
    """f16 of each block as f32 (R, blocks, 1)."""
    return np.ascontiguousarray(raw[..., at : at + 2]).view(np.float16).astype(np.float32)


def _runs(dtype: Dtype, layout: Layout, raw: Bytes) -> Iterator[tuple[Bytes, int, int]]:
    """Views (R, blocks, runs, bytes) of the low bits and of those above, from which bit of a code on, and how many."""
    above = (layout.levels >> layout.bits).bit_length() - 1
    places = [(layout.quads, layout.runs, 0, layout.bits)]
    if above > 0:
        places.append((layout.high, layout.high_runs, layout.bits, above))
    for at, runs, shift, bits in places:
        part = raw[..., at : at + dtype.block * bits // 8]
        yield part.reshape(*raw.shape[:2], runs, -1), shift, bits
