"""Checkpoints with gated delta nets in Hugging Face's layout, and what they compute, in float64, all tokens at once.

As hugging_face.py, for Qwen3-Next and Qwen3.5. It shares no line with packtrain.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]
DELTA = {
    "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 24,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 10, "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
}  # fmt: skip
EXPERTS = {
    "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
SECTIONS = ROPE | {"mrope_interleaved": True, "mrope_section": [1, 1, 1]}
KINDS: dict[str, Config] = {
    "qwen3next": DELTA | EXPERTS | {
        "architectures": ["Qwen3NextForCausalLM"], "rope_parameters": ROPE, "decoder_sparse_step": 1,
        "norm_topk_prob": True, "mlp_only_layers": [],
    },
    "qwen35": DELTA | {
        "architectures": ["Qwen3_5ForCausalLM"], "rope_parameters": SECTIONS, "tie_word_embeddings": True,
    },
    "qwen35moe": DELTA | EXPERTS | {
        "architectures": ["Qwen3_5MoeForCausalLM"], "rope_parameters": SECTIONS, "intermediate_size": None,
    },
}  # fmt: skip
KINDS["qwen35moe apart"] = KINDS["qwen35moe"] | {"experts": "apart"}
CLASSES = {config["architectures"][0] for config in KINDS.values()}


def joined(c: Config) -> bool:
    """Whether the inputs of delta nets are two matrices, not four."""
    return bool(c["architectures"] == ["Qwen3NextForCausalLM"])


def sizes(c: Config) -> tuple[int, int, int]:
    return c["linear_num_key_heads"], c["linear_num_value_heads"], c["linear_key_head_dim"]


def delta_shapes(c: Config) -> Shapes:
    (groups, heads, n), width = sizes(c), c["hidden_size"]
    inner, qk_width = heads * n, 2 * groups * n
    tensor_shapes: Shapes = {
        "A_log": (heads,), "dt_bias": (heads,), "norm.weight": (n,), "out_proj.weight": (width, inner),
        "conv1d.weight": (qk_width + inner, 1, c["linear_conv_kernel_dim"]),
    }  # fmt: skip
    rows = {"qkv": qk_width + inner, "z": inner, "b": heads, "a": heads}
    if joined(c):
        rows = {"qkvz": qk_width + 2 * inner, "ba": 2 * heads}
    return tensor_shapes | {
        f"in_proj_{name}.weight": (count, width) for name, count in rows.items()
    }


def shapes(c: Config) -> Shapes:
    width, d = c["hidden_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    tensor_shapes: Shapes = {"model.embed_tokens.weight": (c["vocab_size"], width)}
    for i, kind in enumerate(c["layer_types"]):
        at = f"model.layers.{i}"
        tensor_shapes[f"{at}.input_layernorm.weight"] = tensor_shapes[
            f"{at}.post_attention_layernorm.weight"
        ] = (width,)
        if kind == "full_attention":
            rows = {"q": 2 * q, "k": kv, "v": kv}
            tensor_shapes |= {
                f"{at}.self_attn.{x}_proj.weight": (n, width) for x, n in rows.items()
            }
            tensor_shapes |= {f"{at}.self_attn.{x}_norm.weight": (d,) for x in "qk"}
            tensor_shapes[f"{at}.self_attn.o_proj.weight"] = (width, q)
        else:
            tensor_shapes |= {f"{at}.linear_attn.{name}": s for name, s in delta_shapes(c).items()}
        tensor_shapes |= {f"{at}.mlp.{name}": shape for name, shape in feed_shapes(c).items()}
    tensor_shapes["model.norm.weight"] = (width,)
    return tensor_shapes | (
        {} if c["tie_word_embeddings"] else {"lm_head.weight": (c["vocab_size"], width)}
    )


def feed_shapes(c: Config) -> Shapes:
    width, f = c["hidden_size"], c["intermediate_size"]

    def gated(at: str, f: int) -> Shapes:
        gate_up = {f"{at}{x}_proj.weight": (f, width) for x in ("gate", "up")}
        return {**gate_up, f"{at}down_proj.weight": (width, f)}

    if "num_experts" not in c:
        return gated("", f)
    count, f = c["num_experts"], c["moe_intermediate_size"]
    tensor_shapes: Shapes = {"gate.weight": (count, width), "shared_expert_gate.weight": (1, width)}
    tensor_shapes |= gated("shared_expert.", c["shared_expert_intermediate_size"])
    if joined(c) or "experts" in c:
        for e in range(count):
            tensor_shapes |= gated(f"experts.{e}.", f)
        return tensor_shapes
    stacked = {"gate_up_proj": (count, 2 * f, width), "down_proj": (count, width, f)}
    return tensor_shapes | {f"experts.{name}": shape for name, shape in stacked.items()}


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class Model:
    """A checkpoint's forward pass, one sequence without a cache."""

    def __init__(self, config: Config, tensors: Mapping[str, np.ndarray]) -> None:
        self.c = config
        self.w = {name: value.astype(np.float64) for name, value in tensors.items()}

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        embedding = self.w["model.embed_tokens.weight"]
        h = embedding[tokens]
        for i, kind in enumerate(self.c["layer_types"]):
            at = f"model.layers.{i}"
            mixed = self.attention if kind == "full_attention" else self.delta
            h = h + mixed(at, self.norm(f"{at}.input_layernorm", h))
            h = h + self.feed_forward(f"{at}.mlp", self.norm(f"{at}.post_attention_layernorm", h))
        return self.norm("model.norm", h) @ self.w.get("lm_head.weight", embedding).T

    def norm(self, name: str, x: np.ndarray, offset: float = 1.0) -> np.ndarray:
        return (
            x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (offset + self.w[f"{name}.weight"])
        )

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.w[f"{name}.weight"].T

    def inputs(self, at: str, x: np.ndarray) -> tuple[np.ndarray, ...]:
        """What is convolved, the gate, and b and a of each head."""
        groups, heads, n = sizes(self.c)
        time = len(x)
        if not joined(self.c):
            return tuple(self.linear(f"{at}.in_proj_{name}", x) for name in ("qkv", "z", "b", "a"))
        heads_per_group = heads // groups
        parts = self.linear(f"{at}.in_proj_qkvz", x).reshape(time, groups, -1)
        q, k, v, z = np.split(parts, np.cumsum([n, n, heads_per_group * n]), axis=-1)
        b, a = np.split(self.linear(f"{at}.in_proj_ba", x).reshape(time, groups, -1), 2, axis=-1)
        qkv = np.concatenate([part.reshape(time, -1) for part in (q, k, v)], axis=-1)
        return (qkv, *(part.reshape(time, -1) for part in (z, b, a)))

    def delta(self, at: str, x: np.ndarray) -> np.ndarray:
        """What tokens add to the state solves a triangular system."""
        at, (groups, heads, n), time = f"{at}.linear_attn", sizes(self.c), len(x)
        x, z, b, a = self.inputs(at, x)
        filters = self.w[f"{at}.conv1d.weight"][:, 0]
        taps = filters.shape[1]
        padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
        x = np.stack([(padded[t : t + taps].T * filters).sum(1) for t in range(time)])
        parts = np.split(x * sigmoid(x), [groups * n, 2 * groups * n], axis=-1)
        q, k, v = (part.reshape(time, -1, n) for part in parts)
        q, k = (y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
        q, k = (np.repeat(y, heads // groups, axis=1) for y in (q, k))
        steps = np.log1p(np.exp(a + self.w[f"{at}.dt_bias"]))
        total, beta = np.cumsum(-steps * np.exp(self.w[f"{at}.A_log"]), axis=0), sigmoid(b)
        y = np.empty_like(v)
        for h in range(heads):
            since = np.exp(np.minimum(total[:, None, h] - total[None, :, h], 0)) * np.tri(time)
            system = np.tril(k[:, h] @ k[:, h].T * since * beta[:, h, None], -1) + np.eye(time)
            added = np.linalg.solve(system, beta[:, h, None] * v[:, h])
            y[:, h] = (q[:, h] @ k[:, h].T * since) @ added / np.sqrt(n)
        y = self.norm(f"{at}.norm", y, 0.0).reshape(time, -1) * z * sigmoid(z)
        return self.linear(f"{at}.out_proj", y)

    def attention(self, at: str, x: np.ndarray) -> np.ndarray:
        c, at, time = self.c, f"{at}.self_attn", len(x)
        d, heads = c["head_dim"], c["num_attention_heads"]
        q_gate = self.linear(f"{at}.q_proj", x).reshape(time, heads, 2 * d)
        q, gate = q_gate[..., :d], q_gate[..., d:]
        k, v = (self.linear(f"{at}.{name}_proj", x).reshape(time, -1, d) for name in "kv")
        q, k = (self.rotate(self.norm(f"{at}.{n}_norm", y)) for n, y in (("q", q), ("k", k)))
        y = np.zeros_like(q)
        for head in range(heads):
            group = head * k.shape[1] // heads
            scores = q[:, head] @ k[:, group].T / np.sqrt(d)
            e = np.exp(scores - scores.max()) * np.tri(time)
            y[:, head] = e / e.sum(-1, keepdims=True) @ v[:, group]
        return self.linear(f"{at}.o_proj", (y * sigmoid(gate)).reshape(time, -1))

    def rotate(self, x: np.ndarray) -> np.ndarray:
        """The first quarter of each head (T, H, D), in pairs half of that apart."""
        half = int(x.shape[-1] * 0.25) // 2
        angle = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(half) / half)
        pairs = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * angle)[:, None]
        return np.concatenate([pairs.real, pairs.imag, x[..., 2 * half :]], axis=-1)

    def feed_forward(self, at: str, x: np.ndarray) -> np.ndarray:
        if f"{at}.gate.weight" not in self.w:
            return self.gated(f"{at}.", x)
        share = sigmoid(self.linear(f"{at}.shared_expert_gate", x))
        y = self.gated(f"{at}.shared_expert.", x) * share
        p = np.exp(self.linear(f"{at}.gate", x))
        for t in range(len(x)):
            chosen = np.argsort(-p[t])[: self.c["num_experts_per_tok"]]
            for e in chosen:
                y[t] += p[t, e] / p[t, chosen].sum() * self.expert(at, e, x[t])
        return y

    def expert(self, at: str, e: int, x: np.ndarray) -> np.ndarray:
        if f"{at}.experts.{e}.up_proj.weight" in self.w:
            return self.gated(f"{at}.experts.{e}.", x)
        gate, up = np.split(self.w[f"{at}.experts.gate_up_proj"][e] @ x, 2)
        output: np.ndarray = self.w[f"{at}.experts.down_proj"][e] @ (gate * sigmoid(gate) * up)
        return output

    def gated(self, at: str, x: np.ndarray) -> np.ndarray:
        gate = self.linear(f"{at}gate_proj", x)
        return self.linear(f"{at}down_proj", gate * sigmoid(gate) * self.linear(f"{at}up_proj", x))
