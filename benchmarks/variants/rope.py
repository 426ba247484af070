"""Rope settings of a config.json: the logits of transformers, or a refusal that names a setting.

The folder's config.json is the same for both; transformers reads old and new keys by its own rules.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.convert import relative_error
from benchmarks.variants.models import MAX_ERROR, load_model, logits, tiny_checkpoint
from benchmarks.variants.outcome import DIFFERENT, EQUAL, INVALID, Outcome, refused_outcome
from packtrain.common.errors import InputError
from packtrain.conversion.hugging_face import convert
from packtrain.inference.generator import Generator
from packtrain.models.model_file import open_model
from tests.hugging_face import V

CLASSES = (
    "LlamaConfig", "MistralConfig", "MixtralConfig", "Ministral3Config", "Qwen2Config", "Qwen3Config", "GemmaConfig",
    "Gemma2Config", "Gemma3TextConfig", "Phi3Config", "SmolLM3Config", "GraniteConfig", "Olmo2Config", "Olmo3Config",
    "Exaone4Config", "Glm4Config", "HunYuanDenseV1Config", "SeedOssConfig", "Ernie4_5Config", "Qwen2MoeConfig",
    "DeepseekV3Config", "DeepseekV2Config", "GptOssConfig", "Glm4MoeConfig", "Lfm2Config", "FalconH1Config",
    "PhiConfig", "StableLmConfig", "NemotronConfig", "Cohere2Config", "Starcoder2Config", "Llama4TextConfig",
    "GraniteMoeConfig",
)  # fmt: skip
TYPES = {
    "default": 1,
    "linear": 2,
    "yarn": 6,
    "llama3": 3,
    "longrope": 2,
    "dynamic": 1,
    "proportional": 0.5,
}
NAMES = (
    "rope",
    "rotary",
    "context",
    "original",
    "factor",
    "theta",
    "alpha",
    "window",
    "layer_types",
)


def settings(rng: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    """A type of rope with some of its settings, and now and then some of another's."""
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kind, values = rng.choices([*TYPES], [*TYPES.values()])[0], {
        "factor": rng.choice((1.0, 2.0, 4.0, 8)), "attention_factor": rng.choice((1.0, 0.8, 1.3)),
        "mscale": rng.choice((0.7, 1.0)), "mscale_all_dim": rng.choice((0.0, 0.7, 1.0)),
        "beta_fast": rng.choice((32, 16.0, 8)), "beta_slow": rng.choice((1, 2.0)), "truncate": rng.random() < 0.5,
        "original_max_position_embeddings": rng.choice((16, 32, 64)), "low_freq_factor": 1.0,
        "high_freq_factor": rng.choice((4.0, 2.0)), "partial_rotary_factor": rng.choice((0.5, 0.25, 1.0)),
        "long_factor": [1 + i * rng.random() for i in range(width // 2)],
        "short_factor": [1 + i * rng.random() for i in range(width // 2)], "alpha": rng.choice((1.0, 1000.0)),
    }  # fmt: skip
    needed = {
        "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",), "longrope": ("long_factor", "short_factor"),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }.get(kind, ())  # fmt: skip
    optional_names = {
        "yarn": ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate",
                 "original_max_position_embeddings"),
        "longrope": ("factor", "attention_factor", "original_max_position_embeddings"), "dynamic": ("alpha",),
    }.get(kind, ())  # fmt: skip
    names = {*needed, *(name for name in optional_names if rng.random() < 0.4)}
    if rng.random() < 0.15:
        names.add(rng.choice([*values]))
    return {"rope_type": kind} | {name: values[name] for name in sorted(names)}


def variant(rng: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    """The config.json with other rope settings, by new or old keys."""
    rope, theta = settings(rng, config), rng.choice((1e4, 5e5, 1e6))
    changed = {k: v for k, v in config.items() if k not in ("rope_scaling", "rope_theta")}
    before = config.get("rope_parameters") or {}
    if "full_attention" in before and rng.random() < 0.8:
        inner = {"full_attention": rope | {"rope_theta": theta}}
        return changed | {"rope_parameters": before | inner}
    if rng.random() < 0.5:
        return changed | {"rope_parameters": rope | {"rope_theta": theta}}
    del changed["rope_parameters"]
    name = rng.choice(("rope_type", "type"))
    old = {name: rope.pop("rope_type"), **rope}
    share = {"partial_rotary_factor": rng.choice((0.5, 1.0))} if rng.random() < 0.1 else {}
    scaled = {} if rope == {} and rng.random() < 0.5 else {"rope_scaling": old}
    return changed | scaled | share | ({"rope_theta": theta} if rng.random() < 0.8 else {})


def compare(rng: random.Random, folder: Path) -> Outcome:
    """One variant: the logits after 12 and after 60 tokens."""
    name = rng.choice(CLASSES)
    source, config = tiny_checkpoint(name)
    shutil.copytree(source, folder / "m")
    changed = variant(rng, config)
    changed["max_position_embeddings"] = rng.choice((64, 64, 128))
    if "original_max_position_embeddings" in config:
        changed["original_max_position_embeddings"] = rng.choice((16, 32))
    (folder / "m/config.json").write_text(json.dumps(changed))
    rope_keys = ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings", "partial_rotary_factor",
            "original_max_position_embeddings")  # fmt: skip
    shown = f"{name} { ({key: changed[key] for key in rope_keys if key in changed}) }"
    texts = [np.array([rng.randrange(3, V) for _ in range(count)]) for count in (12, 60)]
    try:
        expected_logits = [logits(load_model(folder / "m"), ids) for ids in texts]
    except Exception as error:
        return Outcome(INVALID, f"{shown}: {error!r}")
    if not all(np.isfinite(expected).all() for expected in expected_logits):
        return Outcome(INVALID, f"{shown}: logits that are not finite")
    try:
        convert(folder / "m", folder / "m.gguf", "f32", report=lambda line: None)
    except InputError as error:
        return refused_outcome(error, *NAMES)
    for ids, expected in zip(texts, expected_logits, strict=True):
        got = Generator.from_model(open_model(folder / "m.gguf"), len(ids)).feed(ids.tolist())
        if relative_error(got, expected) > MAX_ERROR:
            return Outcome(
                DIFFERENT, f"{shown}: {relative_error(got, expected):.1e} apart after {len(ids)}"
            )
    return Outcome(EQUAL, shown)
