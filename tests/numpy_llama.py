"""A llama's forward pass in float64, written from the architecture's description: it shares no line with packtrain.ops.

Touvron et al. 2023, arXiv 2302.13971; interleaved rotary pairs as llama.cpp has them.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

PARTS = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up",
         "ffn_down")  # fmt: skip


def logits(config: Any, weights: Mapping[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Logits (T, V) of one sequence of tokens (T,)."""
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    h = w["token_embd.weight"][tokens]
    for i in range(config.block_count):
        part = {name: w[f"blk.{i}.{name}.weight"] for name in PARTS}
        h = h + attention(config, part, normed(h, part["attn_norm"], config.rms_eps))
        x = normed(h, part["ffn_norm"], config.rms_eps)
        gate, up = x @ part["ffn_gate"].T, x @ part["ffn_up"].T
        h = h + (gate / (1 + np.exp(-gate)) * up) @ part["ffn_down"].T
    x = normed(h, w["output_norm.weight"], config.rms_eps)
    return x @ w.get("output.weight", w["token_embd.weight"]).T


def normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def attention(config: Any, part: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    time, width = x.shape
    head = width // config.head_count
    q = turned((x @ part["attn_q"].T).reshape(time, config.head_count, head), config.rope_freq_base)
    k = turned(
        (x @ part["attn_k"].T).reshape(time, config.head_count_kv, head), config.rope_freq_base
    )
    v = (x @ part["attn_v"].T).reshape(time, config.head_count_kv, head)
    future = np.triu(np.ones((time, time), bool), 1)
    y = np.empty_like(q)
    for i in range(config.head_count):
        j = i * config.head_count_kv // config.head_count
        scores = np.where(future, -np.inf, q[:, i] @ k[:, j].T / np.sqrt(head))
        likely = np.exp(scores - scores.max(axis=-1, keepdims=True))
        y[:, i] = likely / likely.sum(axis=-1, keepdims=True) @ v[:, j]
    return y.reshape(time, width) @ part["attn_output"].T


def turned(x: np.ndarray, base: float) -> np.ndarray:
    """Rotate the pairs (2i, 2i + 1) of x (T, heads, D) by position * base**(-2i / D)."""
    time, _, head = x.shape
    angle = np.arange(time)[:, None] * base ** (-np.arange(0, head, 2) / head)
    pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)[:, None]
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)


def losses(config: Any, weights: Mapping[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Negative log-likelihoods (T,) of ids[1:], each after those before it; ids (T + 1,)."""
    found = logits(config, weights, ids[:-1])
    top = found.max(axis=-1, keepdims=True)
    total = np.log(np.exp(found - top).sum(axis=-1)) + top[:, 0]
    return total - np.take_along_axis(found, ids[1:, None], axis=1)[:, 0]
