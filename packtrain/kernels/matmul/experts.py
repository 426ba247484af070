"""Mixture of experts: top-k, sorting of rows by expert, and products of each expert's rows with its matrix.

`ids` of products are ascending. A task is some columns of one expert, so that routing cannot starve a thread.
"""

from packtrain.kernels.matmul.matmul_f32 import FEW_ROWS, SMALL, block, dot_rows, matrix_layout
from packtrain.kernels.matmul.packed import columns, multiply_back
from packtrain.kernels.runtime.jit import each_task, kernel, parallel
from packtrain.kernels.runtime.kernel_types import i64
from packtrain.kernels.simd.simd_f32 import LANES, address, fma, load_part, splat, store_part, total

SERIAL = 1 << 14
WIDE, OUTER_ROWS = 128, 120  # columns of a product, rows of an outer product in a task


# ---- top-k --------------------------------------------------------------------------------------------------


@parallel("out_ints2, in2", lambda x: x.shape, serial=SERIAL)
def top_k(ids, x, row_start, row_stop):
    """Write indices of the k largest of each row, largest first, on ties the lower one; x (N, E) f32, ids (N, k)."""
    for i in range(row_start, row_stop):
        for j in range(ids.shape[1]):
            best_expert = -1
            for e in range(x.shape[1]):
                before = ids[i, j - 1]
                left = j == 0 or x[i, e] < x[i, before] or (x[i, e] == x[i, before] and e > before)
                if left and (best_expert < 0 or x[i, e] > x[i, best_expert]):
                    best_expert = e
            ids[i, j] = max(best_expert, 0)  # a NaN compares false with everything


@kernel("out2, in2, ints2")
def take_columns(y, x, ids):
    """Gather columns: y[i, j] = x[i, ids[i, j]]; x (N, E) and y (N, k) f32, ids (N, k) i32."""
    for i in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            y[i, j] = x[i, ids[i, j]]


@kernel("out2, in2, ints2")
def take_columns_back(dx, dy, ids):
    """Add dy[i, j] to dx[i, ids[i, j]]: the gradient of take_columns. dx (N, E) starts from zeros."""
    dx[:] = 0
    for i in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            dx[i, ids[i, j]] += dy[i, j]


@kernel("out_ints1, out_ints1, out_ints2, ints2, out_ints1")
def group_rows(row_ids, group_ids, positions, ids, group_starts):
    """Sort all ids, the experts of each row, stably by expert, so that rows of an expert lie side by side.

    row_ids, group_ids  (T k,)  row and expert of each place of the order
    positions, ids      (T, k)  place in the order of each id
    group_starts        (E,)    scratch
    """
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


@kernel("i64(ints1, i64)")
def expert_start(ids, expert):
    """Return the first index of the ascending `ids` whose id is at least `expert`; ids.size if there is none."""
    low_index, high_index = 0, ids.size
    while low_index < high_index:
        middle = (low_index + high_index) // 2
        if ids[middle] < expert:
            low_index = middle + 1
        else:
            high_index = middle
    return low_index


@each_task(
    "out2, in2, any_in3, ints1, boolean",
    lambda y, x, w: (-(-y.shape[1] // WIDE) * w.shape[0], y.size * x.shape[1]),
    serial=SMALL,
)
def matmul_id(y, x, w, ids, accumulate, task):
    """y[i] = x[i] @ w[ids[i]].T, plus y if `accumulate`.

    x    (N, K)     f32
    w    (E, F, K)  f32, unit stride on either of its last axes
    ids  (N,)       i32, ascending
    y    (N, F)     f32
    """
    expert, j = task % w.shape[0], task // w.shape[0] * WIDE
    start, stop = expert_start(ids, expert), expert_start(ids, expert + 1)
    transposed = w[expert].T
    if 0 < stop - start <= FEW_ROWS and matrix_layout(transposed)[0] == 1:
        col_stop = min(j + WIDE, y.shape[1])
        dot_rows(y[start:stop], x[start:stop], transposed, accumulate, j, col_stop)
    elif start < stop:  # else its matrix is not even read
        block(y[start:stop], x[start:stop], transposed, accumulate, 0, 0, stop - start, j, WIDE)


@each_task(
    "out2, in2, i64, bytes2, i64, ints1, boolean",
    lambda w, experts: -(-(w.shape[0] // experts) // WIDE) * experts,
)
def packed_matmul_id(y, x, qtype, w, experts, ids, accumulate, task):
    """y[i] = x[i] @ w[ids[i]].T, plus y if `accumulate`: matmul_id with w (experts F, row bytes) of type `qtype`."""
    expert_rows, e, j = w.shape[0] // experts, task % experts, task // experts * WIDE
    row_start, row_stop = expert_start(ids, e), expert_start(ids, e + 1)
    if row_start < row_stop:
        matrix, end = w[e * expert_rows : (e + 1) * expert_rows], min(j + WIDE, expert_rows)
        columns(y[row_start:row_stop], x[row_start:row_stop], qtype, matrix, accumulate, 0, j, end)


@each_task(
    "out2, in2, i64, i64, bytes2, i64, ints1, boolean",
    lambda dx, block_columns, experts: -(-dx.shape[1] // max(block_columns, WIDE)) * experts,
)
def packed_matmul_id_back(dx, dy, block_columns, qtype, w, experts, ids, accumulate, task):
    """dx[i] = dy[i] @ w[ids[i]], plus dx if `accumulate`; w (E F, row bytes) has blocks of `block_columns` columns."""
    high, nbytes, k = w.shape[0] // experts, w.shape[1], dx.shape[1]
    step, e = max(block_columns, WIDE), task % experts
    row_start, row_stop = expert_start(ids, e), expert_start(ids, e + 1)
    col_start = task // experts * step
    if row_start < row_stop:
        multiply_back(
            *(qtype, row_stop - row_start, high, k, col_start, min(k, col_start + step)),
            *(address(dy, row_start * high), high, w.ctypes.data + e * high * nbytes, nbytes),
            *(accumulate, address(dx, row_start * k), k, 0),
        )


@each_task(
    "out3, in2, in2, ints1, boolean",
    lambda y, a: (
        -(-y.shape[1] // OUTER_ROWS) * y.shape[0],
        max(a.shape[0], y.shape[0]) * y.shape[1] * y.shape[2],
    ),
    serial=SMALL,
)
def out_prod_id(y, a, b, ids, accumulate, task):
    """y[e] = sum of the outer products of a[i] and b[i] over ids[i] == e, or 0, plus y[e] if `accumulate`.

    a    (N, P)     f32
    b    (N, Q)     f32
    ids  (N,)       i32, ascending
    y    (E, P, Q)  f32
    """
    e, row_start = task % y.shape[0], task // y.shape[0] * OUTER_ROWS
    start, stop = expert_start(ids, e), expert_start(ids, e + 1)
    block(y[e], a[start:stop].T, b[start:stop], accumulate, 0, row_start, OUTER_ROWS, 0, y.shape[2])


# ---- weighted sums of rows -----------------------------------------------------------------------------------


@parallel("out2, in2, ints2, in2, boolean", lambda y: y.shape, serial=SERIAL // 2)
def weighted_rows(y, x, ids, weights, accumulate, token_start, token_stop):
    """y[t] = sum over j of weights[t, j] * x[ids[t, j]], plus y if `accumulate`.

    x             (N, C)  f32
    ids, weights  (T, k)  i32, f32
    y             (T, C)  f32
    """
    width = y.shape[1]
    for token in range(token_start, token_stop):
        for i in range(0, width, LANES):
            v = load_part(y, token * width + i, width - i) if accumulate else splat(0.0)
            for j in range(ids.shape[1]):
                offset = i64(ids[token, j]) * width + i
                v = fma(load_part(x, offset, width - i), weights[token, j], v)
            store_part(y, token * width + i, v, width - i)


@parallel("out2, out2, in2, in2, ints2, in2", lambda dy: dy.shape, serial=SERIAL // 2)
def weighted_rows_back(dx, dweights, dy, x, ids, weights, token_start, token_stop):
    """Write the gradients of weighted_rows, dx and dweights, unless their size is 0; dx may be x.

    dx[ids[t, j]] = weights[t, j] * dy[t], dweights[t, j] = dy[t] . x[ids[t, j]]; each row of x is in ids once
    """
    width = dy.shape[1]
    for token in range(token_start, token_stop):
        for j in range(ids.shape[1]):
            row_offset = i64(ids[token, j]) * width
            if dweights.size:
                lane_sums = splat(0.0)
                for i in range(0, width, LANES):
                    v = load_part(dy, token * width + i, width - i)
                    lane_sums = fma(v, load_part(x, row_offset + i, width - i), lane_sums)
                dweights[token, j] = total(lane_sums)
            if dx.size:
                for i in range(0, width, LANES):
                    v = load_part(dy, token * width + i, width - i) * weights[token, j]
                    store_part(dx, row_offset + i, v, width - i)
