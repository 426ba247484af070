"""Checkpoints that transformers writes, converted, and what they compute there and here.

    pip install transformers torch
    python -m benchmarks.convert

A small model of random weights of each class is saved by `save_pretrained`, converted to f32, and reads the same
tokens in both. Printed are the largest difference of a logit, relative to the largest logit, and that of the loss's
gradients for the embedding and the last norm, which go through everything.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.gemma3n import modeling_gemma3n

from packtrain.conversion.hugging_face import convert
from packtrain.engine.autodiff import differentiate
from packtrain.engine.graph import Graph
from packtrain.engine.interpreter import interpret
from packtrain.inference.generator import Generator
from packtrain.models import transformer
from packtrain.models.model_file import ModelFile, open_model
from tests.hugging_face import V, sentencepiece_model

LAST = ("model.norm.weight", "ln_f.weight", "final_layernorm.weight", "embedding_norm.weight")
TOKENS = np.random.default_rng(5).integers(3, 300, 24)
BASE = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "num_hidden_layers": 2, "vocab_size": V, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "long_factor": [2.0] * 8,
    "short_factor": [1.5] * 8,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
}
GEMMA_3N = {
    "head_dim": 24, "sliding_window": 4, "laurel_rank": 64, "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": V,
}  # fmt: skip
GPT_YARN = YARN | {"attention_factor": None, "truncate": True}
NULLABLE_KEYS = ("sliding_window",)  # where null says something
SCAN = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4}
HYBRID = SCAN | {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 96,
    "position_embedding_type": "nope",
}
DELTA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
FALCON_H1 = SCAN | {"mamba_d_ssm": 96, "head_dim": 24}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.6,
    "mlp_multipliers": [0.9, 1.1],
    "ssm_multipliers": [0.5, 1.5, 0.8, 1.1, 0.9],
}
WINDOWS = {"num_hidden_layers": 5, "sliding_window": 4}
WINDOW = {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 4}
GEMMA_4 = {
    "head_dim": 24,
    "global_head_dim": 32,
    "sliding_window": 4,
    "vocab_size_per_layer_input": V,
}
# class of the config, and how it differs from BASE
CLASSES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {"rope_parameters": LLAMA_3, "attention_bias": True, "mlp_bias": True},
    "MistralConfig": {"head_dim": 24, "sliding_window": None},
    "MixtralConfig": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "Ministral3Config": {"head_dim": 24},
    "Qwen2Config": {},
    "Qwen3Config": {"head_dim": 24},
    "GemmaConfig": {"head_dim": 24},
    "Gemma2Config": WINDOW,
    "Gemma3TextConfig": {**WINDOW, "num_hidden_layers": 6},
    "Gemma3nTextConfig": {
        **GEMMA_3N, "num_hidden_layers": 5, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.95] * 5,
    },
    "Gemma3nTextConfig shared": {
        **GEMMA_3N, "num_hidden_layers": 22, "num_kv_shared_layers": 2,
        "layer_types": [*([*["sliding_attention"] * 4, "full_attention"] * 4), "sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 12,
    },
    "Gemma4TextConfig": {
        **GEMMA_4, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 3.0,
        "hidden_size_per_layer_input": 16,
    },
    "Gemma4TextConfig experts": {
        **GEMMA_4, "num_hidden_layers": 6, "hidden_size_per_layer_input": 0, "enable_moe_block": True,
        "num_experts": 5, "top_k_experts": 3, "moe_intermediate_size": 40,
    },
    "Gemma4TextConfig values": {
        **GEMMA_4, "num_hidden_layers": 6, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
    },
    "Phi3Config": {
        "rope_parameters": LONG, "max_position_embeddings": 1024, "original_max_position_embeddings": 512,
    },
    "SmolLM3Config": {"num_hidden_layers": 4},
    "GraniteConfig": {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.1, "residual_multiplier": 0.4, "logits_scaling": 2.0,
    },
    "GraniteMoeConfig": {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.1, "residual_multiplier": 0.4, "logits_scaling": 2.0,
        "num_local_experts": 5, "num_experts_per_tok": 3,
    },
    "GraniteMoeSharedConfig": {
        "residual_multiplier": 0.4, "num_local_experts": 5, "num_experts_per_tok": 3, "shared_intermediate_size": 56,
    },
    "Olmo2Config": {},
    "Olmo3Config": {
        **WINDOWS, "rope_parameters": {
            "full_attention": YARN | {"rope_theta": 5e5}, "sliding_attention": {"rope_type": "default"},
        },
    },
    "Exaone4Config": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "Exaone4Config 32B": {"num_hidden_layers": 64, "sliding_window": 4, "sliding_window_pattern": 4},
    "Glm4Config": {"head_dim": 24, "attention_bias": True},
    "HunYuanDenseV1Config": {"head_dim": 24},
    "HunYuanDenseV1Config dynamic": {
        "head_dim": 24, "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0},
    },
    "SeedOssConfig": {"head_dim": 24},
    "Ernie4_5Config": {"head_dim": 24},
    "Qwen2MoeConfig": {
        "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
    },
    "Qwen3MoeConfig": {
        "head_dim": 24, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    },
    "Ernie4_5_MoeConfig": {
        "moe_num_experts": 5, "moe_k": 3, "moe_intermediate_size": 40, "moe_layer_start_index": 1,
    },
    "OlmoeConfig": {"num_experts": 5, "num_experts_per_tok": 3},
    "DeepseekV3Config": {
        "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 20, "q_lora_rank": 40, "kv_lora_rank": 32,
        "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 40,
        "n_shared_experts": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4, "num_hidden_layers": 3,
        "rope_parameters": YARN | {"attention_factor": None, "mscale": 0.7, "mscale_all_dim": 0.7},
    },
    "DeepseekV2Config": {
        "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 20, "q_lora_rank": None, "kv_lora_rank": 32,
        "n_routed_experts": 5, "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 40,
        "n_shared_experts": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4, "topk_method": "greedy",
        "mlp_layer_types": None,
    },
    "Llama4TextConfig": {
        "head_dim": 24, "intermediate_size": 40, "intermediate_size_mlp": 96, "num_local_experts": 5,
        "num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "num_hidden_layers": 5,
    },
    "GptOssConfig": {
        "num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 24, "sliding_window": 4,
        "rope_parameters": GPT_YARN,
    },
    "Glm4MoeConfig": {
        "head_dim": 24, "n_routed_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "n_shared_experts": 2, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True,
        "routed_scaling_factor": 1.5,
    },
    "Lfm2Config": {"num_hidden_layers": 3, "full_attn_idxs": [1], "block_multiple_of": 16},
    "Lfm2MoeConfig": {
        "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_experts": 5,
        "num_experts_per_tok": 3, "moe_intermediate_size": 40, "num_dense_layers": 1,
    },
    "GraniteMoeHybridConfig": {
        **HYBRID, "embedding_multiplier": 3.0, "attention_multiplier": 0.1, "residual_multiplier": 0.4,
        "logits_scaling": 2.0, "num_local_experts": 0,
    },
    "GraniteMoeHybridConfig experts": {**HYBRID, "num_local_experts": 5, "num_experts_per_tok": 3},
    "GraniteMoeHybridConfig all attend": {
        **HYBRID, "layer_types": ["full_attention"] * 3, "position_embedding_type": "rope", "num_local_experts": 0,
        "num_experts_per_tok": 0, "attention_multiplier": 0.1, "residual_multiplier": 0.4,
    },
    "FalconH1Config": {**FALCON_H1, **MULTIPLIERS},
    "FalconH1Config norm": {**FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "Qwen3NextConfig": {
        **DELTA, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
    },
    "Qwen3_5TextConfig": DELTA,
    "Qwen3_5MoeTextConfig": {
        **DELTA, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56, "intermediate_size": None,
    },
    "PhiConfig": {},
    "GPT2Config": {"intermediate_size": None, "num_key_value_heads": None, "n_inner": None},
    "Starcoder2Config": {"sliding_window": None},
    "StableLmConfig": {"use_qkv_bias": True},
    "StableLmConfig parallel": {"use_parallel_residual": True, "qk_layernorm": True},
    "FalconConfig": {"intermediate_size": None},
    "FalconConfig 40B": {"new_decoder_architecture": True, "num_kv_heads": 2, "intermediate_size": None},
    "NemotronConfig": {},
    "Cohere2Config": {**WINDOWS, "logit_scale": 0.25},
}  # fmt: skip


def sparse(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    """Gates of Gemma 3n's first blocks by a sample's deviation, as in llama.cpp; transformers divides by all."""
    threshold = torch.distributions.normal.Normal(0, 1).icdf(torch.tensor(mlp.activation_sparsity))
    return torch.relu(x - x.mean(-1, keepdim=True) - x.std(-1, keepdim=True) * threshold)


def tiny(name: str) -> tuple[Any, Any]:
    """The config of a class, and a model of random weights."""
    options = {
        key: value
        for key, value in (BASE | CLASSES[name]).items()
        if value is not None or key in NULLABLE_KEYS
    }
    config = getattr(transformers, name.split()[0])(**options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.eval().to(torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 1.5 / weight.shape[-1] ** 0.5)
            else:
                weight.add_(torch.randn_like(weight) * 0.2)
        for label, value in model.named_buffers():
            if label.endswith("layer_scalar"):
                value.mul_(0.7)
    return config, model


def difference(name: str, folder: Path) -> tuple[float, float]:
    """How far apart the logits of one model are, and its gradients."""
    config, model = tiny(name)
    ids = torch.tensor(TOKENS)[None]
    torch_logits = model(ids).logits[0]
    loss = torch.nn.functional.cross_entropy(torch_logits[:-1], ids[0, 1:])
    slopes = torch.autograd.grad(loss, _end_weights(model))
    expected = torch_logits.detach().numpy()
    model.save_pretrained(folder)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model())
    path = folder / "model.gguf"
    convert(folder, path, "f32")
    generator = Generator.from_model(open_model(path), len(TOKENS))
    our_logits = np.stack([generator.feed([int(token)]).copy() for token in TOKENS])
    our_slopes = gradients(open_model(path))
    scales = getattr(config, "embedding_multiplier", 1.0) if "FalconH1" in name else 1.0, 1.0
    pairs = [
        (our_slope * by, d.numpy())
        for our_slope, d, by in zip(our_slopes, slopes, scales, strict=True)
    ]
    return relative_error(our_logits, expected), max(relative_error(*pair) for pair in pairs)


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def _end_weights(model: Any) -> list[Any]:
    """The embedding and the weight of the last norm."""
    last = [weight for name, weight in model.named_parameters() if name.endswith(LAST)]
    return [model.get_input_embeddings().weight, last[-1]]


def gradients(model: ModelFile) -> list[np.ndarray]:
    """Of the mean loss of TOKENS, for the embedding and the last norm."""
    end_names = "token_embd.weight", f"{model.config.traits.last_norm}.weight"
    time, leaves = len(TOKENS) - 1, transformer.weights(model.config)
    model_loss = transformer.loss(model.config, leaves, 1, time)
    slopes = differentiate(model_loss.loss, [leaves[label] for label in end_names])
    graph = Graph({leaf.label: d for leaf, d in slopes.items()})
    pos = np.arange(time, dtype=np.int32)[None]
    fed = {
        "tokens": TOKENS[None, :-1].astype(np.int32),
        "targets": TOKENS[None, 1:].astype(np.int32),
    }
    fed |= {
        "weights": np.full((1, time), 1 / time, np.float32),
        "pos": pos,
        "seq": np.zeros_like(pos),
    }
    leaf_names = {leaf.label for leaf in graph.leaves}
    stored = model.stored()
    inputs = {n: stored.get(n, fed.get(n)) for n in leaf_names}
    made_by_name = interpret(graph, {n: v for n, v in inputs.items() if v is not None})
    return [made_by_name[label] for label in end_names]


def main() -> None:
    transformers.logging.set_verbosity_error()
    modeling_gemma3n.Gemma3nTextMLP._gaussian_topk = sparse
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    for name in CLASSES:
        with tempfile.TemporaryDirectory() as folder:
            values, slopes = difference(name, Path(folder))
            print(f"{name:24} {values:.1e}  {slopes:.1e}", flush=True)


if __name__ == "__main__":
    main()
