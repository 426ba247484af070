"""Files of other programs whose values are of another type, or missing, are refused in one line, or read."""

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain.common.errors import InputError
from packtrain.conversion.calibration.importance_matrix import load_importance
from packtrain.conversion.hugging_face import convert, open_checkpoint
from packtrain.conversion.hugging_face.config_translation import describe_checkpoint
from packtrain.conversion.hugging_face.safetensors import open_file
from packtrain.conversion.hugging_face.vocabulary import vocabulary_metadata
from packtrain.conversion.peft import CONFIG, TENSORS, read_peft
from packtrain.gguf import MetadataValue, write_gguf
from packtrain.models.arch import llama
from packtrain.models.model_file import open_model
from tests.hugging_face import write_checkpoint, write_safetensors

LLAMA = llama.ARCHITECTURE.families[0]
OTHER_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**63,
    0.5,
    "x",
    [],
    [1],
    [[]],
    {},
    {"a": []},
    [{}],
    "\udc00",
)


def mutants(value: Any) -> Iterator[Any]:
    """The value with each part of it changed into one of another type, or left out."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            for inner in mutants(value[key]):
                changed = copy.deepcopy(value)
                changed[key] = inner
                yield changed
            changed = copy.deepcopy(value)
            del changed[key]
            yield changed
    yield from OTHER_VALUES


def safetensors_bytes(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "m", num_hidden_layers=1, hidden_size=16, intermediate_size=16)
    return tmp_path / "m"


def test_headers_of_safetensors(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    }
    for mutant in mutants(header):
        (tmp_path / "m.safetensors").write_bytes(safetensors_bytes(mutant, bytes(16)))
        with contextlib.suppress(InputError):
            for stored in open_file(tmp_path / "m.safetensors").values():
                stored.array()


def test_indexes(folder: Path) -> None:
    for mutant in mutants({"metadata": {}, "weight_map": {"w": "model-1.safetensors"}}):
        (folder / "model.safetensors.index.json").write_text(json.dumps(mutant))
        (folder / "model.safetensors").unlink(missing_ok=True)
        with contextlib.suppress(InputError):
            describe_checkpoint(open_checkpoint(folder))


@pytest.mark.parametrize(
    "name", ["special_tokens_map.json", "chat_template.json", "tokenizer_config.json"]
)
def test_files_beside_a_checkpoint(folder: Path, name: str) -> None:
    checkpoint = open_checkpoint(folder)
    for mutant in mutants(
        {"eos_token": {"content": "</s>"}, "chat_template": [{"name": "a", "template": "b"}]}
    ):
        (folder / name).write_text(json.dumps(mutant))
        with contextlib.suppress(InputError):
            vocabulary_metadata(checkpoint, 320, LLAMA, str)


def test_configurations_of_adapters(folder: Path) -> None:
    convert(folder, folder / "base.gguf")
    model, name = (
        open_model(folder / "base.gguf"),
        "base_model.model.model.layers.0.mlp.up_proj.lora_{}.weight",
    )
    halves = {name.format("A"): np.ones((2, 16)), name.format("B"): np.ones((16, 2))}
    write_safetensors(folder / TENSORS, halves)
    base_config = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 4, "alpha_pattern": {"up_proj": 2}, "target_modules": ["up_proj"],
        "exclude_modules": ["k_proj"], "layers_to_transform": [0], "layers_pattern": ["layers"], "bias": "none",
        "init_lora_weights": True, "use_rslora": False, "use_dora": False,
    }  # fmt: skip
    for mutant in mutants(base_config):
        (folder / CONFIG).write_text(json.dumps(mutant))
        with contextlib.suppress(InputError):
            read_peft(folder, model)


@pytest.mark.parametrize("end", [".in_sum2", ".counts"])
def test_importance_matrices(end: str, tmp_path: Path) -> None:
    for array in (
        np.empty(0),
        np.ones((0, 3)),
        np.ones((2, 2, 2)),
        np.full(3, np.nan),
        np.array(-1.0),
        np.ones(5),
    ):
        for kind in (np.float32, np.float16, np.int32):
            with np.errstate(invalid="ignore"):
                tensors = {"w.in_sum2": np.ones(6, np.float32), "w.counts": np.ones(1, np.float32)}
                tensors[f"w{end}"] = array.astype(kind)
            write_gguf(
                tmp_path / "i.gguf", {"general.type": MetadataValue("string", "imatrix")}, tensors
            )
            with contextlib.suppress(InputError):
                load_importance(tmp_path / "i.gguf").weights("w")


def test_an_older_importance_matrix_is_named(tmp_path: Path) -> None:
    name = b"blk.0.attn_q.weight"
    numbers = (1).to_bytes(4, "little"), len(name).to_bytes(4, "little")
    (tmp_path / "i.dat").write_bytes(b"".join((*numbers, name, bytes(64))))
    with pytest.raises(
        InputError,
        match=r"i\.dat: .*importance matrix in llama\.cpp's older format, which llama-im",
    ):
        load_importance(tmp_path / "i.dat")
