"""Mixture of experts: top-k, sorting rows by expert, products of each run of rows with its expert's matrix.

`ids` that products take are ascending. Tasks are columns of all experts, so that routing cannot starve a thread.
"""

from numba import types

from packtrain.kernels import simd
from packtrain.kernels.call import each, kernel, spans
from packtrain.kernels.dequantize import packed2
from packtrain.kernels.matmul import FEW_ROWS, SMALL, block, dot_rows, layout
from packtrain.kernels.packed import columns, multiply_back
from packtrain.kernels.simd import LANES, ids1, in2, out2, out3

i64, f32, void = types.int64, types.float32, types.void
ids2 = types.Array(types.int32, 2, "C", readonly=True)
out_ids1, out_ids2 = types.Array(types.int32, 1, "C"), types.Array(types.int32, 2, "C")
any_in3 = simd.rank(3, "A", readonly=True)
SERIAL = 1 << 14
BLOCK = 1 << 13
WIDE, HIGH = 128, 120  # columns of a product in a task, rows of an outer product


# ---- top-k --------------------------------------------------------------------------------------------------


@kernel(void(out_ids2, in2, i64, i64))
def largest_rows(ids, x, start, stop):
    for i in range(start, stop):
        for j in range(ids.shape[1]):
            best = -1
            for e in range(x.shape[1]):
                before = ids[i, j - 1]
                left = j == 0 or x[i, e] < x[i, before] or (x[i, e] == x[i, before] and e > before)
                if left and (best < 0 or x[i, e] > x[i, best]):
                    best = e
            ids[i, j] = max(best, 0)  # a NaN compares false with everything


@kernel(void(out_ids2, in2))
def top_k(ids, x):
    """The indices of the k largest of each row, the largest first; the lower index on ties.

    x    (N, E)  f32
    ids  (N, k)  i32
    """
    n, width = x.shape
    spans(largest_rows, (ids, x), n, BLOCK // width if x.size > SERIAL else n)


@kernel(void(out2, in2, ids2))
def take(y, x, ids):
    """y[i, j] = x[i, ids[i, j]]."""
    for i in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            y[i, j] = x[i, ids[i, j]]


@kernel(void(out2, in2, ids2))
def take_back(dx, dy, ids):
    """dx[i, ids[i, j]] += dy[i, j] into zeros."""
    dx[:] = 0
    for i in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            dx[i, ids[i, j]] += dy[i, j]


@kernel(void(out_ids1, out_ids1, out_ids2, ids2, out_ids1))
def group_rows(row, group, place, ids, starts):
    """Stable sort of all ids: see the op. starts (groups,) is scratch."""
    starts[:] = 0
    for i in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            starts[ids[i, j]] += 1
    before = 0
    for g in range(starts.size):
        starts[g], before = before, before + starts[g]
    for i in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            at = starts[ids[i, j]]
            starts[ids[i, j]] += 1
            row[at], group[at], place[i, j] = i, ids[i, j], at


# ---- products ------------------------------------------------------------------------------------------------


@kernel(i64(ids1, i64))
def first_of(ids, expert):
    """Where the rows of an expert begin, or would begin."""
    low, high = 0, ids.size
    while low < high:
        middle = (low + high) // 2
        if ids[middle] < expert:
            low = middle + 1
        else:
            high = middle
    return low


@kernel(void(out2, in2, any_in3, ids1, types.boolean, i64))
def matmul_id_task(y, x, w, ids, accumulate, task):
    """WIDE columns of the rows of one expert."""
    e, j = task % w.shape[0], task // w.shape[0] * WIDE
    start, stop = first_of(ids, e), first_of(ids, e + 1)
    transposed = w[e].T
    if 0 < stop - start <= FEW_ROWS and layout(transposed)[0] == 1:
        end = min(j + WIDE, y.shape[1])
        dot_rows(y[start:stop], x[start:stop], transposed, accumulate, j, end)
    else:
        block(y[start:stop], x[start:stop], transposed, accumulate, 0, 0, stop - start, j, WIDE)


@kernel(void(out2, in2, any_in3, ids1, types.boolean))
def matmul_id(y, x, w, ids, accumulate):
    """y[i] = x[i] @ w[ids[i]].T, or y + that.

    x    (N, K)     f32
    w    (E, F, K)  f32, unit stride on either of its last axes
    ids  (N,)       i32, ascending
    y    (N, F)     f32
    """
    tasks = -(-y.shape[1] // WIDE) * w.shape[0]
    if y.size * x.shape[1] <= SMALL:
        for t in range(tasks):
            matmul_id_task(y, x, w, ids, accumulate, t)
        return
    each(matmul_id_task, (y, x, w, ids, accumulate), tasks)


@kernel(void(out2, in2, i64, packed2, i64, ids1, types.boolean, i64))
def packed_matmul_id_task(y, x, kind, w, experts, ids, accumulate, task):
    """WIDE columns of the rows of one expert."""
    high, e, j = w.shape[0] // experts, task % experts, task // experts * WIDE
    start, stop = first_of(ids, e), first_of(ids, e + 1)
    if start < stop:
        matrix, end = w[e * high : (e + 1) * high], min(j + WIDE, high)
        columns(y[start:stop], x[start:stop], kind, matrix, accumulate, 0, j, end)


@kernel(void(out2, in2, i64, packed2, i64, ids1, types.boolean))
def packed_matmul_id(y, x, kind, w, experts, ids, accumulate):
    """Like matmul_id, with w (E * F, row bytes) quantized."""
    tasks = -(-(w.shape[0] // experts) // WIDE) * experts
    each(packed_matmul_id_task, (y, x, kind, w, experts, ids, accumulate), tasks)


@kernel(void(out2, in2, i64, i64, packed2, i64, ids1, types.boolean, i64))
def packed_matmul_id_back_task(dx, dy, step, kind, w, experts, ids, accumulate, task):
    """`step` columns of the rows of one expert."""
    high, nbytes, k = w.shape[0] // experts, w.shape[1], dx.shape[1]
    e, c = task % experts, task // experts * step
    start, stop = first_of(ids, e), first_of(ids, e + 1)
    if start < stop:
        multiply_back(
            *(kind, stop - start, high, k, c, min(k, c + step)),
            *(simd.address(dy, start * high), high, w.ctypes.data + e * high * nbytes, nbytes),
            *(accumulate, simd.address(dx, start * k), k, 0),
        )


@kernel(void(out2, in2, i64, i64, packed2, i64, ids1, types.boolean))
def packed_matmul_id_back(dx, dy, unit, kind, w, experts, ids, accumulate):
    """dx[i] = dy[i] @ w[ids[i]], or dx + that; w (E * F, row bytes) quantized in blocks of `unit` columns."""
    step = max(unit, WIDE)
    task_args = (dx, dy, step, kind, w, experts, ids, accumulate)
    each(packed_matmul_id_back_task, task_args, -(-dx.shape[1] // step) * experts)


@kernel(void(out3, in2, in2, ids1, types.boolean, i64))
def out_prod_id_task(y, a, b, ids, accumulate, task):
    """HIGH rows of the product of one expert; zeros for one without rows."""
    e, i = task % y.shape[0], task // y.shape[0] * HIGH
    start, stop = first_of(ids, e), first_of(ids, e + 1)
    block(y[e], a[start:stop].T, b[start:stop], accumulate, 0, i, HIGH, 0, y.shape[2])


@kernel(void(out3, in2, in2, ids1, types.boolean))
def out_prod_id(y, a, b, ids, accumulate):
    """y[e] = sum of outer products of a[i] and b[i] over ids[i] == e, or y[e] + that.

    a    (N, P)     f32
    b    (N, Q)     f32
    ids  (N,)       i32, ascending
    y    (E, P, Q)  f32
    """
    tasks = -(-y.shape[1] // HIGH) * y.shape[0]
    if max(a.shape[0], y.shape[0]) * y.shape[1] * y.shape[2] <= SMALL:
        for t in range(tasks):
            out_prod_id_task(y, a, b, ids, accumulate, t)
        return
    each(out_prod_id_task, (y, a, b, ids, accumulate), tasks)


# ---- weighted sums of rows -----------------------------------------------------------------------------------


@kernel(void(out2, in2, ids2, in2, types.boolean, i64, i64))
def weighted_part(y, x, ids, weights, accumulate, start, stop):
    width = y.shape[1]
    for t in range(start, stop):
        for i in range(0, width, LANES):
            v = simd.load_part(y, t * width + i, width - i) if accumulate else simd.splat(0.0)
            for j in range(ids.shape[1]):
                at = i64(ids[t, j]) * width + i
                v = simd.fma(simd.load_part(x, at, width - i), weights[t, j], v)
            simd.store_part(y, t * width + i, v, width - i)


@kernel(void(out2, in2, ids2, in2, types.boolean))
def weighted_rows(y, x, ids, weights, accumulate):
    """y[t] = sum over j of weights[t, j] * x[ids[t, j]], or y + that.

    x             (N, C)  f32
    ids, weights  (T, k)  i32, f32
    y             (T, C)  f32
    """
    n, width = y.shape
    rows = BLOCK // width if x.size > SERIAL else n
    spans(weighted_part, (y, x, ids, weights, accumulate), n, rows)


@kernel(void(out2, out2, in2, in2, ids2, in2, i64, i64))
def weighted_back_part(dx, dweights, dy, x, ids, weights, start, stop):
    width = dy.shape[1]
    for t in range(start, stop):
        for j in range(ids.shape[1]):
            row = i64(ids[t, j]) * width
            if dweights.size:
                lanes = simd.splat(0.0)
                for i in range(0, width, LANES):
                    v = simd.load_part(dy, t * width + i, width - i)
                    lanes = simd.fma(v, simd.load_part(x, row + i, width - i), lanes)
                dweights[t, j] = simd.total(lanes)
            if dx.size:
                for i in range(0, width, LANES):
                    v = simd.load_part(dy, t * width + i, width - i) * weights[t, j]
                    simd.store_part(dx, row + i, v, width - i)


@kernel(void(out2, out2, in2, in2, ids2, in2))
def weighted_rows_back(dx, dweights, dy, x, ids, weights):
    """Gradients of weighted_rows, where dx and dweights are not of size 0; dx may be x.

    dx[ids[t, j]] = weights[t, j] * dy[t], dweights[t, j] = dy[t] . x[ids[t, j]]; each row of x is in ids once
    """
    n, width = dy.shape
    rows = BLOCK // width if x.size > SERIAL else n
    spans(weighted_back_part, (dx, dweights, dy, x, ids, weights), n, rows)
