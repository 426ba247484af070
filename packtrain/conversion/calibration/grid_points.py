"""Rounds to points of a grid (the IQ types), eight columns at a time.

Signs are those of the targets. The chosen point has the least error of the outputs once later columns have
compensated it: a quadratic form for each point of a row, all of them by one matrix product."""

from typing import Any

import numpy as np

from packtrain import kernels
from packtrain.dtypes import dtype_of

UNIT_COLUMNS = 8
ROWS_AT_ONCE = 512  # rows whose points are compared at a time


class PointRounder:
    """Chooses points for quantized rows (R, blocks); scales and shifts stay. See rounding_grid for other types."""

    unit = UNIT_COLUMNS

    def __init__(self, rows: np.ndarray) -> None:
        dtype, raw_bytes = dtype_of(rows), _rows_as_blocks(rows)
        assert dtype.points is not None
        self.points, (num_rows, num_blocks) = dtype.points, rows.shape
        width = self.points.width
        self.row_scales = _blocks_first(self.points.read_scales(raw_bytes))
        read_shifts = self.points.read_shifts
        self.row_shifts = None if read_shifts is None else _blocks_first(read_shifts(raw_bytes))
        self.numbers = np.zeros((num_blocks * dtype.block // width, num_rows), np.uint16)
        self.signs = np.zeros((num_blocks * dtype.block // UNIT_COLUMNS, num_rows), np.uint8)
        left_axis, second = np.triu_indices(width)
        self._pair = left_axis, second, np.where(left_axis == second, 1, 2).astype(np.float32)
        grid = self.points.grid
        self._features = np.concatenate([grid[:, left_axis] * grid[:, second], grid], 1).T.copy()

    def choose(self, columns: np.ndarray, aim: np.ndarray, factor: np.ndarray) -> np.ndarray:
        """Return grid values (8, R) for targets `aim` (8, R) of the eight neighbouring columns with these numbers;
        `factor` (8, 8) is their corner of ErrorFeedback.factor."""
        at, width, rounded = columns[0] // UNIT_COLUMNS, self.points.width, np.empty_like(aim)
        scale = self.row_scales[columns[0] // self.points.group_size]
        shift = np.float32(0) if self.row_shifts is None else self.row_shifts[at] * scale
        aim = aim - shift
        signs = self._negative_signs(aim, factor)
        for point_start in range(0, UNIT_COLUMNS, width):
            point_slice = slice(point_start, point_start + width)
            if not self.points.has_even_signs and self.row_shifts is None:
                signs[point_slice] = aim[point_slice] < 0
            sign_factors = np.where(signs[point_slice], np.float32(-1), np.float32(1))
            back = np.linalg.inv(factor[point_slice, point_slice])
            point_indices = self._nearest(aim[point_slice], sign_factors, scale, back @ back.T)
            self.numbers[(at * UNIT_COLUMNS + point_start) // width] = point_indices
            rounded[point_slice] = sign_factors * self.points.grid[point_indices].T * scale
            error = back.T @ (rounded[point_slice] - aim[point_slice])
            aim[point_slice.stop :] += factor[point_slice, point_slice.stop :].T @ error
        self.signs[at] = np.packbits(signs, axis=0, bitorder="little")[0]
        rounded += shift
        return rounded

    def _negative_signs(self, aim: np.ndarray, factor: np.ndarray) -> np.ndarray:
        """Return bool (8, R): which values are negative; if their number must be even, the cheapest sign may change."""
        if self.row_shifts is not None:
            return np.zeros(aim.shape, bool)
        signs = aim < 0
        if self.points.has_even_signs:
            column_weights = np.square(np.linalg.inv(factor)).sum(1)
            cheapest = np.argmin(np.square(aim) * column_weights[:, None], 0)
            signs[cheapest, np.arange(aim.shape[1])] ^= signs.sum(0) % 2 == 1
        return signs

    def _nearest(
        self, aim: np.ndarray, by: np.ndarray, scale: np.ndarray, form: np.ndarray
    ) -> np.ndarray:
        """Return for each row the number of the grid point whose value (point * by * scale) has the least error e =
        value - aim, measured by eᵀ form e. `by`: signs ±1 (width, R), `scale` (R,), `form` (width, width)."""
        left_axis, second, times = self._pair
        squares = (form[left_axis, second] * times)[:, None] * scale * by[left_axis] * by[second]
        row_features = np.concatenate([squares, -2 * by * (form @ aim)]).T
        point_indices = np.empty(len(row_features), np.uint16)
        costs = np.empty((min(ROWS_AT_ONCE, len(row_features)), len(self.points.grid)), np.float32)
        compiled: Any = kernels
        for row_start in range(0, len(row_features), ROWS_AT_ONCE):
            line_batch = np.ascontiguousarray(row_features[row_start : row_start + ROWS_AT_ONCE])
            batch_costs = costs[: len(line_batch)]
            compiled.matmul_f32.product(batch_costs, line_batch, self._features, False, 0)
            point_indices[row_start : row_start + ROWS_AT_ONCE] = batch_costs.argmin(1)
        return point_indices

    def write_rows(self, rows: np.ndarray) -> None:
        """Write the chosen points and signs into the blocks of `rows`, which keep their scales."""
        count, blocks = rows.shape
        numbers, signs = (part.T.reshape(count, blocks, -1) for part in (self.numbers, self.signs))
        self.points.write_points(_rows_as_blocks(rows), numbers, signs)


def _rows_as_blocks(rows: np.ndarray) -> np.ndarray:
    return rows.view(np.uint8).reshape(*rows.shape, dtype_of(rows).block_nbytes)


def _blocks_first(values: np.ndarray) -> np.ndarray:
    """Return (R, blocks, n) as (blocks * n, R)."""
    return np.ascontiguousarray(values.reshape(len(values), -1).T)
