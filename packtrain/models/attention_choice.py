"""Chooses a run's attention: one flash op, if a backend has it, or products and a softmax."""

from collections.abc import Callable
from dataclasses import replace

from packtrain.common.errors import InputError
from packtrain.dtypes import Dtype, f32, i32
from packtrain.engine import ops
from packtrain.engine.backends import Backend, Target
from packtrain.engine.tensor import Tensor, input, state
from packtrain.models.config import Config

AUTO, ON, OFF = FLASH_MODES = "auto", "on", "off"
FLASH_HELP = (
    "attention as one operation (on), or written out as products and a softmax, which needs memory for all pairs (off);"
    " auto: on where the device of keys and values has it"
)


def with_flash(
    config: Config, mode: str, target: Target, report: Callable[[str], None], cache: Dtype | None
) -> Config:
    """Return config with `flash` by `mode` (--flash-attn) and backends; `cache`: type of the KV cache, None without."""
    missing_ops = "" if mode == OFF else missing_attention_ops(config, target, cache)
    if missing_ops and mode == ON:
        raise InputError(f"--flash-attn on: {missing_ops}")
    if missing_ops or mode == OFF:
        report(f"attention is written out: {missing_ops or '--flash-attn off'}")
    return replace(config, flash=not (missing_ops or mode == OFF))


def missing_attention_ops(config: Config, target: Target, cache: Dtype | None) -> str:
    """Name an attention op that the backends of keys and values lack; "" if they have all. `cache` as in with_flash."""
    for y in attention_calls(config, cache):
        call = y.call
        for backend in kv_backends(config, target, cache):
            if call is not None and backend.kernel(call.op, call.inputs) is None:
                operands = ", ".join(str(t.spec) for t in call.inputs[:3] if t is not None)
                return f"{backend.name} has no {call.op.name} of {operands}"
    return ""


def kv_backends(config: Config, target: Target, cache: Dtype | None) -> list[Backend]:
    """Return the backends that hold keys and values, where attention must run; `cache` as in with_flash."""
    if cache is None:
        return [target.backends[0]]
    cache_leaves = (state(f"cache.k.{i}", (1,), role="cache") for i in range(config.block_count))
    return list({(b.name, b.space): b for b in map(target.home, cache_leaves)}.values())


def attention_calls(config: Config, cache: Dtype | None) -> list[Tensor]:
    """Return attention calls of one query and one key, to ask backends for kernels; nothing is allocated."""
    heads, kv, d = config.head_count, config.kv_heads_of(0), config.width_of(0)
    index = input("one", (1,), i32)
    sinks = input("sinks", (heads,)) if config.traits.attention_sinks else None
    if cache is not None:
        kv, d = config.cached_heads(0)
        q, order = input("q", (1, heads, d)), input("order", (1, 1), i32)
        k, v = (state(name, (1, kv, d), cache) for name in "kv")
        return [ops.attention_cells(q, k, v, index, index, order, index, index, sinks, scale=1.0)]
    q, k, v = (input(n, (1, 1, count, d), f32) for n, count in (("q", heads), ("k", kv), ("v", kv)))
    y, lse = ops.attention(q, k, v, None, None, None, None, None, sinks, scale=1.0)
    return [y, ops.attention_back(q, y, lse, q, k, v, scale=1.0)[0]]
