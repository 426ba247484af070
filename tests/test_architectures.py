"""Every architecture against forward passes of its own in float64; what would be wrong is seen to be wrong."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from packtrain import Graph, differentiate, interpret
from packtrain.cli.main import main
from packtrain.common.errors import InputError
from packtrain.gguf import GGUF, MetadataValue, write_gguf
from packtrain.inference.kv_cache.kv_cells import CellTable
from packtrain.models import transformer
from packtrain.models.arch import ARCHITECTURES
from packtrain.models.arch.refused_architectures import ARCHITECTURES_BY_NEED
from packtrain.models.cached_transformer import CacheLayout, generation
from packtrain.models.config import Config, RopeScaling
from packtrain.models.model_file import open_model
from packtrain.models.model_metadata import model_metadata
from tests.architectures import BIASES, CONFIGS, YARN, random_model, random_weights, vocabulary
from tests.cell_inputs import feed_inputs
from tests.checks import assert_slope, slope
from tests.models import bind_graph, logits_graph, relative_error, seeded_batch
from tests.numpy_models import Model

TIME = 40  # longer than the windows
# of logits of size 1; SEEN is what a wrong variant is at least off by
F32, F64, SEEN = 1e-4, 1e-10, 3e-3
# of differences, smaller where the second derivative of relu² jumps, where a step would choose other experts, where
# scores are not divided, where gates begin at a mean, and where short vectors are divided by their lengths
STEP = dict.fromkeys(
    (
        "nemotron",
        "glm4moe",
        "gpt-oss",
        "olmoe",
        "granitemoe",
        "lfm2moe",
        "deepseek2",
        "granitehybrid",
        "qwen3next",
        "qwen35",
        "qwen35moe",
        "llama4",
        "gemma4",
    ),
    0.01,
) | {"gemma3n": 1e-4}
TOKENS = np.random.RandomState(3).randint(3, 259, TIME).astype(np.int32)


def graph_weights(graph: Graph, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Those weights that the graph has as leaves."""
    return {leaf.label: weights[leaf.label] for leaf in graph.leaves if leaf.label in weights}


def model_inputs(tokens: np.ndarray) -> dict[str, np.ndarray]:
    pos = np.arange(len(tokens), dtype=np.int32)[None]
    return {"tokens": tokens[None], "pos": pos, "seq": np.zeros_like(pos)}


def forward(config: Config, weights: Mapping[str, np.ndarray], exact: bool = True) -> np.ndarray:
    """Logits (T, V) of TOKENS: by the specification in float64, or on the cpu."""
    graph = logits_graph(config, 1, TIME)
    leaf_values, fed = graph_weights(graph, weights), model_inputs(TOKENS)
    if exact:
        return interpret(graph, leaf_values | fed)["logits"][0]
    return bind_graph(graph, leaf_values)(fed)["logits"][0]


@cache
def expected_logits(name: str) -> np.ndarray:
    """Logits of TOKENS by the independent forward."""
    keys = {key: value.value for key, value in model_metadata(CONFIGS[name], "random").items()}
    return Model(keys, random_weights(CONFIGS[name]), TIME).logits(TOKENS)


def max_error(got: np.ndarray, name: str) -> float:
    return float(np.abs(got - expected_logits(name)).max())


# ---- right


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "written"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_an_independent_forward(name: str, flash: bool) -> None:
    config, weights = replace(CONFIGS[name], flash=flash), random_weights(CONFIGS[name])
    assert max_error(forward(config, weights), name) <= F64
    assert max_error(forward(config, weights, exact=False), name) <= F32


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_opens_as_it_was_written(tmp_path: Path, name: str) -> None:
    config = random_model(tmp_path / "m.gguf", name)
    model = open_model(tmp_path / "m.gguf")
    assert model.config == config
    weights = random_weights(config)
    assert all(np.array_equal(model.weight(n), weights[n]) for n in model.weight_names)


def rewrite_file(path: Path, to: Path, weights: dict[str, np.ndarray]) -> None:
    """The same model by the writer of the package `gguf`, which packs what it can itself."""
    file, kinds = GGUF(path), gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(to, file.metadata["general.architecture"])
    for key, value in file.values.items():
        if key == "general.architecture":
            continue
        is_array = isinstance(value.value, list | np.ndarray)
        kind = gguf.GGUFValueType[
            {"f32": "FLOAT32", "u32": "UINT32", "i32": "INT32"}.get(value.kind, value.kind.upper())
        ]
        items = [*value.value] if is_array else value.value
        items = (
            [item.item() if isinstance(item, np.generic) else item for item in items]
            if is_array
            else items
        )
        writer.add_key_value(
            key, items, gguf.GGUFValueType.ARRAY if is_array else kind, kind if is_array else None
        )
    for name, entry in file.entries.items():
        kind = kinds[str(entry.dtype).upper()]
        if kind in (kinds.F32, kinds.Q8_0):
            data = gguf.quants.quantize(weights[name], kind)
        else:
            data = np.frombuffer(file.array(name).tobytes(), np.uint8).reshape(
                *entry.shape[:-1], -1
            )
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


FIRST = {config.architecture: name for name, config in reversed(CONFIGS.items())}
QUICK_CASES = [(name, mix) for name in ("llama", "gemma4", "qwen3next") for mix in ("F32", "Q8_0")]


@pytest.mark.parametrize(
    "name, mix", [*((name, "Q4_K_M") for name in FIRST.values()), *QUICK_CASES]
)
def test_a_file_by_another_writer_is_the_same_model(tmp_path: Path, name: str, mix: str) -> None:
    config = random_model(tmp_path / "F32.gguf", name)
    if mix != "F32":
        assert (
            main(["quantize", str(tmp_path / "F32.gguf"), str(tmp_path / f"{mix}.gguf"), mix]) == 0
        )
    rewrite_file(tmp_path / f"{mix}.gguf", tmp_path / "theirs.gguf", random_weights(config))
    our_model, their_model = (open_model(tmp_path / f"{by}.gguf") for by in (mix, "theirs"))
    assert their_model.config == our_model.config == config
    assert their_model.gguf.entries.keys() == our_model.gguf.entries.keys()
    for at, entry in our_model.gguf.entries.items():
        assert (their_model.gguf.entries[at].dtype, their_model.gguf.entries[at].shape) == (
            entry.dtype,
            entry.shape,
        )
        assert their_model.gguf.array(at).tobytes() == our_model.gguf.array(at).tobytes()


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "written"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_gradient_of_the_loss(name: str, flash: bool) -> None:
    """Against central differences in float64; the cpu's against those of the specification."""
    config, weights = replace(CONFIGS[name], flash=flash), random_weights(CONFIGS[name])
    leaves = transformer.weights(config)
    loss_graph = transformer.loss(config, leaves, 2, 12, chunk=16)
    trained = [leaf for leaf in leaves.values() if leaf.role != "table"]
    gradients = differentiate(loss_graph.loss, trained, loss_graph.block_outputs)
    graph = Graph({"loss": loss_graph.loss, **{f"d/{w.label}": d for w, d in gradients.items()}})
    leaf_values, fed = graph_weights(graph, weights), seeded_batch(config, 2, 12)
    reference = interpret(graph, leaf_values | fed)
    rng = np.random.default_rng(7)
    step = STEP.get(config.architecture, 1.0)
    direction = {leaf.label: step * rng.standard_normal(leaf.shape) for leaf in trained}
    measured = slope(Graph({"loss": loss_graph.loss}), leaf_values | fed, direction)
    assert_slope(measured, {n: reference[f"d/{n}"] * d for n, d in direction.items()}, name)
    actual = bind_graph(graph, leaf_values)(fed)
    assert max(relative_error(actual[n], reference[n]) for n in actual) <= F32


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "written"])
@pytest.mark.parametrize("name", CONFIGS)
def test_cached_generation_gives_the_logits_of_the_full_forward(name: str, flash: bool) -> None:
    config, parts = replace(CONFIGS[name], flash=flash), []
    cells = CellTable(TIME, width=config.conv_width)
    states = CellTable(2) if config.scan else None
    leaves = transformer.weights(config)
    for start, size in ((0, 24), (24, 8), *((at, 1) for at in range(32, TIME))):
        logits, handles = generation(config, leaves, size, CacheLayout(TIME), size)
        graph = Graph([logits], handles)
        if not parts:
            run = bind_graph(graph, graph_weights(graph, random_weights(config)))
        elif size != parts[-1].shape[0]:
            run = bind_graph(graph, session=run.session)
        tokens, seqs = TOKENS[start : start + size], np.zeros(size, np.int32)
        rows = np.arange(size, dtype=np.int32)
        parts.append(
            run(feed_inputs(cells, tokens, seqs, rows, flash=flash, state_table=states))["logits"]
        )
    assert max_error(np.concatenate(parts), name) <= F32


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "written"])
def test_chunks_that_end_within_a_text(flash: bool) -> None:
    """Files mean chunks of 8,192 tokens, whatever they say."""
    config, weights = replace(CONFIGS["llama4"], window=9), random_weights(CONFIGS["llama4"])
    keys = {key: value.value for key, value in model_metadata(config, "random").items()}
    expected = Model(keys, weights, TIME).logits(TOKENS)
    config = replace(config, flash=flash)
    assert np.abs(forward(config, weights) - expected).max() <= F64
    assert np.abs(forward(config, weights, exact=False) - expected).max() <= F32
    full_config = replace(CONFIGS["llama4"], flash=flash)
    assert np.abs(forward(full_config, weights) - expected).max() >= SEEN
    cells, (logits, handles) = (
        CellTable(TIME),
        generation(config, transformer.weights(config), TIME, CacheLayout(TIME), TIME),
    )
    rows = np.arange(TIME, dtype=np.int32)
    run = bind_graph(Graph([logits], handles), graph_weights(Graph([logits], handles), weights))
    actual = run(feed_inputs(cells, TOKENS, 0 * rows, rows, flash=flash))["logits"]
    assert np.abs(actual - expected).max() <= F32


# ---- wrong

TRAITS: Mapping[str, Mapping[str, Any]] = {  # of an architecture, as they are not
    "llama": {"halves": True, "use_gelu": True, "scaled_embedding": True, "rope_pause": 2},
    "llama experts": {"halves": True},
    "mistral3": {"halves": True},
    "qwen2": {"halves": False},
    "qwen3": {"halves": False, "head_norms": False},
    "qwen2moe": {
        "halves": False,
        "normalized_expert_weights": True,
        "sigmoid_routing": True,
        "gated_shared_expert": False,
    },
    "qwen3moe": {"halves": False, "head_norms": False},
    "ernie4_5-moe": {"halves": True, "sigmoid_routing": True, "normalized_expert_weights": False},
    "glm4moe": {"halves": False, "sigmoid_routing": False},
    "olmoe": {"halves": False, "joint_qk_norms": False, "normalized_expert_weights": True},
    "gpt-oss": {"halves": False, "attention_sinks": False, "clamped": False},
    "gemma": {"halves": False, "use_gelu": False, "scaled_embedding": False},
    "gemma2": {"halves": False, "use_gelu": False, "post_norms": False, "wide_score_blocks": 3},
    "gemma3": {"halves": False, "head_norms": False, "post_norms": False, "wide_score_blocks": 7},
    "gemma3n": {
        "halves": False,
        "head_norms": False,
        "value_norms": False,
        "unscaled_scores": False,
        "scaled_embedding": False,
        "use_gelu": False,
        "post_norms": False,
        "laurel_rank": 0,
        "num_sparse_blocks": 2,
    },
    "gemma3n shared": {"num_sparse_blocks": 9},
    "gemma4": {
        "halves": False,
        "head_norms": False,
        "value_norms": False,
        "unscaled_scores": False,
        "scaled_embedding": False,
        "use_gelu": False,
        "post_norms": False,
    },
    "phi3": {"halves": False},
    "smollm3": {"halves": True, "rope_pause": 0},
    "granite": {"halves": True},
    "granitemoe": {"halves": True, "normalized_expert_weights": False},
    "deepseek2": {"halves": True, "sigmoid_routing": False, "normalized_expert_weights": False},
    "deepseek2 lite": {"halves": True, "sigmoid_routing": True, "normalized_expert_weights": True},
    "llama4": {
        "halves": True,
        "unweighted_qk_norms": False,
        "rope_pause": 0,
        "weigh_expert_inputs": False,
        "normalized_expert_weights": True,
    },
    "olmo2": {"halves": False, "post_norms": False, "joint_qk_norms": False},
    "seed_oss": {"halves": False},
    "ernie4_5": {"halves": True},
    "exaone4": {"halves": False, "head_norms": False, "post_norms": False},
    "glm4": {"halves": True, "post_norms": False},
    "hunyuan-dense": {"halves": False, "qk_norms_after_rope": False},
    "internlm2": {"halves": True},
    "phi2": {"halves": False, "layer_norms": False, "use_gelu": False},
    "gpt2": {"layer_norms": False, "use_gelu": False, "learned_positions": False},
    "starcoder2": {"halves": False, "layer_norms": False, "use_gelu": False},
    "stablelm": {"halves": False, "layer_norms": False},
    "stablelm parallel": {"halves": False},
    "falcon": {"halves": False, "layer_norms": False, "use_gelu": False},
    "nemotron": {"halves": False, "layer_norms": False, "use_gelu": True},
    "cohere2": {
        "halves": True,
        "layer_norms": False,
        "multiplies_logits": False,
        "rope_only_in_windows": False,
    },
    "lfm2": {"halves": False, "head_norms": False},
    "granitehybrid experts": {"halves": True},
    "falcon-h1": {"halves": False, "parallel_scan": False},
    "qwen3next": {
        "halves": False,
        "head_norms": False,
        "gated_shared_expert": False,
        "normalized_expert_weights": False,
    },
    "qwen35": {"halves": False, "head_norms": False},
    "lfm2moe": {"sigmoid_routing": False, "normalized_expert_weights": False},
    "olmo3": {"unscaled_window_rope": False},
    "exaone4 windows": {"rope_only_in_windows": False},
}
OTHER_SETTINGS: Mapping[str, Mapping[str, Any]] = {  # settings of a model, as they are not
    "llama": {"rope_freq_base": 1e4, "rms_eps": 1e-2, "tied": True, "rope_dims": 32},
    "llama 3": {"optional": ()},
    "llama biased": {"optional": (), "rope_freq_base": 1e4},
    "llama linear": {"rope_scaling": RopeScaling()},
    "llama yarn": {"rope_scaling": RopeScaling("linear", 4.0)},
    "llama experts": {"expert_used_count": 1},
    "mistral3": {"temperature_scale": 0.0, "rope_scaling": RopeScaling("yarn", 4.0, 16)},
    "qwen2": {"optional": ("attn_q.bias", "attn_k.bias")},
    "qwen2moe": {"expert_used_count": 2, "optional": ()},
    "qwen3moe": {"expert_used_count": 2, "rope_freq_base": 1e4},
    "ernie4_5-moe": {
        "expert_used_count": 2,
        "optional": (),
        "expert_shared_feed_forward_length": 0,
    },
    "glm4moe": {
        "expert_used_count": 2,
        "optional": BIASES,
        "rope_dims": None,
        "expert_weights_scale": 0.0,
        "expert_weights_norm": False,
        "expert_shared_feed_forward_length": 0,
    },
    "glm4moe apart": {"expert_weights_norm": True},
    "gpt-oss": {
        "expert_used_count": 2,
        "optional": BIASES,
        "window": 0,
        "rope_scaling": RopeScaling("linear", 4.0),
    },
    "gemma2": {"window": 10, "window_pattern": 3, "attention_softcap": 0.0, "final_softcap": 0.0},
    "gemma3": {"window": 8, "window_pattern": 7, "rope_freq_base_swa": None},
    "gemma3 linear": {"window": 0, "rope_scaling": RopeScaling()},
    "gemma3n": {"window": 8, "rope_freq_base_swa": None, "final_softcap": 0.0},
    "gemma3n shared": {"window": 8, "own_kv": 19},
    "gemma4": {
        "window": 8,
        "rope_freq_base_swa": None,
        "final_softcap": 0.0,
        "optional": ("rope_freqs.weight",),
        "embedding_length_per_layer": 0,
    },
    "gemma4 experts": {"expert_used_count": 2, "rms_eps": 1e-2},
    "phi3": {"rope_dims": None},
    "glm4": {"rope_dims": None, "optional": ()},
    "phi2": {"rope_dims": 64, "optional": (), "rms_eps": 1e-2},
    "gpt2": {"optional": ("attn_qkv.bias",)},
    "starcoder2": {"optional": ("attn_q.bias", "attn_k.bias", "attn_v.bias")},
    "stablelm": {"rope_dims": None, "optional": ("ffn_norm.weight",)},
    "stablelm parallel": {"optional": ("attn_norm.bias", "output_norm.bias")},
    "falcon 40b": {"optional": ("attn_norm.bias", "output_norm.bias")},
    "nemotron": {"rope_dims": None, "optional": ()},
    "cohere2": {"window": 8, "window_pattern": 3, "logit_scale": 0.5},
    "granitehybrid": {"turned": True, "logit_scale": 0.0},
    "granitehybrid experts": {"turned": False, "expert_used_count": 2},
    "lfm2moe": {"expert_used_count": 2, "optional": ()},
    "qwen3next": {"expert_used_count": 2, "rope_dims": None},
    "qwen35": {"rope_dims": None, "rms_eps": 1e-2},
    "olmo3": {"window": 8, "rope_scaling": RopeScaling()},
    "exaone4 windows": {"window": 8},
    "granite": {
        "embedding_scale": 0.0,
        "residual_scale": 0.0,
        "score_scale": 0.0,
        "logit_scale": 0.0,
    },
    "granitemoe": {
        "residual_scale": 0.0,
        "expert_used_count": 2,
        "expert_shared_feed_forward_length": 0,
    },
    "deepseek2": {
        "expert_gating_func": 1,
        "expert_group_used_count": 3,
        "expert_weights_norm": False,
        "expert_weights_scale": 0.0,
        "rope_scaling": replace(YARN, beta_fast=4.0),
    },
    "deepseek2 unsplit": {"rope_scaling": RopeScaling()},
    "llama4": {"expert_used_count": 1, "optional": ()},
    "seed_oss": {"optional": ("attn_q.bias", "attn_k.bias"), "score_scale": 0.5},
    "phi3 short": {"rope_scaling": RopeScaling("longrope", 1.0, 256)},
    "phi3 long": {"rope_scaling": RopeScaling("longrope", 1.0, 128, attn_factor=1.19)},
}


@pytest.mark.parametrize(("name", "trait"), [(n, t) for n in TRAITS for t in TRAITS[n]])
def test_a_wrong_trait_is_seen(monkeypatch: pytest.MonkeyPatch, name: str, trait: str) -> None:
    config = CONFIGS[name]
    wrong = replace(config.traits, **{trait: TRAITS[name][trait]})
    weights = random_weights(config)
    monkeypatch.setitem(ARCHITECTURES, config.architecture, wrong)
    assert max_error(forward(config, weights), name) >= SEEN


@pytest.mark.parametrize(
    ("name", "field"), [(n, f) for n in OTHER_SETTINGS for f in OTHER_SETTINGS[n]]
)
def test_a_wrong_setting_is_seen(name: str, field: str) -> None:
    wrong = replace(CONFIGS[name], **{field: OTHER_SETTINGS[name][field]})
    assert max_error(forward(wrong, random_weights(CONFIGS[name])), name) >= SEEN


# ---- what files may say


def test_what_llama_cpp_takes_where_a_file_says_nothing(tmp_path: Path) -> None:
    """gemma2 has a window and caps without keys, gemma3 a base of its own for blocks with a window."""
    for name, removed_keys, expected in (
        ("gemma2", ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
         {"window": 4096, "attention_softcap": 50.0, "final_softcap": 30.0}),
        ("gemma3", ("rope.freq_base_swa", "attention.sliding_window"), {"window": 0, "rope_freq_base_swa": 1e4}),
    ):  # fmt: skip
        config, path = CONFIGS[name], tmp_path / "m.gguf"
        keys = model_metadata(config, "random") | vocabulary()
        for key in removed_keys:
            del keys[f"{config.architecture}.{key}"]
        write_gguf(path, keys, random_weights(config))
        assert open_model(path).config == replace(config, **expected)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_key_that_an_architecture_names_is_read(tmp_path: Path, name: str) -> None:
    """A text in its place is refused, in one of the models at least."""
    models = [config for config in CONFIGS.values() if config.architecture == name]
    if "expert_count" in ARCHITECTURES[name].key_defaults:
        models.append(replace(models[0], expert_count=4, expert_used_count=2))
    for key in ARCHITECTURES[name].key_defaults:
        assert any(is_refused(tmp_path / "m.gguf", config, key) for config in models), key


def is_refused(path: Path, config: Config, key: str) -> bool:
    """Whether a model with a text for this key is refused because of it."""
    keys = model_metadata(config, "random") | vocabulary()
    keys[f"{config.architecture}.{key}"] = MetadataValue("string", "text")
    write_gguf(path, keys, random_weights(config))
    try:
        open_model(path)
    except InputError as error:
        return key in str(error)
    return False


def test_windows_that_llama_cpp_ignores_are_ignored(tmp_path: Path) -> None:
    for name in ("llama", "phi3"):
        config, path = CONFIGS[name], tmp_path / "m.gguf"
        random_model(path, name)
        keys = GGUF(path).values
        number = type(keys[f"{config.architecture}.block_count"])("u32", 4)
        keys |= {f"{config.architecture}.attention.sliding_window": number}
        write_gguf(tmp_path / "n.gguf", keys, random_weights(config))
        assert open_model(tmp_path / "n.gguf").config == config


def test_a_granite_whose_blocks_all_attend_may_have_keys_of_scans(tmp_path: Path) -> None:
    """llama.cpp's converter writes them for Granite 4's dense models, and a number of heads for each block."""
    config, path = CONFIGS["granite"], tmp_path / "m.gguf"
    keys = model_metadata(config, "random") | vocabulary()
    per_block = {"attention.head_count_kv": [config.head_count_kv] * config.block_count}
    keys |= {f"granite.{key}": MetadataValue("i32", value) for key, value in per_block.items()}
    scan_keys = {
        "expert_shared_feed_forward_length": 96,
        "expert_count": 0,
        "expert_used_count": 0,
        "ssm.state_size": 128,
    }
    keys |= {f"granite.{key}": MetadataValue("u32", value) for key, value in scan_keys.items()}
    write_gguf(path, keys, random_weights(config))
    assert open_model(path).config == config
    keys["granite.attention.head_count_kv"] = MetadataValue("i32", [2, 1])
    write_gguf(path, keys, random_weights(config))
    with pytest.raises(InputError, match=r"head_count_kv is .*must be a whole number"):
        open_model(path)


def test_what_is_refused_is_not_here():
    """Each name once, and none that is supported: take a line away when an architecture comes."""
    names = [name for names in ARCHITECTURES_BY_NEED.values() for name in names.split()]
    assert len(names) == len({*names}) and not {*names} & {*ARCHITECTURES}
