"""Multiply rows of integers by quantized rows with the tiles of `dot_tile`."""

import numpy as np

from packtrain.kernels.matmul import dot_tile
from packtrain.kernels.matmul.dot_tile import ROWS
from packtrain.kernels.matmul.rounding import nbytes
from packtrain.kernels.quant.type_dispatch import compile_role
from packtrain.kernels.runtime.jit import kernel, part
from packtrain.kernels.runtime.kernel_types import i64

TILE_COLUMNS = np.array([ROWS.get(m, 0) for m in range(9)])  # by rows of activations
PANEL = 24  # rows of weights that all rows of x are multiplied with while they are in the cache
row_tile = dot_tile.dot_tiles(
    compile_role("codes", part(dot_tile.CODES_FORM)),
    compile_role("scales", part(dot_tile.SCALES_FORM)),
)


@kernel("*[i64] * 12")
def product_panel(m, n, k, qtype, planes, x, w, ldw, y, add, start, stop):
    """Compute columns start … stop - 1 of y (m, n) = x @ w.T, plus y if `add`, by tiles; arguments are as in dots."""
    i, ldy = i64(0), 4 * n
    while i < m:
        num_left, x_at, y_at = m - i, x + i * nbytes(k, planes), y + i * ldy
        high = 8 if num_left >= 8 else 4 if num_left >= 4 else 2 if num_left >= 2 else 1
        wide = TILE_COLUMNS[high]
        for j in range(start, stop, wide):
            to, tile_columns = y_at + 4 * j, min(wide, stop - j)
            row_tile(qtype, high, planes, x_at, w + j * ldw, ldw, k, to, ldy, tile_columns, add)
        i += high


@kernel("*[i64] * 12")
def dots(m, n, k, qtype, planes, x, w, ldw, y, add, start, stop):
    """Compute columns start … stop - 1 of y (m, n) = x @ w.T, plus y if `add`, by panels of w that stay in the cache.

    x, w, y are addresses: of integers by round_row with `planes` planes, of packed rows `ldw` bytes apart, and of f32.
    """
    for j in range(start, stop, PANEL):
        panel_stop = min(j + PANEL, stop)
        product_panel(m, n, k, qtype, planes, x, w, ldw, y, add, j, panel_stop)
