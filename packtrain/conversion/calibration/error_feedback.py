"""Rounds one matrix to a grid with little change of its outputs: error feedback (GPTQ), column by column.

After each column, its error is added to later columns, weighted by U, where UᵀU is the inverse of H = ZᵀZ and Z are
the inputs, (tokens, columns). Frantar et al. 2022, "GPTQ", arXiv 2210.17323. Needs the sums H and no model. A column
is a few vector operations over all rows, so NumPy and the engine's products suffice and no kernel needs compiling.

Worked example, without DAMPING: a row with targets (0.6, 0.4) is rounded to whole numbers.

    H = ( 1.25  -0.5 )    its inverse = ( 1    0.5  ) = UᵀU,    U = ( 1  0.5 )
        ( -0.5   1   )                  ( 0.5  1.25 )               ( 0   1  )

    column 0: 0.6 becomes 1. Its error is e = (1 - 0.6) / U₀₀ = 0.4, so column 1 becomes 0.4 + U₀₁ e = 0.6.
    column 1: 0.6 becomes 1. Its error is (1 - 0.6) / U₁₁ = 0.4.

The squared error of the outputs, d H dᵀ for d = (0.4, 0.6), is 0.4² + 0.4² = 0.32. The nearest numbers (1, 0) have
d = (0.4, -0.4) and an error of 0.52."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from packtrain import kernels

DAMPING = 0.01  # share of the mean of H's diagonal that is added to the diagonal
BLOCK, GROUP_COLUMNS = 128, 32  # columns updated by a matrix product; columns updated one by one


class ColumnRounder(Protocol):
    """Chooses the codes of `unit` columns at a time; see rounding_grid and grid_points.

    choose  returns values (unit, R) for targets `aim` (unit, R) of these columns; `factor` is their corner of U
    """

    unit: int

    def choose(self, columns: np.ndarray, aim: np.ndarray, factor: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class ErrorFeedback:
    """How later columns compensate the error of a column.

    order   (n,)    columns, the largest inputs first; columns that are rounded together stay together
    factor  (n, n)  f32, upper U: the inverse of damped H, in that order, is UᵀU
    shift   (n, n)  f32, (X - Z)ᵀZ with its columns in that order, or None
    """

    order: np.ndarray
    factor: np.ndarray
    shift: np.ndarray | None

    def row_targets(self, matrix_rows: np.ndarray) -> np.ndarray:
        """Return targets T + T (X - Z)ᵀZ H⁻¹, (n, R) in `order`: they give for Z what rows T (R, n) give for X."""
        targets = np.ascontiguousarray(matrix_rows[:, self.order].T)
        if self.shift is not None:
            shifted_rows = product(self.factor, product(self.shift.T, matrix_rows.T))
            product(self.factor.T, shifted_rows, targets)
        return targets

    def target_rows(self, aim: np.ndarray) -> np.ndarray:
        """Return targets `aim` (n, R), sorted by `order`, as matrix rows (R, n) with columns in the matrix's order."""
        matrix_rows = np.empty(aim.shape[::-1], np.float32)
        matrix_rows[:, self.order] = aim.T
        return matrix_rows

    def round_targets(self, aim: np.ndarray, rounder: ColumnRounder) -> float:
        """Round targets `aim` (n, R) in place, by column, compensating earlier errors; returns the squared error."""
        total_error, errors = 0.0, np.empty((BLOCK, aim.shape[1]), np.float32)
        for start in range(0, len(aim), BLOCK):
            stop = min(start + BLOCK, len(aim))
            for at in range(start, stop):
                if at % rounder.unit == 0:
                    unit_slice = slice(at, at + rounder.unit)
                    unit_values = rounder.choose(
                        self.order[unit_slice], aim[unit_slice], self.factor[unit_slice, unit_slice]
                    )
                error = (unit_values[at % rounder.unit] - aim[at]) / self.factor[at, at]
                errors[at - start] = error
                end = min(at - at % GROUP_COLUMNS + GROUP_COLUMNS, stop)
                if at + 1 < end:
                    aim[at + 1 : end] += self.factor[at, at + 1 : end, None] * error
                elif end < stop:
                    first = at - at % GROUP_COLUMNS
                    aim[end:stop] += (
                        self.factor[first:end, end:stop].T @ errors[first - start : end - start]
                    )
            block_errors = errors[: stop - start]
            total_error += float(np.square(block_errors, dtype=np.float64).sum())
            if stop < len(aim):
                product(self.factor[start:stop, stop:].T, block_errors, aim[stop:])
        return total_error


def compute_feedback(squares: np.ndarray, shift: np.ndarray | None, unit: int = 1) -> ErrorFeedback:
    """Compute error feedback from sums over inputs, `squares` ZᵀZ and `shift` (X - Z)ᵀZ (n, n), or None for X = Z;
    their memory is reused. Columns are rounded `unit` at a time, which divides n."""
    diagonal, n = squares.diagonal().astype(np.float64), len(squares)
    unit_order = np.argsort(-diagonal.reshape(-1, unit).sum(1), kind="stable")
    column_order = (unit_order[:, None] * unit + np.arange(unit)).reshape(-1)
    inverse = np.empty((n, n))
    for row, column in zip(inverse, column_order[::-1], strict=True):
        row[:] = squares[column, column_order[::-1]]
    # damping also makes columns without input invertible
    inverse.flat[:: n + 1] += DAMPING * float(diagonal.mean()) or 1.0
    cholesky(inverse)
    invert_lower(inverse)
    squares[...] = inverse[::-1, ::-1]
    for row in () if shift is None else shift:
        row[:] = row[column_order]
    return ErrorFeedback(column_order, squares, shift)


def cholesky(a: np.ndarray) -> None:
    """Replace a (n, n), f64, by its Cholesky factor L, a = LLᵀ, zeros above; needs memory for only a few columns."""
    n = len(a)
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        a[start:stop, start:stop] = corner = np.linalg.cholesky(a[start:stop, start:stop])
        a[start:stop, stop:] = 0
        lower_rows = a[stop:, start:stop]
        lower_rows[...] = lower_rows @ np.linalg.inv(corner).T
        for at in range(stop, n, BLOCK):
            end = min(at + BLOCK, n)
            a[at:end, stop:end] -= lower_rows[at - stop : end - stop] @ lower_rows[: end - stop].T


def invert_lower(a: np.ndarray) -> None:
    """Invert a lower triangular matrix in place, by recursive halves."""
    n = len(a)
    if n <= BLOCK:
        a[...] = np.tril(np.linalg.inv(a))
        return
    half = n // 2 // BLOCK * BLOCK or BLOCK
    upper_half, lower_half, corner = a[:half, :half], a[half:, half:], a[half:, :half]
    invert_lower(upper_half)
    invert_lower(lower_half)
    # the corner becomes -(lower half)(corner)(upper half): columns from the left, then rows from below
    for at in range(0, half, BLOCK):
        block_slice = slice(at, at + BLOCK)
        corner[:, block_slice] = corner[:, at:] @ upper_half[at:, block_slice]
    for at in reversed(range(0, len(lower_half), BLOCK)):
        block_slice = slice(at, at + BLOCK)
        corner[block_slice] = -(lower_half[block_slice, : at + BLOCK] @ corner[: at + BLOCK])


def product(a: np.ndarray, b: np.ndarray, accumulator: np.ndarray | None = None) -> np.ndarray:
    """Return a @ b, f32, on all cores; with an accumulator, add the product to it in place."""
    compiled: Any = kernels
    result = np.empty((a.shape[0], b.shape[1]), np.float32) if accumulator is None else accumulator
    compiled.matmul_f32.product(result, a, b, accumulator is not None, 0)
    return result
