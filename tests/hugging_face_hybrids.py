"""Checkpoints of hybrids in Hugging Face's layout, and what they compute, in float64, token by token.

As hugging_face.py, for LFM2. It shares no line with packtrain.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]
LFM2 = {
    "conv_L_cache": 3, "conv_bias": False, "norm_eps": 1e-5, "rms_norm_eps": None, "hidden_act": None,
    "tie_word_embeddings": True, "num_hidden_layers": 3,
}  # fmt: skip
KINDS: dict[str, Config] = {
    "lfm2": LFM2 | {
        "architectures": ["Lfm2ForCausalLM"], "full_attn_idxs": [1], "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.5, "block_multiple_of": 16,
    },
    "lfm2moe": LFM2 | {
        "architectures": ["Lfm2MoeForCausalLM"], "layer_types": ["conv", "full_attention", "conv"], "num_experts": 5,
        "num_experts_per_tok": 3, "moe_intermediate_size": 40, "num_dense_layers": 1, "use_expert_bias": True,
        "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    },
}  # fmt: skip
CLASSES = {config["architectures"][0] for config in KINDS.values()}


def attends(c: Config, i: int) -> bool:
    return i in c["full_attn_idxs"] if "full_attn_idxs" in c else c["layer_types"][i] != "conv"


def wide(c: Config) -> int:
    """Of the feed-forward: two thirds of what the config says, rounded up."""
    if "block_multiple_of" not in c:
        return int(c["intermediate_size"])
    part = c["block_multiple_of"]
    width = int(c["block_ffn_dim_multiplier"] * int(2 * c["intermediate_size"] / 3))
    return part * ((width + part - 1) // part)


def shapes(c: Config) -> Shapes:
    width, heads = c["hidden_size"], c["num_attention_heads"]
    d = width // heads
    kv = c["num_key_value_heads"] * d
    made: Shapes = {"model.embed_tokens.weight": (c["vocab_size"], width)}
    for i in range(c["num_hidden_layers"]):
        block: Shapes = {"operator_norm": (width,), "ffn_norm": (width,)}
        if attends(c, i):
            block |= {"self_attn.q_proj": (width, width), "self_attn.out_proj": (width, width)}
            block |= {f"self_attn.{x}_proj": (kv, width) for x in "kv"}
            block |= {f"self_attn.{x}_layernorm": (d,) for x in "qk"}
        else:
            block |= {"conv.conv": (width, 1, c["conv_L_cache"])}
            block |= {"conv.in_proj": (3 * width, width), "conv.out_proj": (width, width)}
        mixture = "num_experts" in c and i >= c["num_dense_layers"]
        places = {"feed_forward": wide(c)}
        if mixture:
            block["feed_forward.gate"] = (c["num_experts"], width)
            made[f"model.layers.{i}.feed_forward.expert_bias"] = (c["num_experts"],)
            f = c["moe_intermediate_size"]
            places = {f"feed_forward.experts.{e}": f for e in range(c["num_experts"])}
        for at, f in places.items():
            block |= {f"{at}.w1": (f, width), f"{at}.w2": (width, f), f"{at}.w3": (f, width)}
        made |= {f"model.layers.{i}.{name}.weight": shape for name, shape in block.items()}
    made["model.embedding_norm.weight"] = (width,)
    return made


class Model:
    """A checkpoint's forward pass, one sequence without a cache."""

    def __init__(self, config: Config, tensors: Mapping[str, np.ndarray]) -> None:
        self.c = config
        self.w = {name: value.astype(np.float64) for name, value in tensors.items()}

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        embedding = self.w["model.embed_tokens.weight"]
        h = embedding[tokens]
        for i in range(self.c["num_hidden_layers"]):
            at = f"model.layers.{i}"
            x = self.norm(f"{at}.operator_norm", h)
            h = h + (self.attention(at, x) if attends(self.c, i) else self.conv(f"{at}.conv", x))
            h = h + self.feed_forward(f"{at}.feed_forward", self.norm(f"{at}.ffn_norm", h))
        return self.norm("model.embedding_norm", h) @ embedding.T

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * self.w[f"{name}.weight"]

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.w[f"{name}.weight"].T

    def conv(self, at: str, x: np.ndarray) -> np.ndarray:
        before, after, x = np.split(self.linear(f"{at}.in_proj", x), 3, axis=-1)
        filters = self.w[f"{at}.conv.weight"][:, 0]
        taps = filters.shape[1]
        padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), before * x])
        y = np.stack([(padded[t : t + taps].T * filters).sum(1) for t in range(len(x))])
        return self.linear(f"{at}.out_proj", after * y)

    def attention(self, at: str, x: np.ndarray) -> np.ndarray:
        c, time = self.c, len(x)
        heads, d = c["num_attention_heads"], c["hidden_size"] // c["num_attention_heads"]
        q, k, v = (self.linear(f"{at}.self_attn.{n}_proj", x).reshape(time, -1, d) for n in "qkv")
        q, k = (self.norm(f"{at}.self_attn.{n}_layernorm", y) for n, y in (("q", q), ("k", k)))
        angle = np.arange(time)[:, None] * c["rope_theta"] ** (-np.arange(d // 2) / (d // 2))
        q, k = (turned(y, angle) for y in (q, k))
        y = np.zeros((time, heads, d))
        for head in range(heads):
            group = head * k.shape[1] // heads
            for t in range(time):
                scores = k[: t + 1, group] @ q[t, head] / np.sqrt(d)
                e = np.exp(scores - scores.max())
                y[t, head] = e / e.sum() @ v[: t + 1, group]
        return self.linear(f"{at}.self_attn.out_proj", y.reshape(time, -1))

    def gated(self, at: str, x: np.ndarray) -> np.ndarray:
        gate = self.linear(f"{at}.w1", x)
        return self.linear(f"{at}.w2", gate / (1 + np.exp(-gate)) * self.linear(f"{at}.w3", x))

    def feed_forward(self, at: str, x: np.ndarray) -> np.ndarray:
        if f"{at}.gate.weight" not in self.w:
            return self.gated(at, x)
        p = 1 / (1 + np.exp(-self.linear(f"{at}.gate", x)))
        better, y = p + self.w[f"{at}.expert_bias"], np.zeros_like(x)
        for t in range(len(x)):
            chosen = np.argsort(-better[t])[: self.c["num_experts_per_tok"]]
            for e in chosen:
                y[t] += p[t, e] / p[t, chosen].sum() * self.gated(f"{at}.experts.{e}", x[t])
        return y


def turned(x: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Heads (T, H, D) rotated: the pairs (i, i + D / 2)."""
    half = x.shape[-1] // 2
    pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
    return np.concatenate([pairs.real, pairs.imag], axis=-1)
