"""Rounding to points of a grid (the IQ types), eight columns at a time.

Signs are those of the targets. Then the point is the one with the least error of the outputs once later columns have
compensated it: for each of a row's points a quadratic form, all of them by one matrix product.
"""

from typing import Any

import numpy as np

from packtrain import kernels
from packtrain.dtypes import dtype_of

EIGHT = 8
ROWS = 512  # whose points are compared at a time


class OnPoints:
    """Points for quantized rows (R, blocks), whose scales and shifts stay. See rounding_grid for the other types."""

    unit = EIGHT

    def __init__(self, rows: np.ndarray) -> None:
        dtype, raw = dtype_of(rows), _bytes(rows)
        assert dtype.points is not None
        self.points, (count, blocks) = dtype.points, rows.shape
        width = self.points.width
        self.scale = _by_row(self.points.scales(raw))
        self.shift = None if self.points.shifts is None else _by_row(self.points.shifts(raw))
        self.numbers = np.zeros((blocks * dtype.block // width, count), np.uint16)
        self.signs = np.zeros((blocks * dtype.block // EIGHT, count), np.uint8)
        first, second = np.triu_indices(width)
        self._pair = first, second, np.where(first == second, 1, 2).astype(np.float32)
        grid = self.points.grid
        self._features = np.concatenate([grid[:, first] * grid[:, second], grid], 1).T.copy()

    def choose(self, columns: np.ndarray, aim: np.ndarray, factor: np.ndarray) -> np.ndarray:
        """Values (8, R) for targets (8, R) of eight neighbouring columns with this corner of the factor."""
        at, width, result = columns[0] // EIGHT, self.points.width, np.empty_like(aim)
        scale = self.scale[columns[0] // self.points.group]
        shift = np.float32(0) if self.shift is None else self.shift[at] * scale
        aim = aim - shift
        signs = self._signs(aim, factor)
        for start in range(0, EIGHT, width):
            part = slice(start, start + width)
            if not self.points.even and self.shift is None:
                signs[part] = aim[part] < 0
            by = np.where(signs[part], np.float32(-1), np.float32(1))
            back = np.linalg.inv(factor[part, part])
            numbers = self._nearest(aim[part], by, scale, back @ back.T)
            self.numbers[(at * EIGHT + start) // width] = numbers
            result[part] = by * self.points.grid[numbers].T * scale
            error = back.T @ (result[part] - aim[part])
            aim[part.stop :] += factor[part, part.stop :].T @ error
        self.signs[at] = np.packbits(signs, axis=0, bitorder="little")[0]
        result += shift
        return result

    def _signs(self, aim: np.ndarray, factor: np.ndarray) -> np.ndarray:
        """Which values are negative; where their number must be even, the one that matters least may be the other."""
        if self.shift is not None:
            return np.zeros(aim.shape, bool)
        signs = aim < 0
        if self.points.even:
            weight = np.square(np.linalg.inv(factor)).sum(1)
            cheapest = np.argmin(np.square(aim) * weight[:, None], 0)
            signs[cheapest, np.arange(aim.shape[1])] ^= signs.sum(0) % 2 == 1
        return signs

    def _nearest(
        self, aim: np.ndarray, by: np.ndarray, scale: np.ndarray, form: np.ndarray
    ) -> np.ndarray:
        """Numbers of the points for which (value - aim)ᵀ form (value - aim) is least."""
        first, second, times = self._pair
        squares = (form[first, second] * times)[:, None] * scale * by[first] * by[second]
        lines = np.concatenate([squares, -2 * by * (form @ aim)]).T
        numbers = np.empty(len(lines), np.uint16)
        costs = np.empty((min(ROWS, len(lines)), len(self.points.grid)), np.float32)
        compiled: Any = kernels
        for start in range(0, len(lines), ROWS):
            line_batch = np.ascontiguousarray(lines[start : start + ROWS])
            compiled.matmul.product(costs[: len(line_batch)], line_batch, self._features, False, 0)
            numbers[start : start + ROWS] = costs[: len(line_batch)].argmin(1)
        return numbers

    def put(self, rows: np.ndarray) -> None:
        """Write the points that were chosen, and their signs."""
        count, blocks = rows.shape
        numbers, signs = (part.T.reshape(count, blocks, -1) for part in (self.numbers, self.signs))
        self.points.put(_bytes(rows), numbers, signs)


def _bytes(rows: np.ndarray) -> np.ndarray:
    return rows.view(np.uint8).reshape(*rows.shape, dtype_of(rows).block_nbytes)


def _by_row(values: np.ndarray) -> np.ndarray:
    """(R, blocks, n) as (blocks * n, R)."""
    return np.ascontiguousarray(values.reshape(len(values), -1).T)
