"""Attention whose keys and values all heads make from one narrow vector of a token, which is what a cache keeps.

DeepSeek-V2 (arXiv 2405.04434). A batch has keys and values of each head. With a cache, queries are multiplied by the
matrix of keys instead, and what they mix by that of values: the same sums in another order. Parts of heads that rope
turns come first.
"""

import numpy as np

from packtrain.dtypes import f32, i32
from packtrain.engine import ops
from packtrain.engine.ops import mixture
from packtrain.engine.tensor import Tensor, constant
from packtrain.models.activation_rounding import product
from packtrain.models.block_weights import Block, Mixer, Tables


def attention(part: Block, x: Tensor, tables: Tables, mixer: Mixer) -> Tensor:
    """The heads' mixed values, side by side: x (..., C) -> (..., H V)."""
    config, i = part.config, part.number
    heads, rope_width, rank = config.head_count, config.rope_width, config.kv_lora_rank
    for_q, for_k = tables[config.rope_of(i)]
    q = queries(part, x)
    q_nope, q = (
        _cut(q, 0, config.head_width - rope_width),
        _cut(q, config.head_width - rope_width, rope_width),
    )
    q = part.named("q_rope", ops.rope(q, for_q, neox=config.traits.halves))
    both = part.saved(part.linear("attn_kv_a_mqa", x))
    k = ops.reshape(ops.cont(_cut(both, rank, rope_width)), shape=(*x.shape[:-1], 1, rope_width))
    k = part.named("k_rope", ops.rope(k, for_k, neox=config.traits.halves))
    narrow = part.saved(part.norm("attn_kv_a_norm", ops.cont(_cut(both, 0, rank))))
    if mixer.cached and config.latent:
        q = ops.concat((q, by_head(part, "attn_k_b", q_nope)), axis=-1)
        k = ops.concat((k, ops.reshape(narrow, shape=(*k.shape[:-1], rank))), axis=-1)
        y = by_head(part, "attn_v_b", _cut(mixer.attend(i, q, k, None, None), rope_width, rank))
    else:
        keys, v = expanded(part, narrow)
        k = ops.repeat(k, shape=(*x.shape[:-1], heads, rope_width))
        q, k = (part.saved(ops.concat(parts, axis=-1)) for parts in ((q, q_nope), (k, keys)))
        padded_v = ops.narrow_back(v, axis=len(v.shape) - 1, start=0, size=config.head_width)
        y = _cut(mixer.attend(i, q, k, part.saved(padded_v), None), 0, config.value_width)
    return ops.reshape(ops.cont(y), shape=(*x.shape[:-1], heads * config.value_width))


def queries(part: Block, x: Tensor) -> Tensor:
    """x (..., C) -> (..., H, D), by way of a narrow vector if the model has one."""
    name, heads = "attn_q", part.config.head_count
    if part.config.q_lora_rank:
        x = part.saved(part.linear("attn_q_a", x))
        x, name = part.saved(part.norm("attn_q_a_norm", x)), "attn_q_b"
    return ops.reshape(part.linear(name, x), shape=(*x.shape[:-1], heads, part.config.head_width))


def expanded(part: Block, narrow: Tensor) -> tuple[Tensor, Tensor]:
    """The plain parts of keys (..., H, D - R) and the values (..., H, V) of narrow vectors."""
    config, lead = part.config, narrow.shape[:-1]
    nope_width, v = config.head_width - config.rope_width, config.value_width
    if not config.latent:
        both = part.linear("attn_kv_b", narrow)
        both = ops.reshape(both, shape=(*lead, config.head_count, nope_width + v))
        return _cut(both, 0, nope_width), _cut(both, nope_width, v)
    outputs = list[Tensor]()
    for name, width in (("attn_k_b", nope_width), ("attn_v_b", v)):
        matrix_shape = config.head_count * width, config.kv_lora_rank
        w, lora_weight = whole(part, name)
        y = product(config, narrow, ops.reshape(w, shape=matrix_shape))
        if lora_weight is not None:
            lora_weight = ops.reshape(lora_weight, shape=matrix_shape)
            y = ops.matmul(narrow, lora_weight, y, precision=config.precision)
        outputs.append(ops.reshape(part.named(name, y), shape=(*lead, config.head_count, width)))
    return outputs[0], outputs[1]


def whole(part: Block, name: str) -> tuple[Tensor, Tensor | None]:
    """The matrices of each head, and what their LoRA adapter, which has no dropout here, adds: (H, N, K).

    Those of keys are turned, from (H, K, N).
    """
    w, adapter, is_transposed = part.weight(name), part.low(name), name == "attn_k_b"
    if is_transposed:
        w = ops.cont(ops.transpose(w if w.dtype == f32 else ops.cast(w)))
    if adapter is None:
        return w, None
    a, b, by, _ = adapter
    inputs = ops.cont(ops.transpose(a))
    return w, ops.scale(ops.matmul(*((inputs, b) if is_transposed else (b, inputs))), by=by)


def by_head(part: Block, name: str, x: Tensor) -> Tensor:
    """x (T, H, K) times a matrix of each head (H, N, K), with its LoRA adapter: (T, H, N)."""
    t, h, k = x.shape
    rows = ops.reshape(ops.cont(ops.permute(x, axes=(1, 0, 2))), shape=(h * t, k))
    head_ids = constant(
        f"{part.whole(name)}.heads", np.repeat(np.arange(h, dtype=np.int32), t), i32
    )
    y = mixture.product(rows, part.weight(name), part.low(name), None, head_ids)
    y = ops.reshape(part.named(name, y), shape=(h, t, y.shape[-1]))
    return ops.cont(ops.permute(y, axes=(1, 0, 2)))


def _cut(x: Tensor, start: int, length: int) -> Tensor:
    return ops.narrow(x, axis=len(x.shape) - 1, start=start, length=length)
