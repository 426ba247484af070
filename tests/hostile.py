"""The valid files that hostile ones are made from."""

from pathlib import Path

import numpy as np

from packtrain.dtypes import BLOCK_TYPES, bf16
from packtrain.gguf import Value, write
from tests.fuzz import Draft
from tests.test_model_file import save

KINDS = ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f32", "f64")


def header_draft(folder: Path) -> Draft:
    """Every kind of value, arrays of every kind, and tensors of several types and shapes."""
    values = {f"one.{kind}": Value(kind, 1) for kind in KINDS}
    values |= {f"many.{kind}": Value(kind, [1, 2, 3]) for kind in KINDS}
    values |= {
        "general.architecture": Value("string", "llama"),
        "general.alignment": Value("u32", 32),
        "flag": Value("bool", True),
        "flags": Value("bool", [True, False]),
        "tokenizer.ggml.tokens": Value("string", [b"a", b"<s>", b"", "\u2581b".encode()]),
        "tokenizer.ggml.eos_token_id": Value("u32", 1),
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
    write(folder / "header.gguf", values, tensors)
    return Draft.of(folder / "header.gguf")


def model_drafts(folder: Path) -> list[Draft]:
    """Small models that can be generated with."""
    save(folder / "model.gguf")
    return [Draft.of(folder / "model.gguf")]
