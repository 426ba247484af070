"""Adapters that PEFT writes, converted, and what they compute there and here; and back.

    pip install peft transformers torch
    python -m benchmarks.peft_folders

Random LoRA adapters of small models (benchmarks.convert), of two ranks and two alphas, plain and rsLoRA. Printed are
differences of logits relative to the largest: here, in PEFT from the folder that --peft writes, without the adapter.
"""

import contextlib
import io
import tempfile
from pathlib import Path

import numpy as np
import peft
import torch
import transformers

from benchmarks.convert import BASE, CLASSES, TOKENS
from packtrain.cli import main as packtrain
from packtrain.generation import Generator
from packtrain.models.adapted import adapted, read_scaled
from packtrain.models.file import ModelFile, open_model
from tests.hugging_face import sentencepiece_model

NAMES = ("LlamaConfig", "MistralConfig", "Qwen3Config", "Gemma2Config", "Phi3Config")


def theirs(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        logits: np.ndarray = model.eval()(torch.tensor(TOKENS)[None]).logits[0, -1].numpy()
    return logits


def ours(model: ModelFile) -> np.ndarray:
    return Generator.of(model, len(TOKENS)).feed([*map(int, TOKENS)])


def differences(name: str, rslora: bool, folder: Path) -> list[float]:
    config = getattr(transformers, name)(**(BASE | CLASSES[name]))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.save_pretrained(folder / "model")
    (folder / "model/tokenizer.model").write_bytes(sentencepiece_model())
    settings = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules="all-linear", use_rslora=rslora, rank_pattern={"o_proj": 2},
        alpha_pattern={"down_proj": 20},
    )  # fmt: skip
    with_adapter = peft.get_peft_model(model, settings)
    with torch.no_grad():
        for weight_name, weight in with_adapter.named_parameters():
            if "lora_" in weight_name:
                weight.normal_(0, 0.3)
    want = theirs(with_adapter)
    with_adapter.save_pretrained(folder / "lora")
    base, adapter = str(folder / "base.gguf"), str(folder / "adapter.gguf")
    with contextlib.redirect_stdout(io.StringIO()):
        for source, *more in (
            ("model", "-o", base),
            ("lora", "--base", base, "-o", adapter),
            ("adapter.gguf", "--base", base, "--peft", str(folder / "back")),
        ):
            assert packtrain(["convert", str(folder / source), *more]) == 0
    alone = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", attn_implementation="eager"
    )
    back = theirs(peft.PeftModel.from_pretrained(alone, folder / "back"))
    opened = open_model(base)
    found = (ours(adapted(opened, read_scaled([adapter], opened.gguf))), back, ours(opened))
    return [float(np.abs(logits - want).max() / np.abs(want).max()) for logits in found]


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(f"peft {peft.__version__}, transformers {transformers.__version__}")
    for name in NAMES:
        for rslora in (False, True):
            torch.manual_seed(0)
            with tempfile.TemporaryDirectory() as folder:
                here, back, without = differences(name, rslora, Path(folder))
            kind = "rsLoRA" if rslora else "LoRA"
            print(
                f"{name:14} {kind:6} {here:.1e}  back {back:.1e}  without {without:.1e}", flush=True
            )


if __name__ == "__main__":
    main()
