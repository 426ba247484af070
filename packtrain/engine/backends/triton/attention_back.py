"""Gradients of attention: a kernel for keys and values by blocks of keys, another for queries by blocks of queries."""

import torch
import triton
import triton.language as tl

from packtrain.engine.backends.triton import blocks, launch
from packtrain.engine.backends.triton.attention import (
    FACTORS,
    across,
    kernel_flags,
    masked_scores,
    query_offsets,
    read,
    tile_sizes,
    visible_mask,
)


@triton.jit
def _dy_dot_y(sums, dy, y, queries, heads, width, M: tl.constexpr, D: tl.constexpr):
    """Store the sum of dy * y for each query and head."""
    _, query_ids, d, head_offset, lse_offset = query_offsets(queries, heads, width, M, D)
    products = read(dy + head_offset, query_ids, d, queries, width, heads * width)
    products *= read(y + head_offset, query_ids, d, queries, width, heads * width)
    tl.store(sums + lse_offset + query_ids, tl.sum(products, 1), mask=query_ids < queries)


@triton.jit
def _score_grads(
    q, k, v, dy, sums, lse, rows, key_ids, mask, queries, keys, heads, kv, width, scale, softcap,
    HAS_SOFTCAP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return probabilities (queries, keys), and gradients of the products of queries and keys."""
    sizes = queries, keys, width, heads * width, kv * width
    z, cap_slope = masked_scores(
        across(q, k, rows, key_ids, *sizes, M, N, D, PRECISION), mask, scale, softcap, HAS_SOFTCAP
    )
    p = tl.exp(z - tl.load(lse + rows, mask=rows < queries, other=0.0)[:, None])
    row_sums = tl.load(sums + rows, mask=rows < queries, other=0.0)
    ds = (across(dy, v, rows, key_ids, *sizes, M, N, D, PRECISION) - row_sums[:, None]) * p * scale
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
