"""Fields of an adapter_config.json: the logits of PEFT, which opens the same folder, there and back, or a refusal.

PEFT saves an adapter of random weights; then the folder's configuration may be changed by hand.
"""

import functools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import peft
import torch

from benchmarks.convert import TOKENS, relative_error
from benchmarks.variants.models import MAX_ERROR, load_model, logits, tiny_checkpoint
from benchmarks.variants.outcome import DIFFERENT, EQUAL, INVALID, Outcome, refused_outcome
from packtrain.common.errors import InputError
from packtrain.conversion.hugging_face import convert
from packtrain.conversion.peft import read_peft, write_peft
from packtrain.inference.generator import Generator
from packtrain.models.adapter_file import check_fits, write_adapter
from packtrain.models.model_file import ModelFile, open_model
from packtrain.models.model_with_adapters import adapted, read_scaled

CLASSES = (
    "LlamaConfig", "LlamaConfig", "MistralConfig", "Qwen2Config", "Qwen3Config", "Gemma2Config", "GemmaConfig",
    "Phi3Config", "Olmo2Config", "Qwen2MoeConfig", "OlmoeConfig", "PhiConfig", "Glm4Config", "GPT2Config",
    "Starcoder2Config", "Cohere2Config", "SmolLM3Config", "Lfm2Config", "FalconH1Config",
)  # fmt: skip
STARTS = (True, False, "gaussian", "orthogonal", "pissa", "pissa_niter_4", "olora", "eva", "loftq")
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# changes of a written configuration by hand, with which PEFT reads the same tensors otherwise
BY_HAND: tuple[dict[str, Any], ...] = (
    {"use_rslora": True}, {"lora_alpha": 3}, {"lora_alpha": 0.5}, {"alpha_pattern": {"q_proj": 32}},
    {"alpha_pattern": {r".*\.0\..*": 32}}, {"layers_to_transform": [0]}, {"layers_to_transform": 1},
    {"target_modules": ["q_proj"]}, {"target_modules": r".*\.[qv]_proj"}, {"exclude_modules": ["v_proj"]},
    {"use_dora": True}, {"bias": "all"}, {"lora_bias": True}, {"fan_in_fan_out": True}, {"peft_type": "IA3"},
    {"layer_replication": [[0, 2], [0, 2]]}, {"modules_to_save": ["lm_head"]}, {"inference_mode": False},
    {"lora_dropout": 0.5}, {"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"},
    {"trainable_token_indices": [1, 2]}, {"target_parameters": ["mlp.experts.down_proj"]}, {"new_field": 5},
    {"rank_pattern": {"q_proj": 2}}, {"use_qalora": True}, {"alora_invocation_tokens": [5, 6]}, {"r": 8},
    {"megatron_config": {"a": 1}}, {"task_type": "SEQ_CLS"}, {"revision": "main"}, {"layers_pattern": "layers"},
)  # fmt: skip


@functools.cache
def base(name: str) -> tuple[Path, ModelFile]:
    """A checkpoint of a class, and its GGUF file."""
    folder, _ = tiny_checkpoint(name)
    path = Path(tempfile.mkdtemp(prefix="variants-")) / "base.gguf"
    convert(folder, path, "f32")
    return folder, open_model(path)


def settings(rng: random.Random, names: list[str]) -> dict[str, Any]:
    """Arguments of LoraConfig for a model with these modules."""
    target_names = rng.sample(names, min(len(names), rng.choice((1, 2, 3))))
    targets = rng.choice(
        ("all-linear", target_names, "|".join(rf".*\.{name}" for name in target_names))
    )
    chosen: dict[str, Any] = {
        "r": rng.choice((2, 4)),
        "lora_alpha": rng.choice((1, 4, 6)),
        "target_modules": targets,
    }
    extra_options: dict[str, Any] = {
        "use_rslora": True, "rank_pattern": {rng.choice(names): 3}, "alpha_pattern": {rng.choice(names): 20},
        "alpha_pattern ": {rf".*\.1\..*{rng.choice(names)}": 20}, "layers_to_transform": rng.choice(([0], [1], 1)),
        "exclude_modules": [rng.choice(names)], "use_dora": True, "bias": rng.choice(("all", "lora_only")),
        "lora_bias": True, "init_lora_weights": rng.choice(STARTS), "init_lora_weights ": rng.choice(STARTS),
        "modules_to_save": [rng.choice(("lm_head", "norm", "embed_tokens"))], "trainable_token_indices": [3, 4],
        "layer_replication": [[0, 2], [1, 2]],
        "target_modules": [*target_names, rng.choice(("lm_head", "embed_tokens"))],
        "fan_in_fan_out": True, "lora_dropout": 0.3, "task_type": "CAUSAL_LM", "use_qalora": True,
        "target_parameters": ["mlp.experts.gate_up_proj"], "alora_invocation_tokens": [5, 6],
    }  # fmt: skip
    for name in rng.sample([*extra_options], rng.choice((0, 1, 1, 2, 3))):
        chosen[name.strip()] = extra_options[name]
    return chosen


def save(rng: random.Random, source: Path, folder: Path) -> str:
    """An adapter of random weights as PEFT saves it; what it is."""
    model, torch_seed = load_model(source), rng.randrange(1 << 30)
    torch.manual_seed(torch_seed)
    linear = torch.nn.Linear, torch.nn.Embedding
    names = {
        name.rsplit(".", 1)[-1] for name, one in model.named_modules() if isinstance(one, linear)
    }
    chosen = settings(rng, sorted(names - {"lm_head", "embed_tokens"}))
    peft_model = peft.get_peft_model(model, peft.LoraConfig(**chosen))
    save_options: dict[str, Any] = {}
    if str(chosen.get("init_lora_weights"))[:5] in ("pissa", "olora") and rng.random() < 0.5:
        peft_model.peft_config["default"].init_lora_weights = True
        peft_model.save_pretrained(folder / "start")
        peft_model.peft_config["default"].init_lora_weights = chosen["init_lora_weights"]
        save_options = {"path_initial_model_for_weight_conversion": str(folder / "start")}
    with torch.no_grad():
        for weight in (one for one in peft_model.parameters() if one.requires_grad):
            weight.add_(torch.randn_like(weight) * 0.3)
    peft_model.save_pretrained(folder / "lora", **save_options)
    by_hand = rng.choice(BY_HAND) if rng.random() < 0.4 else {}
    if by_hand:
        path = folder / "lora/adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | by_hand))
    return f"{chosen} {'saved for the base ' if save_options else ''}then {by_hand}"


def compare(rng: random.Random, folder: Path) -> Outcome:
    """One variant: logits with the adapter, and with the folder that packtrain writes of it."""
    name = rng.choice(CLASSES)
    source, model = base(name)
    try:
        shown = f"{name} {save(rng, source, folder)}"
        opened = peft.PeftModel.from_pretrained(load_model(source), folder / "lora")
        expected, base_logits = logits(opened, TOKENS), logits(load_model(source), TOKENS)
    except Exception as error:
        return Outcome(INVALID, f"{name}: {error!r}")
    try:
        adapter = read_peft(folder / "lora", model)
        check_fits(adapter, folder, model.gguf)
        write_adapter(folder / "adapter.gguf", adapter, "adapter", model.gguf)
        both = adapted(model, read_scaled([str(folder / "adapter.gguf")], model.gguf))
        got = Generator.from_model(both, len(TOKENS)).feed(TOKENS.tolist())
        write_peft(folder / "back", adapter, model)
    except InputError as error:
        return refused_outcome(error)
    back = logits(peft.PeftModel.from_pretrained(load_model(source), folder / "back"), TOKENS)
    changes = f"; the adapter changes {relative_error(base_logits, expected):.1e}"
    if max(relative_error(got, expected), relative_error(back, expected)) > MAX_ERROR:
        return Outcome(
            DIFFERENT,
            f"{shown}: {relative_error(got, expected):.1e}, back {relative_error(back, expected):.1e}{changes}",
        )
    return Outcome(EQUAL, shown + changes)
