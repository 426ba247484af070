"""The valid files that hostile ones are made from."""

from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np

from packtrain.data.tokenizer.bpe import ALPHABET
from packtrain.dtypes import BLOCK_TYPES, bf16
from packtrain.gguf import GGUF, MetadataValue, write_gguf
from packtrain.kernels.quant.quantized_arrays import quantize
from packtrain.models.adapter_file import Adapter, write_adapter
from packtrain.models.arch import ARCHITECTURES
from packtrain.models.config import RopeScaling
from packtrain.models.model_file import save_model
from tests.architectures import vocabulary
from tests.fuzz import Draft
from tests.models import seeded_weights
from tests.test_model_file import CONFIG

KINDS = ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f32", "f64")


def header_draft(folder: Path) -> Draft:
    """Every kind of value, arrays of every kind, and tensors of several types and shapes."""
    metadata = {f"one.{kind}": MetadataValue(kind, 1) for kind in KINDS}
    metadata |= {f"many.{kind}": MetadataValue(kind, [1, 2, 3]) for kind in KINDS}
    metadata |= {
        "general.architecture": MetadataValue("string", "llama"),
        "general.alignment": MetadataValue("u32", 32),
        "flag": MetadataValue("bool", True),
        "flags": MetadataValue("bool", [True, False]),
        "tokenizer.ggml.tokens": MetadataValue("string", [b"a", b"<s>", b"", "\u2581b".encode()]),
        "tokenizer.ggml.eos_token_id": MetadataValue("u32", 1),
    }
    packed = {
        dtype.name: np.zeros((2, 1), dtype.numpy)
        for dtype in (bf16, *(BLOCK_TYPES[name] for name in ("q8_0", "q4_K", "mxfp4")))
    }
    tensors = {
        "token_embd.weight": np.ones((4, 8), np.float32),
        "half": np.ones((2, 2, 2, 2), np.float16),
        "none": np.zeros((0, 4), np.float32),
        "scalar": np.ones((), np.float64),
        "blk.0.attn_norm.weight": np.ones(8, np.int32),
        **packed,
    }
    write_gguf(folder / "header.gguf", metadata, tensors)
    return Draft.of(folder / "header.gguf")


def byte_pairs() -> dict[str, MetadataValue]:
    """A byte-level vocabulary with a few merges and a template."""
    merges = [b"t h", b"th e", "\u0120 c".encode(), b"a t"]
    tokens = [*(c.encode() for c in ALPHABET.values()), *(m.replace(b" ", b"") for m in merges)]
    end_tokens = [b"<|im_start|>", b"<|im_end|>"]
    return {
        "tokenizer.ggml.model": MetadataValue("string", "gpt2"),
        "tokenizer.ggml.pre": MetadataValue("string", "qwen2"),
        "tokenizer.ggml.tokens": MetadataValue("string", tokens + end_tokens),
        "tokenizer.ggml.token_type": MetadataValue(
            "i32", [1] * len(tokens) + [3] * len(end_tokens)
        ),
        "tokenizer.ggml.merges": MetadataValue("string", merges),
        "tokenizer.ggml.eos_token_id": MetadataValue("u32", len(tokens) + 1),
        "tokenizer.chat_template": MetadataValue(
            "string", "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        ),
    }


def model_drafts(folder: Path) -> list[Draft]:
    """Small models that can be generated with, of every architecture and both kinds of vocabulary."""
    base = replace(CONFIG, block_count=1)
    window = replace(base, window=4, window_pattern=2, block_count=2)
    configs = {
        "llama": base,
        "experts": replace(base, expert_count=3, expert_used_count=2),
        "factors": replace(base, optional=("rope_freqs.weight", "attn_q.bias", "ffn_down.bias")),
        "mistral3": replace(base, rope_scaling=RopeScaling("yarn", 4.0, 16), temperature_scale=0.1),
        "qwen2": replace(base, optional=("attn_q.bias", "attn_k.bias", "attn_v.bias")),
        "qwen3": replace(base, key_length=8),
        "gemma": base,
        "gemma2": replace(window, attention_softcap=50.0, final_softcap=30.0),
        "gemma3": replace(window, rope_freq_base_swa=1e4),
        "phi3": base,
        "smollm3": replace(base, block_count=4),
        "packed": replace(base, embedding_length=32, feed_forward_length=64),
        "qwen3moe": replace(
            base, expert_count=3, expert_used_count=2, expert_feed_forward_length=12
        ),
    }
    drafts = []
    for name, config in configs.items():
        vocab = vocabulary() if len(drafts) % 3 else byte_pairs()
        architecture = name if name in ARCHITECTURES else "llama"
        tokens = len(vocab["tokenizer.ggml.tokens"].value)
        config = replace(config, vocab_size=tokens, architecture=architecture)
        path = folder / f"{name}.gguf"
        save_model(path, config, vocab, seeded_weights(config).__getitem__, name="small")
        if name == "packed":
            pack(path)
        drafts.append(Draft.of(path))
    return drafts


def pack(path: Path) -> None:
    """Matrices as blocks, of one type after the other."""
    file, types = GGUF(path), cycle(BLOCK_TYPES[name] for name in ("q8_0", "q4_0", "q5_1"))
    arrays = {name: file.array(name).copy() for name in file.entries}
    packed = {n: quantize(a, next(types)) if a.ndim > 1 else a for n, a in arrays.items()}
    write_gguf(path, file.values, packed)


def adapter_draft(folder: Path) -> Draft:
    """A LoRA adapter for two matrices."""
    rng = np.random.default_rng(0)
    pair = tuple(rng.standard_normal(shape).astype(np.float32) for shape in ((4, 24), (24, 4)))
    pairs = {f"blk.0.attn_{part}.weight": pair for part in ("q", "output")}
    write_adapter(folder / "adapter.gguf", Adapter("llama", 8.0, pairs), "adapter")
    return Draft.of(folder / "adapter.gguf")
