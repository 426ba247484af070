"""Cross-entropy over rows of logits, and the fused head: projection, softmax and all gradients by chunks.

A row with a negative target is ignored. Losses are summed in float64 in the order of the rows.
"""

from numba import types

from packtrain.kernels import logits as logit_kernels
from packtrain.kernels.call import each, kernel, part, spans
from packtrain.kernels.dequantize import F32, packed2
from packtrain.kernels.gemm import sgemm
from packtrain.kernels.logits import add_parts, add_to, fill_zero, log_sum_exp, slopes, weighted_sum
from packtrain.kernels.packed import multiply, multiply_back
from packtrain.kernels.simd import LANES, address, load_part, peek, poke, scratch, store_part

MOST_COLUMNS, LEAST_COLUMNS = 288, 64  # of logits in a slice, which stays in the L2 cache
MOST_ROWS = 4096  # rows of a chunk, whatever the workspace
SERIAL = 1 << 15  # elements below which a parallel region costs more than it saves

i64, f32, void = types.int64, types.float32, types.void
a3, a2, a1, i1 = f32[:, :, ::1], f32[:, ::1], f32[::1], types.int32[::1]
bias1 = types.Array(types.float32, 1, "C", readonly=True)
chunk_of_rows = types.Tuple((i64, f32, i64, i64, i64, i64))  # lse, cap, counted, after, half, rows


@kernel(void(a1, a2, i1, i64))
def row_loss(losses, logits, targets, i):
    target, V = i64(targets[i]), logits.shape[1]
    losses[i] = log_sum_exp(address(logits, i * V), V) - logits[i, target] if target >= 0 else 0.0


@kernel(void(a1, a1, a2, i1, a1))
def cross_entropy(loss, losses, logits, targets, weights):
    """The loss of each row and their weighted sum.

    losses = logsumexp(logits) - logits[target], loss = sum(weights * losses)

        loss (1,), losses (N,), logits (N, V), targets (N,) int32, weights (N,)
    """
    N, V = logits.shape
    if N * V < SERIAL:
        for i in range(N):
            row_loss(losses, logits, targets, i)
    else:
        each(row_loss, (losses, logits, targets), N)
    weighted_sum(loss, losses, weights)


@kernel(void(a2, f32, a2, i1, a1, i64))
def row_loss_back(d_logits, d_loss, logits, targets, weights, i):
    V = logits.shape[1]
    x, y = address(logits, i * V), address(d_logits, i * V)
    target, weight = i64(targets[i]), d_loss * weights[i]
    if target < 0:
        fill_zero(y, V)
        return
    logit_kernels.probabilities(y, x, V, log_sum_exp(x, V), weight, 0.0)
    poke(y, target, peek(y, target) - weight)


@kernel(void(a2, a1, a2, i1, a1))
def cross_entropy_back(d_logits, d_loss, logits, targets, weights):
    """d_logits = d_loss * weights * (softmax(logits) - onehot(target)); d_logits may be logits.

    d_logits (N, V), d_loss (1,), logits (N, V), targets (N,) int32, weights (N,)
    """
    N, V = logits.shape
    if N * V < SERIAL:
        for i in range(N):
            row_loss_back(d_logits, d_loss[0], logits, targets, weights, i)
    else:
        each(row_loss_back, (d_logits, d_loss[0], logits, targets, weights), N)


@kernel(void(a2, a2, i64, packed2, i64, i64, i64, i64))
def project(logits, x, kind, w, half, rows, start, stop):
    """logits[:rows, start:stop] = x[:rows] @ w[start:stop].T."""
    C, (V, nbytes) = x.shape[1], w.shape
    x_at, out = address(x, 0), address(logits, start)
    w_at = w.ctypes.data + start * nbytes
    if kind == F32:
        sgemm(0, 1, rows, stop - start, C, x_at, C, w_at, C, 0.0, out, V, half)
    else:
        multiply(kind, rows, stop - start, C, x_at, C, w_at, nbytes, False, out, V, half)


@kernel(void(a1, a1, i64, a2, bias1, i1, f32, i64, i64))
def row_lse(losses, right, lse, logits, bias, targets, cap, counted, i):
    """The loss of row counted[i], whether its target has the largest logit, and its log-sum-exp to lse[i].

    The row gets the bias, if there is one, first.
    With a cap, the row is capped here, after its largest value was found: very large logits become equal.
    """
    row, V = i64(peek(counted, i)), logits.shape[1]
    target = i64(targets[row])
    if bias.size:
        add_to(address(logits, i * V), address(bias, 0), V)
    if right.size:
        right[row] = f32(logits[i, target] >= logit_kernels.highest(address(logits, i * V), V))
    if cap > 0:
        logit_kernels.squash(address(logits, i * V), V, cap)
    value = log_sum_exp(address(logits, i * V), V)
    poke(lse, i, value)
    losses[row] = value - logits[i, target]


@part(i64(i64, i64, i64))
def slices_in_part(size, width, parts):
    slices = -(-size // width)
    return -(-slices // parts)


@kernel(void(a2, a1, a2, a2, i1, a1, chunk_of_rows, i64, i64))
def slice_back(dw, db, logits, x, targets, weights, chunk, start, stop):
    """Columns start:stop of d_logits, written over logits; from them dw (+)= d_logits.T @ x there, db += their sums."""
    C, V, (lse, cap, counted, after, half, rows) = x.shape[1], logits.shape[1], chunk
    at, size = address(logits, start), stop - start
    slopes(db, at, V, rows, start, size, counted, lse, cap, targets, weights)
    if dw.size:
        x_at, out = address(x, 0), address(dw, start * C)
        sgemm(1, 0, size, C, rows, at, V, x_at, C, after, out, C, half)


@kernel(void(a3, a2, i64, packed2, i64, i64, i64, types.boolean, i64, i64))
def add_slice(sums, logits, kind, w, half, rows, number, add, start, stop):
    """sums[number, :rows] = d_logits[:rows, start:stop] @ w[start:stop], + itself if `add`."""
    (chunk, C), (V, nbytes) = sums.shape[1:], w.shape
    at, out = address(logits, start), address(sums, number * chunk * C)
    w_at, columns = w.ctypes.data + start * nbytes, stop - start
    if kind == F32:
        beta = f32(1.0) if add else f32(0.0)
        sgemm(0, 0, rows, C, columns, at, V, w_at, C, beta, out, C, half)
    else:
        multiply_back(kind, rows, columns, C, 0, C, at, V, w_at, nbytes, add, out, C, half)


@kernel(void(a2, a2, a1, a3, a2, a2, i64, packed2, i1, a1, chunk_of_rows, i64, i64))
def part_back(dx, dw, db, sums, logits, x, kind, w, targets, weights, chunk, width, number):
    """All that follows from one of the parts of V: its d_logits, dw, db, and its share of dx, by slices of `width`."""
    V, half, rows = logits.shape[1], chunk[4], chunk[5]
    wide = slices_in_part(V, width, sums.shape[0]) * width
    first = number * wide
    for start in range(first, min(first + wide, V), width):
        stop = min(start + width, V)
        slice_back(dw, db, logits, x, targets, weights, chunk, start, stop)
        if dx.size:
            add_slice(sums, logits, kind, w, half, rows, number, start > first, start, stop)


@kernel(void(a2, a2, i64, i64))
def move_row(gathered, every, counted, i):
    """gathered[i] = source[counted[i]]."""
    C, row = gathered.shape[1], i64(peek(counted, i))
    for j in range(0, C, LANES):
        store_part(gathered, i * C + j, load_part(every, row * C + j, C - j), C - j)


@kernel(types.UniTuple(i64, 2)(i64, i64, i64, i64))
def parts(size, most, least, unit):
    """(count, width): split into an even number of equal parts, multiples of `unit`, as a function of the size."""
    count = max(2 * -(-size // (2 * most)), min(8, size // least), 1)
    width = -(-size // (count * unit)) * unit
    return -(-size // max(width, 1)), width


@kernel(void(a1, a1, a1, a2, a2, a1, a2, a2, a3, a2, i64, packed2, bias1, i1, a1, f32, i64))
def linear_cross_entropy(
    loss, losses, right, dx, dw, db, logits, x_rows, sums, x, kind, w, bias, targets, weights, cap, half,
):  # fmt: skip
    """The loss of the head and, if they are not empty: whether each target is likeliest; gradients at d_loss = 1.

    losses = logsumexp(z) - z[target], loss = sum(weights * losses), z = x w^T + bias, with a cap cap * tanh(z / cap)
    Rows without a target are left out: the others are gathered, `chunk` at a time.

        x, dx (N, C), w, dw (V, C), bias, db (V,) or empty, losses, right, targets int32, weights (N,), loss (1,)
        logits (chunk, V), x_rows (chunk, C), sums (parts of V, chunk, C): workspace
        w u8 (V, row bytes), of a kind of `dequantize`
    dx is summed by parts of V, whose number does not depend on that of threads.
    With half = 1, factors of all products are rounded to bf16.
    """
    V, N = w.shape[0], x.shape[0]
    chunk, lse, counted = min(logits.shape[0], MOST_ROWS), scratch(MOST_ROWS), scratch(MOST_ROWS)
    _, width = parts(V, MOST_COLUMNS, LEAST_COLUMNS, LANES)
    for zeros in (losses, right, db):
        fill_zero(address(zeros, 0), zeros.size)
    fill_zero(address(dx, 0), dx.size)
    after, at = 0, 0
    while at < N:
        rows, at = logit_kernels.find_targets(counted, targets, at, chunk)
        if rows == 0:
            break
        each(move_row, (x_rows, x, counted), rows)
        spans(project, (logits, x_rows, kind, w, half, rows), V, width)
        each(row_lse, (losses, right, lse, logits, bias, targets, cap, counted), rows)
        if dx.size + dw.size + db.size > 0:
            wide = slices_in_part(V, width, sums.shape[0]) * width
            back_arrays = dx, dw, db, sums, logits, x_rows, kind, w, targets, weights
            row_state = lse, cap, counted, after, half, rows
            each(part_back, (*back_arrays, row_state, width), -(-V // wide))
        if dx.size:
            each(add_parts, (dx, sums, -(-V // wide), counted), rows)
        after = 1
    if after == 0:
        fill_zero(address(dw, 0), dw.size)
    weighted_sum(loss, losses, weights)
