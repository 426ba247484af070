"""Gradients of attention: those of keys and values by blocks of keys, and those of queries by blocks of queries."""

import torch
import triton
import triton.language as tl

from packtrain.engine.backends.triton import blocks, launch
from packtrain.engine.backends.triton.attention import (
    FACTORS,
    across,
    flags_of,
    of_queries,
    read,
    scored,
    seen,
    tiles,
)


@triton.jit
def _along(sums, dy, y, queries, heads, width, M: tl.constexpr, D: tl.constexpr):
    """Of each query and head the sum of dy * y."""
    _, rows, d, at, line = of_queries(queries, heads, width, M, D)
    both = read(dy + at, rows, d, queries, width, heads * width)
    both *= read(y + at, rows, d, queries, width, heads * width)
    tl.store(sums + line + rows, tl.sum(both, 1), mask=rows < queries)


@triton.jit
def _slopes(
    q, k, v, dy, sums, lse, rows, columns, mask, queries, keys, heads, kv, width, scale, softcap,
    CAPPED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Probabilities (queries, keys), and gradients of the products of queries and keys."""
    sizes = queries, keys, width, heads * width, kv * width
    z, cap = scored(
        across(q, k, rows, columns, *sizes, M, N, D, PRECISION), mask, scale, softcap, CAPPED
    )
    p = tl.exp(z - tl.load(lse + rows, mask=rows < queries, other=0.0)[:, None])
    row_sums = tl.load(sums + rows, mask=rows < queries, other=0.0)
    ds = (across(dy, v, rows, columns, *sizes, M, N, D, PRECISION) - row_sums[:, None]) * p * scale
    if CAPPED:
        ds *= cap
    return p, ds


@triton.jit
def _of_keys(
    dk, dv, dy, lse, sums, q, k, v, q_pos, k_pos, q_seq, k_seq, length,
    queries, keys, heads, kv, width, scale, softcap, window: tl.constexpr,
    PLACED: tl.constexpr, APART: tl.constexpr, LIMITED: tl.constexpr, CAPPED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    batch, kv_head = tl.program_id(1).to(tl.int64) // kv, tl.program_id(1) % kv
    columns, d = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, D)
    begin = (batch * keys * kv + kv_head) * width
    of_key, of_value = tl.zeros((N, D), tl.float32), tl.zeros((N, D), tl.float32)
    first = 0 if PLACED else tl.program_id(0) * N // M * M
    for start in range(first, queries, M):
        rows = start + tl.arange(0, M)
        mask = seen(
            batch, rows, columns, q_pos, k_pos, q_seq, k_seq, length, queries, keys, window, PLACED, APART, LIMITED
        )  # fmt: skip
        if tl.max(mask.to(tl.int32)) > 0:
            for head in range(kv_head * (heads // kv), (kv_head + 1) * (heads // kv)):
                at = (batch * queries * heads + head) * width
                line = (batch * heads + head) * queries
                p, ds = _slopes(
                    q + at, k + begin, v + begin, dy + at, sums + line, lse + line, rows, columns, mask,
                    queries, keys, heads, kv, width, scale, softcap, CAPPED, M, N, D, PRECISION,
                )  # fmt: skip
                slope = read(dy + at, rows, d, queries, width, heads * width)
                of_value += tl.dot(tl.trans(p), slope, input_precision=PRECISION)
                query = read(q + at, rows, d, queries, width, heads * width)
                of_key += tl.dot(tl.trans(ds), query, input_precision=PRECISION)
    to = begin + columns.to(tl.int64)[:, None] * (kv * width) + d[None, :]
    store_mask = (columns < keys)[:, None] & (d < width)[None, :]
    tl.store(dk + to, of_key, mask=store_mask)
    tl.store(dv + to, of_value, mask=store_mask)


@triton.jit
def _of_queries(
    dq, dy, lse, sums, q, k, v, q_pos, k_pos, q_seq, k_seq, length,
    queries, keys, heads, kv, width, scale, softcap, window: tl.constexpr,
    PLACED: tl.constexpr, APART: tl.constexpr, LIMITED: tl.constexpr, CAPPED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    batch, rows, d, at, line = of_queries(queries, heads, width, M, D)
    head = tl.program_id(1) % heads
    begin = (batch * keys * kv + head // (heads // kv)) * width
    of_query = tl.zeros((M, D), tl.float32)
    last = keys if PLACED else tl.minimum(keys, (tl.program_id(0) + 1) * M)
    for start in range(0, last, N):
        columns = start + tl.arange(0, N)
        mask = seen(
            batch, rows, columns, q_pos, k_pos, q_seq, k_seq, length, queries, keys, window, PLACED, APART, LIMITED
        )  # fmt: skip
        if tl.max(mask.to(tl.int32)) > 0:
            _, ds = _slopes(
                q + at, k + begin, v + begin, dy + at, sums + line, lse + line, rows, columns, mask,
                queries, keys, heads, kv, width, scale, softcap, CAPPED, M, N, D, PRECISION,
            )  # fmt: skip
            key = read(k + begin, columns, d, keys, width, kv * width)
            of_query += tl.dot(ds, key, input_precision=PRECISION)
    to = dq + at + rows.to(tl.int64)[:, None] * (heads * width) + d[None, :]
    tl.store(to, of_query, mask=(rows < queries)[:, None] & (d < width)[None, :])


def attention_back(
    out, dy, y, lse, q, k, v, q_pos, k_pos, q_seq, k_seq, length, *, scale, window, softcap
):
    """dq may be where y is: of y only the sums with dy are needed, which are made first."""
    (b, queries, heads, width), (keys, kv) = q.shape, k.shape[1:3]
    m, n, d, warps = tiles(width)
    sums = torch.empty((b, heads, queries), dtype=torch.float32, device=q.device)
    by_query = blocks(queries, m), b * heads
    launch(_along, by_query, sums, dy, y, queries, heads, width, M=m, D=d)
    optional_inputs = [q if t is None else t for t in (q_pos, k_pos, q_seq, k_seq, length)]
    sizes = queries, keys, heads, kv, width, scale, float(softcap), window
    kernel_args = dy, lse, sums, q, k, v, *optional_inputs, *sizes
    options = flags_of(q_pos, q_seq, length, softcap) | FACTORS | {"D": d, "num_warps": warps}
    dq, dk, dv = out
    launch(_of_keys, (blocks(keys, m), b * kv), dk, dv, *kernel_args, **options, M=n, N=m)
    launch(_of_queries, by_query, dq, *kernel_args, **options, M=m, N=n)
