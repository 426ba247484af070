"""Attention that reads a KV cache."""

import math

import numpy as np

from packtrain import kernels
from packtrain.dtypes import BLOCK_TYPES, f16, f32, i32
from packtrain.engine.ops import torch_attention
from packtrain.engine.ops.arrays import flatten_or_absent, floats, run_replayable
from packtrain.engine.ops.attention import reach
from packtrain.engine.ops.costs import Cost
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require

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
