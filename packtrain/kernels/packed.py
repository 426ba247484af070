"""Products with quantized weights, dequantized panel by panel into per-thread scratch, never as a whole matrix.

`multiply` and `multiply_back` work on addresses and one thread, for other kernels; `product` and `product_back`
on arrays. Kinds are those of `dequantize`; w is u8 (N, row bytes). A product is split into one task for each thread;
sums are never split, so that results do not depend on it.
"""

from numba import types

from packtrain.kernels import simd
from packtrain.kernels.amx import STEPS, TILE, pack_columns
from packtrain.kernels.call import each, kernel, part_of, spans, tasks_of, threads, words2
from packtrain.kernels.dequantize import packed2, row
from packtrain.kernels.dots import FUSED, dot
from packtrain.kernels.gemm import B_SIZE, BROAD, BROADEST, DEEP, even, pack, times_block
from packtrain.kernels.matmul import shares
from packtrain.kernels.panels import AMX, PANEL, pair, places
from packtrain.kernels.simd import LANES, address, fma, in2, load, out2, peek, poke, scratch, splat

i64, f32, void = types.int64, types.float32, types.void
COLUMNS = 256  # dequantized at a time: the most that a block can have
FEW_ROWS, SUMS = 8, 128  # up to this many rows use dot products
LINE = COLUMNS + PANEL  # scratch: the values of a long block, and space after them
LINES = (STEPS if AMX else 2) * LINE
FLAT = DEEP * PANEL
UNPACKING = 16  # dequantizing a value costs as much as this many multiply-adds
SMALL = 1 << 21  # below this many multiply-adds a parallel region does not pay
TASKS = 8  # of each thread, of dot products: who comes late is not waited for
LEAST_COLUMNS = 128  # of a task of `product_back`


@kernel(void(*[i64] * 8, types.boolean, i64, i64, i64))
def multiply(kind, m, n, k, x, ldx, w, nbytes, add, y, ldy, half):
    """y (m, n) = x (m, k) @ w (n, k).T, + y if `add`; x, w and y are addresses, `nbytes` are those of a row of w.

    With half = 1, x and w are rounded to bf16; see amx.py for half = 2.
    """
    flat, block = scratch(FLAT), scratch(B_SIZE)
    step, across = even(k, DEEP, COLUMNS), even(n, BROADEST if half else BROAD, PANEL)
    for p in range(0, max(k, 1), step):
        depth = min(k - p, step)
        keep = f32(1.0) if add or p else f32(0.0)
        for j in range(0, n, across):
            width = min(n - j, across)
            for c in range(0, width, PANEL):
                num_columns = min(width - c, PANEL)
                for r in range(num_columns):
                    source = w + (j + c + r) * nbytes + p * nbytes // k
                    row(kind, address(flat, r * DEEP), source, depth)
                pack(
                    address(block, c * places(depth, half)), flat, 1, DEEP, depth, num_columns, half
                )
            left, target = address(x, p), address(y, j)
            times_block(0, m, width, left, ldx, block, depth, keep, target, ldy, half)


@kernel(void(*[i64] * 10, types.boolean, i64, i64, i64))
def multiply_back(kind, m, n, k, start, stop, y, ldy, w, nbytes, add, x, ldx, half):
    """x (m, start:stop) = y (m, n) @ w (n, k)[:, start:stop], + x if `add`; start and stop - start whole blocks."""
    lines, block, per = scratch(LINES), scratch(B_SIZE), 1 + half
    tiled = AMX and half > 0
    step = even(n, DEEP, LANES)
    for p in range(0, max(n, 1), step):
        depth = min(n - p, step)
        deep = places(depth, half)
        keep = f32(1.0) if add or p else f32(0.0)
        for c in range(start, stop, COLUMNS):
            width = min(stop - c, COLUMNS)
            for r in range(0, depth if tiled else 0, STEPS):
                for i in range(min(depth - r, STEPS)):
                    source = w + (p + r + i) * nbytes + c * nbytes // k
                    row(kind, address(lines, i * LINE), source, width)
                target, left = address(block, r // STEPS * TILE * half), min(depth - r, STEPS)
                pack_columns(target, deep * LANES, lines, 0, LINE, left, width, half)
            for r in range(0 if tiled else deep):
                for i in range(r * per, min(r * per + per, depth)):
                    source = w + (p + i) * nbytes + c * nbytes // k
                    row(kind, address(lines, i % per * LINE), source, width)
                for j in range(0, width, LANES):
                    values = load(lines, j) if r * per < depth else splat(0.0)
                    if half:
                        after = load(lines, LINE + j) if r * per + 1 < depth else splat(0.0)
                        values = pair(values, after)
                    simd.store(block, j // PANEL * PANEL * deep + r * PANEL + j % PANEL, values)
            left, target = address(y, p), address(x, c)
            times_block(0, m, width, left, ldy, block, depth, keep, target, ldx, half)


@kernel(types.boolean(i64, i64, i64))
def fused(m, k, kind):
    """Whether weights are multiplied as they are unpacked."""
    return m == 1 and k % 32 == 0 and kind in FUSED


@kernel(void(out2, in2, i64, packed2, types.boolean, i64, i64))
def dots(y, x, kind, w, add, start, stop):
    """y[:, start:stop] = x @ w[start:stop].T for up to 8 rows: every block is read and dequantized once."""
    m, k = x.shape
    nbytes, n = w.shape[1], y.shape[1]
    line, sums = scratch(LINE), scratch(SUMS)
    is_fused = fused(m, k, kind)
    for j in range(start, stop):
        source = w.ctypes.data + j * nbytes
        if is_fused:
            s = dot(kind, address(x, 0), source, k)
            poke(y, j, peek(y, j) + s if add else s)
            continue
        for i in range(m):
            simd.store(sums, i * LANES, splat(0.0))
        for p in range(0, k, 256):
            depth = min(k - p, 256)
            row(kind, line, source + p * nbytes // k, depth)
            for i in range(m):
                at = address(x, i * k + p)
                a, b = splat(0.0), splat(0.0)
                vector_end = depth // 32 * 32
                for c in range(0, vector_end, 32):
                    a = fma(load(line, c), load(at, c), a)
                    b = fma(load(line, c + 16), load(at, c + 16), b)
                for c in range(vector_end, depth, LANES):
                    a = fma(simd.load_part(line, c, depth - c), simd.load_part(at, c, depth - c), a)
                simd.store(sums, i * LANES, load(sums, i * LANES) + (a + b))
        for i in range(m):
            s = simd.total(load(sums, i * LANES))
            poke(y, i * n + j, peek(y, i * n + j) + s if add else s)


@kernel(void(out2, in2, i64, packed2, types.boolean, i64, i64, i64))
def columns(y, x, kind, w, add, half, start, stop):
    m, k = x.shape
    n, nbytes = y.shape[1], w.shape[1]
    if m <= FEW_ROWS and half == 0:
        dots(y, x, kind, w, add, start, stop)
    else:
        multiply(
            *(kind, m, stop - start, k, address(x, 0), k, w.ctypes.data + start * nbytes, nbytes),
            *(add, address(y, start), n, half),
        )


@kernel(void(out2, in2, i64, packed2, types.boolean, i64))
def product(y, x, kind, w, add, half):
    """y = x @ w.T, or y + x @ w.T.

        x  (M, K)          f32
        w  (N, row bytes)  packed
        y  (M, N)          f32

    Up to 8 rows use dot products, bound by reading w once, unless half = 1: x and w are rounded to bf16.
    """
    m, k = x.shape
    n = w.shape[0]
    if y.size == 0:
        return
    count = threads()
    if n * k * (m + UNPACKING) < SMALL or count == 1:
        columns(y, x, kind, w, add, half, 0, n)
        return
    shares = TASKS if fused(m, k, kind) and half == 0 else 1
    spans(columns, (y, x, kind, w, add, half), n, -(-n // (count * shares * LANES)) * LANES)


@kernel(void(words2, i64, i64, i64, i64, i64))
def some_dots(every, x, k, kind, step, task):
    """Up to `step` columns of one of the products, fused."""
    i, start = part_of(every, step, task)
    y, n, w, stride = every[i, 0], every[i, 1], every[i, 2], every[i, 3]
    for j in range(start, min(start + step, n)):
        s = dot(kind, x, w + j * stride, k)
        poke(y, j, peek(y, j) + s if every[i, 4] else s)


@kernel(void(words2, in2, i64, i64))
def products(every, x, kind, half):
    """`product` with several weights of one kind, fused.

    every  of each the address of y, N, the address of w, the bytes of a row, and add
    half   0
    """
    step = -(-tasks_of(every, 1) // (threads() * TASKS * LANES)) * LANES
    task_args = every, address(x, 0), x.shape[1], kind, step
    each(some_dots, task_args, tasks_of(every, step))


@kernel(void(out2, in2, i64, packed2, types.boolean, i64, i64, i64, i64, i64))
def product_back_task(x, y, kind, w, add, half, rows, step, across, task):
    """`rows` rows and `step` columns of x."""
    m, k = x.shape
    n, nbytes = w.shape
    i, c = task // across * rows, task % across * step
    multiply_back(
        *(kind, min(rows, m - i), n, k, c, min(k, c + step), address(y, i * n), n),
        *(w.ctypes.data, nbytes, add, address(x, i * k), k, half),
    )


@kernel(void(out2, in2, i64, i64, packed2, types.boolean, i64))
def product_back(x, y, block, kind, w, add, half):
    """x = y @ w, or x + y @ w.

    y  (M, N)          f32
    w  (N, row bytes)  packed by `block` columns
    x  (M, K)          f32
    """
    m, k = x.shape
    if x.size == 0:
        return
    rows, step = shares(m, k, threads(), max(block, LEAST_COLUMNS), UNPACKING, BROADEST)
    across = -(-k // step)
    task_args = (x, y, kind, w, add, half, rows, step, across)
    each(product_back_task, task_args, across * -(-m // rows))
