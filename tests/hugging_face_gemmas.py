"""Checkpoints of Gemma 3n and 4 in Hugging Face's layout, and what they compute, in float64: see hugging_face.

The forward pass is that of numpy_models, given the tensors by names of files and the config as keys.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests import numpy_models

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]
SLIDING, FULL = "sliding_attention", "full_attention"
ROPE = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
FOUR: Config = {
    "architectures": ["Gemma4ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "sliding_window": 4, "rope_parameters": ROPE, "rope_theta": None, "hidden_act": None, "head_dim": 24,
}  # fmt: skip
THREE: Config = {
    "architectures": ["Gemma3nForCausalLM"], "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "sliding_window": 4, "rope_theta": None, "hidden_act": None, "head_dim": 24, "final_logit_softcapping": 30.0,
    "rope_parameters": {
        FULL: {"rope_type": "default", "rope_theta": 1e6}, SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    },
    "altup_num_inputs": 4, "altup_active_idx": 0, "laurel_rank": 64, "hidden_size_per_layer_input": 256,
    "num_hidden_layers": 22, "num_kv_shared_layers": 2, "layer_types": [*([*[SLIDING] * 4, FULL] * 4), SLIDING, FULL],
    "intermediate_size": [96] * 22, "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 12,
    "vocab_size_per_layer_input": 300,
}  # fmt: skip
KINDS: dict[str, Config] = {
    "gemma3n": THREE,
    "gemma4": FOUR | {
        "num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True, "hidden_size_per_layer_input": 16, "per_layer_config": {"01": {"head_dim": 32}},
        "final_logit_softcapping": 3.0,
    },
    "gemma4 experts": FOUR | {
        "num_hidden_layers": 3, "layer_types": [SLIDING, FULL, SLIDING], "global_head_dim": 32,
        "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 5, "top_k_experts": 3,
        "moe_intermediate_size": 40,
    },
    "gemma4 values": FOUR | {
        "num_hidden_layers": 3, "layer_types": [SLIDING, SLIDING, FULL], "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "global_head_dim": 32, "hidden_size_per_layer_input": 0,
    },
}  # fmt: skip
CLASSES = {config["architectures"][0] for config in KINDS.values()}
OUTSIDE = {
    "embed_tokens": "token_embd", "norm": "output_norm", "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj", "per_layer_projection_norm": "per_layer_proj_norm",
}  # fmt: skip
INSIDE = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm",
    "layer_scalar": "layer_output_scale", "router.proj": "ffn_gate_inp", "experts.gate_up_proj": "ffn_gate_up_exps",
    "experts.down_proj": "ffn_down_exps", "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2", "post_feedforward_layernorm_2": "post_ffw_norm_2",
}  # fmt: skip
OUTSIDE |= {"altup_projections": "altup_proj", "altup_unembed_projections": "altup_unembd_proj"}
INSIDE |= {
    "laurel.linear_left": "laurel_l", "laurel.linear_right": "laurel_r", "laurel.post_laurel_norm": "laurel_post_norm",
    "altup.correction_coefs": "altup_correct_coef", "altup.correct_output_scale": "altup_correct_scale",
    "altup.prediction_coefs": "altup_predict_coef", "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
}  # fmt: skip
SCALES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}


def sizes(c: Config, i: int) -> tuple[int, int]:
    """Width of a block's heads, and number of those of keys."""
    if c["layer_types"][i] == SLIDING:
        return c["head_dim"], c["num_key_value_heads"]
    is_wide = (
        c["head_dim"] if THREE["architectures"] == c["architectures"] else c.get("global_head_dim")
    )
    is_wide = is_wide or c["per_layer_config"]["01"]["head_dim"]
    return is_wide, c.get("num_global_key_value_heads", c["num_key_value_heads"])


def shapes(c: Config) -> Shapes:
    h, f, n, p = (
        c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"], c["hidden_size_per_layer_input"],
    )  # fmt: skip
    tensor_shapes: Shapes = {
        "model.embed_tokens.weight": (c["vocab_size"], h),
        "model.norm.weight": (h,),
    }
    streams, rows = (
        c.get("altup_num_inputs", 0),
        c.get("vocab_size_per_layer_input", c["vocab_size"]),
    )
    for name in ("altup_projections", "altup_unembed_projections"):
        tensor_shapes |= {f"model.{name}.{j}.weight": (h, h) for j in range(streams - 1)}
    f = f[0] if isinstance(f, list) else f
    if p:
        tensor_shapes["model.embed_tokens_per_layer.weight"] = (rows, n * p)
        tensor_shapes["model.per_layer_model_projection.weight"] = (n * p, h)
        tensor_shapes["model.per_layer_projection_norm.weight"] = (p,)
    for i in range(n):
        (d, kv), q = sizes(c, i), c["num_attention_heads"]
        shared = i >= n - c.get("num_kv_shared_layers", 0)
        ffn_width = 2 * f if shared and c.get("use_double_wide_mlp") else f
        norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                 "post_feedforward_layernorm")  # fmt: skip
        block: Shapes = dict.fromkeys(norms, (h,))
        block |= {
            "self_attn.q_proj": (q * d, h),
            "self_attn.o_proj": (h, q * d),
            "self_attn.q_norm": (d,),
        }
        block |= {"self_attn.k_proj": (kv * d, h), "self_attn.k_norm": (d,)}
        if not c.get("attention_k_eq_v") or c["layer_types"][i] == SLIDING:
            block["self_attn.v_proj"] = (kv * d, h)
        block |= {
            "mlp.gate_proj": (ffn_width, h),
            "mlp.up_proj": (ffn_width, h),
            "mlp.down_proj": (h, ffn_width),
        }
        if p:
            block |= {"per_layer_input_gate": (p, h), "per_layer_projection": (h, p),
                      "post_per_layer_input_norm": (h,)}  # fmt: skip
        unsuffixed: Shapes = {} if streams else {"layer_scalar": (1,)}
        if streams:
            block |= {
                "altup.correction_coefs": (streams, streams), "altup.prediction_coefs": (streams**2, streams),
                "altup.modality_router": (streams, h), "altup.router_norm": (h,), "laurel.linear_left": (64, h),
                "laurel.linear_right": (h, 64), "laurel.post_laurel_norm": (h,),
            }  # fmt: skip
            unsuffixed["altup.correct_output_scale"] = (h,)
        if streams and i == n - 1:  # transformers leaves out what nothing reads, others keep it
            block = {k: s for k, s in block.items() if k[:11] not in ("self_attn.k", "self_attn.v")}
        if e := c.get("num_experts"):
            block |= {
                f"{name}_feedforward_layernorm_{n}": (h,)
                for name, n in (("post", 1), ("pre", 2), ("post", 2))
            }
            block["router.proj"], m = (e, h), c["moe_intermediate_size"]
            unsuffixed |= {"router.scale": (h,), "router.per_expert_scale": (e,)}
            unsuffixed |= {"experts.gate_up_proj": (e, 2 * m, h), "experts.down_proj": (e, h, m)}
        tensor_shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in block.items()}
        tensor_shapes |= {f"model.layers.{i}.{name}": shape for name, shape in unsuffixed.items()}
    return tensor_shapes


class Model:
    """A checkpoint's forward pass, one sequence without a cache."""

    def __init__(self, c: Config, tensors: Mapping[str, np.ndarray]) -> None:
        self.c, self.tensors = c, tensors

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        tensors = dict(map(self.named, self.tensors))
        for name in ("altup_proj", "altup_unembd_proj"):
            parts = [
                tensors.pop(f"{name}.{j}.weight")
                for j in range(3)
                if f"{name}.{j}.weight" in tensors
            ]
            tensors |= {f"{name}.weight": np.stack(parts)} if parts else {}
        model = numpy_models.Model(self.keys(), tensors, len(tokens))
        return model.logits(tokens)

    def named(self, name: str) -> tuple[str, np.ndarray]:
        value, inner = self.tensors[name], name.removeprefix("model.").removesuffix(".weight")
        if inner.startswith("altup"):
            name, number = inner.split(".")
            return f"{OUTSIDE[name]}.{number}.weight", value
        if not inner.startswith("layers."):
            return f"{OUTSIDE[inner]}.weight", value
        _, number, part = inner.split(".", 2)
        return f"blk.{number}.{SCALES.get(part) or INSIDE[part] + '.weight'}", value

    def keys(self) -> dict[str, Any]:
        c = self.c
        full = c["layer_types"].index(FULL)
        keys = {
            "block_count": c["num_hidden_layers"], "embedding_length": c["hidden_size"],
            "context_length": c["max_position_embeddings"], "attention.head_count": c["num_attention_heads"],
            "attention.layer_norm_rms_epsilon": c["rms_norm_eps"], "attention.key_length_swa": c["head_dim"],
            "attention.key_length": sizes(c, full)[0], "attention.sliding_window": c["sliding_window"],
            "attention.sliding_window_pattern": [kind == SLIDING for kind in c["layer_types"]],
            "attention.shared_kv_layers": c.get("num_kv_shared_layers", 0), "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4, "embedding_length_per_layer_input": c["hidden_size_per_layer_input"],
            "rope.turned": 0.25, "expert_used_count": c.get("top_k_experts"),
            "final_logit_softcapping": c.get("final_logit_softcapping") or 0.0,
        }  # fmt: skip
        name = "gemma3n" if "altup_num_inputs" in c else "gemma4"
        if name == "gemma3n":
            del keys["rope.turned"]
        return {"general.architecture": name, **{f"{name}.{k}": v for k, v in keys.items()}}
