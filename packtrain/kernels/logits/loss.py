"""Compute cross-entropy of rows of logits, and the fused head: projection, softmax and all gradients by chunks.

A row with a negative target is ignored. Losses are summed in float64 in the order of the rows. An online log-sum-exp by
slice is left out: it takes 264 to 266 instead of 267 to 270 ms for the head of `15m`, products 224 ms of them.
"""

from packtrain.kernels.logits import log_sum_exp as logit_kernels
from packtrain.kernels.logits.log_sum_exp import log_sum_exp, slopes, sum_parts, weighted_sum
from packtrain.kernels.matmul.gemm import sgemm
from packtrain.kernels.matmul.packed import multiply, multiply_back
from packtrain.kernels.quant.dequantize import F32
from packtrain.kernels.runtime.jit import each, each_if_large, each_task, kernel, part, spans
from packtrain.kernels.runtime.kernel_types import Tuple, f32, i64
from packtrain.kernels.simd.simd_f32 import LANES, address, peek, poke, scratch
from packtrain.kernels.simd.f32_ranges import add, copy, fill

MOST_COLUMNS, MIN_COLUMNS = 288, 64  # of logits in a slice, which stays in the L2 cache
MOST_ROWS = 4096  # rows of a chunk, whatever the workspace
SERIAL = 1 << 15  # elements below which a parallel region costs more than it saves

# lse, cap, row_ids, is_later, bf16, num_rows
row_state_type = Tuple((i64, f32, i64, i64, i64, i64))


@kernel("out1, out2, out_ints1, i64")
def write_row_loss(losses, logits, targets, i):
    """Write the loss of row i of logits, log-sum-exp less the target's logit; 0 without a target."""
    target, V = i64(targets[i]), logits.shape[1]
    losses[i] = log_sum_exp(address(logits, i * V), V) - logits[i, target] if target >= 0 else 0.0


@kernel("out1, out1, out2, out_ints1, out1")
def cross_entropy(loss, losses, logits, targets, weights):
    """Write the loss of each row and their weighted sum.

    losses = logsumexp(logits) - logits[target], loss = sum(weights * losses); 0 where the target is below 0

        loss (1,), losses (N,), logits (N, V), targets (N,) int32, weights (N,)
    """
    N, V = logits.shape
    each_if_large(N * V >= SERIAL, write_row_loss, (losses, logits, targets), N)
    weighted_sum(loss, losses, weights)


@each_task("out2, in1, out2, out_ints1, out1", lambda logits: logits.shape, serial=SERIAL)
def cross_entropy_back(d_logits, d_loss, logits, targets, weights, i):
    """d_logits = d_loss * weights * (softmax(logits) - onehot(target)); d_logits may be logits.

    d_logits (N, V), d_loss (1,), logits (N, V), targets (N,) int32, weights (N,)
    """
    V = logits.shape[1]
    x, y = address(logits, i * V), address(d_logits, i * V)
    target, weight = i64(targets[i]), d_loss[0] * weights[i]
    if target < 0:
        fill(y, V, f32(0.0))
        return
    logit_kernels.probabilities(y, x, V, log_sum_exp(x, V), weight, 0.0)
    poke(y, target, peek(y, target) - weight)


@kernel("out2, out2, i64, bytes2, i64, i64, i64, i64")
def project_logits(logits, x, qtype, w, bf16, num_rows, start, stop):
    """logits[:num_rows, start:stop] = x[:num_rows] @ w[start:stop].T, with w packed as type `qtype` (ggml's number)."""
    C, (V, row_nbytes) = x.shape[1], w.shape
    x_ptr, out = address(x, 0), address(logits, start)
    w_ptr = w.ctypes.data + start * row_nbytes
    if qtype == F32:
        sgemm(0, 1, num_rows, stop - start, C, x_ptr, C, w_ptr, C, 0.0, out, V, bf16)
    else:
        multiply(qtype, num_rows, stop - start, C, x_ptr, C, w_ptr, row_nbytes, False, out, V, bf16)


@kernel("out1, out1, i64, out2, in1, out_ints1, f32, i64, i64")
def row_lse_loss(losses, right, lse, logits, bias, targets, cap, row_ids, i):
    """Write loss and `right` (1 if the target's logit is largest) of row row_ids[i], which has logits[i], and lse[i].

    row_ids, as f32, and lse are addresses. The row gets the bias, if there is one, first.
    With a cap, the row is capped here, after its largest value was found: very large logits become equal.
    """
    row, V = i64(peek(row_ids, i)), logits.shape[1]
    target = i64(targets[row])
    if bias.size:
        add(address(logits, i * V), address(bias, 0), V)
    if right.size:
        right[row] = f32(logits[i, target] >= logit_kernels.max_value(address(logits, i * V), V))
    if cap > 0:
        logit_kernels.softcap(address(logits, i * V), V, cap)
    row_log_sum = log_sum_exp(address(logits, i * V), V)
    poke(lse, i, row_log_sum)
    losses[row] = row_log_sum - logits[i, target]


@part("i64(i64, i64, i64)")
def num_slices_in_part(num_columns, width, num_parts):
    """Return how many slices of `width` columns each of num_parts parts of num_columns has."""
    num_slices = -(-num_columns // width)
    return -(-num_slices // num_parts)


@kernel("out2, out1, out2, out2, out_ints1, out1, row_state_type, i64, i64")
def vocab_slice_back(dw, db, logits, x, targets, weights, row_state, start, stop):
    """Turn logits[:, start:stop] into d_logits; dw there = (is_later: +=) d_logits.T @ x, db += sums of d_logits."""
    C, V, (lse, cap, row_ids, is_later, bf16, num_rows) = x.shape[1], logits.shape[1], row_state
    logits_ptr, num_columns = address(logits, start), stop - start
    slopes(db, logits_ptr, V, num_rows, start, num_columns, row_ids, lse, cap, targets, weights)
    if dw.size:
        x_ptr, dw_ptr = address(x, 0), address(dw, start * C)
        sgemm(1, 0, num_columns, C, num_rows, logits_ptr, V, x_ptr, C, is_later, dw_ptr, C, bf16)


@kernel("out3, out2, i64, bytes2, i64, i64, i64, boolean, i64, i64")
def add_slice(sums, logits, qtype, w, bf16, num_rows, number, add, start, stop):
    """sums[number, :num_rows] = logits[:num_rows, start:stop], now d_logits, @ w[start:stop], plus itself if `add`."""
    (chunk_rows, C), (V, nbytes) = sums.shape[1:], w.shape
    at, out = address(logits, start), address(sums, number * chunk_rows * C)
    w_ptr, columns = w.ctypes.data + start * nbytes, stop - start
    if qtype == F32:
        beta = f32(1.0) if add else f32(0.0)
        sgemm(0, 0, num_rows, C, columns, at, V, w_ptr, C, beta, out, C, bf16)
    else:
        multiply_back(qtype, num_rows, columns, C, 0, C, at, V, w_ptr, nbytes, add, out, C, bf16)


@kernel(
    "out2, out2, out1, out3, out2, out2, i64, bytes2, out_ints1, out1, row_state_type, i64, i64"
)
def part_back(dx, dw, db, sums, logits, x, qtype, w, targets, weights, row_state, width, number):
    """Compute all gradients from part `number` of V, by slices of `width`: d_logits, dw, db, its share of dx: sums."""
    V, bf16, rows = logits.shape[1], row_state[4], row_state[5]
    part_columns = num_slices_in_part(V, width, sums.shape[0]) * width
    first = number * part_columns
    for start in range(first, min(first + part_columns, V), width):
        col_stop = min(start + width, V)
        vocab_slice_back(dw, db, logits, x, targets, weights, row_state, start, col_stop)
        if dx.size:
            add_slice(sums, logits, qtype, w, bf16, rows, number, start > first, start, col_stop)


@kernel("out2, out2, i64, i64")
def gather_row(gathered, source_rows, row_ids, i):
    """gathered[i] = source_rows[row_ids[i]]; row_ids are f32 at an address."""
    C, row = gathered.shape[1], i64(peek(row_ids, i))
    copy(address(gathered, i * C), address(source_rows, row * C), C)


@kernel("UniTuple(i64, 2)(i64, i64, i64, i64)")
def vocab_parts(num_columns, max_columns, min_columns, column_unit):
    """Return (count, width) of parts of num_columns, multiples of column_unit: about min_columns to max_columns."""
    num_parts = max(2 * -(-num_columns // (2 * max_columns)), min(8, num_columns // min_columns), 1)
    part_columns = -(-num_columns // (num_parts * column_unit)) * column_unit
    return -(-num_columns // max(part_columns, 1)), part_columns


@kernel(
    "out1, out1, out1, out2, out2, out1, out2, out2, out3, out2, i64, bytes2, in1, out_ints1, out1, f32, i64"
)
def linear_cross_entropy(
    loss, losses, right, dx, dw, db, logits, x_rows, sums, x, qtype, w, bias, targets, weights, cap, bf16,
):  # fmt: skip
    """Compute the loss of the head and, if not empty: whether each target is likeliest; gradients at d_loss = 1.

    losses = logsumexp(z) - z[target], loss = sum(weights * losses), z = x w^T + bias, with a cap cap * tanh(z / cap)
    Rows without a target are left out: the others are gathered, `chunk` at a time. With bf16 = 1, factors of all
    products are rounded to bf16.

        x, dx (N, C), w, dw (V, C), bias, db (V,) or empty, losses, right, targets int32, weights (N,), loss (1,)
        logits (chunk, V), x_rows (chunk, C), sums (parts of V, chunk, C): workspace
        w u8 (V, row bytes), packed as type `qtype`
    dx is summed by parts of V, whose number does not depend on that of threads.
    """
    V, N = w.shape[0], x.shape[0]
    chunk, lse, row_ids = min(logits.shape[0], MOST_ROWS), scratch(MOST_ROWS), scratch(MOST_ROWS)
    _, slice_columns = vocab_parts(V, MOST_COLUMNS, MIN_COLUMNS, LANES)
    for zeros in (losses, right, db):
        fill(address(zeros, 0), zeros.size, f32(0.0))
    is_later, next_row = 0, 0
    while next_row < N:
        num_rows, next_row = logit_kernels.find_targets(row_ids, targets, next_row, chunk)
        if num_rows == 0:
            break
        each(gather_row, (x_rows, x, row_ids), num_rows)
        spans(project_logits, (logits, x_rows, qtype, w, bf16, num_rows), V, slice_columns)
        each(row_lse_loss, (losses, right, lse, logits, bias, targets, cap, row_ids), num_rows)
        if dx.size + dw.size + db.size > 0:
            part_columns = num_slices_in_part(V, slice_columns, sums.shape[0]) * slice_columns
            back_arrays = dx, dw, db, sums, logits, x_rows, qtype, w, targets, weights
            row_state = lse, cap, row_ids, is_later, bf16, num_rows
            each(part_back, (*back_arrays, row_state, slice_columns), -(-V // part_columns))
        if dx.size:
            each(sum_parts, (dx, sums, -(-V // part_columns), row_ids), num_rows)
        is_later = 1
    if dx.size:
        each(logit_kernels.zero_without_target, (dx, targets), N)
    if is_later == 0:
        fill(address(dw, 0), dw.size, f32(0.0))
    weighted_sum(loss, losses, weights)
