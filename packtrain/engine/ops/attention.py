"""Attention with online softmax: causal, grouped queries, packed sequences, and reading a KV cache."""

import math

import numpy as np

from packtrain import kernels
from packtrain.dtypes import BLOCK_TYPES, f16, f32, i32
from packtrain.engine.backends import triton
from packtrain.engine.ops import torch_attention
from packtrain.engine.ops.arrays import ABSENT_IDS, flatten_or_absent, floats, run_replayable
from packtrain.engine.ops.costs import Cost, num_attended_pairs, queries_per_block
from packtrain.engine.ops.elementwise import exp, mul, neg, sub
from packtrain.engine.ops.reduce import sum_rows, sum_to
from packtrain.engine.ops.shape import cont, permute, reshape
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require

MIN_KV_HEADS = 8  # kv heads of all batches, below which the gradient has a task for each query head


def _check_heads(q, k, v):
    """Check q, k and v for a shape rule; return the numbers of batches, queries, query heads and keys."""
    has_axes = len(q.shape) == 4 and len(k.shape) == 4
    require(has_axes, f"q is {q.spec} and k is {k.spec}; both need four axes")
    (b, t, h, d), (_, s, kv, _) = q.shape, k.shape
    fact = f"q, k, v are {q.spec}, {k.spec}, {v.spec}; q must be f32, k and v both f32 or f16"
    require(q.dtype == f32 and k.dtype == v.dtype and k.dtype in (f32, f16), fact)
    fits = k.shape == (b, s, kv, d) == v.shape
    require(fits, f"k is {k.spec} and v is {v.spec}; for q {q.spec} both must be [{b}, S, K, {d}]")
    require(h % kv == 0, f"q has {h} heads and k has {kv}; they must divide")
    return b, t, h, s


@op()
def attention(
    q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor | None = None, k_pos: Tensor | None = None,
    q_seq: Tensor | None = None, k_seq: Tensor | None = None, length: Tensor | None = None, sinks: Tensor | None = None,
    *, scale: float, window: int = 0, softcap: float = 0.0,
) -> tuple[Spec, ...]:  # fmt: skip
    """Softmax-weighted mean of the values that each query attends to; query head h reads kv head h // (H / K).

    y = softmax(z) v over keys j with seq equal, k_pos[j] <= q_pos[i] and j < length; with a window of n also
    q_pos[i] - k_pos[j] < n, with one of -n k_pos[j] >= q_pos[i] // n * n.
    z = scale * q k^T; with a softcap of c it becomes c * tanh(z / c).
    Without positions, position = index (S = T); a query that attends to nothing gives y = lse = 0.

        q, y          (B, T, H, D)  f32
        k, v          (B, S, K, D)  f32, or f16 without a gradient; a KV cache has B = 1 and S cells
        q_pos, q_seq  (B, T)        i32
        k_pos, k_seq  (B, S)        i32; unused cells have a k_seq that no query has
        length        (1,)          i32; cells from there on are ignored
        sinks         (H,)          f32; logits of one more key without a value: they add exp(sinks) to denominators
        lse           (B, H, T)     f32, the second result: log of the softmax's denominator
    Dao 2023, arXiv 2307.08691; sinks: arXiv 2309.17453; ggml_flash_attn_ext.
    """
    b, t, h, s = _check_heads(q, k, v)
    require(softcap >= 0, f"softcap is {softcap}; it must not be below 0")
    is_paired = (q_pos is None) == (k_pos is None) and (q_seq is None) == (k_seq is None)
    require(is_paired, "q and k need both or none")
    fact = f"q has {t} and k has {s} positions; without q_pos and k_pos they must be equal"
    require(q_pos is not None or t == s, fact)
    Spec((b, t), i32).require(q_pos=q_pos, q_seq=q_seq)
    Spec((b, s), i32).require(k_pos=k_pos, k_seq=k_seq)
    Spec((1,), i32).require(length=length)
    Spec((h,)).require(sinks=sinks)
    return q.spec, Spec((b, h, t))


@attention.vjp
def attention_vjp(dy, y, q, k, v, *mask_inputs, **attrs):
    require(dy[1] is None, "the log-sum-exp has no gradient here")
    *positions, sinks = mask_inputs
    dq, dk, dv = attention_back(dy[0], y[0], y[1], q, k, v, *positions, **attrs)
    dsinks = None if sinks is None else _sinks_back(dy[0], y[0], y[1], sinks)
    return dq, dk, dv, None, None, None, None, None, dsinks


def _sinks_back(dy: Tensor, y: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of sinks (H,): - sum of exp(sinks - lse) * sum(dy * y) over batch and queries. The online
    softmax starts with the sink as first logit, so lse includes it and attention_back needs no change."""
    b, h, t = lse.shape
    dy_dot_y = reshape(sum_rows(mul(dy, y)), shape=(b, t, h))
    sink_probability = exp(sub(reshape(sinks, shape=(h, 1)), lse))
    grads = mul(sink_probability, cont(permute(dy_dot_y, axes=(0, 2, 1))))
    return neg(reshape(sum_to(grads, shape=(h, 1)), shape=(h,)))


def reach(q_pos, window):
    """Return how many positions back each query may see in its window, its own included; see attention."""
    if window < 0:
        return q_pos % -window + 1
    return np.full_like(q_pos, window or np.iinfo(np.int64).max, dtype=np.int64)


def _invisible_keys(q, k, q_pos, k_pos, q_seq, k_seq, length, window):
    (b, t), s = q.shape[:2], k.shape[1]
    q_positions = np.arange(t)[None] if q_pos is None else q_pos
    k_positions = np.arange(s)[None] if k_pos is None else k_pos
    distance = q_positions[:, :, None].astype(np.int64) - k_positions[:, None, :]
    hidden = np.broadcast_to(
        (distance < 0) | (distance >= reach(q_positions, window)[..., None]), (b, t, s)
    ).copy()
    if q_seq is not None:
        hidden |= k_seq[:, None, :] != q_seq[:, :, None]
    if length is not None:
        hidden |= np.arange(s) >= length[0]
    return hidden[:, None]


def _probabilities(q, k, positions, sinks, scale, window, softcap):
    """Return P (B, H, T, S), its log-denominator (B, H, T), k by query head, and the slope of the softcap. P is 0 for a
    query without keys, and so is the log-denominator if there is no sink. `positions`: the inputs q_pos to length."""
    k_by_head = np.repeat(k, q.shape[2] // k.shape[2], axis=2).swapaxes(1, 2)
    z, slope = scale * q.swapaxes(1, 2) @ k_by_head.swapaxes(2, 3), 1
    if softcap:
        capped = np.tanh(z / softcap)
        z, slope = softcap * capped, 1 - capped**2
    z = np.where(_invisible_keys(q, k, *positions, window), -np.inf, z)
    sink = -np.inf if sinks is None else sinks[:, None, None]
    max_score = np.maximum(z.max(-1, keepdims=True), sink)
    max_score = np.where(np.isinf(max_score), 0, max_score)
    e = np.exp(z - max_score)
    denominator = e.sum(-1, keepdims=True) + np.exp(sink - max_score)
    denominator = np.where(denominator == 0, 1, denominator)
    return e / denominator, (np.log(denominator) + max_score)[..., 0], k_by_head, slope


@attention.kernel("numpy")
def attention_numpy(out, q, k, v, *mask_inputs, **attrs):
    y, lse = out
    *positions, sinks = mask_inputs
    p, lse[...], *_ = _probabilities(q, k, positions, sinks, **attrs)
    v_by_head = np.repeat(v, q.shape[2] // v.shape[2], axis=2).swapaxes(1, 2)
    y[...] = (p @ v_by_head).swapaxes(1, 2)


def position_arrays(q_pos, k_pos, q_seq, k_seq, length):
    """Return positions and sequences as kernels take them: (0, 0) if absent."""
    absent = ABSENT_IDS.reshape(0, 0)
    ids = [absent if x is None else x for x in (q_pos, k_pos, q_seq, k_seq)]
    return (*ids, flatten_or_absent(length, ABSENT_IDS))


@attention.kernel("cpu")
def attention_cpu(out, q, k, v, *mask_inputs, scale, window, softcap):
    keys, values = k.view(np.uint8), v.view(np.uint8)
    *positions, sinks = mask_inputs
    args = *position_arrays(*positions), flatten_or_absent(sinks), scale, window, softcap
    return run_replayable(kernels.flash_attention.attention, *out, q, keys, values, *args)


attention.kernel("torch")(torch_attention.attention)
attention.kernel("cuda")(triton.lazy_kernel("attention", "attention"))


def _sample_inputs():
    def qkv(b, t, h, s, kv, d):
        return input("q", (b, t, h, d)), input("k", (b, s, kv, d)), input("v", (b, s, kv, d))

    sizes = (1, 1, 1, 1, 8), (2, 15, 2, 1, 16), (1, 65, 4, 2, 20), (1, 130, 2, 2, 64)
    for b, t, h, kv, d in sizes:
        yield qkv(b, t, h, t, kv, d), (), {}
    yield qkv(1, 200, 2, 200, 1, 16), (), {"window": 70}
    yield qkv(1, 200, 2, 200, 1, 16), (), {"window": -70}
    yield qkv(1, 3, 4, 3, 2, 24), (), {"window": 2, "softcap": 1.5}
    yield qkv(1, 90, 2, 90, 2, 40), (), {"softcap": 0.7}
    pos = constant("pos", np.tile([0, 1, 2, 0, 1, 2, 3, 0], (2, 1)), i32)
    seq = constant("seq", np.tile([0, 0, 0, 1, 1, 1, 1, 2], (2, 1)), i32)
    for attrs in ({}, {"window": 2}, {"window": -3}, {"window": 3, "softcap": 2.0}):
        yield qkv(2, 8, 4, 8, 2, 8), (pos, pos, seq, seq), attrs
    cells = np.arange(70)
    cell_pos, cell_seq = constant("k_pos", [cells // 2], i32), constant("k_seq", [cells % 2], i32)
    for q_pos, q_seq, attrs in (
        ([[20]], [[1]], {}), ([[20]], [[1]], {"window": 7, "softcap": 1.0}), ([[5, 6, 7, 30]], [[0, 0, 0, 1]], {}),
        ([[5, 6, 7, 30]], [[0, 0, 0, 1]], {"window": 3}), ([[3] * 17], [[0, 1, 9] * 5 + [0, 1]], {}),
    ):  # fmt: skip
        t = len(q_pos[0])
        ids = constant("q_pos", q_pos, i32), cell_pos, constant("q_seq", q_seq, i32), cell_seq
        yield qkv(1, t, 4, 70, 2, 16), (*ids, constant("length", [50], i32)), attrs


@attention.cost
def attention_cost(out, q, k, v, *mask_inputs, scale, window, softcap):
    (b, t, h, d), num_pairs = q.shape, num_attended_pairs(q, k, window)
    work = {"attend": 2 * d * num_pairs, "score": num_pairs}
    return Cost(work, num_tasks=b * h * -(-t // queries_per_block(d)), is_causal=True)


@attention.samples
def attention_samples():
    for qkv, positions, attrs in _sample_inputs():
        yield attention(*qkv, *positions, scale=qkv[0].shape[-1] ** -0.5, **attrs)[0]
        sinks = input("sinks", qkv[0].shape[2:3])
        scale = qkv[0].shape[-1] ** -0.5
        padded_positions = (*positions, *(None,) * (5 - len(positions)))
        yield attention(*qkv, *padded_positions, sinks, scale=scale, **attrs)[0]


# dq may overwrite y, which is read first; dy and q are read until a block is done
@op(inplace=(1,))
def attention_back(
    dy: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor | None = None,
    k_pos: Tensor | None = None, q_seq: Tensor | None = None, k_seq: Tensor | None = None, length: Tensor | None = None,
    *, scale: float, window: int = 0, softcap: float = 0.0,
) -> tuple[Spec, ...]:  # fmt: skip
    """Gradients of attention for q, k and v; recomputes the probabilities from the log-sum-exp, block by block.

    With P = exp(z - lse) and dS = P * (dy v^T - sum(dy * y)), times 1 - (z / softcap)**2 if there is one:
    dq = scale dS k,  dk = scale dS^T q,  dv = P^T dy.  Shapes as in attention, whose lse includes sinks.
    ggml_flash_attn_back.
    """
    q.spec.require(dy=dy, y=y)
    require(k.dtype == v.dtype == f32, f"k is {k.spec} and v is {v.spec}; only f32 has a gradient")
    return q.spec, k.spec, v.spec


@attention_back.kernel("numpy")
def attention_back_numpy(out, dy, y, lse, q, k, v, *mask_inputs, scale, **attrs):
    p, lse_without_sinks, wide_k, slope = _probabilities(q, k, mask_inputs, None, scale, **attrs)
    p = p * np.exp(lse_without_sinks - lse)[..., None]  # with a sink, they add up to less than 1
    group_size = q.shape[2] // k.shape[2]
    wide_v = np.repeat(v, group_size, axis=2).swapaxes(1, 2)
    dy, y, q = dy.swapaxes(1, 2), y.swapaxes(1, 2), q.swapaxes(1, 2)
    ds = scale * slope * p * (dy @ wide_v.swapaxes(2, 3) - (dy * y).sum(-1, keepdims=True))
    grads_by_head = ds @ wide_k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dy
    for d, grad, heads in zip(out, grads_by_head, (1, group_size, group_size), strict=True):
        b, h, t, width = grad.shape
        d[...] = grad.reshape(b, h // heads, heads, t, width).sum(2).swapaxes(1, 2)


@attention_back.workspace("cpu")
def attention_back_workspace(dy, y, lse, q, k, *other_inputs, **attrs):
    """Return specs for dk and dv by query head, to be summed, if kv heads are too few for one task each; else ()."""
    (b, s, heads, d), q_heads = k.shape, q.shape[2]
    use_query_heads = b * heads < MIN_KV_HEADS and q_heads > heads
    return (Spec((b, s, q_heads, d)),) * 2 if use_query_heads else ()


@attention_back.kernel("cpu")
def attention_back_cpu(out, dy, y, lse, q, k, v, *mask_inputs, scale, window, softcap, work=()):
    out_arrays = *out, *(work or out[1:])
    options = *position_arrays(*mask_inputs), scale, window, softcap
    args = out_arrays, dy, y, lse, q, k, v, *options, 0
    return run_replayable(kernels.attention_back.attention_back, *args)


attention_back.kernel("torch")(torch_attention.attention_back)
attention_back.kernel("cuda")(triton.lazy_kernel("attention", "attention_back"))


@attention_back.cost
def attention_back_cost(out, dy, y, lse, q, k, v, *mask_inputs, scale, window, softcap):
    num_pairs = num_attended_pairs(q, k, window)
    work = {"attend back": 5 * q.shape[-1] * num_pairs, "score back": num_pairs}
    task_heads = q if attention_back_workspace(dy, y, lse, q, k) else k
    return Cost(work, num_tasks=task_heads.shape[0] * task_heads.shape[2], is_causal=True)


@attention_back.samples
def attention_back_samples():
    for (q, k, v), positions, attrs in _sample_inputs():
        all_attrs = {"scale": q.shape[-1] ** -0.5, **attrs}
        y, lse = attention(q, k, v, *positions, **all_attrs)
        yield from attention_back(input("dy", q.shape), y, lse, q, k, v, *positions, **all_attrs)


CACHE_DTYPES = f32, f16, BLOCK_TYPES["q8_0"]


@op()
def attention_cells(
    q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, q_row: Tensor, order: Tensor, counts: Tensor, k_pos: Tensor,
    sinks: Tensor | None = None, *, scale: float, window: int = 0, softcap: float = 0.0,
) -> Spec:  # fmt: skip
    """Attention over the cells of a KV cache that each query's row of `order` names, up to its own position.

    y = softmax(z) v over cells j = order[r, :counts[r]], r = q_row[i], with k_pos[j] <= q_pos[i]; with a window of n
    also q_pos[i] - k_pos[j] < n. z = scale * q k^T; with a softcap of c it becomes c * tanh(z / c). A query that sees
    nothing gives y = 0. The result depends neither on where cells lie nor on other rows. ggml_flash_attn_ext.

        q, y          (T, H, D)  f32
        k, v          (S, K, D)  f32, f16 or q8_0; query head h reads kv head h // (H / K)
        q_pos, q_row  (T,)       i32
        order         (R, S)     i32; the cells of a row by position, ascending
        counts        (R,)       i32; number of cells of each row
        k_pos         (S,)       i32; position of each cell
        sinks         (H,)       f32; logits of one more key without a value: they add exp(sinks) to denominators
    """
    fact = f"q, k and v are {q.spec}, {k.spec} and {v.spec}"
    is_valid = len(q.shape) == len(k.shape) == 3 and q.dtype == f32
    require(is_valid, f"{fact}; all need three axes, q f32")
    is_valid = k.spec == v.spec and k.dtype in CACHE_DTYPES
    require(is_valid, f"{fact}; k and v must be equal: f32, f16 or q8_0")
    is_valid = k.shape[2] == q.shape[2] and q.shape[1] % k.shape[1] == 0
    require(is_valid, f"{fact}; heads must be equally wide, and those of k divide those of q")
    Spec(q.shape[1:2]).require(sinks=sinks)
    (t, *_), s, rows = q.shape, k.shape[0], order.shape[0]
    Spec((t,), i32).require(q_pos=q_pos, q_row=q_row)
    Spec((rows, s), i32).require(order=order)
    Spec((rows,), i32).require(counts=counts)
    Spec((s,), i32).require(k_pos=k_pos)
    require(softcap >= 0, f"softcap is {softcap}; it must not be below 0")
    return q.spec


@attention_cells.kernel("numpy")
def attention_cells_numpy(
    y, q, k, v, q_pos, q_row, order, counts, k_pos, sinks, *, scale, window, softcap
):
    sink = -1e30 if sinks is None else sinks[:, None]
    k, v, group_size = floats(k), floats(v), q.shape[1] // k.shape[1]
    for i, (position, row) in enumerate(zip(q_pos, q_row, strict=True)):
        cells = order[row, : counts[row]]
        distance = position - k_pos[cells]
        cells = cells[(distance >= 0) & (distance < reach(position, window))]
        keys, values = (np.repeat(x[cells], group_size, axis=1) for x in (k, v))
        z = scale * np.einsum("hd,shd->hs", q[i], keys)
        z = softcap * np.tanh(z / softcap) if softcap else z
        max_score = np.maximum(z.max(-1, keepdims=True, initial=-1e30), sink)
        e = np.exp(z - max_score)
        denominator = e.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sink - max_score))
        y[i] = np.einsum("hs,shd->hd", e, values) / np.where(denominator == 0, 1, denominator)


@attention_cells.kernel("cpu")
def attention_cells_cpu(y, q, k, v, *mask_inputs, scale, window, softcap):
    keys, values = (x.view(np.uint8).reshape(*x.shape[:2], -1) for x in (k, v))
    *positions, sinks = mask_inputs
    args = y, q, keys, values, *positions, flatten_or_absent(sinks), scale, window, softcap
    return run_replayable(kernels.attention_cells.attention, *args)


attention_cells.kernel("torch")(torch_attention.attention_cells)


@attention_cells.cost
def attention_cells_cost(y, q, k, v, *mask_inputs, scale, window, softcap):
    num_pairs = math.prod(q.shape[:2]) * k.shape[0]  # its fill is not known
    return Cost({"attend": 2 * q.shape[2] * num_pairs, "score": num_pairs}, is_causal=True)


@attention_cells.samples
def attention_cells_samples():
    random = np.random.default_rng(1)
    # rows of scattered cells: a sequence, one that begins like it, a short one, and an empty one
    cell_order = random.permutation(150).astype(np.int32)
    order = np.stack((cell_order, np.roll(cell_order, 50), np.roll(cell_order, 100), cell_order))
    positions = np.argsort(cell_order)
    order[1, :70] = cell_order[np.r_[:30, 100:140]]
    row_inputs = constant("order", order, i32), constant("counts", [140, 70, 3, 0], i32)
    cell_args = *row_inputs, constant("k_pos", positions, i32)
    sizes = (1, 2, 1, 64), (5, 4, 2, 20), (16, 6, 2, 32), (17, 2, 1, 136), (90, 2, 2, 64)
    for t, h, kv, d in sizes:
        k, v = (input(name, (150, kv, d)) for name in "kv")
        at, query_rows = np.linspace(149, -1, t).astype(int), np.arange(t) * 4 // t
        ids = constant("q_pos", at, i32), constant("q_row", query_rows, i32), *cell_args
        for attrs in ({}, {"window": 40, "softcap": 1.5}, {"window": -40}):
            q = input("q", (t, h, d))
            yield attention_cells(q, k, v, *ids, scale=d**-0.5, **attrs)
            yield attention_cells(q, k, v, *ids, input("sinks", (h,)), scale=d**-0.5, **attrs)
