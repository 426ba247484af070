"""Checkpoints of models with layer norms, in Hugging Face's layout, and what they compute, in float64.

As hugging_face.py, for GPT-2, Phi-2, StarCoder 2, StableLM, Falcon, Nemotron and Command R7B. It shares no line with
packtrain.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]
GONE: Config = dict.fromkeys(("rms_norm_eps", "hidden_act"))
OLD: Config = GONE | dict.fromkeys(
    ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "intermediate_size",
     "max_position_embeddings", "rope_theta", "tie_word_embeddings"),
)  # fmt: skip
FALCON = GONE | {
    "architectures": ["FalconForCausalLM"], "intermediate_size": None, "num_key_value_heads": None,
    "max_position_embeddings": None, "layer_norm_epsilon": 1e-5, "alibi": False, "bias": False,
    "parallel_attn": True, "tie_word_embeddings": None, "activation": "gelu",
}  # fmt: skip
STABLE = GONE | {
    "architectures": ["StableLmForCausalLM"], "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25,
    "hidden_act": "silu",
}  # fmt: skip
KINDS: dict[str, Config] = {
    "phi2": GONE | {
        "architectures": ["PhiForCausalLM"], "hidden_act": "gelu_new", "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
    },
    "gpt2": OLD | {
        "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64,
        "n_inner": None, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
    },
    "starcoder2": GONE | {
        "architectures": ["Starcoder2ForCausalLM"], "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5,
        "tie_word_embeddings": True, "use_bias": True,
    },
    "stablelm": STABLE | {"use_qkv_bias": True},
    "stablelm parallel": STABLE | {"use_parallel_residual": True, "qk_layernorm": True},
    "falcon": FALCON | {"multi_query": True, "num_kv_heads": 4},
    "falcon 40b": FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "nemotron": GONE | {
        "architectures": ["NemotronForCausalLM"], "hidden_act": "relu2", "norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
    },
    "cohere2": GONE | {
        "architectures": ["Cohere2ForCausalLM"], "hidden_act": "silu", "layer_norm_eps": 1e-5,
        "num_hidden_layers": 5, "sliding_window": 4, "logit_scale": 0.25, "tie_word_embeddings": True,
    },
}  # fmt: skip
CLASSES = {config["architectures"][0] for config in KINDS.values()}


@dataclass(frozen=True)
class Layout:
    """Names of modules. `qkv` are one or three; the first norm is attention's, the second the feed-forward's."""

    embed: str
    blocks: str
    last: str
    norms: tuple[str, ...]
    qkv: tuple[str, ...]
    out: str
    up: str
    down: str
    gate: str = ""
    biased: tuple[str, ...] = ()


QKV_NAMES = tuple(f"self_attn.{part}_proj" for part in "qkv")
NORMS = ("input_layernorm", "post_attention_layernorm")
OUT, UP, DOWN, GATE = "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj", "mlp.gate_proj"
MODEL = "model.embed_tokens", "model.layers"


def layout(c: Config) -> Layout:
    kind, norms = c["architectures"][0], NORMS
    if kind == "PhiForCausalLM":
        parts = (*QKV_NAMES, "self_attn.dense", "mlp.fc1", "mlp.fc2")
        return Layout(
            *MODEL, "model.final_layernorm", NORMS[:1], QKV_NAMES, *parts[3:], biased=parts
        )
    if kind == "GPT2LMHeadModel":
        parts = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
        at = "transformer.wte", "transformer.h", "transformer.ln_f", ("ln_1", "ln_2")
        return Layout(*at, parts[:1], *parts[1:], biased=parts)
    if kind == "Starcoder2ForCausalLM":
        parts = (*QKV_NAMES, OUT, "mlp.c_fc", "mlp.c_proj")
        return Layout(*MODEL, "model.norm", NORMS, QKV_NAMES, *parts[3:], biased=parts)
    if kind == "FalconForCausalLM":
        norms = ("ln_attn", "ln_mlp") if c.get("new_decoder_architecture") else NORMS[:1]
        parts = ("self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
        at = "transformer.word_embeddings", "transformer.h", "transformer.ln_f", norms
        return Layout(*at, ("self_attention.query_key_value",), *parts)
    is_parallel = c.get("use_parallel_residual") or kind == "Cohere2ForCausalLM"
    at = *MODEL, "model.norm", NORMS[:1] if is_parallel else NORMS
    gate = "" if kind == "NemotronForCausalLM" else GATE
    return Layout(*at, QKV_NAMES, OUT, UP, DOWN, gate, QKV_NAMES if c.get("use_qkv_bias") else ())


def sizes(c: Config) -> tuple[int, int, int, int, int]:
    """Width, heads, heads of keys, width of the feed-forward, blocks."""
    width, heads = c["hidden_size"] or c["n_embd"], c["num_attention_heads"] or c["n_head"]
    kv = c["num_key_value_heads"] or c.get("num_kv_heads") or heads
    if c.get("multi_query"):
        kv = 1
    return (
        width,
        heads,
        kv,
        c["intermediate_size"] or 4 * width,
        c["num_hidden_layers"] or c["n_layer"],
    )


def shapes(c: Config) -> Shapes:
    names, (width, heads, kv, wide, blocks) = layout(c), sizes(c)
    d, order = width // heads, -1 if "n_embd" in c else 1
    rows = (width, kv * d, kv * d) if len(names.qkv) == 3 else (width + 2 * kv * d,)
    matrices = {module: (n, width)[::order] for module, n in zip(names.qkv, rows, strict=True)}
    matrices |= {names.out: (width, width)[::order], names.up: (wide, width)[::order]}
    matrices |= {names.down: (width, wide)[::order]} | (
        {names.gate: (wide, width)} if names.gate else {}
    )
    block: Shapes = {f"{module}.weight": shape for module, shape in matrices.items()}
    block |= {f"{module}.bias": matrices[module][::order][:1] for module in names.biased}
    bias = c["architectures"][0] != "Cohere2ForCausalLM"
    kinds = ("weight", "bias") if bias else ("weight",)
    block |= {f"{norm}.{kind}": (width,) for norm in names.norms for kind in kinds}
    if c.get("qk_layernorm"):
        for part, count in (("q", heads), ("k", kv)):
            block |= {f"self_attn.{part}_layernorm.norms.{n}.weight": (d,) for n in range(count)}
    tensor_shapes: Shapes = {f"{names.embed}.weight": (c["vocab_size"], width)}
    if "n_positions" in c:
        tensor_shapes["transformer.wpe.weight"] = (c["n_positions"], width)
    for i in range(blocks):
        tensor_shapes |= {f"{names.blocks}.{i}.{name}": shape for name, shape in block.items()}
    tensor_shapes |= {f"{names.last}.{kind}": (width,) for kind in kinds}
    if c["tie_word_embeddings"] is False:
        tensor_shapes["lm_head.weight"] = (c["vocab_size"], width)
        if c["architectures"][0] == "PhiForCausalLM":
            tensor_shapes["lm_head.bias"] = (c["vocab_size"],)
    return tensor_shapes


class Model:
    """A checkpoint's forward pass, one sequence without a cache."""

    def __init__(self, config: Config, tensors: Mapping[str, np.ndarray]) -> None:
        self.c, self.kind, self.names = config, config["architectures"][0], layout(config)
        self.w = {name: value.astype(np.float64) for name, value in tensors.items()}
        self.width, self.heads, self.kv, _, self.blocks = sizes(config)

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        embedding = self.w[f"{self.names.embed}.weight"]
        h = embedding[tokens]
        if "transformer.wpe.weight" in self.w:
            h = h + self.w["transformer.wpe.weight"][: len(h)]
        for i in range(self.blocks):
            h = self.block(f"{self.names.blocks}.{i}", i, h)
        y = self.norm(self.names.last, h) @ self.w.get("lm_head.weight", embedding).T
        return (y + self.w.get("lm_head.bias", 0)) * self.c.get("logit_scale", 1.0)

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        """1 + the stored weight in Nemotron."""
        u = x - x.mean(-1, keepdims=True)
        weight = self.w[f"{name}.weight"] + (self.kind == "NemotronForCausalLM")
        return u / np.sqrt((u**2).mean(-1, keepdims=True) + 1e-5) * weight + self.w.get(
            f"{name}.bias", 0
        )

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """GPT-2's matrices are (inputs, outputs)."""
        w = self.w[f"{name}.weight"]
        return x @ (w if "n_embd" in self.c else w.T) + self.w.get(f"{name}.bias", 0)

    def block(self, at: str, i: int, h: np.ndarray) -> np.ndarray:
        first, *second = (f"{at}.{norm}" for norm in self.names.norms)
        y = self.attention(at, i, self.norm(first, h))
        if not second:
            return h + y + self.feed_forward(at, self.norm(first, h))
        if self.kind == "FalconForCausalLM":
            return h + y + self.feed_forward(at, self.norm(second[0], h))
        return h + y + self.feed_forward(at, self.norm(second[0], h + y))

    def feed_forward(self, at: str, x: np.ndarray) -> np.ndarray:
        up, down = self.linear(f"{at}.{self.names.up}", x), f"{at}.{self.names.down}"
        if self.names.gate:
            gate = self.linear(f"{at}.{self.names.gate}", x)
            return self.linear(down, gate / (1 + np.exp(-gate)) * up)
        if self.kind == "NemotronForCausalLM":
            return self.linear(down, np.where(up > 0, up, 0) ** 2)
        # Falcon's gelu is exact, and this form in llama.cpp
        inner = math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)
        return self.linear(down, 0.5 * up * (1 + np.tanh(inner)))

    def attention(self, at: str, i: int, x: np.ndarray) -> np.ndarray:
        time, d = len(x), self.width // self.heads
        q, k, v = self.queries(at, x, d)
        if self.c.get("qk_layernorm"):
            for part, values in (("q", q), ("k", k)):
                for n in range(values.shape[1]):
                    values[:, n] = self.norm(
                        f"{at}.self_attn.{part}_layernorm.norms.{n}", values[:, n]
                    )
        local = self.kind == "Cohere2ForCausalLM" and (i + 1) % 4 != 0
        if "n_embd" not in self.c and (local or self.kind != "Cohere2ForCausalLM"):
            q, k = self.rotate(q), self.rotate(k)
        distance = np.arange(time)[:, None] - np.arange(time)
        hidden = (distance < 0) | (distance >= self.c["sliding_window"]) if local else distance < 0
        y = np.empty_like(q)
        for j in range(self.heads):
            group = j * self.kv // self.heads
            scores = np.where(hidden, -np.inf, q[:, j] @ k[:, group].T / math.sqrt(d))
            p = np.exp(scores - scores.max(-1, keepdims=True))
            y[:, j] = p / p.sum(-1, keepdims=True) @ v[:, group]
        return self.linear(f"{at}.{self.names.out}", y.reshape(time, -1))

    def queries(self, at: str, x: np.ndarray, d: int) -> list[np.ndarray]:
        """Queries, keys and values by heads; Falcon's stand together by groups."""
        projections = [self.linear(f"{at}.{module}", x) for module in self.names.qkv]
        if len(projections) == 3:
            return [part.reshape(len(x), -1, d) for part in projections]
        if self.kind == "FalconForCausalLM":
            groups = projections[0].reshape(len(x), self.kv, -1, d)
            parts = groups[:, :, :-2], groups[:, :, -2], groups[:, :, -1]
            return [part.reshape(len(x), -1, d) for part in parts]
        return [part.reshape(len(x), -1, d) for part in np.split(projections[0], 3, -1)]

    def rotate(self, x: np.ndarray) -> np.ndarray:
        n = int(self.c.get("partial_rotary_factor", 1.0) * x.shape[-1]) // 2
        turn = np.exp(1j * np.arange(len(x))[:, None] * 1e4 ** (-np.arange(n) / n))[:, None]
        if self.kind == "Cohere2ForCausalLM":
            pairs = (x[..., ::2] + 1j * x[..., 1::2]) * turn
            return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)
        pairs = (x[..., :n] + 1j * x[..., n : 2 * n]) * turn
        return np.concatenate([pairs.real, pairs.imag, x[..., 2 * n :]], -1)
