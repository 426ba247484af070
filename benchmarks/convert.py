"""Checkpoints that transformers writes, converted, and what they compute there and here.

    pip install transformers torch
    python -m benchmarks.convert

A small model of random weights of each class is saved by `save_pretrained`, converted to f32, and reads the same
tokens in both. Printed is the largest difference of a logit, relative to the largest logit.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from packtrain.convert import convert
from packtrain.generation import Generator
from packtrain.models.file import open_model
from tests.hugging_face import V, sentencepiece_model

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
KEPT = ("sliding_window",)  # where null says something
WINDOWS = {"num_hidden_layers": 5, "sliding_window": 4}
WINDOW = {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 4}
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
    "Phi3Config": {
        "rope_parameters": LONG, "max_position_embeddings": 1024, "original_max_position_embeddings": 512,
    },
    "SmolLM3Config": {"num_hidden_layers": 4},
    "GraniteConfig": {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.1, "residual_multiplier": 0.4, "logits_scaling": 2.0,
    },
    "Olmo2Config": {},
    "Olmo3Config": {**WINDOWS, "rope_parameters": YARN},
    "Exaone4Config": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "SeedOssConfig": {"head_dim": 24},
    "Ernie4_5Config": {"head_dim": 24},
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


def difference(name: str, folder: Path) -> float:
    """How far apart the logits of one model are."""
    given = {
        key: value
        for key, value in (BASE | CLASSES[name]).items()
        if value is not None or key in KEPT
    }
    config = getattr(transformers, name.split()[0])(**given)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.eval().to(torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 1.5 / weight.shape[-1] ** 0.5)
            else:
                weight.add_(torch.randn_like(weight) * 0.2)
        want = model(torch.tensor(TOKENS)[None]).logits[0].numpy()
    model.save_pretrained(folder)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model())
    path = folder / "model.gguf"
    convert(folder, path, "f32")
    generator = Generator.of(open_model(path), len(TOKENS))
    got = np.stack([generator.feed([int(token)]).copy() for token in TOKENS])
    return float(np.abs(got - want).max() / np.abs(want).max())


def main() -> None:
    transformers.logging.set_verbosity_error()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    for name in CLASSES:
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name:18} {difference(name, Path(folder)):.1e}", flush=True)


if __name__ == "__main__":
    main()
