"""Multiply many rows of integers by panels of quantized rows with the tiles of `code_panels`."""

import numpy as np

from packtrain.dtypes import ROUNDABLE
from packtrain.kernels.matmul import code_panels, dot_tile
from packtrain.kernels.matmul.code_panels import HIGH, WIDE
from packtrain.kernels.matmul.dot_tile import LANES_NBYTES, VALUES
from packtrain.kernels.matmul.gemm import even_parts
from packtrain.kernels.matmul.panels import transpose16
from packtrain.kernels.matmul.rounding import WIDTH, nbytes
from packtrain.kernels.quant.type_dispatch import compile_role
from packtrain.kernels.runtime.jit import kernel, part
from packtrain.kernels.runtime.kernel_types import f32
from packtrain.kernels.simd.simd_f32 import LANES, address, scratch
from packtrain.kernels.simd.simd_i32 import byte_at, put_byte

CODES = compile_role("codes", part(dot_tile.CODES_FORM))
SCALE_FUNCTIONS = compile_role("scales", part(dot_tile.SCALES_FORM))
chunk_tile = code_panels.panel_tiles(CODES)
emit_weight_line = code_panels.weight_lines(CODES, SCALE_FUNCTIONS)
DEEP, MAX_CHUNK = 1024, 256  # values of a row in a panel, and of the longest chunk
LINE_SIZE = (MAX_CHUNK + LANES_NBYTES) // 4  # f32 of a line: a chunk and its scales
LINES, PANEL_SIZE = LANES * LINE_SIZE, WIDE * LANES * DEEP // VALUES * (VALUES + LANES_NBYTES) // 4
CHUNK = np.zeros(64, np.int64)  # bytes of a chunk by qtype
for dtype in ROUNDABLE:
    CHUNK[dtype.number] = dtype.block_nbytes * max(1, VALUES // dtype.block)


@part("i64(i64, i64, i64, i64)")
def padded_chunk(buffer, w, num_left, chunk_nbytes):
    """Return w, or if a row at w has only num_left of chunk_nbytes bytes, the address `buffer` of these, then zeros."""
    if num_left >= chunk_nbytes:
        return w
    for i in range(chunk_nbytes):
        put_byte(buffer, i, byte_at(w, i) if i < num_left else 0)
    return buffer


@kernel("*[i64] * 8")
def pack_panel(panel_ptr, qtype, w, ldw, first_chunk, count, num_rows, wide):
    """Write `count` chunks, from first_chunk on, of num_rows rows at w, ldw bytes each, as a panel: see code_panels."""
    lines_ptr, room = scratch(LINES), scratch(LINE_SIZE)
    per, chunk = (WIDTH[qtype] + LANES_NBYTES) // 4, CHUNK[qtype]
    for c in range(count):
        at = (first_chunk + c) * chunk
        for column in range(0, num_rows, LANES):
            lines_here = min(num_rows - column, LANES)
            for r in range(lines_here):
                source = w + (column + r) * ldw + at
                emit_weight_line(
                    qtype, address(lines_ptr, r * per), padded_chunk(room, source, ldw - at, chunk)
                )
            for i in range(0, per, LANES):
                target = address(panel_ptr, ((c * per + i) * wide + column // LANES) * LANES)
                transpose16(address(lines_ptr, i), per, lines_here - 1, LANES, target, wide * LANES)


@kernel("*[i64] * 11")
def panels(m, n, k, qtype, x, w, ldw, y, add, start, stop):
    """Compute columns start … stop - 1 of y (m, n) = x @ w.T, plus y if `add`, for many rows, by packed panels of w.

    x, w, y are addresses: of integers by round_row with one plane, of packed rows `ldw` bytes apart, and of f32.
    """
    panel, width = scratch(PANEL_SIZE), WIDTH[qtype]
    x_stride, line_nbytes = nbytes(k, 1), width + 3 * LANES_NBYTES
    depth_step = even_parts(k, DEEP, MAX_CHUNK)
    for j in range(start, stop, WIDE * LANES):
        num_columns = min(stop - j, WIDE * LANES)
        wide = -(-num_columns // LANES)
        for p in range(0, k, depth_step):
            first_chunk, chunks = p // width, -(-min(k - p, depth_step) // width)
            pack_panel(panel, qtype, w + j * ldw, ldw, first_chunk, chunks, num_columns, wide)
            beta = f32(1) if add or p else f32(0)
            for i in range(0, m, HIGH):
                to, x_at = y + 4 * (i * n + j), x + i * x_stride + first_chunk * line_nbytes
                tile_args = x_at, x_stride, panel, chunks, to, beta, 4 * n, min(m - i, HIGH)
                chunk_tile(wide, qtype, *tile_args, num_columns)
