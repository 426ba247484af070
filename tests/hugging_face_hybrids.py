"""Checkpoints of hybrids in Hugging Face's layout, and what they compute, in float64, token by token.

As hugging_face.py, for LFM2, Granite 4 and Falcon-H1. It shares no line with packtrain.
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
SCAN = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_d_conv": 4,
    "mamba_d_head": "auto",
}
GRANITE = SCAN | {
    "architectures": ["GraniteMoeHybridForCausalLM"], "tie_word_embeddings": True, "embedding_multiplier": 3.0,
    "attention_multiplier": 0.1, "residual_multiplier": 0.4, "logits_scaling": 2.0, "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"], "mamba_expand": 2, "position_embedding_type": "nope",
    "shared_intermediate_size": 56, "mamba_conv_bias": True, "mamba_proj_bias": False, "norm_eps": 1e-5,
}  # fmt: skip
ATTEND = {"layer_types": ["attention"] * 3, "position_embedding_type": "rope"}
KINDS: dict[str, Config] = {
    "granitehybrid": GRANITE | {"num_local_experts": 0, "num_experts_per_tok": 0},
    "granitehybrid experts": GRANITE | {"num_local_experts": 5, "num_experts_per_tok": 3},
    "granite all attend": GRANITE | ATTEND | {"num_local_experts": 0, "num_experts_per_tok": 0},
    "granitemoe all attend": GRANITE | ATTEND | {"num_local_experts": 5, "num_experts_per_tok": 3},
    "falcon-h1": SCAN | {
        "architectures": ["FalconH1ForCausalLM"], "head_dim": 24, "mamba_d_ssm": 48, "mamba_rms_norm": False,
        "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.7,
        "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.6, "mlp_multipliers": [0.9, 1.1], "ssm_multipliers": [0.5, 1.5, 0.8, 1.1, 0.9],
    },
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


def inner(c: Config) -> int:
    return int(c.get("mamba_d_ssm", 2 * c["hidden_size"]))


def scan_shapes(c: Config) -> Shapes:
    wide, heads = inner(c) + 2 * c["mamba_n_groups"] * c["mamba_d_state"], c["mamba_n_heads"]
    tensor_shapes: Shapes = {f"mamba.{name}": (heads,) for name in ("A_log", "D", "dt_bias")}
    tensor_shapes |= {
        "mamba.conv1d.weight": (wide, 1, c["mamba_d_conv"]),
        "mamba.conv1d.bias": (wide,),
    }
    tensor_shapes["mamba.in_proj.weight"] = (inner(c) + wide + heads, c["hidden_size"])
    tensor_shapes["mamba.out_proj.weight"] = (c["hidden_size"], inner(c))
    return tensor_shapes | ({} if "mamba_d_ssm" in c else {"mamba.norm.weight": (inner(c),)})


def mamba_shapes(c: Config) -> Shapes:
    """Of a Granite or a Falcon-H1."""
    width, falcon = c["hidden_size"], "mamba_d_ssm" in c
    d = c.get("head_dim", width // c["num_attention_heads"])
    tensor_shapes: Shapes = {"model.embed_tokens.weight": (c["vocab_size"], width)}
    for i in range(c["num_hidden_layers"]):
        block = scan_shapes(c) if falcon or c["layer_types"][i] == "mamba" else {}
        if falcon or not block:
            for name, heads in (("q", "attention"), ("k", "key_value"), ("v", "key_value")):
                block[f"self_attn.{name}_proj.weight"] = (c[f"num_{heads}_heads"] * d, width)
            block["self_attn.o_proj.weight"] = (width, c["num_attention_heads"] * d)
        block["input_layernorm.weight"] = (width,)
        if falcon:
            f = c["intermediate_size"]
            block |= {
                "pre_ff_layernorm.weight": (width,),
                "feed_forward.down_proj.weight": (width, f),
            }
            block |= {f"feed_forward.{x}_proj.weight": (f, width) for x in ("gate", "up")}
        else:
            f, e = c["shared_intermediate_size"], c["num_local_experts"]
            block |= {
                "post_attention_layernorm.weight": (width,),
                "shared_mlp.output_linear.weight": (width, f),
            }
            block["shared_mlp.input_linear.weight"] = (2 * f, width)
            if e:
                f = c["intermediate_size"]
                block["block_sparse_moe.router.layer.weight"] = (e, width)
                block["block_sparse_moe.input_linear.weight"] = (e, 2 * f, width)
                block["block_sparse_moe.output_linear.weight"] = (e, width, f)
        tensor_shapes |= {f"model.layers.{i}.{name}": shape for name, shape in block.items()}
    if falcon:
        tensor_shapes["lm_head.weight"] = (c["vocab_size"], width)
    return tensor_shapes | {f"model.{'final_layernorm' if falcon else 'norm'}.weight": (width,)}


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
    if "mamba_n_heads" in c:
        return mamba_shapes(c)
    width, heads = c["hidden_size"], c["num_attention_heads"]
    d = width // heads
    kv = c["num_key_value_heads"] * d
    tensor_shapes: Shapes = {"model.embed_tokens.weight": (c["vocab_size"], width)}
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
            tensor_shapes[f"model.layers.{i}.feed_forward.expert_bias"] = (c["num_experts"],)
            f = c["moe_intermediate_size"]
            places = {f"feed_forward.experts.{e}": f for e in range(c["num_experts"])}
        for at, f in places.items():
            block |= {f"{at}.w1": (f, width), f"{at}.w2": (width, f), f"{at}.w3": (f, width)}
        tensor_shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in block.items()}
    tensor_shapes["model.embedding_norm.weight"] = (width,)
    return tensor_shapes


class Model:
    """A checkpoint's forward pass, one sequence without a cache."""

    def __init__(self, config: Config, tensors: Mapping[str, np.ndarray]) -> None:
        self.c = config
        self.w = {name: value.astype(np.float64) for name, value in tensors.items()}

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        if "mamba_d_ssm" in self.c:
            return self.falcon(tokens)
        if "mamba_n_heads" in self.c:
            return self.granite(tokens)
        embedding = self.w["model.embed_tokens.weight"]
        h = embedding[tokens]
        for i in range(self.c["num_hidden_layers"]):
            at = f"model.layers.{i}"
            x = self.norm(f"{at}.operator_norm", h)
            h = h + (self.attention(at, x) if attends(self.c, i) else self.conv(f"{at}.conv", x))
            h = h + self.feed_forward(f"{at}.feed_forward", self.norm(f"{at}.ffn_norm", h))
        return self.norm("model.embedding_norm", h) @ embedding.T

    def granite(self, tokens: np.ndarray) -> np.ndarray:
        c, embedding = self.c, self.w["model.embed_tokens.weight"]
        h, by = embedding[tokens] * c["embedding_multiplier"], c["residual_multiplier"]
        for i, kind in enumerate(c["layer_types"]):
            at = f"model.layers.{i}"
            x = self.norm(f"{at}.input_layernorm", h)
            h = h + by * (self.scan(at, x) if kind == "mamba" else self.attention(at, x))
            x = self.norm(f"{at}.post_attention_layernorm", h)
            up, down = (self.w[f"{at}.shared_mlp.{n}_linear.weight"] for n in ("input", "output"))
            y = halves(x, up, down)
            if c["num_local_experts"]:
                z = self.linear(f"{at}.block_sparse_moe.router.layer", x)
                up, down = (
                    self.w[f"{at}.block_sparse_moe.{n}_linear.weight"] for n in ("input", "output")
                )
                for t in range(len(x)):
                    chosen = np.argsort(-z[t])[: c["num_experts_per_tok"]]
                    share = np.exp(z[t, chosen]) / np.exp(z[t, chosen]).sum()
                    y[t] += sum(
                        s * halves(x[t], up[e], down[e]) for s, e in zip(share, chosen, strict=True)
                    )
            h = h + by * y
        return self.norm("model.norm", h) @ embedding.T / c["logits_scaling"]

    def falcon(self, tokens: np.ndarray) -> np.ndarray:
        c = self.c
        h = self.w["model.embed_tokens.weight"][tokens] * c["embedding_multiplier"]
        for i in range(c["num_hidden_layers"]):
            at = f"model.layers.{i}"
            x = self.norm(f"{at}.input_layernorm", h)
            y = self.attention(at, x * c["attention_in_multiplier"]) * c["attention_out_multiplier"]
            h = h + y + self.scan(at, x * c["ssm_in_multiplier"]) * c["ssm_out_multiplier"]
            x, at = self.norm(f"{at}.pre_ff_layernorm", h), f"{at}.feed_forward"
            gate = self.linear(f"{at}.gate_proj", x) * c["mlp_multipliers"][0]
            y = gate / (1 + np.exp(-gate)) * self.linear(f"{at}.up_proj", x)
            h = h + self.linear(f"{at}.down_proj", y) * c["mlp_multipliers"][1]
        return (
            self.norm("model.final_layernorm", h)
            @ self.w["lm_head.weight"].T
            * c["lm_head_multiplier"]
        )

    def scan(self, at: str, x: np.ndarray) -> np.ndarray:
        """Mamba-2, as products with the matrix of all decays from one token to another."""
        c, time = self.c, len(x)
        wide, n, groups, heads = (
            inner(c),
            c["mamba_d_state"],
            c["mamba_n_groups"],
            c["mamba_n_heads"],
        )
        sizes = (wide, wide, groups * n, groups * n, heads)
        by = np.repeat(c.get("ssm_multipliers", [1.0] * 5), sizes)
        z, x, steps = np.split(
            self.linear(f"{at}.mamba.in_proj", x) * by, [wide, sum(sizes[:4])], axis=-1
        )
        filters = self.w[f"{at}.mamba.conv1d.weight"][:, 0]
        taps = filters.shape[1]
        padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
        x = np.stack([(padded[t : t + taps].T * filters).sum(1) for t in range(time)])
        x = x + self.w[f"{at}.mamba.conv1d.bias"]
        x = x / (1 + np.exp(-x))
        values, b, k = np.split(x, [wide, wide + groups * n], axis=-1)
        b, k = (
            np.repeat(part.reshape(time, groups, n), heads // groups, axis=1) for part in (b, k)
        )
        values = values.reshape(time, heads, -1)
        delta = np.log1p(np.exp(steps + self.w[f"{at}.mamba.dt_bias"]))
        total = np.cumsum(-delta * np.exp(self.w[f"{at}.mamba.A_log"]), axis=0)
        since = np.where(np.tri(time)[..., None] > 0, np.exp(total[:, None] - total[None]), 0)
        seen = since * np.einsum("thn,shn->tsh", k, b) * delta[None]
        y = np.einsum("tsh,shp->thp", seen, values) + self.w[f"{at}.mamba.D"][:, None] * values
        y = y.reshape(time, -1) * z / (1 + np.exp(-z))
        if f"{at}.mamba.norm.weight" in self.w:
            y = y.reshape(time, groups, -1)
            y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5)
            y = y.reshape(time, -1) * self.w[f"{at}.mamba.norm.weight"]
        return self.linear(f"{at}.mamba.out_proj", y)

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
        heads = c["num_attention_heads"]
        d = c.get("head_dim", c["hidden_size"] // heads)
        q, k, v = (self.linear(f"{at}.self_attn.{n}_proj", x).reshape(time, -1, d) for n in "qkv")
        k = k * c.get("key_multiplier", 1.0)
        if "conv_L_cache" in c:
            q, k = (self.norm(f"{at}.self_attn.{n}_layernorm", y) for n, y in (("q", q), ("k", k)))
        angle = np.arange(time)[:, None] * c["rope_theta"] ** (-np.arange(d // 2) / (d // 2))
        if c.get("position_embedding_type", "rope") == "rope":
            q, k = (rotate_halves(y, angle) for y in (q, k))
        y = np.zeros((time, heads, d))
        for head in range(heads):
            group = head * k.shape[1] // heads
            for t in range(time):
                scores = k[: t + 1, group] @ q[t, head] * c.get("attention_multiplier", d**-0.5)
                e = np.exp(scores - scores.max())
                y[t, head] = e / e.sum() @ v[: t + 1, group]
        out = "out_proj" if "conv_L_cache" in c else "o_proj"
        return self.linear(f"{at}.self_attn.{out}", y.reshape(time, -1))

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


def halves(x: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    gate, value = np.split(x @ up.T, 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * value @ down.T


def rotate_halves(x: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Heads (T, H, D) rotated: the pairs (i, i + D / 2)."""
    half = x.shape[-1] // 2
    pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
    return np.concatenate([pairs.real, pairs.imag], axis=-1)
