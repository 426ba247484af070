"""PEFT folders become adapters that change a converted model as PEFT changes its checkpoint; and back, bit for bit."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain.cli.main import main
from packtrain.common.errors import InputError
from packtrain.conversion.hugging_face import convert
from packtrain.conversion.hugging_face.safetensors import open_file
from packtrain.conversion.peft import CONFIG, CONFIG_FIELDS, FIELD_KINDS, TENSORS, read_peft
from packtrain.dtypes import f32
from packtrain.inference.generator import Generator
from packtrain.models.adapter_file import read_adapter
from packtrain.models.model_file import open_model
from packtrain.models.model_with_adapters import adapted, read_scaled
from tests import hugging_face
from tests.hugging_face import write_checkpoint, write_safetensors

IDS = np.random.default_rng(6).integers(3, 300, 12)
RANK, ALPHA = 4, 6.0
GOOD = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "use_dora": False}
Tensors = dict[str, np.ndarray]


def random_halves(tensors: Tensors, tied: bool) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A and B for every matrix, by the name of its module; not for embeddings that are the head, nor for heads."""
    rng, halves = np.random.default_rng(7), {}
    embedding = ["model.embed_tokens"] if tied else []
    for name, w in tensors.items():
        module = name.removesuffix(".weight")
        if module.startswith("transformer.h.") and w.ndim == 2:  # GPT-2's are (inputs, outputs)
            rows, width = w.shape[:: -1 if "c_" in module else 1]
            a, b = rng.standard_normal((RANK, width)), rng.standard_normal((rows, RANK))
            halves[module] = 0.1 * a.astype(np.float32), b.astype(np.float32)
        elif w.ndim == 2 and not module.startswith(("lm_head", "transformer.", *embedding)):
            a, b = rng.standard_normal((RANK, w.shape[1])), rng.standard_normal((w.shape[0], RANK))
            halves[module] = 0.1 * a.astype(np.float32), b.astype(np.float32)
    return halves


def write_folder(folder: Path, halves: dict[str, tuple[np.ndarray, np.ndarray]], **changes: Any):
    """As PEFT does: the embedding's A reads rows by token, so it is B there."""
    folder.mkdir(exist_ok=True)
    stored = {}
    for module, (a, b) in halves.items():
        name = f"base_model.model.{module}"
        if module == "model.embed_tokens":
            stored |= {
                f"{name}.lora_embedding_A": b.T.copy(),
                f"{name}.lora_embedding_B": a.T.copy(),
            }
        else:
            stored |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    write_safetensors(folder / TENSORS, stored)
    (folder / CONFIG).write_text(json.dumps(GOOD | changes))


def check_same(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """A converted folder changes the converted model as it changes its checkpoint; written again it is the same."""
    config, tensors = write_checkpoint(tmp_path / "model", kind)
    convert(tmp_path / "model", tmp_path / "base.gguf")
    halves = random_halves(tensors, config["tie_word_embeddings"])
    write_folder(tmp_path / "lora", halves, **changes)
    file_paths = [
        str(tmp_path / name) for name in ("lora", "base.gguf", "a.gguf", "back", "again.gguf")
    ]
    lora, base, adapter_path, peft_folder, rewritten_path = file_paths
    assert main(["convert", lora, "--base", base, "-o", adapter_path]) == 0
    by = ALPHA / (math.sqrt(RANK) if changes else RANK)
    deltas = {m: by * (b @ a) for m, (a, b) in halves.items()}
    changed = {
        f"{m}.weight": tensors[f"{m}.weight"] + (delta.T if kind == "gpt2" else delta)
        for m, delta in deltas.items()
    }
    expected = hugging_face.logits(config, tensors | changed, IDS)[-1]
    model = open_model(tmp_path / "base.gguf")
    adapted_model = adapted(model, read_scaled((adapter_path,), model.gguf))
    got = Generator.from_model(adapted_model, len(IDS), f32).feed([*map(int, IDS)])
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()
    assert main(["convert", adapter_path, "--base", base, "--peft", peft_folder]) == 0
    first, second = (open_file(Path(folder) / TENSORS) for folder in (lora, peft_folder))
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name].array(), second[name].array()) for name in first)
    assert main(["convert", peft_folder, "--base", base, "-o", rewritten_path]) == 0
    adapter_a, adapter_b = (read_adapter(file) for file in (adapter_path, rewritten_path))
    assert adapter_a.alpha == pytest.approx(by * RANK) and adapter_b.alpha == pytest.approx(
        adapter_a.alpha
    )
    assert all(
        np.array_equal(adapter_a.lora_pairs[n][1], adapter_b.lora_pairs[n][1])
        for n in adapter_a.lora_pairs
    )


KINDS = [
    ("llama", {}),
    ("qwen3", {"use_rslora": True}),
    ("gemma2", {}),
    ("phi3", {}),
    ("mixtral", {}),
    ("phi2", {}),
    ("gpt2", {}),
    ("falcon 40b", {}),
    ("glm4", {}),
    ("llama4", {}),
    ("qwen35", {}),
]


@pytest.mark.parametrize(("kind", "changes"), KINDS)
def test_an_adapter_of_peft_computes_the_same(kind: str, changes: dict[str, Any], tmp_path: Path):
    check_same(kind, changes, tmp_path)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_rows_in_their_old_order_are_seen(kind: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("packtrain.conversion.peft.pair_halves", lambda rows, heads: rows)
    with pytest.raises(AssertionError):
        check_same(kind, {}, tmp_path)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    _, tensors = write_checkpoint(tmp_path / "model", "llama")
    convert(tmp_path / "model", tmp_path / "base.gguf")
    write_folder(tmp_path / "lora", random_halves(tensors, False))
    return tmp_path


def test_a_module_with_another_alpha_has_its_scale_in_b(llama: Path):
    model, name = open_model(llama / "base.gguf"), "blk.1.ffn_up.weight"
    base_adapter = read_peft(llama / "lora", model)
    changes = {"alpha_pattern": {r"layers\.1\.mlp\.up_proj": 3 * ALPHA}}
    (llama / "lora" / CONFIG).write_text(json.dumps(GOOD | changes))
    scaled_adapter = read_peft(llama / "lora", model)
    assert scaled_adapter.alpha == base_adapter.alpha == ALPHA
    for tensor in base_adapter.lora_pairs:
        by = 3 if tensor == name else 1
        np.testing.assert_allclose(
            scaled_adapter.lora_pairs[tensor][1], by * base_adapter.lora_pairs[tensor][1], rtol=1e-6
        )


def test_experts_without_additions_have_zeros(tmp_path: Path):
    _, tensors = write_checkpoint(tmp_path / "model", "mixtral")
    convert(tmp_path / "model", tmp_path / "base.gguf")
    module = "model.layers.0.block_sparse_moe.experts.2.w3"
    pair = random_halves(tensors, False)[module]
    write_folder(tmp_path / "lora", {module: pair})
    adapter = read_peft(tmp_path / "lora", open_model(tmp_path / "base.gguf"))
    ((name, (a, b)),) = adapter.lora_pairs.items()
    assert name == "blk.0.ffn_up_exps.weight" and a.shape[0] == b.shape[0] == 4
    np.testing.assert_array_equal(a[2], pair[0])
    assert not a[[0, 1, 3]].any() and not b[[0, 1, 3]].any()


Q = "base_model.model.model.layers.0.self_attn.q_proj"
HALVES = {
    f"{Q}.lora_A.weight": np.ones((RANK, 64), np.float32),
    f"{Q}.lora_B.weight": np.ones((64, RANK), np.float32),
}


@pytest.mark.parametrize(
    ("said", "changes", "tensors"),
    [
        *(
            (
                f"init_lora_weights is '{start}': PEFT takes A and B out of the base",
                {"init_lora_weights": start},
                {},
            )
            for start in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "of tomorrow")
        ),
        *(
            (f"{key} is set, unknown to packtrain; merge", {key: 2}, {})
            for key in ("use_next", "r_next")
        ),
        *(
            (f"{key} is set, which", {key: {"a": 1}}, {})
            for key in CONFIG_FIELDS["refused"].split()
        ),
        ("q_proj has A and B, and target_modules", {"target_modules": ["k_proj", "proj"]}, {}),
        (
            "q_proj has A and B, and target_modules",
            {"target_modules": ["q_proj"], "layers_to_transform": [1]},
            {},
        ),
        (
            "exclude_modules or layers",
            {"target_modules": ["q_proj"], "exclude_modules": ".*self_attn.*"},
            {},
        ),
        ("use_dora is set, which an adapter file cannot hold", {"use_dora": True}, {}),
        ("modules_to_save is set, which", {"modules_to_save": ["lm_head"]}, {}),
        ("bias is 'all'; an adapter file holds no biases", {"bias": "all"}, {}),
        ("peft_type is 'IA3'; it must be 'LORA'", {"peft_type": "IA3"}, {}),
        ("lora_alpha of .* is 'x'; it must be a number", {"lora_alpha": "x"}, {}),
        ("is not a regular expression", {"alpha_pattern": {"(": 1}}, {}),
        ("q_proj.weight is neither A nor B", {}, {f"{Q}.weight": np.ones((2, 2))}),
        (
            "layers.7.self_attn.q_proj is not a matrix of .*, a llama; use the adapter's base",
            {},
            {f"{Q}.lora_A.weight".replace("0", "7"): np.ones((RANK, 64))},
        ),
        ("k_proj must have A of", {}, {f"{Q}.lora_A.weight".replace("q_", "k_"): np.ones((4, 64))}),
        ("must be a matrix of finite", {}, {f"{Q}.lora_A.weight": np.full((RANK, 64), np.nan)}),
        ("do not fit", {}, {f"{Q}.lora_A.weight": np.ones((RANK, 32))}),
    ],
)
def test_what_no_adapter_can_hold_gets_one_line(llama: Path, capsys, said, changes, tensors):
    (llama / "lora" / CONFIG).write_text(json.dumps(GOOD | changes))
    write_safetensors(llama / "lora" / TENSORS, HALVES | tensors)
    file_paths = [str(llama / name) for name in ("lora", "base.gguf", "a.gguf")]
    assert main(["convert", file_paths[0], "--base", file_paths[1], "-o", file_paths[2]]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(said, error), error
    assert not (llama / "a.gguf").exists()


def test_an_embedding_that_is_the_head_is_refused(tmp_path: Path):
    _, tensors = write_checkpoint(tmp_path / "model", "qwen2")
    convert(tmp_path / "model", tmp_path / "base.gguf")
    halves = random_halves(tensors, tied=False)
    write_folder(tmp_path / "lora", {"model.embed_tokens": halves["model.embed_tokens"]})
    with pytest.raises(InputError, match="one matrix for embedding and head; merge it with PEFT"):
        read_peft(tmp_path / "lora", open_model(tmp_path / "base.gguf"))


def test_a_folder_that_has_an_adapter_is_kept(llama: Path, capsys):
    file_paths = [str(llama / name) for name in ("lora", "base.gguf", "a.gguf")]
    main(["convert", file_paths[0], "--base", file_paths[1], "-o", file_paths[2]])
    assert main(["convert", file_paths[2], "--base", file_paths[1], "--peft", file_paths[0]]) == 2
    assert "exists; give another folder" in capsys.readouterr().err


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "orthogonal", "eva", "lora_ga"])
def test_starts_that_leave_the_base_alone_are_read(llama: Path, start):
    targets = {
        "target_modules": [
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "up_proj",
            "gate_proj",
            "down_proj",
        ]
    }
    base_adapter = read_peft(llama / "lora", open_model(llama / "base.gguf"))
    targets["target_modules"] += ["embed_tokens"]
    peft_config = GOOD | targets | {"init_lora_weights": start, "layers_to_transform": None}
    (llama / "lora" / CONFIG).write_text(json.dumps(peft_config))
    loaded = read_peft(llama / "lora", open_model(llama / "base.gguf"))
    assert (
        loaded.alpha == base_adapter.alpha
        and loaded.lora_pairs.keys() == base_adapter.lora_pairs.keys()
    )


def test_every_field_of_pefts_configuration_is_in_the_table():
    peft = pytest.importorskip("peft")
    unknown = {field.name for field in dataclasses.fields(peft.LoraConfig)} - FIELD_KINDS.keys()
    assert not unknown


@pytest.mark.parametrize("times", [1, 2])
def test_a_copy_of_the_head_beside_an_adapter_is_the_bases(llama: Path, times: int):
    """PEFT saves it with adapters of embedding or head; another one is refused."""
    model = open_model(llama / "base.gguf")
    head = times * open_file(llama / "model/model.safetensors")["lm_head.weight"].array()
    name = "base_model.model.lm_head"
    halves = {
        f"{name}.lora_A.weight": np.ones((4, 64)),
        f"{name}.lora_B.weight": np.ones((len(head), 4)),
    }
    tensors = HALVES | halves | {f"{name}.base_layer.weight": head}
    write_safetensors(llama / "lora" / TENSORS, tensors)
    if times == 1:
        assert read_peft(llama / "lora", model).lora_pairs.keys() == {
            "blk.0.attn_q.weight",
            "output.weight",
        }
        return
    with pytest.raises(
        InputError, match=r"lm_head\.base_layer\.weight is not output.weight of .*/base\.gguf"
    ):
        read_peft(llama / "lora", model)


def test_pickled_adapters_are_named(llama: Path):
    (llama / "lora" / TENSORS).rename(llama / "lora/adapter_model.bin")
    with pytest.raises(
        InputError, match=r"adapter_model\.bin: pickled tensors are not read; load it"
    ):
        read_peft(llama / "lora", open_model(llama / "base.gguf"))


Q_PROJ = "model.layers.0.self_attn.q_proj"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"layers_to_transform": [0], "layers_pattern": "layers"}, "layers_to_transform leave it out"),
    ({"r": 8}, "the rank of .* is not the 4 of its A and B"),
    ({"rank_pattern": {"q_proj": 8}}, f"the rank of {Q_PROJ} is not the 4"),
    ({"alpha_pattern": ["q_proj"]}, r"alpha_pattern is \['q_proj'\]; it must be of type dict"),
    ({"use_rslora": "false"}, "use_rslora is 'false'; it must be of type bool"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_a_configuration_that_does_not_fit_its_tensors_is_refused(
    llama: Path, changes: dict[str, Any], words: str
):
    config_path = llama / "lora" / CONFIG
    config_path.write_text(json.dumps(json.loads(config_path.read_text()) | changes))
    with pytest.raises(InputError, match=words):
        read_peft(llama / "lora", open_model(llama / "base.gguf"))


def test_an_alpha_for_a_modules_name_in_a_vision_model_is_found(llama: Path):
    folder, model = llama / "lora", open_model(llama / "base.gguf")
    before = read_peft(folder, model).lora_pairs["blk.0.attn_q.weight"][1]
    tensors = {name: stored.array() for name, stored in open_file(folder / TENSORS).items()}
    renamed = {
        n.replace(".model.model.", ".model.model.language_model."): a for n, a in tensors.items()
    }
    write_safetensors(folder / TENSORS, {name: np.array(array) for name, array in renamed.items()})
    config = json.loads((folder / CONFIG).read_text())
    config["alpha_pattern"] = {Q_PROJ.replace("model.", "model.language_model."): 2 * ALPHA}
    (folder / CONFIG).write_text(json.dumps(config))
    after = read_peft(folder, model)
    scale = after.alpha / ALPHA
    assert np.allclose(after.lora_pairs["blk.0.attn_q.weight"][1] * scale, 2 * before)


def test_a_half_that_stands_twice_is_refused(llama: Path):
    path = llama / "lora" / TENSORS
    tensors = {name: np.array(stored.array()) for name, stored in open_file(path).items()}
    name = f"{Q_PROJ}.lora_A.weight"
    write_safetensors(path, tensors | {name: tensors[f"base_model.model.{name}"] * 2})
    with pytest.raises(InputError, match=f"{Q_PROJ} has A twice"):
        read_peft(llama / "lora", open_model(llama / "base.gguf"))
