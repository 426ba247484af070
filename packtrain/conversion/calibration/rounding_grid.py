"""The grid of quantized rows: value = code * step + low, with a step and a low for each group of a row.

Reads codes, steps and lows from quantized rows; `put_codes` writes new codes and leaves the scales. The layout of a
quantization block is defined with its type, in dtypes/. Knows no models."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from packtrain.dtypes import Dtype, dtype_of
from packtrain.dtypes.element_type import Bytes, CodeLayout

MIN_BYTE_LEVELS = 64  # with more levels, a code is a byte


@dataclass(frozen=True, slots=True)
class RowGrid:
    """The values that rows of a type can take: codes from 0 to num_levels - 1, in groups of `group_size`.

    step, low  (rows, groups)  f32
    table      (num_levels,)   f32, the values that codes stand for; None: codes stand for themselves
    """

    step: np.ndarray
    low: np.ndarray
    group_size: int
    num_levels: int
    table: np.ndarray | None = None

    def nearest_codes(self, steps: np.ndarray) -> np.ndarray:
        """Return the codes nearest to `steps`, values (x - low) / step: as f32, or with a table as integers."""
        if self.table is None:
            codes: np.ndarray = np.clip(np.rint(steps), 0, np.float32(self.num_levels - 1))
        else:
            codes = np.searchsorted((self.table[1:] + self.table[:-1]) / 2, steps, "right")
        return codes

    def code_steps(self, codes: np.ndarray) -> np.ndarray:
        """Return what u8 codes stand for before step and low are applied, as a new f32 array."""
        return codes.astype(np.float32) if self.table is None else self.table[codes]


class GridRounder:
    """Chooses codes for quantized rows (R, blocks), whose steps and lows stay."""

    unit = 1

    def __init__(self, rows: np.ndarray) -> None:
        self.grid = grid_of(rows)
        self.codes = np.empty((self.grid.step.shape[1] * self.grid.group_size, len(rows)), np.uint8)
        self._step, self._low = (np.ascontiguousarray(x.T) for x in (self.grid.step, self.grid.low))
        with np.errstate(divide="ignore"):
            self._inverse_steps = np.where(self._step != 0, 1 / self._step, np.float32(0))

    def choose(self, columns: np.ndarray, aim: np.ndarray, factor: np.ndarray) -> np.ndarray:
        """Return the nearest values (1, R) of the grid for targets `aim` (1, R) of the column `columns[0]`."""
        (at,), group = columns, columns[0] // self.grid.group_size
        group_step, group_low = self._step[group], self._low[group]
        self.codes[at] = self.grid.nearest_codes((aim[0] - group_low) * self._inverse_steps[group])
        rounded = self.grid.code_steps(self.codes[at])
        rounded *= group_step
        rounded += group_low
        return rounded[None]

    def write_rows(self, rows: np.ndarray) -> None:
        """Write the chosen codes into the blocks of `rows` (R, row bytes), which keep their scales."""
        put_codes(rows, np.ascontiguousarray(self.codes.T))


def grid_of(rows: np.ndarray) -> RowGrid:
    """Return the grid of quantized rows (R, blocks), which reproduces their values bit for bit with their codes."""
    _, layout, raw = _row_layout(rows)
    half_bytes = (np.ascontiguousarray(raw[..., n : n + 2]) for n in layout.half_offsets)
    half_parts = [half.view(np.float16).astype(np.float32) for half in half_bytes]
    if layout.scales:
        half_parts = [half * by for half, by in zip(half_parts, layout.scales(raw), strict=True)]
    step = half_parts[0]
    low = half_parts[1] if layout.low is None else step * np.float32(layout.low)
    step, low = (np.ascontiguousarray(part).reshape(len(raw), -1) for part in (step, low))
    return RowGrid(step, low, layout.group_size, layout.num_codes, layout.table)


def put_codes(rows: np.ndarray, codes: np.ndarray) -> None:
    """Write codes, u8 (R, columns), into the bit fields of quantized rows (R, blocks), in place; scales stay."""
    dtype, layout, raw_bytes = _row_layout(rows)
    codes = codes.reshape(*raw_bytes.shape[:2], dtype.block)
    if layout.num_codes > MIN_BYTE_LEVELS:
        signed_codes = (codes.astype(np.int16) + (layout.low or 0)).astype(np.int8)
        raw_bytes[..., layout.quads : layout.quads + dtype.block] = signed_codes.view(np.uint8)
        return
    for bit_run, shift, num_bits in _bit_runs(dtype, layout, raw_bytes):
        by = np.arange(0, 8, num_bits, dtype=np.uint8)[:, None]
        part = (codes >> shift & ((1 << num_bits) - 1)).reshape(*bit_run.shape[:-1], len(by), -1)
        bit_run[...] = np.bitwise_or.reduce(part << by, axis=-2)


def _row_layout(rows: np.ndarray) -> tuple[Dtype, CodeLayout, Bytes]:
    """Return (type, layout, bytes) of quantized rows (R, blocks); bytes is a view (R, blocks, bytes of a block)."""
    dtype = dtype_of(rows)
    assert dtype.layout is not None, f"codes of {dtype} are not known"
    return dtype, dtype.layout, rows.view(np.uint8).reshape(*rows.shape, dtype.block_nbytes)


def _bit_runs(dtype: Dtype, layout: CodeLayout, raw: Bytes) -> Iterator[tuple[Bytes, int, int]]:
    """Yield (view (R, blocks, runs, bytes), first bit, number of bits) of codes' low bits, then of their high bits."""
    num_high_bits = (layout.num_codes >> layout.num_low_bits).bit_length() - 1
    run_places = [(layout.quads, layout.runs, 0, layout.num_low_bits)]
    if num_high_bits > 0:
        run_places.append((layout.high, layout.high_runs, layout.num_low_bits, num_high_bits))
    for offset, num_runs, shift, num_bits in run_places:
        run_bytes = raw[..., offset : offset + dtype.block * num_bits // 8]
        yield run_bytes.reshape(*raw.shape[:2], num_runs, -1), shift, num_bits
