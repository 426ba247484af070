"""An architecture is added by one module and its name in a list: a copy of packtrain with another one uses it.

The copy converts a checkpoint of that architecture, trains it, writes it, and opens it again.
"""

import json
from pathlib import Path

import numpy as np

from tests import hugging_face
from tests.copied import copy_package, edit_file, python_in

MODULE = '''"""A llama with gelu, norms of heads, every second block without rope, and a soft cap of logits."""

from packtrain.models.arch.architecture import BLOCK, HEAD_NORMS, Architecture, Family, Keys
from packtrain.models.arch.hf_config import HFConfig
from packtrain.models.arch.size_fields import ModelSizes


def keys(config: HFConfig, sizes: ModelSizes) -> Keys:
    config.require_one_of("no_rope_interval", 2, 2)
    return {"final_logit_softcapping": config.real("cap", 8.0)}


ARCHITECTURE = Architecture(
    "toy",
    halves=True,
    use_gelu=True,
    head_norms=True,
    rope_pause=2,
    key_defaults={"final_logit_softcapping": 8.0},
    families=(Family(("ToyForCausalLM",), BLOCK | HEAD_NORMS, keys, norm_shift=1.0),),
)
'''
SCRIPT = """
import contextlib, io, sys
import numpy as np
from packtrain.cli.main import main
from packtrain.inference.generator import Generator
from packtrain.models.model_file import open_model

def logits(path):
    return Generator.from_model(open_model(path), 9).feed(list(range(3, 12))).copy()

def run(*command):
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(list(command)) == 0

run("convert", "checkpoint", "-o", "base.gguf")
run("finetune", "base.gguf", "--data", "text.txt", "--full", "--iters", "2", "--lr", "0.01", "-c", "16",
    "--batch-size", "2", "-o", "tuned.gguf")
base, tuned = open_model("base.gguf"), open_model("tuned.gguf")
assert base.config == tuned.config, (base.config, tuned.config)
assert (base.config.architecture, base.config.final_softcap) == ("toy", 7.0)
same = [n for n in base.weight_names if np.array_equal(base.weight(n), tuned.weight(n))]
assert not same, same
np.save("base.npy", logits("base.gguf"))
assert not np.array_equal(np.load("base.npy"), logits("tuned.gguf"))
print(sys.modules["packtrain"].__file__)
"""


def with_toy(folder: Path) -> Path:
    """A copy of packtrain that has the toy, too: a module, and its name in a list."""
    arch_folder = copy_package(folder) / "models/arch"
    (arch_folder / "toy.py").write_text(MODULE)
    edit_file(arch_folder / "__init__.py", (' "smollm3",\n)', ' "smollm3", "toy",\n)'))
    return folder


def write_toy(folder: Path) -> None:
    """A checkpoint of the toy: a qwen3's modules, norms stored less 1."""
    config, tensors = hugging_face.write_checkpoint(folder, "qwen3")
    config |= {"architectures": ["ToyForCausalLM"], "hidden_act": "gelu_pytorch_tanh", "cap": 7.0}
    (folder / "config.json").write_text(json.dumps(config))
    shifted_norms = {n: value - 1 if value.ndim == 1 else value for n, value in tensors.items()}
    hugging_face.write_safetensors(folder / "model.safetensors", shifted_norms)


def test_one_module_and_its_name_in_a_list_are_an_architecture(tmp_path: Path) -> None:
    write_toy(tmp_path / "checkpoint")
    (tmp_path / "text.txt").write_text("bal cem dis hor fin gut " * 80)
    done = python_in(with_toy(tmp_path), "-c", SCRIPT)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)
    assert np.isfinite(np.load(tmp_path / "base.npy")).all()
