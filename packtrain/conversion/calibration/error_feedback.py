"""Rounds one matrix to a grid with the least change of its outputs: error feedback (GPTQ), column by column.

After each column its error, weighted by the Cholesky factor of the inverse of H = ZᵀZ, is added to the later
columns. Frantar et al. 2022, "GPTQ", arXiv 2210.17323. Works on sums over inputs; it knows no models.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from packtrain import kernels

DAMPING = 0.01  # share of the mean of H's diagonal that is added to the diagonal
BLOCK, FEW = 128, 32  # columns updated by a matrix product, and one by one


class Rounder(Protocol):
    """Chooses the codes of `unit` columns at a time; see rounding_grid and grid_points.

    choose  values (unit, R) for targets (unit, R) of these columns, with their corner of the factor
    """

    unit: int

    def choose(self, columns: np.ndarray, aim: np.ndarray, factor: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class Feedback:
    """How later columns compensate the error of a column.

    order   (n,)    columns, the largest inputs first; those that are rounded together stay so
    factor  (n, n)  f32, upper U: the inverse of damped H, in that order, is UᵀU
    shift   (n, n)  f32, (X - Z)ᵀZ with its columns in that order, or None
    """

    order: np.ndarray
    factor: np.ndarray
    shift: np.ndarray | None

    def targets(self, rows: np.ndarray) -> np.ndarray:
        """Rows (R, n) that give for Z what these give for X, columns in `order`: T + T (X - Z)ᵀZ H⁻¹, (n, R)."""
        aim = np.ascontiguousarray(rows[:, self.order].T)
        if self.shift is not None:
            moved = product(self.factor, product(self.shift.T, rows.T))
            product(self.factor.T, moved, aim)
        return aim

    def rows(self, aim: np.ndarray) -> np.ndarray:
        """Targets (n, R) as rows (R, n), columns in their own order."""
        rows = np.empty(aim.shape[::-1], np.float32)
        rows[:, self.order] = aim.T
        return rows

    def round(self, aim: np.ndarray, grid: Rounder) -> float:
        """Choose codes for targets (n, R), which are overwritten; returns the squared error of the outputs."""
        total, errors = 0.0, np.empty((BLOCK, aim.shape[1]), np.float32)
        for start in range(0, len(aim), BLOCK):
            stop = min(start + BLOCK, len(aim))
            for at in range(start, stop):
                if at % grid.unit == 0:
                    unit_slice = slice(at, at + grid.unit)
                    values = grid.choose(
                        self.order[unit_slice], aim[unit_slice], self.factor[unit_slice, unit_slice]
                    )
                error = (values[at % grid.unit] - aim[at]) / self.factor[at, at]
                errors[at - start] = error
                end = min(at - at % FEW + FEW, stop)
                if at + 1 < end:
                    aim[at + 1 : end] += self.factor[at, at + 1 : end, None] * error
                elif end < stop:
                    first = at - at % FEW
                    aim[end:stop] += (
                        self.factor[first:end, end:stop].T @ errors[first - start : end - start]
                    )
            done = errors[: stop - start]
            total += float(np.square(done, dtype=np.float64).sum())
            if stop < len(aim):
                product(self.factor[start:stop, stop:].T, done, aim[stop:])
        return total


def feedback(squares: np.ndarray, shift: np.ndarray | None, unit: int = 1) -> Feedback:
    """Compute it from sums over inputs ZᵀZ (n, n) and (X - Z)ᵀZ, whose memory is reused.

    unit  columns that are rounded together, which divides n
    """
    diagonal, n = squares.diagonal().astype(np.float64), len(squares)
    units = np.argsort(-diagonal.reshape(-1, unit).sum(1), kind="stable")
    order = (units[:, None] * unit + np.arange(unit)).reshape(-1)
    inverse = np.empty((n, n))
    for row, at in zip(inverse, order[::-1], strict=True):
        row[:] = squares[at, order[::-1]]
    # also for columns without input
    inverse.flat[:: n + 1] += DAMPING * float(diagonal.mean()) or 1.0
    cholesky(inverse)
    invert_lower(inverse)
    squares[...] = inverse[::-1, ::-1]
    for row in () if shift is None else shift:
        row[:] = row[order]
    return Feedback(order, squares, shift)


def cholesky(a: np.ndarray) -> None:
    """Cholesky factor L of a = LLᵀ in place, f64, zeros above; needs memory for only a few columns."""
    n = len(a)
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        a[start:stop, start:stop] = corner = np.linalg.cholesky(a[start:stop, start:stop])
        a[start:stop, stop:] = 0
        below = a[stop:, start:stop]
        below[...] = below @ np.linalg.inv(corner).T
        for at in range(stop, n, BLOCK):
            end = min(at + BLOCK, n)
            a[at:end, stop:end] -= below[at - stop : end - stop] @ below[: end - stop].T


def invert_lower(a: np.ndarray) -> None:
    """The inverse of a lower triangular matrix in place, by recursive halves."""
    n = len(a)
    if n <= BLOCK:
        a[...] = np.tril(np.linalg.inv(a))
        return
    half = n // 2 // BLOCK * BLOCK or BLOCK
    first, last, below = a[:half, :half], a[half:, half:], a[half:, :half]
    invert_lower(first)
    invert_lower(last)
    # - last below first: columns from the left, then rows from below
    for at in range(0, half, BLOCK):
        block_slice = slice(at, at + BLOCK)
        below[:, block_slice] = below[:, at:] @ first[at:, block_slice]
    for at in reversed(range(0, len(last), BLOCK)):
        block_slice = slice(at, at + BLOCK)
        below[block_slice] = -(last[block_slice, : at + BLOCK] @ below[: at + BLOCK])


def product(a: np.ndarray, b: np.ndarray, onto: np.ndarray | None = None) -> np.ndarray:
    """a @ b (+ onto), f32, on all cores."""
    compiled: Any = kernels
    result = np.empty((a.shape[0], b.shape[1]), np.float32) if onto is None else onto
    compiled.matmul.product(result, a, b, onto is not None, 0)
    return result
