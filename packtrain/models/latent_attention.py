"""Attention whose heads make keys and values from one narrow vector per token, which is what a KV cache holds.

DeepSeek-V2 (arXiv 2405.04434). A batch expands keys and values of each head: attention on narrow vectors would take
four times their products. With a cache, queries are multiplied by the matrix of keys instead, and outputs by that of
values: the same sums in another order. Parts of heads that rope rotates come first, as rope and moving cells expect."""

import numpy as np

from packtrain.dtypes import f32, i32
from packtrain.engine import ops
from packtrain.engine.tensor import Tensor, constant
from packtrain.models.activation_rounding import matmul_weight
from packtrain.models.block_weights import BlockBuilder, Mixer, RopeTables


def attention(block: BlockBuilder, x: Tensor, rope_tables: RopeTables, mixer: Mixer) -> Tensor:
    """Compute attention: x (..., C) -> the heads' outputs side by side, (..., H V)."""
    config, i = block.config, block.block_index
    num_heads, rope_width, rank = config.head_count, config.rope_width, config.kv_lora_rank
    q_table, k_table = rope_tables[config.rope_of(i)]
    q = project_queries(block, x)
    nope_width = config.head_width - rope_width
    q_nope, q = _cut(q, 0, nope_width), _cut(q, nope_width, rope_width)
    q = block.named("q_rope", ops.rope(q, q_table, neox=config.traits.halves))
    both = block.saved(block.linear("attn_kv_a_mqa", x))
    k = ops.reshape(ops.cont(_cut(both, rank, rope_width)), shape=(*x.shape[:-1], 1, rope_width))
    k = block.named("k_rope", ops.rope(k, k_table, neox=config.traits.halves))
    latent = block.saved(block.norm("attn_kv_a_norm", ops.cont(_cut(both, 0, rank))))
    if mixer.is_cached and config.has_latent_cache:
        q = ops.concat((q, by_head(block, "attn_k_b", q_nope)), axis=-1)
        k = ops.concat((k, ops.reshape(latent, shape=(*k.shape[:-1], rank))), axis=-1)
        y = by_head(block, "attn_v_b", _cut(mixer.attend(i, q, k, None, None), rope_width, rank))
    else:
        keys, v = expand_latent(block, latent)
        k = ops.repeat(k, shape=(*x.shape[:-1], num_heads, rope_width))
        q, k = (block.saved(ops.concat(sections, axis=-1)) for sections in ((q, q_nope), (k, keys)))
        padded_v = ops.narrow_back(v, axis=len(v.shape) - 1, start=0, size=config.head_width)
        y = _cut(mixer.attend(i, q, k, block.saved(padded_v), None), 0, config.value_width)
    return ops.reshape(ops.cont(y), shape=(*x.shape[:-1], num_heads * config.value_width))


def project_queries(block: BlockBuilder, x: Tensor) -> Tensor:
    """Compute queries (..., H, D) of x (..., C), if the model has q_lora_rank through a vector of that width."""
    name, heads = "attn_q", block.config.head_count
    if block.config.q_lora_rank:
        x = block.saved(block.linear("attn_q_a", x))
        x, name = block.saved(block.norm("attn_q_a_norm", x)), "attn_q_b"
    return ops.reshape(block.linear(name, x), shape=(*x.shape[:-1], heads, block.config.head_width))


def expand_latent(block: BlockBuilder, latent: Tensor) -> tuple[Tensor, Tensor]:
    """Expand narrow vectors (..., kv_lora_rank) to (unrotated parts of keys (..., H, D - R), values (..., H, V))."""
    config, lead = block.config, latent.shape[:-1]
    nope_width, value_width = config.head_width - config.rope_width, config.value_width
    if not config.has_latent_cache:
        both = block.linear("attn_kv_b", latent)
        both = ops.reshape(both, shape=(*lead, config.head_count, nope_width + value_width))
        return _cut(both, 0, nope_width), _cut(both, nope_width, value_width)
    outputs = list[Tensor]()
    for name, width in (("attn_k_b", nope_width), ("attn_v_b", value_width)):
        matrix_shape = config.head_count * width, config.kv_lora_rank
        weight, lora_weight = head_matrices(block, name)
        y = matmul_weight(config, latent, ops.reshape(weight, shape=matrix_shape))
        if lora_weight is not None:
            lora_weight = ops.reshape(lora_weight, shape=matrix_shape)
            y = ops.matmul(latent, lora_weight, y, precision=config.precision)
        outputs.append(ops.reshape(block.named(name, y), shape=(*lead, config.head_count, width)))
    return outputs[0], outputs[1]


def head_matrices(block: BlockBuilder, name: str) -> tuple[Tensor, Tensor | None]:
    """Return (W, scale * B A of its LoRA adapter, or None) for a weight with a matrix per head: (H, N, K) both.

    attn_k_b is transposed, from (H, K, N): read from its other side, it has no dropout and no calibration.
    """
    w, adapter, is_transposed = block.weight(name), block.lora_of(name), name == "attn_k_b"
    if is_transposed:
        w = ops.cont(ops.transpose(w if w.dtype == f32 else ops.cast(w)))
    if adapter is None:
        return w, None
    a, b, lora_scale, _ = adapter
    inputs = ops.cont(ops.transpose(a))
    return w, ops.scale(ops.matmul(*((inputs, b) if is_transposed else (b, inputs))), by=lora_scale)


def by_head(block: BlockBuilder, name: str, x: Tensor) -> Tensor:
    """Compute x (T, H, K) @ W.T head by head, for the weight `name` (H, N, K) with its LoRA adapter: (T, H, N)."""
    t, h, k = x.shape
    head_rows = ops.reshape(ops.cont(ops.permute(x, axes=(1, 0, 2))), shape=(h * t, k))
    head_ids = constant(
        f"{block.tensor_name(name)}.heads", np.repeat(np.arange(h, dtype=np.int32), t), i32
    )
    y = ops.routing.product(head_rows, block.weight(name), block.lora_of(name), None, head_ids)
    y = ops.reshape(block.named(name, y), shape=(h, t, y.shape[-1]))
    return ops.cont(ops.permute(y, axes=(1, 0, 2)))


def _cut(x: Tensor, start: int, length: int) -> Tensor:
    """Return a view of x: elements start … start + length - 1 of the last axis."""
    return ops.narrow(x, axis=len(x.shape) - 1, start=start, length=length)
