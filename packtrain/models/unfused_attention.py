"""Attention written out: products, a mask and a softmax instead of one op, for backends that have none.

Positions are compared as f32, which is exact up to 16,777,216."""

from packtrain.dtypes import f32
from packtrain.engine import ops
from packtrain.engine.tensor import Tensor

CHUNK_TOLERANCE = 1e-5
MASK_VALUE = 1e30  # subtracted from the scores of keys that a query does not see


def attention(
    q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, q_seq: Tensor, k_seq: Tensor,
    sinks: Tensor | None = None, *, scale: float, window: int = 0, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute the first result of ops.attention from its inputs; a query without a key to see gets all values' mean."""
    is_other_seq = ops.step(ops.abs(_position_differences(q_seq, k_seq)))
    visible = ops.mul(_visible_keys(q_pos, k_pos, window), ops.scale(is_other_seq, by=-1, bias=1))
    return _weighted_values(q, k, v, sinks, visible, scale, softcap)


def attention_cells(
    q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, q_lines: Tensor, seen: Tensor, k_pos: Tensor,
    sinks: Tensor | None = None, *, scale: float, window: int = 0, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute ops.attention_cells without a fused op; `seen` (R, S): 1 where line r, a sequence, has cell s."""
    seen = ops.mul(_visible_keys(q_pos, k_pos, window), ops.get_rows(seen, q_lines))
    q, k, v, seen = (ops.reshape(x, shape=(1, *x.shape)) for x in (q, _to_f32(k), _to_f32(v), seen))
    y = _weighted_values(q, k, v, sinks, seen, scale, softcap)
    return ops.reshape(y, shape=y.shape[1:])


def _to_f32(x: Tensor) -> Tensor:
    return x if x.dtype == f32 else ops.cast(x)


def _position_differences(q: Tensor, k: Tensor) -> Tensor:
    """Subtract all pairs: q (..., T) and k (..., S) i32 -> q - k (..., T, S) f32."""
    q, k = ops.cast(q), ops.cast(k)
    return ops.sub(
        ops.reshape(q, shape=(*q.shape, 1)), ops.reshape(k, shape=(*k.shape[:-1], 1, k.shape[-1]))
    )


def _visible_keys(q_pos: Tensor, k_pos: Tensor, window: int) -> Tensor:
    """Return (..., T, S) f32: 1 for keys that are not later than the query and less than `window` before it (0: no
    limit; negative: in its chunk of -window tokens), else 0."""
    since = _position_differences(q_pos, k_pos)
    seen = ops.step(ops.scale(since, by=1, bias=0.5))
    if window < 0:  # `grown` values are equal within a chunk and differ between chunks
        q, k = (ops.grown(pos, rate=1.0, length=-window) for pos in (q_pos, k_pos))
        k = ops.reshape(k, shape=(*k_pos.shape[:-1], 1, k_pos.shape[-1]))
        is_other_chunk = ops.step(ops.scale(ops.abs(ops.sub(q, k)), by=1, bias=-CHUNK_TOLERANCE))
        return ops.mul(seen, ops.scale(is_other_chunk, by=-1, bias=1))
    return ops.mul(seen, ops.step(ops.scale(since, by=-1, bias=window - 0.5))) if window else seen


def _weighted_values(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, seen: Tensor, scale: float, softcap: float,
) -> Tensor:  # fmt: skip
    """Return attention's outputs like q, (B, T, H, D): for each query the mean of v (B, S, K, D), weighted by the
    softmax of scores where `seen` (B, T, S) is 1."""
    (b, t, h, d), (s, kv) = q.shape, k.shape[1:3]
    grouped = ops.reshape(ops.scale(q, by=scale / (softcap or 1)), shape=(b, t, kv, h // kv, d))
    x = ops.cont(ops.permute(grouped, axes=(0, 2, 3, 1, 4)))  # (B, K, H / K, T, D)
    keys = ops.reshape(ops.permute(k, axes=(0, 2, 1, 3)), shape=(b, kv, 1, s, d))
    values = ops.reshape(ops.permute(v, axes=(0, 2, 3, 1)), shape=(b, kv, 1, d, s))
    z = ops.matmul(x, keys)
    z = ops.scale(ops.tanh(z), by=softcap) if softcap else z
    mask = ops.scale(seen, by=MASK_VALUE, bias=-MASK_VALUE)
    z = ops.add(z, ops.reshape(mask, shape=(b, 1, 1, t, s)))
    if sinks is None:
        p = ops.soft_max(z)
    else:
        p = ops.soft_max_sinks(ops.reshape(z, shape=(b, h, t, s)), sinks)
        p = ops.reshape(ops.cont(p), shape=z.shape)
    y = ops.permute(ops.matmul(p, values), axes=(0, 3, 1, 2, 4))
    return ops.reshape(ops.cont(y), shape=q.shape)
