"""Attention, block of queries by block, with online softmax: Dao 2023, arXiv 2307.08691.

Which keys a query sees is said by positions and sequences, see `ops.attention`; a block of keys that no query of a
block sees is left out. Products have f32's accuracy on tensor cores, as sums of three in tf32.
"""

import triton
import triton.language as tl

from packtrain.engine.backends.triton import blocks, launch, power_of_two

SLICE = tl.constexpr(32)
FACTORS = {"PRECISION": "tf32x3"}


@triton.jit
def of_queries(queries, heads, width, M: tl.constexpr, D: tl.constexpr):
    """A program's batch, queries of a head, elements; and where that head begins in (B, T, H, D), and in (B, H, T)."""
    batch, head = tl.program_id(1).to(tl.int64) // heads, tl.program_id(1) % heads
    rows, d = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, D)
    return (
        batch,
        rows,
        d,
        (batch * queries * heads + head) * width,
        (batch * heads + head) * queries,
    )


@triton.jit
def seen(
    batch, rows, columns, q_pos, k_pos, q_seq, k_seq, length, queries, keys, window: tl.constexpr,
    PLACED: tl.constexpr, APART: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Which keys (columns) which queries (rows) of a batch see."""
    mask = (rows < queries)[:, None] & (columns < keys)[None, :]
    if PLACED:
        at_q = tl.load(q_pos + batch * queries + rows, mask=rows < queries, other=0)
        at_k = tl.load(k_pos + batch * keys + columns, mask=columns < keys, other=0)
    else:
        at_q, at_k = rows, columns
    mask &= at_k[None, :] <= at_q[:, None]
    if window > 0:
        mask &= at_q[:, None].to(tl.int64) - at_k[None, :] < window
    if window < 0:
        mask &= at_k[None, :] >= (at_q // -window * -window)[:, None]
    if APART:
        of_q = tl.load(q_seq + batch * queries + rows, mask=rows < queries, other=0)
        of_k = tl.load(k_seq + batch * keys + columns, mask=columns < keys, other=0)
        mask &= of_q[:, None] == of_k[None, :]
    if LIMITED:
        mask &= (columns < tl.load(length))[None, :]
    return mask


@triton.jit
def read(x, rows, columns, count, width, step):
    """A block of rows (N, D), 0 where there is nothing, in f32."""
    mask = (rows < count)[:, None] & (columns < width)[None, :]
    return tl.load(
        x + rows.to(tl.int64)[:, None] * step + columns[None, :], mask=mask, other=0.0
    ).to(tl.float32)


@triton.jit
def across(
    x, y, rows, columns, x_count, y_count, width, x_step, y_step,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Products of rows of x and of y, a few elements of them at a time: more do not fit into registers."""
    z = tl.zeros((M, N), tl.float32)
    for start in tl.static_range(0, D, min(D, SLICE)):
        d = start + tl.arange(0, min(D, SLICE))
        a, b = read(x, rows, d, x_count, width, x_step), read(y, columns, d, y_count, width, y_step)
        z = tl.dot(a, tl.trans(b), z, input_precision=PRECISION)
    return z


@triton.jit
def scored(products, mask, scale, softcap, CAPPED: tl.constexpr):
    """Scores (queries, keys), -inf where hidden, and their slope by the products where there is a cap."""
    z = products * scale
    slope = z
    if CAPPED:
        t = 1 - 2 / (tl.exp(2 * z / softcap) + 1)
        z, slope = softcap * t, 1 - t * t
    return tl.where(mask, z, -float("inf")), slope


@triton.jit
def _finish(y, lse, made, top, total, rows, d, queries, width, step):
    """Write results and sums; 0 for a query without keys."""
    none = total == 0
    safe = tl.where(none, 1.0, total)
    to = y + rows.to(tl.int64)[:, None] * step + d[None, :]
    tl.store(to, made / safe[:, None], mask=(rows < queries)[:, None] & (d < width)[None, :])
    sums = tl.where(none, 0.0, tl.log(safe) + tl.where(none, 0.0, top))
    tl.store(lse + rows, sums, mask=rows < queries)


@triton.jit
def _attend(
    y, lse, q, k, v, q_pos, k_pos, q_seq, k_seq, length, sinks,
    queries, keys, heads, kv, width, scale, softcap, window: tl.constexpr,
    PLACED: tl.constexpr, APART: tl.constexpr, LIMITED: tl.constexpr, SUNK: tl.constexpr, CAPPED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    batch, rows, d, at, line = of_queries(queries, heads, width, M, D)
    head = tl.program_id(1) % heads
    kv_offset = (batch * keys * kv + head // (heads // kv)) * width
    top, total = tl.full((M,), -float("inf"), tl.float32), tl.zeros((M,), tl.float32)
    if SUNK:
        sink = tl.load(sinks + head)
        total += (sink > -float("inf")).to(tl.float32)
        top = tl.zeros((M,), tl.float32) + sink
    output = tl.zeros((M, D), tl.float32)
    last = keys if PLACED else tl.minimum(keys, (tl.program_id(0) + 1) * M)
    for start in range(0, last, N):
        columns = start + tl.arange(0, N)
        mask = seen(
            batch, rows, columns, q_pos, k_pos, q_seq, k_seq, length, queries, keys, window, PLACED, APART, LIMITED
        )  # fmt: skip
        if tl.max(mask.to(tl.int32)) > 0:
            products = across(
                q + at, k + kv_offset, rows, columns, queries, keys, width, heads * width, kv * width,
                M, N, D, PRECISION
            )  # fmt: skip
            z, _ = scored(products, mask, scale, softcap, CAPPED)
            higher = tl.maximum(top, tl.max(z, 1))
            safe = tl.where(higher == -float("inf"), 0.0, higher)
            e, fade = tl.exp(z - safe[:, None]), tl.exp(top - safe)
            total = total * fade + tl.sum(e, 1)
            value = read(v + kv_offset, columns, d, keys, width, kv * width)
            output = output * fade[:, None] + tl.dot(e, value, input_precision=PRECISION)
            top = higher
    _finish(
        y + at, lse + line, output, top, total, rows, d, queries, width, heads * width
    )  # fmt: skip


def flags_of(q_pos, q_seq, length, softcap):
    return {
        "PLACED": q_pos is not None,
        "APART": q_seq is not None,
        "LIMITED": length is not None,
        "CAPPED": softcap > 0,
    }


def tiles(width):
    """Queries, keys, and elements of a head that are computed at a time, and warps: what fits into registers."""
    d = max(power_of_two(width), 16)
    return (64, 32, d, 4) if d <= 64 else (32, 16, d, 8) if d <= 128 else (16, 16, d, 8)


def attention(out, q, k, v, q_pos, k_pos, q_seq, k_seq, length, sinks, *, scale, window, softcap):
    (b, queries, heads, width), (keys, kv) = q.shape, k.shape[1:3]
    m, n, d, warps = tiles(width)
    optional_inputs = (q if t is None else t for t in (q_pos, k_pos, q_seq, k_seq, length, sinks))
    sizes = queries, keys, heads, kv, width, scale, float(softcap), window
    flags = flags_of(q_pos, q_seq, length, softcap) | {"SUNK": sinks is not None} | FACTORS
    grid = blocks(queries, m), b * heads
    launch(
        _attend,
        grid,
        *out,
        q,
        k,
        v,
        *optional_inputs,
        *sizes,
        **flags,
        M=m,
        N=n,
        D=d,
        num_warps=warps,
    )
