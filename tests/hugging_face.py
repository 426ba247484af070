"""Small random checkpoints in Hugging Face's layout, and what they compute, in float64 and in that layout's terms.

The forward pass is written from the descriptions of the models: rotation by halves, norms as 1 + w, experts one by
one. It shares no line with packtrain.
"""

import io
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from tests import (
    hugging_face_deltas,
    hugging_face_experts,
    hugging_face_gemmas,
    hugging_face_hybrids,
    hugging_face_layers,
)

Tensors = Mapping[str, np.ndarray]
Config = dict[str, Any]
V = 320
BASE: Config = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "num_hidden_layers": 2, "vocab_size": V, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 24, "tie_word_embeddings": True}
LLAMA_3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "long_factor": [1 + i / 4 for i in range(8)],
    "short_factor": [1 + i / 8 for i in range(8)],
}  # fmt: skip
# the class of the model, and how its config differs from BASE
KINDS: dict[str, Config] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "llama 3": {"architectures": ["LlamaForCausalLM"], "rope_scaling": LLAMA_3},
    "llama linear": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": True, "tie_word_embeddings": True,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "head_dim": 24},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "mistral3": {
        "architectures": ["Ministral3ForCausalLM"], "head_dim": 24, "rope_theta": None, "rope_parameters": YARN,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 24},
    "qwen3moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 24, "num_experts": 5, "num_experts_per_tok": 3,
        "moe_intermediate_size": 40, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "gemma": {"architectures": ["GemmaForCausalLM"], **GEMMA, "hidden_act": "gelu"},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"], **GEMMA, "query_pre_attn_scalar": 24, "sliding_window": 4,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], **GEMMA, "query_pre_attn_scalar": 24, "sliding_window": 4,
        "num_hidden_layers": 6, "rope_theta": 1e6, "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"], "rope_scaling": LONG, "original_max_position_embeddings": 512,
        "max_position_embeddings": 1024,
    },
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"], "tie_word_embeddings": True, "num_hidden_layers": 4,
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0],
    },
    "granite": {
        "architectures": ["GraniteForCausalLM"], "tie_word_embeddings": True, "embedding_multiplier": 3.0,
        "attention_multiplier": 0.1, "residual_multiplier": 0.4, "logits_scaling": 2.0,
    },
    "olmoe": {
        "architectures": ["OlmoeForCausalLM"], "num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": False,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"]},
    "glm4": {
        "architectures": ["Glm4ForCausalLM"], "head_dim": 24, "attention_bias": True, "partial_rotary_factor": 0.5,
    },
    "hunyuan": {
        "architectures": ["HunYuanDenseV1ForCausalLM"], "head_dim": 24, "tie_word_embeddings": True,
        "rope_scaling": {"type": "dynamic", "alpha": 20.0, "factor": 1.0},
    },
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"], "num_hidden_layers": 5, "sliding_window": 4, "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
            "beta_slow": 1.0, "attention_factor": 1.1386294361,
        },
    },
    "exaone4 windows": {
        "architectures": ["Exaone4ForCausalLM"], "num_hidden_layers": 64, "sliding_window": 4,
        "sliding_window_pattern": "LLLG", "hidden_size": 16, "intermediate_size": 16,
    },
    "exaone4": {"architectures": ["Exaone4ForCausalLM"], "rope_scaling": LLAMA_3},
    "seed_oss": {
        "architectures": ["SeedOssForCausalLM"], "head_dim": 24, "attention_bias": True,
        "attention_out_bias": False,
    },
    "ernie4_5": {
        "architectures": ["Ernie4_5ForCausalLM"], "head_dim": 24, "use_bias": False, "tie_word_embeddings": True,
    },
}  # fmt: skip

KINDS |= hugging_face_layers.KINDS | hugging_face_experts.KINDS | hugging_face_hybrids.KINDS
KINDS |= hugging_face_gemmas.KINDS | hugging_face_deltas.KINDS
LAYER_MODULES = {
    kind: module
    for module in (
        hugging_face_layers,
        hugging_face_hybrids,
        hugging_face_gemmas,
        hugging_face_deltas,
    )
    for kind in module.CLASSES
}
HEAD_NORMS = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Gemma3ForCausalLM", "Glm4MoeForCausalLM")
GATE_UP = ("Phi3ForCausalLM", "Glm4ForCausalLM")
FULL_WIDTH_CLASSES = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
QKV_BIASES = ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "SeedOssForCausalLM", "Glm4ForCausalLM",
              "Glm4MoeForCausalLM")  # fmt: skip
NORMS_BEHIND = (*FULL_WIDTH_CLASSES, "Exaone4ForCausalLM")  # and none before
# where experts are, what their number is called, and gate, up and down
EXPERTS = {
    "OlmoeForCausalLM": ("mlp", "num_experts", ("gate_proj", "up_proj", "down_proj")),
    "MixtralForCausalLM": ("block_sparse_moe", "num_local_experts", ("w1", "w3", "w2")),
    "Qwen3MoeForCausalLM": ("mlp", "num_experts", ("gate_proj", "up_proj", "down_proj")),
}


NORMS = (
    "norm.weight",
    ".ln_1.weight",
    ".ln_2.weight",
    ".ln_f.weight",
    ".ln_mlp.weight",
    ".ln_attn.weight",
)


def config_of(kind: str) -> Config:
    return BASE | KINDS[kind]


def tensors_of(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights, large enough that a wrong variant shows."""
    rng, tensors = np.random.default_rng(seed), {}
    for name, shape in shapes(config).items():
        value = rng.standard_normal(shape)
        if name.endswith(NORMS) or "layernorm" in name:
            shifted = ("GemmaF", "Gemma2", "Gemma3F", "Nemotron", "Qwen3Next", "Qwen3_5")
            is_offset = config["architectures"][0].startswith(shifted) or name.endswith(".bias")
            is_offset = is_offset and not name.endswith("linear_attn.norm.weight")
            value = value * 0.3 + (0 if is_offset else 1)
        elif len(shape) > 1:
            value *= 1.5 / math.sqrt(shape[-1])
        tensors[name] = value.astype(np.float32)
    return tensors


def head_width(config: Config) -> int:
    if "qk_rope_head_dim" in config:
        return int(config["qk_rope_head_dim"])  # of what rope turns
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    if config["architectures"][0] in LAYER_MODULES:
        return LAYER_MODULES[config["architectures"][0]].shapes(config)
    kind, c, f, d = (
        config["architectures"][0],
        config["hidden_size"],
        config["intermediate_size"],
        head_width(config),
    )
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    block: dict[str, tuple[int, ...]] = {"input_layernorm": (c,), "post_attention_layernorm": (c,)}
    if kind in ("Gemma2ForCausalLM", "Gemma3ForCausalLM"):
        block |= {"pre_feedforward_layernorm": (c,), "post_feedforward_layernorm": (c,)}
    if kind in HEAD_NORMS:
        block |= {"self_attn.q_norm": (d,), "self_attn.k_norm": (d,)}
    if kind == "Glm4ForCausalLM":
        block |= {"post_self_attn_layernorm": (c,), "post_mlp_layernorm": (c,)}
    if kind == "HunYuanDenseV1ForCausalLM":
        block |= {"self_attn.query_layernorm": (d,), "self_attn.key_layernorm": (d,)}
    if kind == "OlmoeForCausalLM":
        block |= {"self_attn.q_norm": (q,), "self_attn.k_norm": (kv,)}
    if kind in NORMS_BEHIND:
        del block["input_layernorm"]
        full_width = kind in FULL_WIDTH_CLASSES
        block |= {
            "self_attn.q_norm": (q if full_width else d,),
            "self_attn.k_norm": (kv if full_width else d,),
        }
        block["post_feedforward_layernorm"] = (c,)
    if kind in GATE_UP:
        block["mlp.gate_up_proj"] = (2 * f, c)
    if kind == "Phi3ForCausalLM":
        block["self_attn.qkv_proj"] = (q + 2 * kv, c)
    else:
        block |= {
            "self_attn.q_proj": (q, c),
            "self_attn.k_proj": (kv, c),
            "self_attn.v_proj": (kv, c),
        }
    block["self_attn.o_proj"] = (c, q)
    if "kv_lora_rank" in config:
        block = {name: shape for name, shape in block.items() if "self_attn" not in name}
        block |= hugging_face_experts.latent_shapes(config)
    if kind in EXPERTS:
        at, count, (gate, up, down) = EXPERTS[kind]
        f = config.get("moe_intermediate_size", f)
        block[f"{at}.gate"] = (config[count], c)
        for e in range(config[count]):
            for name, shape in ((gate, (f, c)), (down, (c, f)), (up, (f, c))):
                block[f"{at}.experts.{e}.{name}"] = shape
    elif kind not in hugging_face_experts.CLASSES:
        block["mlp.down_proj"] = (c, f)
        if kind not in GATE_UP:
            block |= {"mlp.gate_proj": (f, c), "mlp.up_proj": (f, c)}
    tensor_shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], c)
    }
    for i in range(config["num_hidden_layers"]):
        tensor_shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in block.items()}
        if kind in hugging_face_experts.CLASSES:
            expert_shapes = hugging_face_experts.shapes(config, i).items()
            tensor_shapes |= {f"model.layers.{i}.{name}": shape for name, shape in expert_shapes}
        for part in biased(config):
            tensor_shapes[f"model.layers.{i}.self_attn.{part}_proj.bias"] = block[
                f"self_attn.{part}_proj"
            ][:1]
    tensor_shapes["model.norm.weight"] = (c,)
    if not config["tie_word_embeddings"]:
        tensor_shapes["lm_head.weight"] = (config["vocab_size"], c)
    return tensor_shapes


def biased(config: Config) -> str:
    if config["architectures"][0] in QKV_BIASES:
        return "qkv"
    return "qkvo" if config.get("attention_bias") else ""


# ---- files -----------------------------------------------------------------------------------------------------


INTERNLM = {
    "model.embed_tokens": "model.tok_embeddings", "lm_head": "output", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3",
}  # fmt: skip


def write_safetensors(path: Path, tensors: Tensors, kind: str = "F32") -> None:
    """The format: a length, a JSON header, bytes."""
    header, parts, at = {}, [], 0
    for name, value in tensors.items():
        raw = value if value.dtype == np.uint8 else value.astype("<f4")
        if kind == "BF16":
            raw = (raw.view("<u4") >> 16).astype("<u2")
        data = raw.astype("<f2").tobytes() if kind == "F16" else raw.tobytes()
        header[name] = {
            "dtype": "U8" if value.dtype == np.uint8 else kind,
            "shape": list(value.shape),
            "data_offsets": [at, at + len(data)],
        }
        parts.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


@cache
def sentencepiece_model(leads: bool = True, symbols: Sequence[str] = ()) -> bytes:
    """A SentencePiece model of at most V - 10 tokens, that puts a space in front of a text or does not."""
    words = [f"{a}{b}{c}" for a in "bcdfgh" for b in "aeiou" for c in "lmnrst"]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(words[i::7]) for i in range(7)]), model_writer=model, model_type="bpe",
        vocab_size=V - 10, hard_vocab_limit=False, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, add_dummy_prefix=leads, num_threads=1, minloglevel=4,
        user_defined_symbols=[*symbols],
    )  # fmt: skip
    return model.getvalue()


def write_checkpoint(
    folder: Path, kind: str = "llama", **changes: Any
) -> tuple[Config, dict[str, np.ndarray]]:
    """A folder with a model of a kind, its config changed so, and a SentencePiece vocabulary."""
    config = config_of(kind) | changes
    tensors = tensors_of(config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({"sliding_window": None} | {k: v for k, v in config.items() if k != "experts"})
    )
    (folder / "tokenizer.model").write_bytes(sentencepiece_model())
    write_safetensors(folder / "model.safetensors", tensors)
    return config, tensors


def internlm2(config: Config, tensors: Tensors) -> tuple[Config, dict[str, np.ndarray]]:
    """A llama as InternLM 2 stores it: in one matrix groups of two queries, their key and their value."""
    converted = {}
    for name, value in tensors.items():
        for llama_name, internlm_name in INTERNLM.items():
            name = name.replace(llama_name, internlm_name)
        converted[name] = value
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}.self_attn"
        q, k, v = (converted.pop(f"{at}.{part}_proj.weight").reshape(-1, 16, 64) for part in "qkv")
        groups = [q[0], q[1], k[0], v[0], q[2], q[3], k[1], v[1]]
        converted[f"model.layers.{i}.attention.wqkv.weight"] = np.concatenate(groups)
    return config | {"architectures": ["InternLM2ForCausalLM"], "bias": False}, converted


def byte_characters() -> list[str]:
    """The visible character that stands for each byte in byte-level vocabularies."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    remaining = [b for b in range(256) if b not in shown]
    table = {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(remaining)}
    return [table[b] for b in range(256)]


def added(id: int, text: str, special: bool = True, **flags: bool) -> dict[str, Any]:
    """A token of a tokenizer.json's added_tokens."""
    default_flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": text, "special": special} | default_flags | flags


def bpe_tokenizer(pattern: str, *, ignore_merges: bool = False) -> dict[str, Any]:
    """A tokenizer.json: bytes, five merges, two special tokens."""
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("\u0120", "w"), ("o", "r")]
    tokens = byte_characters() + [left + right for left, right in merges]
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    begin = {"SpecialToken": {"id": "<|begin|>", "type_id": 0}}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {
        "model": {
            "type": "BPE", "vocab": {text: id for id, text in enumerate(tokens)}, "ignore_merges": ignore_merges,
            "merges": [list(pair) for pair in merges],
        },
        "added_tokens": [
            added(len(tokens), "<|begin|>"), added(len(tokens) + 1, "<|eot_id|>"),
            added(len(tokens) + 2, "<tool>", special=False),
        ],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, byte_level]},
        "post_processor": {
            "type": "TemplateProcessing", "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
            "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [len(tokens)], "tokens": ["<|begin|>"]}},
        },
    }  # fmt: skip


# ---- the forward pass --------------------------------------------------------------------------------------------


def logits(config: Config, tensors: Tensors, tokens: np.ndarray) -> np.ndarray:
    """Logits (T, V) of one sequence of tokens (T,)."""
    kind = config["architectures"][0]
    model_class = LAYER_MODULES[kind].Model if kind in LAYER_MODULES else Model
    return model_class(config, tensors).logits(tokens)


class Model:
    """A checkpoint's forward pass, one sequence without a cache."""

    def __init__(self, config: Config, tensors: Tensors) -> None:
        self.config, self.kind = config, config["architectures"][0]
        self.w = {name: value.astype(np.float64) for name, value in tensors.items()}
        self.gemma = self.kind.startswith("Gemma")

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        h = self.w["model.embed_tokens.weight"][tokens]
        if self.gemma:
            h = h * math.sqrt(self.config["hidden_size"])
        h = h * self.config.get("embedding_multiplier", 1.0)
        for i in range(self.config["num_hidden_layers"]):
            h = self.block(i, h)
        x = (
            self.norm("model.norm", h)
            @ self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"]).T
        )
        x = x / self.config.get("logits_scaling", 1.0)
        cap = self.config.get("final_logit_softcapping")
        return cap * np.tanh(x / cap) if cap else x

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        weight = self.w[f"{name}.weight"] + (1 if self.gemma else 0)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * weight

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0)

    def block(self, i: int, h: np.ndarray) -> np.ndarray:
        at, share = f"model.layers.{i}", self.config.get("residual_multiplier", 1.0)
        if self.kind in NORMS_BEHIND:
            h = h + self.norm(f"{at}.post_attention_layernorm", self.attention(i, h))
            return h + self.norm(f"{at}.post_feedforward_layernorm", self.feed_forward(at, h))
        y = self.attention(i, self.norm(f"{at}.input_layernorm", h))
        if self.kind in ("Gemma2ForCausalLM", "Gemma3ForCausalLM"):
            h = h + self.norm(f"{at}.post_attention_layernorm", y)
            y = self.feed_forward(at, self.norm(f"{at}.pre_feedforward_layernorm", h))
            return h + self.norm(f"{at}.post_feedforward_layernorm", y)
        if self.kind == "Glm4ForCausalLM":
            h = h + self.norm(f"{at}.post_self_attn_layernorm", y)
            y = self.feed_forward(at, self.norm(f"{at}.post_attention_layernorm", h))
            return h + self.norm(f"{at}.post_mlp_layernorm", y)
        h = h + share * y
        y = self.feed_forward(at, self.norm(f"{at}.post_attention_layernorm", h))
        return h + share * y

    def feed_forward(self, at: str, x: np.ndarray) -> np.ndarray:
        if self.kind in hugging_face_experts.CLASSES:
            i = int(at.split(".")[-1])
            return hugging_face_experts.feed_forward(self.config, self.w, at, i, x, self.linear)
        if self.kind in EXPERTS:
            return self.experts(f"{at}.{EXPERTS[self.kind][0]}", x)
        if self.kind in GATE_UP:
            gate, up = np.split(self.linear(f"{at}.mlp.gate_up_proj", x), 2, -1)
        else:
            gate, up = self.linear(f"{at}.mlp.gate_proj", x), self.linear(f"{at}.mlp.up_proj", x)
        act = gelu(gate) if self.gemma else silu(gate)
        return self.linear(f"{at}.mlp.down_proj", act * up)

    def experts(self, at: str, x: np.ndarray) -> np.ndarray:
        p = softmax(self.linear(f"{at}.gate", x))
        y = np.zeros_like(x)
        for t in range(len(x)):
            chosen = np.argsort(-p[t])[: self.config["num_experts_per_tok"]]
            for e in chosen:
                gate, up, down = (f"{at}.experts.{e}.{name}" for name in EXPERTS[self.kind][2])
                hidden = silu(self.linear(gate, x[t])) * self.linear(up, x[t])
                total = p[t, chosen].sum() if self.config.get("norm_topk_prob", True) else 1
                y[t] += p[t, e] / total * self.linear(down, hidden)
        return y

    def attention(self, i: int, x: np.ndarray) -> np.ndarray:
        c, at, time = self.config, f"model.layers.{i}.self_attn", len(x)
        if "kv_lora_rank" in c:
            angles, scale = self.rotation(time, False)
            return hugging_face_experts.latent(
                c, at, x, self.linear, self.norm, lambda x: rotate_pairs(x, angles, scale)
            )
        heads, kv, d = c["num_attention_heads"], c["num_key_value_heads"], head_width(c)
        if self.kind == "Phi3ForCausalLM":
            q, k, v = np.split(self.linear(f"{at}.qkv_proj", x), [heads * d, (heads + kv) * d], -1)
        else:
            q, k, v = (self.linear(f"{at}.{name}_proj", x) for name in "qkv")
        if self.kind in (*FULL_WIDTH_CLASSES, "OlmoeForCausalLM"):
            q, k = self.norm(f"{at}.q_norm", q), self.norm(f"{at}.k_norm", k)
        q, k, v = (t.reshape(time, -1, d) for t in (q, k, v))
        if self.kind in (*HEAD_NORMS, "Exaone4ForCausalLM"):
            q, k = self.norm(f"{at}.q_norm", q), self.norm(f"{at}.k_norm", k)
        sliding = self.sliding(i)
        no_rotation = self.kind == "Exaone4ForCausalLM" and "sliding_window" in c and not sliding
        nope_kinds = ("SmolLM3ForCausalLM", "Llama4ForCausalLM")
        if not no_rotation and not (self.kind in nope_kinds and (i + 1) % 4 == 0):
            angles, scale = self.rotation(time, sliding)
            pairs = self.kind.startswith(("Ernie4_5", "Glm4ForCausalLM", "Llama4"))
            rotate, n = rotate_pairs if pairs else rotate_halves, 2 * angles.shape[-1]
            q, k = (
                np.concatenate([rotate(x[..., :n], angles, scale), x[..., n:]], -1) for x in (q, k)
            )
        if self.kind == "Llama4ForCausalLM" and (i + 1) % 4:
            q, k = (x / np.sqrt((x**2).mean(-1, keepdims=True) + c["rms_norm_eps"]) for x in (q, k))
        if self.kind == "HunYuanDenseV1ForCausalLM":
            q, k = self.norm(f"{at}.query_layernorm", q), self.norm(f"{at}.key_layernorm", k)
        if self.kind == "Ministral3ForCausalLM":
            rope = c["rope_parameters"]
            steps = np.floor(np.arange(time) / rope["original_max_position_embeddings"])
            q = q * (1 + rope["llama_4_scaling_beta"] * np.log(1 + steps))[:, None, None]
        distance = np.arange(time)[:, None] - np.arange(time)
        hidden = (distance < 0) | (distance >= c["sliding_window"]) if sliding else distance < 0
        y = np.empty_like(q)
        for j in range(heads):
            scores = (
                q[:, j] @ k[:, j * kv // heads].T / math.sqrt(c.get("query_pre_attn_scalar", d))
            )
            if "attention_multiplier" in c:
                scores = scores * math.sqrt(d) * c["attention_multiplier"]
            if cap := c.get("attn_logit_softcapping"):
                scores = cap * np.tanh(scores / cap)
            scores = np.where(hidden, -np.inf, scores)
            if (sinks := self.w.get(f"{at}.sinks")) is not None:
                scores = np.concatenate([scores, np.full((time, 1), sinks[j])], -1)
            y[:, j] = softmax(scores)[:, :time] @ v[:, j * kv // heads]
        return self.linear(f"{at}.o_proj", y.reshape(time, -1))

    def sliding(self, i: int) -> bool:
        """Whether a block's attention has a window."""
        if self.kind in ("Gemma2ForCausalLM", "GptOssForCausalLM"):
            return i % 2 == 0
        if self.kind in ("Olmo3ForCausalLM", "Exaone4ForCausalLM"):
            return "sliding_window" in self.config and i % 4 != 3
        return self.kind == "Gemma3ForCausalLM" and i % 6 != 5

    def rotation(self, time: int, sliding: bool) -> tuple[np.ndarray, float]:
        """Angles (T, D / 2), and what cosines and sines are multiplied with."""
        c, d = (
            self.config,
            int(head_width(self.config) * self.config.get("partial_rotary_factor", 1)),
        )
        rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
        base = rope.get("rope_theta") or c["rope_theta"]
        if sliding and self.kind == "Gemma3ForCausalLM":
            base, rope = c["rope_local_base_freq"], {}
        if sliding and self.kind == "Olmo3ForCausalLM":
            rope = {}
        inverse, scale = base ** (-np.arange(0, d, 2) / d), 1.0
        kind = rope.get("rope_type", rope.get("type"))
        if kind == "dynamic":
            inverse = (base * rope["alpha"] ** (d / (d - 2))) ** (-np.arange(0, d, 2) / d)
        if kind == "linear":
            inverse = inverse / rope["factor"]
        elif kind == "llama3":
            inverse = llama_3(inverse, rope)
        elif kind == "yarn":
            default_factor = 1 + 0.1 * math.log(rope["factor"])
            scale = rope.get(
                "attention_factor", default_factor if self.kind == "GptOssForCausalLM" else scale
            )
            inverse = yarn(inverse, rope, base, d)  # mscale / mscale_all_dim is 1
        elif kind == "longrope":
            inverse = inverse / np.array(rope["short_factor"])
            original = c["original_max_position_embeddings"]
            length_factor = c["max_position_embeddings"] / original
            scale = math.sqrt(1 + math.log(length_factor) / math.log(original))
        return np.arange(time)[:, None] * inverse, scale


def llama_3(inverse: np.ndarray, rope: Config) -> np.ndarray:
    original, scaled = rope["original_max_position_embeddings"], []
    for f in inverse:
        wavelength = 2 * math.pi / f
        if wavelength < original / rope["high_freq_factor"]:
            scaled.append(f)
        elif wavelength > original / rope["low_freq_factor"]:
            scaled.append(f / rope["factor"])
        else:
            spread = rope["high_freq_factor"] - rope["low_freq_factor"]
            smooth = (original / wavelength - rope["low_freq_factor"]) / spread
            scaled.append((1 - smooth) * f / rope["factor"] + smooth * f)
    return np.array(scaled)


def yarn(inverse: np.ndarray, rope: Config, base: float, d: int) -> np.ndarray:
    def dimension(turns: float) -> float:
        return (
            d
            * math.log(rope["original_max_position_embeddings"] / (turns * 2 * math.pi))
            / (2 * math.log(base))
        )

    low, high = (
        max(math.floor(dimension(rope["beta_fast"])), 0),
        min(math.ceil(dimension(rope["beta_slow"])), d - 1),
    )
    ramp = np.clip((np.arange(d // 2) - low) / max(high - low, 0.001), 0, 1)
    return inverse / rope["factor"] * ramp + inverse * (1 - ramp)


def rotate_halves(x: np.ndarray, angles: np.ndarray, scale: float) -> np.ndarray:
    """Rotation by halves: element i of a head goes with element i + D / 2."""
    cos, sin = (np.concatenate([f(angles)] * 2, -1)[:, None] * scale for f in (np.cos, np.sin))
    first, second = np.split(x, 2, -1)
    return x * cos + np.concatenate([-second, first], -1) * sin


def rotate_pairs(x: np.ndarray, angles: np.ndarray, scale: float) -> np.ndarray:
    """Rotation of neighbours: element 2i of a head goes with element 2i + 1."""
    turn, n = np.exp(1j * angles)[:, None] * scale, 2 * angles.shape[-1]
    pairs = (x[..., :n:2] + 1j * x[..., 1:n:2]) * turn
    both = np.stack([pairs.real, pairs.imag], -1).reshape(*x.shape[:-1], n)
    return np.concatenate([both, x[..., n:]], -1)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
