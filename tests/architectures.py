"""Small models of random weights, one or more of every architecture, as files: what whole-architecture tests share.

Rows are 256 wide, so that every element type can pack them. Weights are large enough that each part of a model
changes its logits.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from packtrain.gguf import MetadataValue
from packtrain.models import transformer
from packtrain.models.arch.gpt_oss import ALL_BIASES
from packtrain.models.arch.size_fields import Scan
from packtrain.models.config import Config, RopeScaling
from packtrain.models.model_file import save_model

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
WORDS = ("\u2581", *"abcdefghijklmnopqrstuvwxyz", "\u2581a", "the", "\u2581the", "\n")
TOKENS = (
    {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    | {f"<0x{b:02X}>": BYTE for b in range(256)}
    | dict.fromkeys(WORDS, NORMAL)
)
BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
LLAMA = Config(len(TOKENS), 128, 256, 2, 512, 4, 2, rope_freq_base=5e4, rms_eps=1e-6)
YARN = RopeScaling("yarn", 4.0, 32)
SECOND = replace(
    LLAMA, architecture="gemma2", key_length=128, block_count=3, window=9, window_pattern=2,
    attention_softcap=2.0, final_softcap=3.0,
)  # fmt: skip
PHI = replace(LLAMA, architecture="phi3", tied=False, rope_dims=48)
BIASED = replace(LLAMA, rms_eps=1e-5)
ALL = (
    *BIASES, "attn_output.bias", "ffn_up.bias", "ffn_down.bias", "attn_norm.bias", "ffn_norm.bias",
    "output_norm.bias",
)  # fmt: skip
PHI_2 = tuple(name for name in ALL if name != "ffn_norm.bias")
DEEP = 8  # blocks
CONFIGS: Mapping[str, Config] = {
    "llama": replace(LLAMA, tied=False),
    "llama tied": LLAMA,
    "llama 3": replace(LLAMA, optional=("rope_freqs.weight",)),
    "llama biased": replace(
        LLAMA,
        optional=(*BIASES, "attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"),
    ),
    "llama linear": replace(LLAMA, rope_scaling=RopeScaling("linear", 4.0)),
    "llama yarn": replace(LLAMA, rope_scaling=YARN),
    "llama experts": replace(LLAMA, expert_count=4, expert_used_count=2),
    "mistral3": replace(
        LLAMA,
        architecture="mistral3",
        key_length=128,
        temperature_scale=0.4,
        rope_scaling=replace(YARN, original_context=16, beta_fast=4.0, log_multiplier=0.7),
    ),
    "qwen2": replace(LLAMA, architecture="qwen2", optional=BIASES),
    "qwen3": replace(LLAMA, architecture="qwen3", key_length=128, tied=False),
    "qwen3 yarn": replace(LLAMA, architecture="qwen3", key_length=128, rope_scaling=YARN),
    "qwen2moe": replace(
        LLAMA, architecture="qwen2moe", tied=False, expert_count=6, expert_used_count=3, optional=BIASES,
        expert_feed_forward_length=256, expert_shared_feed_forward_length=512,
    ),
    "qwen3moe": replace(
        LLAMA, architecture="qwen3moe", key_length=128, tied=False, expert_count=6, expert_used_count=3,
        expert_feed_forward_length=256,
    ),
    "gemma": replace(LLAMA, architecture="gemma", key_length=128),
    "gemma2": SECOND,
    "gemma3": replace(
        LLAMA, architecture="gemma3", key_length=128, block_count=7, window=9, window_pattern=6,
        rope_freq_base=1e6, rope_freq_base_swa=1e4,
    ),
    "gemma3 linear": replace(
        LLAMA, architecture="gemma3", key_length=128, block_count=3, window=5,
        window_pattern=(True, False, True), rope_freq_base=1e6, rope_freq_base_swa=1e4,
        rope_scaling=RopeScaling("linear", 8.0),
    ),
    "gemma3n": replace(
        LLAMA, architecture="gemma3n", block_count=3, key_length=128, window=9, window_pattern=(True, False, True),
        embedding_length_per_layer=256, final_softcap=30.0, rope_freq_base=1e6, rope_freq_base_swa=1e4,
    ),
    "gemma3n shared": replace(
        LLAMA, architecture="gemma3n", block_count=22, embedding_length=128, feed_forward_length=256, head_count=2,
        head_count_kv=1, window=9, window_pattern=((True,) * 4 + (False,)) * 4 + (True, False), own_kv=20, tied=False,
        embedding_length_per_layer=256, final_softcap=30.0, rope_freq_base=1e6, rope_freq_base_swa=1e4,
    ),
    "gemma4": replace(
        LLAMA, architecture="gemma4", block_count=4, key_length=128, key_length_swa=64, head_count_kv=1,
        head_count_kv_swa=2, window=9, window_pattern=(True, False, True, False), own_kv=2, final_softcap=3.0,
        embedding_length_per_layer=256, feed_forward_lengths=(512, 512, 1024, 1024), rope_freq_base=1e6,
        rope_freq_base_swa=1e4, optional=("rope_freqs.weight", "layer_output_scale.weight"),
    ),
    "gemma4 experts": replace(
        LLAMA, architecture="gemma4", block_count=3, key_length=128, key_length_swa=64, window=9, tied=False,
        window_pattern=(True, False, True), rope_freq_base=1e6, rope_freq_base_swa=1e4, final_softcap=3.0,
        expert_count=6, expert_used_count=3, expert_feed_forward_length=256,
        optional=("rope_freqs.weight", "layer_output_scale.weight", "ffn_gate_up_exps.weight"),
    ),
    "gemma4 values": replace(
        LLAMA, architecture="gemma4", block_count=3, key_length=128, key_length_swa=64, window=9,
        window_pattern=(True, True, False), keys_are_values=True, head_count_kv=1, head_count_kv_swa=2,
        rope_freq_base=1e6, rope_freq_base_swa=1e4, optional=("rope_freqs.weight",),
    ),
    "phi3": PHI,
    "phi3 short": replace(
        PHI,
        context_length=512,
        rope_scaling=RopeScaling("longrope", 1.0, 256, attn_factor=1.19),
        optional=("rope_factors_long.weight", "rope_factors_short.weight"),
    ),
    "phi3 long": replace(
        PHI,
        rope_scaling=RopeScaling("longrope", 1.0, 16, attn_factor=1.19),
        optional=("rope_factors_long.weight", "rope_factors_short.weight"),
    ),
    "smollm3": replace(LLAMA, architecture="smollm3", block_count=5),
    "granite": replace(
        LLAMA, architecture="granite", embedding_scale=1.7, residual_scale=0.6, score_scale=0.2, logit_scale=0.8,
    ),
    "granitemoe": replace(
        LLAMA, architecture="granitemoe", embedding_scale=1.7, residual_scale=0.6, score_scale=0.2,
        logit_scale=0.8, expert_count=6, expert_used_count=3, expert_shared_feed_forward_length=512,
    ),
    "granitemoe apart": replace(
        LLAMA, architecture="granitemoe", residual_scale=0.6, logit_scale=0.8, expert_count=6, expert_used_count=3,
    ),
    "deepseek2": replace(
        LLAMA, architecture="deepseek2", tied=False, head_count_kv=4, key_length=96, value_length=64, rope_dims=32,
        q_lora_rank=256, kv_lora_rank=256, expert_count=6, expert_used_count=3, block_count=3,
        expert_feed_forward_length=256, expert_shared_feed_forward_length=512, leading_dense_block_count=1,
        expert_weights_scale=1.5, expert_weights_norm=True, expert_gating_func=2, expert_group_count=3,
        expert_group_used_count=2, optional=("exp_probs_b.bias",),
        rope_scaling=replace(YARN, beta_fast=4.0, log_multiplier=0.0707),
    ),
    "deepseek2 lite": replace(
        LLAMA, architecture="deepseek2", tied=False, block_count=26, embedding_length=64, feed_forward_length=64,
        head_count=2, head_count_kv=2, key_length=48, value_length=32, rope_dims=16, kv_lora_rank=64, expert_count=4,
        expert_used_count=2, expert_feed_forward_length=64, expert_shared_feed_forward_length=64,
        leading_dense_block_count=1, expert_gating_func=1, rope_scaling=YARN,
    ),
    "deepseek2 unsplit": replace(
        LLAMA, architecture="deepseek2", head_count_kv=4, key_length=96, value_length=64, rope_dims=32,
        q_lora_rank=256, kv_lora_rank=256, expert_count=6, expert_used_count=3, expert_feed_forward_length=256,
        expert_shared_feed_forward_length=256, optional=("attn_kv_b.weight",), rope_scaling=RopeScaling("linear", 4.0),
    ),
    "llama4": replace(
        LLAMA, architecture="llama4", tied=False, block_count=5, key_length=128, expert_count=6, expert_used_count=2,
        expert_feed_forward_length=256, expert_shared_feed_forward_length=256, interleave_moe_layer_step=2, window=8192,
        window_pattern=4, optional=("rope_freqs.weight",),
    ),
    "olmo2": replace(LLAMA, architecture="olmo2", tied=False, window_pattern=4),
    "olmo3": replace(
        LLAMA, architecture="olmo2", tied=False, block_count=5, window=9, window_pattern=4, rope_scaling=YARN,
    ),
    "seed_oss": replace(LLAMA, architecture="seed_oss", key_length=128, optional=BIASES),
    "ernie4_5-moe": replace(
        LLAMA, architecture="ernie4_5-moe", expert_count=6, expert_used_count=3, block_count=3,
        expert_feed_forward_length=256, expert_shared_feed_forward_length=512, leading_dense_block_count=1,
        optional=("exp_probs_b.bias",),
    ),
    "glm4moe": replace(
        LLAMA, architecture="glm4moe", key_length=128, rope_dims=64, expert_count=6, expert_used_count=3,
        block_count=3, expert_feed_forward_length=256, expert_shared_feed_forward_length=512, tied=False,
        leading_dense_block_count=1, expert_weights_scale=1.5, expert_weights_norm=True,
        optional=(*BIASES, "exp_probs_b.bias", "attn_q_norm.weight", "attn_k_norm.weight"),
    ),
    "olmoe": replace(
        LLAMA, architecture="olmoe", tied=False, head_count_kv=4, expert_count=6, expert_used_count=3,
    ),
    "gpt-oss": replace(
        LLAMA, architecture="gpt-oss", tied=False, key_length=128, expert_count=6, expert_used_count=3, window=9,
        window_pattern=2, expert_feed_forward_length=256, rope_scaling=YARN, optional=ALL_BIASES,
    ),
    "glm4moe apart": replace(
        LLAMA, architecture="glm4moe", rope_dims=32, expert_count=6, expert_used_count=3,
        expert_feed_forward_length=256, expert_shared_feed_forward_length=256, optional=("exp_probs_b.bias",),
    ),
    "ernie4_5": replace(LLAMA, architecture="ernie4_5", key_length=128),
    "exaone4": replace(LLAMA, architecture="exaone4", optional=("rope_freqs.weight",)),
    "exaone4 windows": replace(
        LLAMA, architecture="exaone4", block_count=64, embedding_length=64, feed_forward_length=64, head_count=2,
        head_count_kv=1, window=9, window_pattern=4,
    ),
    "glm4": replace(
        LLAMA, architecture="glm4", key_length=128, rope_dims=64, optional=BIASES, tied=False
    ),
    "hunyuan-dense": replace(LLAMA, architecture="hunyuan-dense", key_length=128),
    "phi2": replace(BIASED, architecture="phi2", rope_dims=32, optional=(*PHI_2, "output.bias"), tied=False),
    "phi2 fused": replace(
        BIASED, architecture="phi2", optional=("attn_qkv.weight", "attn_qkv.bias", *PHI_2[3:], "output.bias"),
        tied=False,
    ),
    "gpt2": replace(
        BIASED, architecture="gpt2", context_length=320, optional=("attn_qkv.bias", *ALL[3:]), rope_freq_base=1e4,
    ),
    "starcoder2": replace(BIASED, architecture="starcoder2", optional=ALL),
    "stablelm": replace(
        BIASED, architecture="stablelm", rope_dims=16, tied=False,
        optional=(*BIASES, "attn_norm.bias", "ffn_norm.bias", "output_norm.bias", "ffn_norm.weight"),
    ),
    "stablelm parallel": replace(
        BIASED, architecture="stablelm", rope_dims=32, tied=False,
        optional=("attn_norm.bias", "output_norm.bias", "attn_q_norm.weight", "attn_k_norm.weight"),
    ),
    "falcon": replace(BIASED, architecture="falcon", optional=("attn_norm.bias", "output_norm.bias")),
    "falcon 40b": replace(
        BIASED, architecture="falcon",
        optional=("attn_norm.bias", "output_norm.bias", "attn_norm_2.weight", "attn_norm_2.bias"),
    ),
    "nemotron": replace(
        BIASED, architecture="nemotron", rope_dims=32, tied=False,
        optional=("attn_norm.bias", "ffn_norm.bias", "output_norm.bias"),
    ),
    "cohere2": replace(
        LLAMA, architecture="cohere2", block_count=5, window=9, window_pattern=4, logit_scale=0.25,
    ),
    "internlm2": replace(LLAMA, architecture="internlm2", tied=False),
    "lfm2": replace(
        LLAMA, architecture="lfm2", block_count=4, attending=(False, True, False, False), conv_width=3,
    ),
    "granitehybrid": replace(
        LLAMA, architecture="granitehybrid", block_count=4, attending=(False, True, False, False), turned=False,
        scan=Scan(512, 32, 8, 2, 4), optional=("ssm_conv1d.bias", "ssm_norm.weight"), embedding_scale=1.7,
        residual_scale=0.6, score_scale=0.2, logit_scale=0.8,
    ),
    "granitehybrid experts": replace(
        LLAMA, architecture="granitehybrid", block_count=3, attending=(False, True, False), expert_count=6,
        expert_used_count=3, expert_shared_feed_forward_length=256, scan=Scan(512, 16, 16, 1, 4),
        optional=("ssm_conv1d.bias", "ssm_norm.weight"),
    ),
    "falcon-h1": replace(
        LLAMA, architecture="falcon-h1", key_length=128, scan=Scan(384, 32, 6, 2, 4), optional=("ssm_conv1d.bias",),
    ),
    "falcon-h1 norm": replace(
        LLAMA, architecture="falcon-h1", key_length=128, tied=False, scan=Scan(384, 16, 12, 1, 3),
        optional=("ssm_conv1d.bias", "ssm_norm.weight"),
    ),
    "qwen3next": replace(
        LLAMA, architecture="qwen3next", block_count=4, attending=(False, True, False, False), tied=False,
        key_length=128, rope_dims=32, expert_count=6, expert_used_count=3, expert_feed_forward_length=256,
        expert_shared_feed_forward_length=256, scan=Scan(256, 32, 8, 4, 4),
    ),
    "qwen35": replace(
        LLAMA, architecture="qwen35", block_count=4, attending=(False, False, True, False), key_length=128,
        rope_dims=64, scan=Scan(384, 32, 12, 4, 4),
    ),
    "qwen35moe": replace(
        LLAMA, architecture="qwen35moe", block_count=3, attending=(False, True, False), tied=False, rope_dims=16,
        expert_count=6, expert_used_count=3, expert_feed_forward_length=256, expert_shared_feed_forward_length=256,
        scan=Scan(256, 64, 4, 2, 3),
    ),
    "lfm2moe": replace(
        LLAMA, architecture="lfm2moe", block_count=3, attending=(False, True, False), conv_width=4,
        expert_count=6, expert_used_count=3, expert_feed_forward_length=256, leading_dense_block_count=1,
        optional=("exp_probs_b.bias",),
    ),
}  # fmt: skip


def vocabulary(tokens: dict[str, int] = TOKENS) -> dict[str, MetadataValue]:
    """A small vocabulary of bytes, letters and a few words, later ones merged later."""
    return {
        "tokenizer.ggml.model": MetadataValue("string", "llama"),
        "tokenizer.ggml.tokens": MetadataValue("string", [text.encode() for text in tokens]),
        "tokenizer.ggml.scores": MetadataValue("f32", [-float(i) for i in range(len(tokens))]),
        "tokenizer.ggml.token_type": MetadataValue("i32", list(tokens.values())),
    }


def random_weights(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Matrices that keep the size of what they multiply, uneven norms, biases and rope factors."""
    rng, weights = np.random.RandomState(seed), {}
    for name, leaf in transformer.weights(config).items():
        uniform = rng.random_sample(leaf.shape) * 2 - 1
        if name.endswith(("ssm_a", "ssm_dt.bias")):
            # decays, and steps about 0.1
            value = (uniform - 1.2) * (1 if name.endswith("a") else 2)
        elif name.startswith("rope_"):
            value = np.geomspace(1, 8 if "long" in name else 3, leaf.shape[0]) * (
                1.2 + 0.1 * uniform
            )
        elif name.endswith("attn_sinks.weight"):
            value = 2 * uniform
        elif name.endswith("exps.bias"):
            value = 3 * uniform  # beyond the limit of the activation
        elif len(leaf.shape) > 1 and "norm" not in name and not name.endswith("ssm_d"):
            value = uniform * (3 / leaf.shape[-1]) ** 0.5
        else:
            value = 0.3 * uniform + name.endswith(".weight")
            if "post_" in name and config.block_count > DEEP:
                value /= DEEP  # else slopes change too fast for differences to measure them
        weights[name] = value.astype(np.float32)
    return weights


def random_model(
    path: Path, name: str, *, seed: int = 0, dtype: str = "f32", feed_forward: int = 0
) -> Config:
    """Write a model of random weights, one of CONFIGS by name (each architecture is one), of any type of matrices."""
    config = CONFIGS[name]
    if feed_forward:
        experts = feed_forward // 4 if config.expert_feed_forward_length else 0
        config = replace(
            config,
            feed_forward_length=feed_forward,
            feed_forward_lengths=(),
            expert_feed_forward_length=experts,
            expert_shared_feed_forward_length=experts
            if config.expert_shared_feed_forward_length
            else 0,
        )
    values = random_weights(config, seed)
    # by its name alone llama.cpp would take it for a phi-3, whose vocabulary has other tokens
    save_model(path, config, vocabulary(), values.__getitem__, name="random", dtype=dtype)
    return config
