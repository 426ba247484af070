"""Multiply quantized weights by activations that are rounded to integers, 32 of them with one step.

With one plane, activations are rounded to 8 bits; with three, to 24 bits: errors are at most 1.4e-6 of the mean result
(0.7e-6 for sums in f32), and up to eight rows need less time than in f32. A token of `110m` in Q4_0 or Q4_K_M took 6.3
or 6.1 ms with codes as f32, now 3.2 or 3.6 ms. Integers lie as `dot_tile` says; n values take `nbytes(n, planes)`.
"""

from packtrain.kernels.matmul.panel_products import panels
from packtrain.kernels.matmul.rounding import (
    BLOCK, MAX_INT_1, block_step, round_all, round_rows, rounded_codes,
)  # fmt: skip
from packtrain.kernels.matmul.row_products import PANEL, dots
from packtrain.kernels.runtime.jit import each, kernel, part, part_of, spans, tasks_of, threads
from packtrain.kernels.runtime.kernel_types import i64
from packtrain.kernels.simd.simd_f32 import LANES, address, load, store

# Below this many weights a region does not pay; above, it costs 2 of the 60 µs of a 768 x 768 product.
MIN_PARALLEL_WEIGHTS = 1 << 17
TASKS_PER_THREAD = 8


@kernel("out1, in1")
def rounded(y, x):
    """y = x, each 32 values rounded to multiples of one step: their largest magnitude / 127."""
    for i in range(0, len(x), BLOCK):
        d = block_step(address(x, i), MAX_INT_1)
        for j in range(i, i + BLOCK, LANES):
            store(y, j, rounded_codes(load(x, j), d) * d)


@part("i64(i64)")
def columns_per_task(n):
    """Return how many of n columns make a task: so few that nobody waits for a late thread."""
    return -(-n // (threads() * TASKS_PER_THREAD * PANEL)) * PANEL


@kernel("out2, in2, i64, bytes2, boolean, i64, out1")
def product(y, x, qtype, w, add, planes, workspace):
    """y = rounded(x) @ w.T, plus y if `add`.

    x          (M, K)          f32; K is a multiple of 32 and of the block
    w          (N, row bytes)  packed, of a type in ROUNDABLE
    y          (M, N)          f32
    planes     1 or 3: x is rounded to 8 or 24 bits
    workspace  (M * nbytes(K, planes) / 4,)  f32
    """
    m, k = x.shape
    n, integers = w.shape[0], address(workspace, 0)
    round_all(x, integers, qtype, planes)
    task_args = m, n, k, qtype, planes, integers, w.ctypes.data, w.shape[1], address(y, 0), i64(add)
    if n * k * m < MIN_PARALLEL_WEIGHTS:
        dots(*task_args, 0, n)
    else:
        spans(dots, task_args, n, columns_per_task(n))


@kernel("longs2, i64, i64, i64, i64, i64, i64, i64")
def product_task(every, m, k, qtype, planes, x, columns_per_part, task):
    """Compute up to columns_per_part columns of one of `products`, found by `task` (part_of); x: round_row's result."""
    i, col_start = part_of(every, columns_per_part, task)
    y, n, w, ldw, add = (every[i, 0], every[i, 1], every[i, 2], every[i, 3], every[i, 4])
    dots(m, n, k, qtype, planes, x, w, ldw, y, add, col_start, min(col_start + columns_per_part, n))


@kernel("longs2, in2, i64, i64, out1")
def products(every, x, qtype, planes, workspace):
    """Compute `product` of the same rows with several weights of one type.

    every  (P, 5)  i64, a row for each product: address of y, N, address of w, bytes of a row of w, 1 to add to y or 0
    """
    m, k = x.shape
    integers = address(workspace, 0)
    round_all(x, integers, qtype, planes)
    step = columns_per_task(tasks_of(every, 1))
    each(product_task, (every, m, k, qtype, planes, integers, step), tasks_of(every, step))


@kernel("out2, i64, i64, i64, bytes2, boolean, i64, i64")
def columns(y, x, k, qtype, w, add, start, stop):
    """Compute columns start … stop - 1 of y = x @ w.T, plus y if `add`; x: address of round_row's integers."""
    m, n = y.shape
    panels(m, n, k, qtype, x, w.ctypes.data, w.shape[1], address(y, 0), i64(add), start, stop)


@kernel("out2, in2, i64, bytes2, boolean, out1")
def product_of_many(y, x, qtype, w, add, workspace):
    """Compute `product` with one plane for many rows: weights are taken out of their blocks once for all rows."""
    m, k = x.shape
    n, integers = w.shape[0], address(workspace, 0)
    spans(round_rows, (x, integers, qtype, 1), m, -(-m // threads()))
    spans(columns, (y, integers, k, qtype, w, add), n, -(-n // (threads() * LANES)) * LANES)
