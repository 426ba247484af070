"""Feed-forwards of checkpoints with experts in Hugging Face's layout, in float64.

Those of Qwen2 MoE, ERNIE 4.5, GLM-4.5, Granite and gpt-oss.

The other parts of these models are in hugging_face.py. It shares no line with packtrain.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

Config = dict[str, Any]
Linear = Callable[[str, np.ndarray], np.ndarray]
KINDS: dict[str, Config] = {
    "qwen2moe": {
        "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 5, "num_experts_per_tok": 3,
        "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56, "norm_topk_prob": False,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "ernie4_5-moe": {
        "architectures": ["Ernie4_5_MoeForCausalLM"], "head_dim": 24, "use_bias": False,
        "tie_word_embeddings": True, "moe_num_experts": 5, "moe_k": 3, "moe_intermediate_size": 40,
        "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_interval": 1, "num_hidden_layers": 3,
    },
    "glm4moe": {
        "architectures": ["Glm4MoeForCausalLM"], "head_dim": 24, "partial_rotary_factor": 0.5,
        "attention_bias": True, "attention_out_bias": False, "use_qk_norm": True, "n_routed_experts": 5,
        "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
        "num_nextn_predict_layers": 1, "num_hidden_layers": 3,
    },
    "granitemoe": {
        "architectures": ["GraniteMoeSharedForCausalLM"], "num_local_experts": 5, "num_experts_per_tok": 3,
        "shared_intermediate_size": 56, "embedding_multiplier": 3.0, "attention_multiplier": 0.1,
        "residual_multiplier": 0.4, "logits_scaling": 2.0, "tie_word_embeddings": True,
    },
    "deepseek2": {
        "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
        "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 20,
        "q_lora_rank": 40, "kv_lora_rank": 32, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
        "topk_group": 2, "moe_intermediate_size": 40, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "num_hidden_layers": 3, "norm_topk_prob": True, "routed_scaling_factor": 1.5, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "rope_scaling": {
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 1.0,
            "mscale": 0.7, "mscale_all_dim": 0.7,
        },
    },
    "deepseek2 lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
        "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 20,
        "q_lora_rank": None, "kv_lora_rank": 32, "n_routed_experts": 5, "num_experts_per_tok": 3, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 40, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "num_hidden_layers": 2, "norm_topk_prob": False, "routed_scaling_factor": 1.5, "scoring_func": "softmax",
        "topk_method": "greedy",
    },
    "llama4": {
        "architectures": ["Llama4ForCausalLM"], "head_dim": 24, "intermediate_size": 40, "intermediate_size_mlp": 96,
        "num_local_experts": 5, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "num_hidden_layers": 5,
        "use_qk_norm": True, "no_rope_layers": [1, 1, 1, 0, 1],
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"], "head_dim": 24, "attention_bias": True, "num_local_experts": 5,
        "num_experts_per_tok": 3, "sliding_window": 4, "num_hidden_layers": 3, "swiglu_limit": 7.0,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    },
}  # fmt: skip
CLASSES = {config["architectures"][0] for config in KINDS.values()}
PARTS = ("gate_proj", "up_proj", "down_proj")


def count(c: Config) -> int:
    return int(c.get("num_experts") or c.get("moe_num_experts") or c["n_routed_experts"])


def dense(c: Config, i: int) -> bool:
    return i < c.get("moe_layer_start_index", c.get("first_k_dense_replace", 0))


def offsets(c: Config) -> str:
    """What is added to choose experts."""
    if c["architectures"][0] in ("Qwen2MoeForCausalLM", "DeepseekV2ForCausalLM"):
        return ""
    ernie = c["architectures"][0].startswith("Ernie")
    return (
        "mlp.moe_statics.e_score_correction_bias" if ernie else "mlp.gate.e_score_correction_bias"
    )


def shapes(c: Config, i: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a block's feed-forward."""
    if "swiglu_limit" in c:
        return gpt_oss_shapes(c)
    if c["architectures"][0].startswith("Granite"):
        return granite_shapes(c)
    if "intermediate_size_mlp" in c:
        return llama4_shapes(c, i)
    width, f = c["hidden_size"], c["moe_intermediate_size"]
    ffn_widths = {"mlp": c["intermediate_size"]}
    if not dense(c, i):
        num_shared = c.get("moe_num_shared_experts", c.get("n_shared_experts", 1))
        shared_name = "shared_expert" if "num_experts" in c else "shared_experts"
        ffn_widths = {
            f"mlp.{shared_name}": c.get("shared_expert_intermediate_size", num_shared * f)
        }
        ffn_widths |= {f"mlp.experts.{e}": f for e in range(count(c))}
    tensor_shapes: dict[str, tuple[int, ...]] = {}
    for at, n in ffn_widths.items():
        tensor_shapes |= {f"{at}.{part}.weight": (n, width) for part in PARTS[:2]}
        tensor_shapes[f"{at}.{PARTS[2]}.weight"] = (width, n)
    if dense(c, i):
        return tensor_shapes
    tensor_shapes["mlp.gate.weight"] = (count(c), width)
    if "num_experts" in c:
        tensor_shapes["mlp.shared_expert_gate.weight"] = (1, width)
    ernie = c["architectures"][0].startswith("Ernie")
    shape = (1, count(c)) if ernie else (count(c),)
    return tensor_shapes | ({offsets(c): shape} if offsets(c) else {})


def gpt_oss_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    e, width, f = c["num_local_experts"], c["hidden_size"], c["intermediate_size"]
    return {
        "self_attn.sinks": (c["num_attention_heads"],), "mlp.router.weight": (e, width), "mlp.router.bias": (e,),
        "mlp.experts.gate_up_proj": (e, width, 2 * f), "mlp.experts.gate_up_proj_bias": (e, 2 * f),
        "mlp.experts.down_proj": (e, f, width), "mlp.experts.down_proj_bias": (e, width),
    }  # fmt: skip


def gpt_oss(
    c: Config, w: dict[str, np.ndarray], at: str, x: np.ndarray, linear: Linear
) -> np.ndarray:
    z, y, experts = linear(f"{at}.mlp.router", x), np.zeros_like(x), f"{at}.mlp.experts"
    up, up_bias = w[f"{experts}.gate_up_proj"], w[f"{experts}.gate_up_proj_bias"]
    down, down_bias = w[f"{experts}.down_proj"], w[f"{experts}.down_proj_bias"]
    for t in range(len(x)):
        chosen = np.argsort(-z[t])[: c["num_experts_per_tok"]]
        share = np.exp(z[t, chosen]) / np.exp(z[t, chosen]).sum()
        for e, part in zip(chosen, share, strict=True):
            gate_up = x[t] @ up[e] + up_bias[e]
            gate, clipped_up = np.minimum(gate_up[::2], 7), np.clip(gate_up[1::2], -7, 7)
            hidden = (clipped_up + 1) * gate / (1 + np.exp(-1.702 * gate))
            y[t] += part * (hidden @ down[e] + down_bias[e])
    return y


def latent_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """The tensors of an attention with keys and values from a narrow vector."""
    width, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope_dim, rope_dim, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    q, q_rank = heads * (nope_dim + rope_dim), c["q_lora_rank"]
    tensor_shapes: dict[str, tuple[int, ...]] = {"q_proj": (q, width)}
    if q_rank:
        tensor_shapes = {
            "q_a_proj": (q_rank, width),
            "q_a_layernorm": (q_rank,),
            "q_b_proj": (q, q_rank),
        }
    tensor_shapes |= {"kv_a_proj_with_mqa": (rank + rope_dim, width), "kv_a_layernorm": (rank,)}
    tensor_shapes |= {
        "kv_b_proj": (heads * (nope_dim + value), rank),
        "o_proj": (width, heads * value),
    }
    return {f"self_attn.{name}": shape for name, shape in tensor_shapes.items()}


def latent(
    c: Config,
    at: str,
    x: np.ndarray,
    linear: Linear,
    norm: Linear,
    turn: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """Such an attention; `turn` rotates (T, heads, R)."""
    time, heads, rank = len(x), c["num_attention_heads"], c["kv_lora_rank"]
    nope_dim, value = c["qk_nope_head_dim"], c["v_head_dim"]
    if c["q_lora_rank"]:
        x_q = norm(f"{at}.q_a_layernorm", linear(f"{at}.q_a_proj", x))
        q = linear(f"{at}.q_b_proj", x_q).reshape(time, heads, -1)
    else:
        q = linear(f"{at}.q_proj", x).reshape(time, heads, -1)
    kv_a = linear(f"{at}.kv_a_proj_with_mqa", x)
    k_turned = np.repeat(turn(kv_a[:, None, rank:]), heads, 1)
    kv = linear(f"{at}.kv_b_proj", norm(f"{at}.kv_a_layernorm", kv_a[:, :rank]))
    k, v = np.split(kv.reshape(time, heads, nope_dim + value), [nope_dim], -1)
    q = np.concatenate([q[..., :nope_dim], turn(q[..., nope_dim:])], -1)
    k = np.concatenate([k, k_turned], -1)
    scale = q.shape[-1] ** -0.5
    if rope := c.get("rope_scaling"):
        scale *= (0.1 * rope["mscale_all_dim"] * np.log(rope["factor"]) + 1) ** 2
    y = np.empty((time, heads, value))
    for j in range(heads):
        scores = np.where(np.tri(time, dtype=bool), q[:, j] @ k[:, j].T * scale, -np.inf)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        y[:, j] = e / e.sum(-1, keepdims=True) @ v[:, j]
    return linear(f"{at}.o_proj", y.reshape(time, -1))


def llama4_shapes(c: Config, i: int) -> dict[str, tuple[int, ...]]:
    e, width, f = c["num_local_experts"], c["hidden_size"], c["intermediate_size"]
    experts = (i + 1) % c["interleave_moe_layer_step"] == 0
    at, ffn_width = ("shared_expert.", f) if experts else ("", c["intermediate_size_mlp"])
    tensor_shapes: dict[str, tuple[int, ...]] = {
        f"{at}{part}.weight": (ffn_width, width) for part in PARTS[:2]
    }
    tensor_shapes[f"{at}{PARTS[2]}.weight"] = (width, ffn_width)
    if experts:
        tensor_shapes |= {"router.weight": (e, width), "experts.gate_up_proj": (e, width, 2 * f)}
        tensor_shapes["experts.down_proj"] = (e, f, width)
    return {f"feed_forward.{name}": shape for name, shape in tensor_shapes.items()}


def llama4(
    c: Config, w: dict[str, np.ndarray], at: str, i: int, x: np.ndarray, linear: Linear
) -> np.ndarray:
    def gated(module_path: str) -> np.ndarray:
        gate, up = (linear(f"{module_path}.{part}", x) for part in PARTS[:2])
        return linear(f"{module_path}.{PARTS[2]}", gate / (1 + np.exp(-gate)) * up)

    prefix = f"{at}.feed_forward"
    if (i + 1) % c["interleave_moe_layer_step"]:
        return gated(prefix)
    z, y = linear(f"{prefix}.router", x), gated(f"{prefix}.shared_expert")
    gate_up, down = w[f"{prefix}.experts.gate_up_proj"], w[f"{prefix}.experts.down_proj"]
    for t in range(len(x)):
        for e in np.argsort(-z[t])[: c["num_experts_per_tok"]]:
            gate, up = np.split(x[t] / (1 + np.exp(-z[t, e])) @ gate_up[e], 2)
            y[t] += (gate / (1 + np.exp(-gate)) * up) @ down[e]
    return y


def granite_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    e, width, f, s = (
        c[key]
        for key in (
            "num_local_experts",
            "hidden_size",
            "intermediate_size",
            "shared_intermediate_size",
        )
    )
    return {
        "block_sparse_moe.router.layer.weight": (e, width),
        "block_sparse_moe.input_linear.weight": (e, 2 * f, width),
        "block_sparse_moe.output_linear.weight": (e, width, f),
        "shared_mlp.input_linear.weight": (2 * s, width), "shared_mlp.output_linear.weight": (width, s),
    }  # fmt: skip


def granite(
    c: Config, w: dict[str, np.ndarray], at: str, x: np.ndarray, linear: Linear
) -> np.ndarray:
    def gated(both: np.ndarray) -> np.ndarray:
        gate, up = np.split(both, 2, -1)
        return gate / (1 + np.exp(-gate)) * up

    into, down_proj = (
        w[f"{at}.block_sparse_moe.{side}_linear.weight"] for side in ("input", "output")
    )
    z = linear(f"{at}.block_sparse_moe.router.layer", x)
    y = linear(f"{at}.shared_mlp.output_linear", gated(linear(f"{at}.shared_mlp.input_linear", x)))
    for t in range(len(x)):
        chosen = np.argsort(-z[t])[: c["num_experts_per_tok"]]
        share = np.exp(z[t, chosen]) / np.exp(z[t, chosen]).sum()
        for e, part in zip(chosen, share, strict=True):
            y[t] += part * (down_proj[e] @ gated(into[e] @ x[t]))
    return y


def feed_forward(
    c: Config, w: dict[str, np.ndarray], at: str, i: int, x: np.ndarray, linear: Linear
) -> np.ndarray:
    """The output of block i's feed-forward, whose tensors begin with `at`."""
    if "swiglu_limit" in c:
        return gpt_oss(c, w, at, x, linear)
    if c["architectures"][0].startswith("Granite"):
        return granite(c, w, at, x, linear)
    if "intermediate_size_mlp" in c:
        return llama4(c, w, at, i, x, linear)

    def gated(module_path: str, x: np.ndarray) -> np.ndarray:
        gate, up = (linear(f"{at}.{module_path}.{part}", x) for part in PARTS[:2])
        return linear(f"{at}.{module_path}.{PARTS[2]}", gate / (1 + np.exp(-gate)) * up)

    if dense(c, i):
        return gated("mlp", x)
    z = linear(f"{at}.mlp.gate", x)
    glm = c["architectures"][0] in ("Glm4MoeForCausalLM", "DeepseekV3ForCausalLM")
    p = 1 / (1 + np.exp(-z)) if glm else np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    better = p + (w[f"{at}.{offsets(c)}"].reshape(-1) if offsets(c) else 0)
    if (groups := c.get("n_group", 1)) > 1:
        grouped_scores = better.reshape(len(x), groups, -1)
        order = np.argsort(np.argsort(-np.sort(grouped_scores, -1)[..., -2:].sum(-1), -1), -1)
        better = np.where((order < c["topk_group"])[..., None], grouped_scores, -np.inf).reshape(
            better.shape
        )
    y = gated("mlp.shared_expert" if "num_experts" in c else "mlp.shared_experts", x)
    if "num_experts" in c:
        y = y / (1 + np.exp(-linear(f"{at}.mlp.shared_expert_gate", x)))
    for t in range(len(x)):
        chosen = np.argsort(-better[t])[: c.get("num_experts_per_tok") or c["moe_k"]]
        total = p[t, chosen].sum() if c.get("norm_topk_prob", True) else 1
        for e in chosen:
            share = p[t, e] / total * c.get("routed_scaling_factor", 1.0)
            y[t] += share * gated(f"mlp.experts.{e}", x[t])
    return y
