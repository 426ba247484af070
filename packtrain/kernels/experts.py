"""Mixture of experts: top-k, sorting of rows by expert, and products of each expert's rows with its matrix.

`ids` of products are ascending. A task is some columns of one expert, so that routing cannot starve a thread.
"""

from numba import types

from packtrain.kernels import simd
from packtrain.kernels.call import each, kernel, spans
from packtrain.kernels.dequantize import packed2
from packtrain.kernels.matmul import FEW_ROWS, SMALL, block, dot_rows, matrix_layout
from packtrain.kernels.packed import columns, multiply_back
from packtrain.kernels.simd import LANES, ids1, in2, out2, out3

i64, f32, void = types.int64, types.float32, types.void
ids2 = types.Array(types.int32, 2, "C", readonly=True)
out_ids1_type, out_ids2 = types.Array(types.int32, 1, "C"), types.Array(types.int32, 2, "C")
any_in3_type = simd.rank(3, "A", readonly=True)
SERIAL = 1 << 14
BLOCK = 1 << 13
WIDE, OUTER_ROWS = 128, 120  # columns of a product, rows of an outer product in a task


# ---- top-k --------------------------------------------------------------------------------------------------


@kernel(void(out_ids2, in2, i64, i64))
def largest_rows(ids, x, row_start, row_stop):
    for i in range(row_start, row_stop):
        for j in range(ids.shape[1]):
            best_expert = -1
            for e in range(x.shape[1]):
                before = ids[i, j - 1]
                left = j == 0 or x[i, e] < x[i, before] or (x[i, e] == x[i, before] and e > before)
                if left and (best_expert < 0 or x[i, e] > x[i, best_expert]):
                    best_expert = e
            ids[i, j] = max(best_expert, 0)  # a NaN compares false with everything


@kernel(void(out_ids2, in2))
def top_k(ids, x):
    """Write the indices of the k largest values of each row, the largest first; on ties the lower index first.

    x    (N, E)  f32
    ids  (N, k)  i32
    """
    n, width = x.shape
    spans(largest_rows, (ids, x), n, BLOCK // width if x.size > SERIAL else n)


@kernel(void(out2, in2, ids2))
def take(y, x, ids):
    """Gather columns: y[i, j] = x[i, ids[i, j]]."""
    for i in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            y[i, j] = x[i, ids[i, j]]


@kernel(void(out2, in2, ids2))
def take_back(dx, dy, ids):
    """Gradient of take: dx[i, ids[i, j]] += dy[i, j], into zeros."""
    dx[:] = 0
    for i in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            dx[i, ids[i, j]] += dy[i, j]


@kernel(void(out_ids1_type, out_ids1_type, out_ids2, ids2, out_ids1_type))
def group_rows(row_ids, group_ids, positions, ids, group_starts):
    """Sort all ids stably by expert: writes each place's row and expert, each id's place; group_starts is scratch."""
    group_starts[:] = 0
    for i in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            group_starts[ids[i, j]] += 1
    num_before = 0
    for group_index in range(group_starts.size):
        group_starts[group_index], num_before = num_before, num_before + group_starts[group_index]
    for i in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            position = group_starts[ids[i, j]]
            group_starts[ids[i, j]] += 1
            row_ids[position], group_ids[position], positions[i, j] = i, ids[i, j], position


# ---- products ------------------------------------------------------------------------------------------------


@kernel(i64(ids1, i64))
def expert_start(ids, expert):
    """Return where the rows of an expert begin, or would begin, in the ascending `ids`."""
    low_index, high_index = 0, ids.size
    while low_index < high_index:
        middle = (low_index + high_index) // 2
        if ids[middle] < expert:
            low_index = middle + 1
        else:
            high_index = middle
    return low_index


@kernel(void(out2, in2, any_in3_type, ids1, types.boolean, i64))
def matmul_id_task(y, x, w, ids, accumulate, task):
    """Multiply the rows of one expert by WIDE rows of its matrix w[expert]."""
    expert, j = task % w.shape[0], task // w.shape[0] * WIDE
    start, stop = expert_start(ids, expert), expert_start(ids, expert + 1)
    transposed = w[expert].T
    if 0 < stop - start <= FEW_ROWS and matrix_layout(transposed)[0] == 1:
        col_stop = min(j + WIDE, y.shape[1])
        dot_rows(y[start:stop], x[start:stop], transposed, accumulate, j, col_stop)
    else:
        block(y[start:stop], x[start:stop], transposed, accumulate, 0, 0, stop - start, j, WIDE)


@kernel(void(out2, in2, any_in3_type, ids1, types.boolean))
def matmul_id(y, x, w, ids, accumulate):
    """y[i] = x[i] @ w[ids[i]].T, plus y if `accumulate`.

    x    (N, K)     f32
    w    (E, F, K)  f32, unit stride on either of its last axes
    ids  (N,)       i32, ascending
    y    (N, F)     f32
    """
    num_tasks = -(-y.shape[1] // WIDE) * w.shape[0]
    if y.size * x.shape[1] <= SMALL:
        for task in range(num_tasks):
            matmul_id_task(y, x, w, ids, accumulate, task)
        return
    each(matmul_id_task, (y, x, w, ids, accumulate), num_tasks)


@kernel(void(out2, in2, i64, packed2, i64, ids1, types.boolean, i64))
def packed_matmul_id_task(y, x, qtype, w, experts, ids, accumulate, task):
    """Multiply the rows of one expert by WIDE rows of its quantized matrix."""
    expert_rows, e, j = w.shape[0] // experts, task % experts, task // experts * WIDE
    row_start, row_stop = expert_start(ids, e), expert_start(ids, e + 1)
    if row_start < row_stop:
        matrix, end = w[e * expert_rows : (e + 1) * expert_rows], min(j + WIDE, expert_rows)
        columns(y[row_start:row_stop], x[row_start:row_stop], qtype, matrix, accumulate, 0, j, end)


@kernel(void(out2, in2, i64, packed2, i64, ids1, types.boolean))
def packed_matmul_id(y, x, qtype, w, experts, ids, accumulate):
    """y[i] = x[i] @ w[ids[i]].T, plus y if `accumulate`, as matmul_id with quantized w (E F, row bytes)."""
    num_tasks = -(-(w.shape[0] // experts) // WIDE) * experts
    each(packed_matmul_id_task, (y, x, qtype, w, experts, ids, accumulate), num_tasks)


@kernel(void(out2, in2, i64, i64, packed2, i64, ids1, types.boolean, i64))
def packed_matmul_id_back_task(dx, dy, step, qtype, w, experts, ids, accumulate, task):
    """Compute `step` columns of dx for the rows of one expert."""
    high, nbytes, k = w.shape[0] // experts, w.shape[1], dx.shape[1]
    e, col_start = task % experts, task // experts * step
    row_start, row_stop = expert_start(ids, e), expert_start(ids, e + 1)
    if row_start < row_stop:
        multiply_back(
            *(qtype, row_stop - row_start, high, k, col_start, min(k, col_start + step)),
            *(simd.address(dy, row_start * high), high, w.ctypes.data + e * high * nbytes, nbytes),
            *(accumulate, simd.address(dx, row_start * k), k, 0),
        )


@kernel(void(out2, in2, i64, i64, packed2, i64, ids1, types.boolean))
def packed_matmul_id_back(dx, dy, block_columns, qtype, w, experts, ids, accumulate):
    """dx[i] = dy[i] @ w[ids[i]], plus dx if `accumulate`; w (E F, row bytes) has blocks of `block_columns` columns."""
    columns_per_task = max(block_columns, WIDE)
    task_args = (dx, dy, columns_per_task, qtype, w, experts, ids, accumulate)
    each(packed_matmul_id_back_task, task_args, -(-dx.shape[1] // columns_per_task) * experts)


@kernel(void(out3, in2, in2, ids1, types.boolean, i64))
def out_prod_id_task(y, a, b, ids, accumulate, task):
    """Compute OUTER_ROWS rows of one expert's sum of outer products; zeros for an expert without rows."""
    e, row_start = task % y.shape[0], task // y.shape[0] * OUTER_ROWS
    start, stop = expert_start(ids, e), expert_start(ids, e + 1)
    block(y[e], a[start:stop].T, b[start:stop], accumulate, 0, row_start, OUTER_ROWS, 0, y.shape[2])


@kernel(void(out3, in2, in2, ids1, types.boolean))
def out_prod_id(y, a, b, ids, accumulate):
    """y[e] = sum of the outer products of a[i] and b[i] over ids[i] == e, plus y[e] if `accumulate`.

    a    (N, P)     f32
    b    (N, Q)     f32
    ids  (N,)       i32, ascending
    y    (E, P, Q)  f32
    """
    num_tasks = -(-y.shape[1] // OUTER_ROWS) * y.shape[0]
    if max(a.shape[0], y.shape[0]) * y.shape[1] * y.shape[2] <= SMALL:
        for task in range(num_tasks):
            out_prod_id_task(y, a, b, ids, accumulate, task)
        return
    each(out_prod_id_task, (y, a, b, ids, accumulate), num_tasks)


# ---- weighted sums of rows -----------------------------------------------------------------------------------


@kernel(void(out2, in2, ids2, in2, types.boolean, i64, i64))
def weighted_span(y, x, ids, weights, accumulate, token_start, token_stop):
    width = y.shape[1]
    for token in range(token_start, token_stop):
        for i in range(0, width, LANES):
            v = simd.load_part(y, token * width + i, width - i) if accumulate else simd.splat(0.0)
            for j in range(ids.shape[1]):
                offset = i64(ids[token, j]) * width + i
                v = simd.fma(simd.load_part(x, offset, width - i), weights[token, j], v)
            simd.store_part(y, token * width + i, v, width - i)


@kernel(void(out2, in2, ids2, in2, types.boolean))
def weighted_rows(y, x, ids, weights, accumulate):
    """y[t] = sum over j of weights[t, j] * x[ids[t, j]], plus y if `accumulate`.

    x             (N, C)  f32
    ids, weights  (T, k)  i32, f32
    y             (T, C)  f32
    """
    n, width = y.shape
    rows_per_task = BLOCK // width if x.size > SERIAL else n
    spans(weighted_span, (y, x, ids, weights, accumulate), n, rows_per_task)


@kernel(void(out2, out2, in2, in2, ids2, in2, i64, i64))
def weighted_back_span(dx, dweights, dy, x, ids, weights, token_start, token_stop):
    width = dy.shape[1]
    for token in range(token_start, token_stop):
        for j in range(ids.shape[1]):
            row_offset = i64(ids[token, j]) * width
            if dweights.size:
                lane_sums = simd.splat(0.0)
                for i in range(0, width, LANES):
                    v = simd.load_part(dy, token * width + i, width - i)
                    lane_sums = simd.fma(v, simd.load_part(x, row_offset + i, width - i), lane_sums)
                dweights[token, j] = simd.total(lane_sums)
            if dx.size:
                for i in range(0, width, LANES):
                    v = simd.load_part(dy, token * width + i, width - i) * weights[token, j]
                    simd.store_part(dx, row_offset + i, v, width - i)


@kernel(void(out2, out2, in2, in2, ids2, in2))
def weighted_rows_back(dx, dweights, dy, x, ids, weights):
    """Write the gradients of weighted_rows, dx and dweights, unless their size is 0; dx may be x.

    dx[ids[t, j]] = weights[t, j] * dy[t], dweights[t, j] = dy[t] . x[ids[t, j]]; each row of x is in ids once
    """
    n, width = dy.shape
    rows_per_task = BLOCK // width if x.size > SERIAL else n
    spans(weighted_back_span, (dx, dweights, dy, x, ids, weights), n, rows_per_task)
