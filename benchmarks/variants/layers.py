"""Patterns of sliding layers, windows, contexts, chunks and sequences: the logits of transformers after every token."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.gemma3n import modeling_gemma3n

from benchmarks.convert import BASE, CLASSES, NULLABLE_KEYS, relative_error, sparse
from benchmarks.variants.models import MAX_ERROR
from benchmarks.variants.outcome import DIFFERENT, EQUAL, INVALID, SAID, Outcome, refused_outcome
from packtrain.common.errors import InputError
from packtrain.conversion.hugging_face import convert
from packtrain.inference.kv_cache import Context
from packtrain.models.model_file import open_model
from tests.hugging_face import V, sentencepiece_model

NAMES = (
    "Gemma3TextConfig", "Gemma2Config", "Olmo3Config", "GptOssConfig", "Cohere2Config", "Exaone4Config",
    "Gemma4TextConfig", "MistralConfig", "Phi3Config", "Qwen2Config", "Starcoder2Config", "Qwen3Config",
    "SmolLM3Config", "Ministral3Config", "MixtralConfig", "Llama4TextConfig", "Gemma3nTextConfig", "Qwen3MoeConfig",
)  # fmt: skip
KINDS = "sliding_attention", "full_attention"
EVERY = {"Gemma3": 6, "Gemma2": 2, "Olmo3": 4, "GptOss": 2, "Cohere2": 4, "Gemma4": 2, "Gemma3n": 5}
WORDS = (
    "layer_types",
    "double_wide",
    "window",
    "pattern",
    "num_hidden_layers",
    "shared",
    "attention",
)


def pattern(rng: random.Random, name: str, blocks: int) -> list[str]:
    """Of windows: every N-th block without, mostly as in the class, all alike, or any."""
    every = next((n for start, n in EVERY.items() if name.startswith(start)), 1)
    every = every if rng.random() < 0.7 else rng.randrange(2, 7)
    class_pattern = [KINDS[(i + 1) % every == 0] for i in range(blocks)]
    other_patterns = (
        [KINDS[0]] * blocks,
        [KINDS[1]] * blocks,
        [rng.choice(KINDS) for _ in range(blocks)],
    )
    return class_pattern if rng.random() < 0.6 else rng.choice(other_patterns)


def model_of(rng: random.Random, name: str) -> tuple[Any, Any]:
    """A config with another pattern, and a model of random weights."""
    blocks = rng.randrange(1, 8)
    config_args = (
        BASE
        | CLASSES[name]
        | {"num_hidden_layers": blocks, "sliding_window": rng.choice((2, 4, 7, 16, 64))}
    )
    if rng.random() < 0.9:
        config_args["layer_types"] = pattern(rng, name, blocks)
    if name.startswith(("Qwen", "SmolLM3")):
        config_args["use_sliding_window"] = rng.random() < 0.5
    if name == "Gemma3nTextConfig":
        config_args |= {"activation_sparsity_pattern": [0.95] * blocks, "num_kv_shared_layers": 0}
    if name == "Gemma4TextConfig" and rng.random() < 0.7:
        config_args |= {"num_kv_shared_layers": 0, "use_double_wide_mlp": False}
    if name == "Exaone4Config" and rng.random() < 0.5:
        config_args |= {"sliding_window": None, "layer_types": [KINDS[1]] * blocks}
    if "num_kv_shared_layers" in config_args:
        config_args["num_kv_shared_layers"] = min(config_args["num_kv_shared_layers"], blocks - 1)
    config = getattr(transformers, name)(
        **{k: v for k, v in config_args.items() if v is not None or k in NULLABLE_KEYS}
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    torch.manual_seed(rng.randrange(1 << 30))
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 1.5 / weight.shape[-1] ** 0.5) if weight.ndim > 1 else weight.add_(
                0.1
            )
    return config, model.eval().to(torch.float32)


def compare(rng: random.Random, folder: Path) -> Outcome:
    """One variant: texts of some sequences in turns, each in chunks, in a context of one size."""
    name = rng.choice(NAMES)
    try:
        config, model = model_of(rng, name)
        texts = [
            [rng.randrange(3, V) for _ in range(rng.randrange(8, 48))]
            for _ in range(rng.choice((1, 1, 2, 3)))
        ]
        with torch.no_grad():
            expected_logits = [
                model(torch.tensor([ids]), use_cache=False).logits[0].numpy() for ids in texts
            ]
        model.save_pretrained(folder / "m")
    except Exception as error:
        return Outcome(INVALID, f"{name}: {error!r}")
    (folder / "m/tokenizer.model").write_bytes(sentencepiece_model())
    shown = json.dumps(
        {
            k: getattr(config, k, None)
            for k in ("layer_types", "sliding_window", "use_sliding_window")
        }
    )
    chunk, is_swa_full = rng.choice((1, 3, 8, 64)), rng.random() < 0.25
    room = sum(map(len, texts)) + rng.choice((0, 1, 50))
    shown = f"{name} {shown}, {[*map(len, texts)]} tokens, chunks of {chunk}, {room} cells, swa_full {is_swa_full}"
    notes: list[str] = []
    try:
        convert(folder / "m", folder / "m.gguf", "f32", report=notes.append)
        opened = open_model(folder / "m.gguf")
    except InputError as error:
        return refused_outcome(error, *WORDS)
    texts = [ids[: opened.config.context_length] for ids in texts]  # beyond it a note speaks
    context = Context(
        opened, cells=room, sequences=len(texts), cache="f32", prompts=(chunk,), rows=chunk, swa_full=is_swa_full
    )  # fmt: skip
    done = [0] * len(texts)
    while any(at < len(ids) for at, ids in zip(done, texts, strict=True)):
        seq = rng.choice([i for i, ids in enumerate(texts) if done[i] < len(ids)])
        part = texts[seq][done[seq] : done[seq] + rng.randrange(1, chunk + 1)]
        got = context.decode(part, seq, wanted=range(len(part)))
        expected = expected_logits[seq][done[seq] : done[seq] + len(part)]
        if relative_error(np.array(got), expected) > MAX_ERROR:
            return Outcome(
                DIFFERENT,
                f"{shown}: {relative_error(np.array(got), expected):.1e} apart at {done[seq]}",
            )
        done[seq] += len(part)
    return Outcome(SAID if notes else EQUAL, f"{shown} {notes}")


modeling_gemma3n.Gemma3nTextMLP._gaussian_topk = sparse
