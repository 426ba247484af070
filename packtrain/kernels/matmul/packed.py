"""Multiply by quantized weights, dequantized panel by panel into per-thread scratch, never as a whole matrix.

`multiply` and `multiply_back` work on addresses and one thread, for other kernels; `product` and `product_back`
on arrays. `qtype` is ggml's type number; w is u8 (N, row bytes). A product is split into one task for each thread;
sums are never split, so that results do not depend on the number of threads.
"""

from packtrain.kernels.matmul.amx import STEPS, TILE, pack_columns
from packtrain.kernels.matmul.dots import FUSED_TYPES, dot
from packtrain.kernels.matmul.gemm import (
    BROAD, BROAD_BF16, B_SIZE, DEEP, even_parts, multiply_block, pack,
)  # fmt: skip
from packtrain.kernels.matmul.matmul_f32 import task_shape
from packtrain.kernels.matmul.panels import AMX, PANEL, pair, places
from packtrain.kernels.quant.dequantize import row
from packtrain.kernels.runtime.jit import each, kernel, part_of, spans, tasks_of, threads
from packtrain.kernels.runtime.kernel_types import f32
from packtrain.kernels.simd.simd_f32 import (
    LANES, address, fma, load, load_part, peek, poke, scratch, splat, store, total,
)  # fmt: skip

COLUMNS = 256  # columns dequantized at a time: the largest block
FEW_ROWS, SUMS_SIZE = 8, 128  # up to this many rows use dot products
LINE_SIZE = COLUMNS + PANEL  # scratch: the values of a long block, and space after them
LINES = (STEPS if AMX else 2) * LINE_SIZE
FLAT_SIZE = DEEP * PANEL
UNPACKING = 16  # dequantizing a value costs as much as this many multiply-adds
SMALL = 1 << 21  # below this many multiply-adds a parallel region does not pay
TASKS_PER_THREAD = 8  # of dot products: nobody waits for a late thread
LEAST_COLUMNS = 128  # least columns of a task of `product_back`


@kernel("*[i64] * 8, boolean, i64, i64, i64")
def multiply(qtype, m, n, k, x, ldx, w, row_nbytes, add, y, ldy, bf16):
    """y (m, n) = x (m, k) @ w (n, k).T, plus y if `add`; x, w, y are addresses, rows of w have `row_nbytes` bytes.

    With bf16 = 1, x and w are rounded to bf16; see amx.py for bf16 = 2.
    """
    flat, block = scratch(FLAT_SIZE), scratch(B_SIZE)
    step, across = even_parts(k, DEEP, COLUMNS), even_parts(n, BROAD_BF16 if bf16 else BROAD, PANEL)
    for p in range(0, max(k, 1), step):
        depth = min(k - p, step)
        beta = f32(1.0) if add or p else f32(0.0)
        for j in range(0, n, across):
            block_columns = min(n - j, across)
            for c in range(0, block_columns, PANEL):
                num_columns = min(block_columns - c, PANEL)
                for r in range(num_columns):
                    w_source = w + (j + c + r) * row_nbytes + p * row_nbytes // k
                    row(qtype, address(flat, r * DEEP), w_source, depth)
                pack(
                    address(block, c * places(depth, bf16)), flat, 1, DEEP, depth, num_columns, bf16
                )
            x_block, target = address(x, p), address(y, j)
            multiply_block(0, m, block_columns, x_block, ldx, block, depth, beta, target, ldy, bf16)


@kernel("*[i64] * 10, boolean, i64, i64, i64")
def multiply_back(qtype, m, n, k, start, stop, y, ldy, w, row_nbytes, add, x, ldx, bf16):
    """x[:, start:stop] = y (m, n) @ w (n, k)[:, start:stop], plus x if `add`, at addresses; start:stop whole blocks."""
    lines, block, per = scratch(LINES), scratch(B_SIZE), 1 + bf16
    use_tiles = AMX and bf16 > 0
    depth_step = even_parts(n, DEEP, LANES)
    for p in range(0, max(n, 1), depth_step):
        depth = min(n - p, depth_step)
        deep = places(depth, bf16)
        beta = f32(1.0) if add or p else f32(0.0)
        for c in range(start, stop, COLUMNS):
            width = min(stop - c, COLUMNS)
            for r in range(0, depth if use_tiles else 0, STEPS):
                for i in range(min(depth - r, STEPS)):
                    source = w + (p + r + i) * row_nbytes + c * row_nbytes // k
                    row(qtype, address(lines, i * LINE_SIZE), source, width)
                target, num_rows = address(block, r // STEPS * TILE * bf16), min(depth - r, STEPS)
                pack_columns(target, deep * LANES, lines, 0, LINE_SIZE, num_rows, width, bf16)
            for r in range(0 if use_tiles else deep):
                for i in range(r * per, min(r * per + per, depth)):
                    source = w + (p + i) * row_nbytes + c * row_nbytes // k
                    row(qtype, address(lines, i % per * LINE_SIZE), source, width)
                for j in range(0, width, LANES):
                    row_lanes = load(lines, j) if r * per < depth else splat(0.0)
                    if bf16:
                        after = load(lines, LINE_SIZE + j) if r * per + 1 < depth else splat(0.0)
                        row_lanes = pair(row_lanes, after)
                    store(block, j // PANEL * PANEL * deep + r * PANEL + j % PANEL, row_lanes)
            num_rows, target = address(y, p), address(x, c)
            multiply_block(0, m, width, num_rows, ldy, block, depth, beta, target, ldx, bf16)


@kernel("boolean(i64, i64, i64)")
def fused(m, k, qtype):
    """Return whether m rows of k activations meet weights of type `qtype` as these are unpacked, in registers."""
    return m == 1 and k % 32 == 0 and qtype in FUSED_TYPES


@kernel("out2, in2, i64, bytes2, boolean, i64, i64")
def dot_columns(y, x, qtype, w, add, start, stop):
    """y[:, start:stop] = x @ w[start:stop].T, plus y if `add`, for up to 8 rows: every block is dequantized once."""
    m, k = x.shape
    row_nbytes, n = w.shape[1], y.shape[1]
    line, sums_ptr = scratch(LINE_SIZE), scratch(SUMS_SIZE)
    is_fused = fused(m, k, qtype)
    for j in range(start, stop):
        source = w.ctypes.data + j * row_nbytes
        if is_fused:
            s = dot(qtype, address(x, 0), source, k)
            poke(y, j, peek(y, j) + s if add else s)
            continue
        for i in range(m):
            store(sums_ptr, i * LANES, splat(0.0))
        for p in range(0, k, 256):
            depth = min(k - p, 256)
            row(qtype, line, source + p * row_nbytes // k, depth)
            for i in range(m):
                at = address(x, i * k + p)
                a, b = splat(0.0), splat(0.0)
                vector_end = depth // 32 * 32
                for c in range(0, vector_end, 32):
                    a = fma(load(line, c), load(at, c), a)
                    b = fma(load(line, c + 16), load(at, c + 16), b)
                for c in range(vector_end, depth, LANES):
                    a = fma(load_part(line, c, depth - c), load_part(at, c, depth - c), a)
                store(sums_ptr, i * LANES, load(sums_ptr, i * LANES) + (a + b))
        for i in range(m):
            s = total(load(sums_ptr, i * LANES))
            poke(y, i * n + j, peek(y, i * n + j) + s if add else s)


@kernel("out2, in2, i64, bytes2, boolean, i64, i64, i64")
def columns(y, x, qtype, w, add, bf16, start, stop):
    """Compute columns start … stop - 1 of y = x @ w.T, plus y if `add`: by dot products if rows are few, or panels."""
    m, k = x.shape
    n, nbytes = y.shape[1], w.shape[1]
    if m <= FEW_ROWS and bf16 == 0:
        dot_columns(y, x, qtype, w, add, start, stop)
    else:
        multiply(
            *(qtype, m, stop - start, k, address(x, 0), k, w.ctypes.data + start * nbytes, nbytes),
            *(add, address(y, start), n, bf16),
        )


@kernel("out2, in2, i64, bytes2, boolean, i64")
def product(y, x, qtype, w, add, bf16):
    """y = x @ w.T, plus y if `add`.

        x  (M, K)          f32
        w  (N, row bytes)  packed
        y  (M, N)          f32

    Up to 8 rows use dot products, bound by reading w once, unless bf16 = 1: x and w are rounded to bf16.
    """
    m, k = x.shape
    n = w.shape[0]
    if y.size == 0:
        return
    num_threads = threads()
    if n * k * (m + UNPACKING) < SMALL or num_threads == 1:
        columns(y, x, qtype, w, add, bf16, 0, n)
        return
    shares = TASKS_PER_THREAD if fused(m, k, qtype) and bf16 == 0 else 1
    spans(columns, (y, x, qtype, w, add, bf16), n, -(-n // (num_threads * shares * LANES)) * LANES)


@kernel("longs2, i64, i64, i64, i64, i64")
def product_task(every, x, k, qtype, step, task):
    """Compute up to `step` columns of one of `products`, which part_of finds by `task`; x: address of k values."""
    i, col_start = part_of(every, step, task)
    y, n, w, ldw = every[i, 0], every[i, 1], every[i, 2], every[i, 3]
    for j in range(col_start, min(col_start + step, n)):
        s = dot(qtype, x, w + j * ldw, k)
        poke(y, j, peek(y, j) + s if every[i, 4] else s)


@kernel("longs2, in2, i64, i64")
def products(every, x, qtype, bf16):
    """Compute `product` of one row x (1, K) with several weights of one type, each unpacked in registers.

    every  (P, 5)  i64, a row for each product: address of y, N, address of w, bytes of a row of w, 1 to add to y or 0
    bf16   must be 0; an argument, because `product` has it
    """
    columns_per_task = -(-tasks_of(every, 1) // (threads() * TASKS_PER_THREAD * LANES)) * LANES
    task_args = every, address(x, 0), x.shape[1], qtype, columns_per_task
    each(product_task, task_args, tasks_of(every, columns_per_task))


@kernel("out2, in2, i64, bytes2, boolean, i64, i64, i64, i64, i64")
def product_back_task(x, y, qtype, w, add, bf16, rows, task_columns, across, task):
    """Compute `rows` x task_columns of x for product_back: `task` says which, with `across` tasks side by side."""
    m, k = x.shape
    n, row_nbytes = w.shape
    i, c = task // across * rows, task % across * task_columns
    multiply_back(
        *(qtype, min(rows, m - i), n, k, c, min(k, c + task_columns), address(y, i * n), n),
        *(w.ctypes.data, row_nbytes, add, address(x, i * k), k, bf16),
    )


@kernel("out2, in2, i64, i64, bytes2, boolean, i64")
def product_back(x, y, block, qtype, w, add, bf16):
    """x = y @ w, plus x if `add`.

    y  (M, N)          f32
    w  (N, row bytes)  packed in blocks of `block` columns
    x  (M, K)          f32
    """
    m, k = x.shape
    if x.size == 0:
        return
    task_rows, step = task_shape(m, k, threads(), max(block, LEAST_COLUMNS), UNPACKING, BROAD_BF16)
    tasks_across = -(-k // step)
    task_args = (x, y, qtype, w, add, bf16, task_rows, step, tasks_across)
    each(product_back_task, task_args, tasks_across * -(-m // task_rows))
