"""Attention, block of queries by block, with online softmax: Dao 2023, arXiv 2307.08691.

Positions and sequences say which keys a query sees, see `ops.attention`; a block of keys that no query of a block sees
is skipped. Products have f32's accuracy on tensor cores, as sums of three products in tf32. Gradients take a kernel for
keys and values by blocks of keys, and another for queries by blocks of queries."""

import torch
import triton
import triton.language as tl

from packtrain.engine.backends.triton import blocks, launch, power_of_two

SLICE = tl.constexpr(32)
FACTORS = {"PRECISION": "tf32x3"}


@triton.jit
def query_offsets(queries, heads, width, M: tl.constexpr, D: tl.constexpr):
    """Return, for a program of M queries: its batch, query ids (M,), element ids (D,), and the offsets of its head's
    first element in (B, `queries`, `heads`, `width`) and in (B, `heads`, `queries`)."""
    batch, head = tl.program_id(1).to(tl.int64) // heads, tl.program_id(1) % heads
    query_ids, d = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, D)
    head_offset = (batch * queries * heads + head) * width
    lse_offset = (batch * heads + head) * queries
    return batch, query_ids, d, head_offset, lse_offset


@triton.jit
def visible_mask(
    batch, rows, key_ids, q_pos, k_pos, q_seq, k_seq, length, queries, keys, window: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, HAS_SEQUENCES: tl.constexpr, HAS_LENGTH: tl.constexpr,
):  # fmt: skip
    """Return the mask (rows, key_ids) of which keys, by index, the program's queries `rows` may attend to; `queries`
    and `keys` count all of them, the other arguments are those of ops.attention."""
    mask = (rows < queries)[:, None] & (key_ids < keys)[None, :]
    if HAS_POSITIONS:
        q_position = tl.load(q_pos + batch * queries + rows, mask=rows < queries, other=0)
        k_position = tl.load(k_pos + batch * keys + key_ids, mask=key_ids < keys, other=0)
    else:
        q_position, k_position = rows, key_ids
    mask &= k_position[None, :] <= q_position[:, None]
    if window > 0:
        mask &= q_position[:, None].to(tl.int64) - k_position[None, :] < window
    if window < 0:
        mask &= k_position[None, :] >= (q_position // -window * -window)[:, None]
    if HAS_SEQUENCES:
        q_sequence = tl.load(q_seq + batch * queries + rows, mask=rows < queries, other=0)
        k_sequence = tl.load(k_seq + batch * keys + key_ids, mask=key_ids < keys, other=0)
        mask &= q_sequence[:, None] == k_sequence[None, :]
    if HAS_LENGTH:
        mask &= (key_ids < tl.load(length))[None, :]
    return mask


@triton.jit
def read(x, row_ids, column_ids, num_rows, width, row_stride):
    """Load x[row_ids, column_ids] as f32, 0 outside of (num_rows, width); rows begin `row_stride` elements apart."""
    mask = (row_ids < num_rows)[:, None] & (column_ids < width)[None, :]
    pointers = x + row_ids.to(tl.int64)[:, None] * row_stride + column_ids[None, :]
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def row_dot(
    x, y, x_ids, y_ids, x_count, y_count, width, x_step, y_step,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return dot products (M, N) of rows x_ids of x and y_ids of y, SLICE elements at a time: more do not fit into
    registers. x and y have x_count and y_count rows of `width` elements, which begin x_step and y_step elements apart.
    """
    z = tl.zeros((M, N), tl.float32)
    for d_start in tl.static_range(0, D, min(D, SLICE)):
        d = d_start + tl.arange(0, min(D, SLICE))
        a, b = read(x, x_ids, d, x_count, width, x_step), read(y, y_ids, d, y_count, width, y_step)
        z = tl.dot(a, tl.trans(b), z, input_precision=PRECISION)
    return z


@triton.jit
def masked_scores(products, mask, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return scores of products q k^T (scaled, capped, -inf where `mask` is false), and the softcap's slope at each."""
    z = products * scale
    slope = z
    if HAS_SOFTCAP:
        t = 1 - 2 / (tl.exp(2 * z / softcap) + 1)
        z, slope = softcap * t, 1 - t * t
    return tl.where(mask, z, -float("inf")), slope


@triton.jit
def _store_results(y, lse, output, row_max, row_sum, rows, d, queries, width, row_stride):
    """Write output / row_sum (rows, d) to y and log-sum-exps to lse; both are 0 for a query that sees no key."""
    is_empty = row_sum == 0
    safe_sum = tl.where(is_empty, 1.0, row_sum)
    to = y + rows.to(tl.int64)[:, None] * row_stride + d[None, :]
    tl.store(to, output / safe_sum[:, None], mask=(rows < queries)[:, None] & (d < width)[None, :])
    lse_values = tl.where(is_empty, 0.0, tl.log(safe_sum) + tl.where(is_empty, 0.0, row_max))
    tl.store(lse + rows, lse_values, mask=rows < queries)


@triton.jit
def _attend_queries(
    y, lse, q, k, v, q_pos, k_pos, q_seq, k_seq, length, sinks,
    queries, keys, heads, kv, width, scale, softcap, window: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, HAS_SEQUENCES: tl.constexpr, HAS_LENGTH: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write y and lse of M queries of a head, by tiles of N keys; arguments as in ops.attention, sizes and flags."""
    batch, query_ids, d, at, line = query_offsets(queries, heads, width, M, D)
    head = tl.program_id(1) % heads
    kv_offset = (batch * keys * kv + head // (heads // kv)) * width
    row_max, row_sum = tl.full((M,), -float("inf"), tl.float32), tl.zeros((M,), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head)
        row_sum += (sink > -float("inf")).to(tl.float32)
        row_max = tl.zeros((M,), tl.float32) + sink
    output = tl.zeros((M, D), tl.float32)
    key_end = keys if HAS_POSITIONS else tl.minimum(keys, (tl.program_id(0) + 1) * M)
    for key_start in range(0, key_end, N):
        key_ids = key_start + tl.arange(0, N)
        mask = visible_mask(
            batch, query_ids, key_ids, q_pos, k_pos, q_seq, k_seq, length, queries, keys, window,
            HAS_POSITIONS, HAS_SEQUENCES, HAS_LENGTH
        )  # fmt: skip
        if tl.max(mask.to(tl.int32)) > 0:
            products = row_dot(
                q + at, k + kv_offset, query_ids, key_ids, queries, keys, width, heads * width, kv * width,
                M, N, D, PRECISION
            )  # fmt: skip
            z, _ = masked_scores(products, mask, scale, softcap, HAS_SOFTCAP)
            new_max = tl.maximum(row_max, tl.max(z, 1))
            finite_max = tl.where(new_max == -float("inf"), 0.0, new_max)
            e, decay = tl.exp(z - finite_max[:, None]), tl.exp(row_max - finite_max)
            row_sum = row_sum * decay + tl.sum(e, 1)
            value = read(v + kv_offset, key_ids, d, keys, width, kv * width)
            output = output * decay[:, None] + tl.dot(e, value, input_precision=PRECISION)
            row_max = new_max
    _store_results(
        y + at, lse + line, output, row_max, row_sum, query_ids, d, queries, width, heads * width
    )  # fmt: skip


def kernel_flags(q_pos, q_seq, length, softcap):
    """Return the HAS_… constants of the attention kernels: which optional inputs there are."""
    flags = {"HAS_POSITIONS": q_pos is not None, "HAS_SEQUENCES": q_seq is not None}
    return flags | {"HAS_LENGTH": length is not None, "HAS_SOFTCAP": softcap > 0}


def tile_sizes(width):
    """Return (queries, keys, head elements, warps) of a tile for heads of this width, as registers allow."""
    d = max(power_of_two(width), 16)
    return (64, 32, d, 4) if d <= 64 else (32, 16, d, 8) if d <= 128 else (16, 16, d, 8)


def attention(out, q, k, v, q_pos, k_pos, q_seq, k_seq, length, sinks, *, scale, window, softcap):
    (b, num_queries, num_heads, width), (num_keys, num_kv_heads) = q.shape, k.shape[1:3]
    m, n, d, warps = tile_sizes(width)
    optional_inputs = (q if t is None else t for t in (q_pos, k_pos, q_seq, k_seq, length, sinks))
    size_args = num_queries, num_keys, num_heads, num_kv_heads, width, scale, float(softcap), window
    flags = kernel_flags(q_pos, q_seq, length, softcap) | {"HAS_SINKS": sinks is not None} | FACTORS
    grid = blocks(num_queries, m), b * num_heads
    options = flags | {"M": m, "N": n, "D": d, "num_warps": warps}
    launch(_attend_queries, grid, *out, q, k, v, *optional_inputs, *size_args, **options)


# ---- gradients ------------------------------------------------------------------------------------------------


@triton.jit
def _dy_dot_y(sums, dy, y, queries, heads, width, M: tl.constexpr, D: tl.constexpr):
    """Store sum(dy * y) for each query and head, which the softmax's gradient needs."""
    _, query_ids, d, head_offset, lse_offset = query_offsets(queries, heads, width, M, D)
    products = read(dy + head_offset, query_ids, d, queries, width, heads * width)
    products *= read(y + head_offset, query_ids, d, queries, width, heads * width)
    tl.store(sums + lse_offset + query_ids, tl.sum(products, 1), mask=query_ids < queries)


@triton.jit
def _score_grads(
    q, k, v, dy, sums, lse, rows, key_ids, mask, queries, keys, heads, kv, width, scale, softcap,
    HAS_SOFTCAP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return a tile's probabilities (rows, key_ids), and gradients of its q k^T; `sums`: sum(dy * y) by query."""
    sizes = queries, keys, width, heads * width, kv * width
    z, cap_slope = masked_scores(
        row_dot(q, k, rows, key_ids, *sizes, M, N, D, PRECISION), mask, scale, softcap, HAS_SOFTCAP
    )
    p = tl.exp(z - tl.load(lse + rows, mask=rows < queries, other=0.0)[:, None])
    row_sums = tl.load(sums + rows, mask=rows < queries, other=0.0)
    ds = (row_dot(dy, v, rows, key_ids, *sizes, M, N, D, PRECISION) - row_sums[:, None]) * p * scale
    if HAS_SOFTCAP:
        ds *= cap_slope
    return p, ds


@triton.jit
def _key_grads(
    dk, dv, dy, lse, sums, q, k, v, q_pos, k_pos, q_seq, k_seq, length,
    queries, keys, heads, kv, width, scale, softcap, window: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, HAS_SEQUENCES: tl.constexpr, HAS_LENGTH: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dk and dv of N keys of a KV head, summed over its query heads; lse and sums are by query."""
    batch, kv_head = tl.program_id(1).to(tl.int64) // kv, tl.program_id(1) % kv
    key_ids, d = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, D)
    kv_offset = (batch * keys * kv + kv_head) * width
    key_grad, value_grad = tl.zeros((N, D), tl.float32), tl.zeros((N, D), tl.float32)
    query_start = 0 if HAS_POSITIONS else tl.program_id(0) * N // M * M
    for query_block in range(query_start, queries, M):
        query_ids = query_block + tl.arange(0, M)
        mask = visible_mask(
            batch, query_ids, key_ids, q_pos, k_pos, q_seq, k_seq, length, queries, keys, window,
            HAS_POSITIONS, HAS_SEQUENCES, HAS_LENGTH
        )  # fmt: skip
        if tl.max(mask.to(tl.int32)) > 0:
            for head in range(kv_head * (heads // kv), (kv_head + 1) * (heads // kv)):
                at = (batch * queries * heads + head) * width
                line = (batch * heads + head) * queries
                p, ds = _score_grads(
                    q + at, k + kv_offset, v + kv_offset, dy + at, sums + line, lse + line, query_ids, key_ids, mask,
                    queries, keys, heads, kv, width, scale, softcap, HAS_SOFTCAP, M, N, D, PRECISION,
                )  # fmt: skip
                dy_rows = read(dy + at, query_ids, d, queries, width, heads * width)
                value_grad += tl.dot(tl.trans(p), dy_rows, input_precision=PRECISION)
                query_rows = read(q + at, query_ids, d, queries, width, heads * width)
                key_grad += tl.dot(tl.trans(ds), query_rows, input_precision=PRECISION)
    store_offsets = kv_offset + key_ids.to(tl.int64)[:, None] * (kv * width) + d[None, :]
    store_mask = (key_ids < keys)[:, None] & (d < width)[None, :]
    tl.store(dk + store_offsets, key_grad, mask=store_mask)
    tl.store(dv + store_offsets, value_grad, mask=store_mask)


@triton.jit
def _query_grads(
    dq, dy, lse, sums, q, k, v, q_pos, k_pos, q_seq, k_seq, length,
    queries, keys, heads, kv, width, scale, softcap, window: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, HAS_SEQUENCES: tl.constexpr, HAS_LENGTH: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dq of M queries of a head, by tiles of N keys; lse, and sums of dy * y, are by query."""
    batch, rows, d, at, line = query_offsets(queries, heads, width, M, D)
    head = tl.program_id(1) % heads
    begin = (batch * keys * kv + head // (heads // kv)) * width
    query_grad = tl.zeros((M, D), tl.float32)
    key_end = keys if HAS_POSITIONS else tl.minimum(keys, (tl.program_id(0) + 1) * M)
    for key_start in range(0, key_end, N):
        key_ids = key_start + tl.arange(0, N)
        mask = visible_mask(
            batch, rows, key_ids, q_pos, k_pos, q_seq, k_seq, length, queries, keys, window,
            HAS_POSITIONS, HAS_SEQUENCES, HAS_LENGTH
        )  # fmt: skip
        if tl.max(mask.to(tl.int32)) > 0:
            _, ds = _score_grads(
                q + at, k + begin, v + begin, dy + at, sums + line, lse + line, rows, key_ids, mask,
                queries, keys, heads, kv, width, scale, softcap, HAS_SOFTCAP, M, N, D, PRECISION,
            )  # fmt: skip
            key_rows = read(k + begin, key_ids, d, keys, width, kv * width)
            query_grad += tl.dot(ds, key_rows, input_precision=PRECISION)
    pointers = dq + at + rows.to(tl.int64)[:, None] * (heads * width) + d[None, :]
    tl.store(pointers, query_grad, mask=(rows < queries)[:, None] & (d < width)[None, :])


def attention_back(
    out, dy, y, lse, q, k, v, q_pos, k_pos, q_seq, k_seq, length, *, scale, window, softcap
):
    """Write dq, dk and dv. dq may overwrite y, of which only the sums of dy * y are needed, made first."""
    (b, num_queries, num_heads, width), (num_keys, kv) = q.shape, k.shape[1:3]
    m, n, d, warps = tile_sizes(width)
    sums = torch.empty((b, num_heads, num_queries), dtype=torch.float32, device=q.device)
    by_query = blocks(num_queries, m), b * num_heads
    launch(_dy_dot_y, by_query, sums, dy, y, num_queries, num_heads, width, M=m, D=d)
    optional_inputs = [q if t is None else t for t in (q_pos, k_pos, q_seq, k_seq, length)]
    size_args = num_queries, num_keys, num_heads, kv, width, scale, float(softcap), window
    kernel_args = dy, lse, sums, q, k, v, *optional_inputs, *size_args
    options = kernel_flags(q_pos, q_seq, length, softcap) | FACTORS | {"D": d, "num_warps": warps}
    dq, dk, dv = out
    launch(_key_grads, (blocks(num_keys, m), b * kv), dk, dv, *kernel_args, **options, M=n, N=m)
    launch(_query_grads, by_query, dq, *kernel_args, **options, M=m, N=n)
