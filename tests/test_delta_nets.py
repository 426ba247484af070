"""What files and checkpoints of gated delta nets may say, long texts, and blocks that only guess more tokens."""

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from packtrain.common.errors import InputError
from packtrain.conversion.hugging_face import convert
from packtrain.dtypes import i32
from packtrain.engine.graph import Graph
from packtrain.engine.interpreter import interpret
from packtrain.engine.ops import delta_rule, delta_rule_back
from packtrain.engine.tensor import input
from packtrain.gguf import GGUF, MetadataValue, write_gguf
from packtrain.models.model_file import open_model
from packtrain.models.model_metadata import model_metadata
from tests.architectures import CONFIGS, random_weights, vocabulary
from tests.hugging_face import write_checkpoint, write_safetensors
from tests.models import bind_graph

Keys = dict[str, MetadataValue]


def save_random_model(
    path: Path, name: str, gone: tuple[str, ...] = (), **changes: MetadataValue
) -> Path:
    """A model of random weights without some keys, and with others changed."""
    config = CONFIGS[name]
    keys = model_metadata(config, "random") | vocabulary()
    keys |= {f"{name}.{key.replace('__', '.')}": value for key, value in changes.items()}
    for key in gone:
        del keys[f"{name}.{key}"]
    write_gguf(path, keys, random_weights(config))
    return path


def test_blocks_with_attention_are_every_fourth_or_those_that_are_not_listed(
    tmp_path: Path,
) -> None:
    loaded = open_model(save_random_model(tmp_path / "a.gguf", "qwen3next")).config
    assert loaded.attending == (False, True, False, False)
    config = replace(CONFIGS["qwen3next"], attending=(False, False, False, True))
    keys = model_metadata(config, "random") | vocabulary()
    assert keys["qwen3next.full_attention_interval"].value == 4
    for name in ("full_attention_interval", "attention.recurrent_layers"):
        del keys[f"qwen3next.{name}"]
    write_gguf(tmp_path / "b.gguf", keys, random_weights(config))
    assert open_model(tmp_path / "b.gguf").config == config


def test_a_file_with_experts_alone_has_no_other_width(tmp_path: Path) -> None:
    path = save_random_model(tmp_path / "m.gguf", "qwen35moe", ("feed_forward_length",))
    assert open_model(path).config == replace(CONFIGS["qwen35moe"], feed_forward_length=256)


BAD = {
    "qwen35.rope.dimension_sections is missing; it must be four": (("rope.dimension_sections",), {}),
    "qwen35.rope.dimension_sections is array([8, 8, 8, 8": ((), {"rope__dimension_sections": [8] * 4}),
    "qwen35.rope.dimension_sections is array([11, 11, 9": ((), {"rope__dimension_sections": [11, 11, 9, 0]}),
    "qwen35.ssm.inner_size is 192; it must be ssm.time_step_rank 12 * ssm.state_size 32":
        ((), {"ssm__inner_size": 192}),
    "qwen35.ssm.group_count is 5; it must be a divisor of": ((), {"ssm__group_count": 5}),
    "qwen35.attention.recurrent_layers is array([0, 0, 0, 0": ((), {"attention__recurrent_layers": [0] * 4}),
    "qwen35.full_attention_interval is 9; it must be such that some of the 4 blocks":
        (("attention.recurrent_layers",), {"full_attention_interval": 9}),
}  # fmt: skip


@pytest.mark.parametrize("line", BAD)
def test_a_bad_file_gets_its_line(tmp_path: Path, line: str) -> None:
    gone, overrides = BAD[line]
    changes = {
        k: MetadataValue("i32" if isinstance(v, list) else "u32", v) for k, v in overrides.items()
    }
    path = save_random_model(tmp_path / "m.gguf", "qwen35", gone, **changes)
    with pytest.raises(InputError) as error:
        open_model(path)
    assert line in str(error.value)


@pytest.mark.parametrize("value", [4, -1, 0.5, True, "x"])
def test_recurrent_blocks_that_are_not_listed_get_their_line(tmp_path: Path, value: object) -> None:
    kind = {int: "i32", float: "f32", bool: "bool", str: "string"}[type(value)]
    path = save_random_model(
        tmp_path / "m.gguf", "qwen3next", attention__recurrent_layers=MetadataValue(kind, value)
    )
    with pytest.raises(InputError, match=f"recurrent_layers is {value!r}; it must be such that"):
        open_model(path)


@pytest.mark.parametrize("key", ["block_count", "rope__dimension_count"])
def test_a_large_number_takes_little_memory(tmp_path: Path, key: str) -> None:
    path = save_random_model(
        tmp_path / "m.gguf",
        "qwen35",
        ("attention.recurrent_layers",),
        **{key: MetadataValue("u32", 1 << 24)},
    )
    tracemalloc.start()
    try:
        with pytest.raises(InputError):
            open_model(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


WRONG = {
    "layer_types is ['full_attention', 'full_attention'": {"layer_types": ["full_attention"] * 3},
    "linear_value_head_dim is 12; it must be 10": {"linear_value_head_dim": 12},
    "linear_num_value_heads is 5; it must be a multiple of": {"linear_num_value_heads": 5},
    "mrope_section is [1, 'a', 2]; it must be three numbers": {
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, "a", 2]}
    },
}


@pytest.mark.parametrize("line", WRONG)
def test_a_config_that_cannot_be_gets_its_line(tmp_path: Path, line: str) -> None:
    write_checkpoint(tmp_path / "model", "qwen35", **WRONG[line])
    with pytest.raises(InputError) as error:
        convert(tmp_path / "model", tmp_path / "m.gguf")
    assert line in str(error.value)


def test_a_model_that_sees_and_guesses_is_converted_without_either(tmp_path: Path) -> None:
    config, tensors = write_checkpoint(tmp_path / "model", "qwen35")
    convert(tmp_path / "model", tmp_path / "m.gguf")
    kinds = ["Qwen3_5ForConditionalGeneration"]
    text = {key: value for key, value in config.items() if key != "architectures"}
    hf_config = {"architectures": kinds, "tie_word_embeddings": True, "text_config": text}
    (tmp_path / "model/config.json").write_text(json.dumps(hf_config))
    seen = {n.replace("model.", "model.language_model.", 1): value for n, value in tensors.items()}
    seen["model.visual.blocks.0.weight"] = seen["mtp.fc.weight"] = np.ones(3, np.float32)
    write_safetensors(tmp_path / "model/model.safetensors", seen)
    convert(tmp_path / "model", tmp_path / "same.gguf")
    original, stripped = GGUF(tmp_path / "m.gguf"), GGUF(tmp_path / "same.gguf")
    assert list(original.entries) == list(stripped.entries)
    assert all(
        np.array_equal(original.array(name), stripped.array(name)) for name in original.entries
    )


def test_many_tokens_with_decays_that_vanish() -> None:
    """States that fade within a token, over chunks and sequences: no gradient divides by a decay."""
    time, heads, n = 150, 4, 16
    rng = np.random.default_rng(0)
    seq = np.sort(rng.integers(0, 3, (1, time)), axis=1).astype(np.int32)
    leaves = [input("x", (1, time, (2 * 2 + heads) * n)), input("decay", (1, time, heads))]
    leaves += [input("beta", (1, time, heads)), input("seq", (1, time), i32)]
    dy, options = input("dy", (1, time, heads * n)), {"groups": 2, "width": n, "tiled": True}
    outs = delta_rule(*leaves, **options), *delta_rule_back(dy, *leaves, **options)
    graph = Graph({str(i): t for i, t in enumerate(outs)})
    inputs = {
        "x": rng.standard_normal(leaves[0].shape).astype(np.float32), "seq": seq,
        "decay": np.where(rng.random((1, time, heads)) < 0.2, -200.0, -0.01).astype(np.float32),
        "beta": rng.random((1, time, heads)).astype(np.float32),
        "dy": rng.standard_normal(dy.shape).astype(np.float32),
    }  # fmt: skip
    expected, got = interpret(graph, inputs), bind_graph(graph, {})(inputs)
    for name in graph.outputs:
        tolerance = 3e-6 * np.abs(expected[name]).max()
        np.testing.assert_allclose(got[name], expected[name], atol=tolerance, rtol=0)
