"""Every key of a config.json is honoured, without effect, or refused by name; so are settings of rope."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain.common.errors import InputError
from packtrain.conversion.hugging_face import convert, open_checkpoint
from packtrain.conversion.hugging_face.config_translation import (
    ModelDescription,
    describe_checkpoint,
)
from packtrain.conversion.hugging_face.unread_keys import NEUTRAL_VALUES, WITHOUT_EFFECT
from packtrain.gguf import GGUF
from packtrain.inference.generator import Generator
from packtrain.models.arch import families_by_class
from packtrain.models.model_file import open_model
from tests import hugging_face
from tests.hugging_face import YARN, write_checkpoint, write_safetensors

IDS = np.random.default_rng(5).integers(3, 300, 12).tolist()


def described(folder: Path, config: Mapping[str, Any]) -> ModelDescription:
    (folder / "config.json").write_text(json.dumps(config))
    return describe_checkpoint(open_checkpoint(folder))


def content(description: ModelDescription) -> tuple[Any, ...]:
    """What differs between two descriptions, as text."""
    metadata = {key: repr(value.value) for key, value in description.metadata.items()}
    computed = {name: array.tobytes() for name, array in description.computed_tensors.items()}
    changed = [(t.name, t.shift, t.change_rows and t.change_rows(np.ones((8, 8), np.float32), 0).tobytes())
               for t in description.tensors if t.name.count("ssm") == 0]  # fmt: skip
    return metadata, computed, changed


def other_values(value: Any) -> list[Any]:
    """Values of another meaning."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 2 + 1]
    if isinstance(value, str):
        return ["relu"]
    return [value[::-1]] if isinstance(value, list) and value != value[::-1] else [{"a": 1}, 3]


KEYS = [
    "attention_bias", "mlp_bias", "alibi", "clip_qkv", "use_qk_norm", "partial_rotary_factor", "hidden_activation",
    "final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "embedding_multiplier", "residual_multiplier",
    "sliding_window", "use_sliding_window", "use_bidirectional_attention", "is_causal", "attn_output_gate", "new_key",
    "pruned_heads", "mlp_only_layers", "routed_scaling_factor", "norm_topk_prob", "n_group", "layer_types",
]  # fmt: skip
# what a class of transformers does not read either; a head of its own is kept whatever tie_word_embeddings says
UNUSED_KEYS = {
    "": {"tie_word_embeddings"},
    "qwen2": {"sliding_window"},
    "gemma2": {"hidden_act"},
    "gemma3": {"hidden_act"},
}


@pytest.mark.parametrize(
    "kind", ["llama", "mixtral", "qwen2", "gemma2", "gemma3", "phi3", "olmo3", "glm4", "gpt2"]
)
def test_another_value_of_a_key_changes_the_file_or_is_refused(kind: str, tmp_path: Path) -> None:
    config, _ = write_checkpoint(tmp_path / "m", kind)
    baseline = content(described(tmp_path / "m", config))
    ignored_keys = {name for names in WITHOUT_EFFECT.values() for name in names.split()}
    for key in {*config, *KEYS} - {"architectures"} - ignored_keys:
        if key.endswith("_id"):
            continue
        for value in other_values(config.get(key)):
            try:
                description = described(tmp_path / "m", config | {key: value})
            except InputError as error:
                assert str(error).startswith(str(tmp_path / "m"))
            else:
                assert content(description) != baseline or key in {
                    "tie_word_embeddings"
                } | UNUSED_KEYS.get(kind, set()), (key, value)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gpt2", "falcon 40b"])
@pytest.mark.parametrize("value", [True, False, 0, 2, 0.5, "x", [], {"a": 1}])
def test_a_key_that_nobody_knows_is_refused_by_name(kind: str, value: Any, tmp_path: Path) -> None:
    config, _ = write_checkpoint(tmp_path / "m", kind)
    with pytest.raises(
        InputError, match=r"config\.json: attention_of_tomorrow is .*; it must be left out"
    ):
        described(tmp_path / "m", config | {"attention_of_tomorrow": value})


def test_keys_without_effect_change_nothing(tmp_path: Path) -> None:
    config, _ = write_checkpoint(tmp_path / "m")
    baseline = content(described(tmp_path / "m", config))
    ignored_keys = {name: 7 for names in WITHOUT_EFFECT.values() for name in names.split()}
    for unset_key in ("architectures", "text_config", "quantization_config"):
        del ignored_keys[unset_key]
    assert content(described(tmp_path / "m", ignored_keys | config)) == baseline
    neutral = {key: values[0] for key, values in NEUTRAL_VALUES.items()}
    assert content(described(tmp_path / "m", neutral | config)) == baseline


def test_no_key_stands_in_two_tables() -> None:
    names = [name for text in WITHOUT_EFFECT.values() for name in text.split()]
    assert len(names) == len({*names}) and not {*names} & NEUTRAL_VALUES.keys()


def test_every_attribute_of_a_class_of_transformers_is_known(tmp_path: Path) -> None:
    """A config as the class writes it, with all of its defaults, is converted: none of its keys is unknown."""
    transformers = pytest.importorskip("transformers")
    by_class = {config["architectures"][0]: kind for kind, config in hugging_face.KINDS.items()}
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    kinds = {name: kind for kind, name in mapping.items() if isinstance(name, str)}
    unknown = []
    for name in families_by_class().keys() & by_class.keys() & kinds.keys():
        config, _ = write_checkpoint(tmp_path / name, by_class[name])
        hf_config = transformers.CONFIG_MAPPING[kinds[name]](
            **{k: v for k, v in config.items() if v is not None and k != "experts"}
        ).to_dict()
        try:
            described(tmp_path / name, json.loads(json.dumps(hf_config)))
        except InputError as error:
            if "does not know what it changes" in str(error):
                unknown.append(str(error))
    assert not unknown


# ---- YaRN ------------------------------------------------------------------------------------------------------


def frequencies(width: int, base: float, rope: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    """Of YaRN by its paper, as transformers has it: by what pairs turn at a position, and what multiplies them."""
    factor, original = rope["factor"], rope["original_max_position_embeddings"]
    base_frequencies = base ** -(np.arange(0, width, 2) / width)
    turns = rope.get("beta_fast", 32.0), rope.get("beta_slow", 1.0)
    ramp_ends = [
        width * math.log(original / (2 * math.pi * n)) / (2 * math.log(base)) for n in turns
    ]
    if rope.get("truncate", True):
        ramp_ends = [math.floor(ramp_ends[0]), math.ceil(ramp_ends[1])]
    low, high = max(ramp_ends[0], 0), min(ramp_ends[1], width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 1e-3), 0, 1)
    scales = rope.get("mscale"), rope.get("mscale_all_dim")
    mscale, mscale_all = scales if scales[0] and scales[1] else (1.0, 0.0)
    magnitude = (1 + 0.1 * mscale * math.log(factor)) / (1 + 0.1 * mscale_all * math.log(factor))
    return base_frequencies * (1 - ramp) + base_frequencies / factor * ramp, rope.get(
        "attention_factor"
    ) or magnitude


ROPES = [
    dict(zip(("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "truncate"), values, strict=True))
    for values in [
        (None, None, None, None, None), (1.0, None, None, None, None), (1.3, 0.7, 0.4, None, None),
        (None, 0.7, 0.4, None, None), (None, None, 0.4, None, None), (None, 0.7, 0.7, 16.0, None),
        (None, None, None, 8.0, True), (None, None, None, None, False), (0.8, None, None, 16.0, False),
    ]
]  # fmt: skip


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: "-".join(str(v) for v in rope.values()))
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral3"])
def test_yarn_turns_as_in_transformers_or_is_refused(
    kind: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    rope = {key: value for key, value in rope.items() if value is not None}
    rope |= {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 1e4,
    }
    extra_keys = {"llama_4_scaling_beta": 0.1} if kind == "mistral3" else {}
    write_checkpoint(tmp_path / "m", kind, rope_theta=None, rope_parameters=YARN)
    config = json.loads((tmp_path / "m/config.json").read_text())
    config |= {"rope_parameters": rope | extra_keys, "rope_theta": None}
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    try:
        convert(tmp_path / "m", tmp_path / "m.gguf")
    except InputError as error:
        assert kind == "qwen2" and ("beta_fast" in str(error) or "truncate" in str(error))
        return
    model = open_model(tmp_path / "m.gguf")
    model_rope = model.config.rope_of(0)
    assert model_rope is not None
    expected, expected_magnitude = frequencies(model_rope.rotated_width, 1e4, rope)
    pairs = np.arange(model_rope.rotated_width // 2)
    low, high = model_rope.blend or (0.0, 1e-3)
    ramp = np.clip((pairs - low) / (high - low), 0, 1) if model_rope.blend else np.zeros(len(pairs))
    factors = GGUF(tmp_path / "m.gguf")
    divisors = factors.array("rope_freqs.weight") if "rope_freqs.weight" in factors.entries else 1.0
    actual = model_rope.base ** -(2 * pairs / model_rope.rotated_width) / divisors
    actual = actual * (1 - ramp) + actual / model_rope.divisor * ramp
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    assert model_rope.magnitude == pytest.approx(expected_magnitude, rel=1e-6)


@pytest.mark.parametrize("kind", ["gemma3", "gemma3n"])
@pytest.mark.parametrize(
    ("rope", "key"),
    [
        ({}, ""),
        ({"attention_factor": 1.0}, "attention_factor"),
        ({"mscale": 0.7, "mscale_all_dim": 0.4}, "mscale"),
        ({"truncate": False}, "truncate"),
    ],
)
def test_a_growth_that_would_reach_blocks_with_a_window_is_refused(
    kind: str, rope: dict[str, Any], key: str, tmp_path: Path
) -> None:
    """A file has one attn_factor for all blocks; transformers rotates those with a window plainly."""
    config, _ = write_checkpoint(tmp_path, kind)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16} | rope
    layer_ropes = {
        "full_attention": yarn | {"rope_theta": 1e6},
        "sliding_attention": {"rope_theta": 1e4},
    }
    ropeless = {k: v for k, v in config.items() if not k.startswith("rope_")}
    changed = ropeless | {"rope_parameters": layer_ropes}
    if not key:
        assert "rope.scaling.attn_factor" not in str(described(tmp_path, changed).metadata)
        return
    with pytest.raises(InputError, match=rf"rope_scaling\.{key} is "):
        described(tmp_path, changed)


def test_yarn_computes_what_transformers_did(tmp_path: Path) -> None:
    """Recorded from transformers 5.24: the mean of -log p of a text, whose model is no part of this repository."""
    shared = Path(__file__).parents[2] / "shared/cases/yarn"
    if not shared.exists():
        pytest.skip("../shared/cases is absent")
    cases = json.loads((shared / "cases.json").read_text())
    shutil.copytree(shared, tmp_path / "m")
    (tmp_path / "m/tokenizer.model").write_bytes(hugging_face.sentencepiece_model())
    for name, config in cases["config"].items():
        (tmp_path / "m/config.json").write_text(json.dumps(config))
        convert(tmp_path / "m", tmp_path / "m.gguf", "f32")
        generator = Generator.from_model(open_model(tmp_path / "m.gguf"), len(cases["ids"]))
        rows = np.stack([generator.feed([id]).copy() for id in cases["ids"][:-1]]).astype(float)
        rows -= np.log(np.exp(rows).sum(1, keepdims=True))
        mean = -rows[np.arange(len(rows)), cases["ids"][1:]].mean()
        assert mean == pytest.approx(cases["nll"][name], abs=1e-5), name


def test_the_ramp_of_a_gpt_oss_is_rounded_and_that_is_said(tmp_path: Path) -> None:
    """Its own checkpoints have truncate: false; files of other architectures refuse what they do not hold."""
    config, _ = write_checkpoint(tmp_path / "m", "gpt-oss")
    rope = YARN | {"truncate": False, "mscale": None, "mscale_all_dim": None}
    del rope["llama_4_scaling_beta"]
    for name, truncate in (("said", False), ("plain", True)):
        changed = config | {"rope_scaling": rope | {"truncate": truncate}}
        (tmp_path / "m/config.json").write_text(json.dumps(changed))
        said: list[str] = []
        convert(tmp_path / "m", tmp_path / f"{name}.gguf", report=said.append)
        assert ["config.json: rope_scaling.truncate is False" in line for line in said] == [
            True
        ] * (not truncate)
    assert (tmp_path / "said.gguf").read_bytes() == (tmp_path / "plain.gguf").read_bytes()


# ---- windows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mistral", {}),
        ("mixtral", {}),
        ("phi3", {}),
        ("starcoder2", {}),
        (
            "qwen2",
            {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
        ),
        ("qwen3moe", {"use_sliding_window": True}),
        ("smollm3", {"use_sliding_window": True}),
    ],
)
def test_a_window_that_a_file_does_not_hold_is_the_context(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Within it all layers see every token, with the window and without."""
    config, _ = write_checkpoint(tmp_path / "m", kind)
    longest = config["max_position_embeddings"]
    for window, context in ((8, 8), (longest, longest), (longest + 1, longest), (None, longest)):
        hf_config = config | changes | {"sliding_window": window}
        if window is None:
            hf_config |= {"use_sliding_window": False, "layer_types": None}
        (tmp_path / "m/config.json").write_text(json.dumps(hf_config))
        said: list[str] = []
        convert(tmp_path / "m", tmp_path / "m.gguf", report=said.append)
        model = open_model(tmp_path / "m.gguf")
        assert model.config.context_length == context and not model.config.has_windows
        line = f"sliding_window is 8, which files of a {model.config.architecture} do not hold: the context is 8 tokens"
        assert [line in message for message in said] == [True] * (context == 8)


@pytest.mark.parametrize("window", [None, 0, 8])
def test_a_window_that_is_turned_off_does_not_count(window: int | None, tmp_path: Path) -> None:
    config, _ = write_checkpoint(tmp_path, "qwen2")
    description = described(
        tmp_path, config | {"use_sliding_window": False, "sliding_window": window}
    )
    assert description.metadata["qwen2.context_length"].value == config["max_position_embeddings"]


def test_a_shorter_context_does_not_change_what_rope_is_scaled_from(tmp_path: Path) -> None:
    config, _ = write_checkpoint(tmp_path / "m", "mistral")
    del (rope := dict(YARN))["original_max_position_embeddings"], rope["llama_4_scaling_beta"]
    changed = config | {"rope_scaling": rope, "sliding_window": 8}
    metadata = {
        key: value.value for key, value in described(tmp_path / "m", changed).metadata.items()
    }
    assert metadata["llama.context_length"] == 8
    assert (
        metadata["llama.rope.scaling.original_context_length"] == config["max_position_embeddings"]
    )


# ---- heads, sizes, files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen2", "olmo2"])
def test_a_head_of_its_own_is_kept_in_a_tied_model(kind: str, tmp_path: Path) -> None:
    config, tensors = write_checkpoint(tmp_path / "m", kind, tie_word_embeddings=True)
    embedding = tensors["model.embed_tokens.weight"]
    logits = {}
    for name, head in (("none", None), ("equal", embedding), ("other", embedding[::-1].copy())):
        checkpoint = tensors | ({} if head is None else {"lm_head.weight": head})
        write_safetensors(tmp_path / "m/model.safetensors", checkpoint)
        convert(tmp_path / "m", tmp_path / f"{name}.gguf")
        logits[name] = Generator.from_model(open_model(tmp_path / f"{name}.gguf"), 16).feed(IDS)
    np.testing.assert_array_equal(logits["none"], logits["equal"])
    np.testing.assert_allclose(logits["other"], logits["equal"][::-1], rtol=1e-5, atol=1e-5)
    assert "output.weight" in GGUF(tmp_path / "other.gguf").entries
    assert config["tie_word_embeddings"]


def test_a_head_of_its_own_is_refused_where_files_have_none(tmp_path: Path) -> None:
    _, tensors = write_checkpoint(tmp_path / "m", "gemma2")
    head = tensors["model.embed_tokens.weight"][::-1].copy()
    write_safetensors(tmp_path / "m/model.safetensors", tensors | {"lm_head.weight": head})
    with pytest.raises(
        InputError, match=r"lm_head\.weight is not the embedding; files of its architecture"
    ):
        convert(tmp_path / "m", tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", ["llama", "qwen3next", "gemma4", "gpt2", "falcon 40b", "lfm2"])
def test_more_blocks_than_tensors_are_refused_at_once(kind: str, tmp_path: Path) -> None:
    config, _ = write_checkpoint(tmp_path / "m", kind)
    key = "n_layer" if "n_layer" in config else "num_hidden_layers"
    with pytest.raises(InputError, match=rf"{key} is 1000000; it must be at most"):
        described(tmp_path / "m", config | {key: 1_000_000})


def test_a_file_that_cannot_run_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each conversion opens its own file, and reads a token with it, before the file gets its name."""
    _, tensors = write_checkpoint(tmp_path / "m")
    (tmp_path / "m.gguf").write_bytes(b"before")
    tensors["model.norm.weight"][:] = 3e38
    write_safetensors(tmp_path / "m/model.safetensors", tensors)
    with pytest.raises(InputError, match=r"m\.gguf: a token gets logits that are not finite"):
        convert(tmp_path / "m", tmp_path / "m.gguf")
    write_checkpoint(tmp_path / "m")
    monkeypatch.setattr(
        "packtrain.conversion.hugging_face.config_translation._expert_keys",
        lambda sizes: {"expert_count": 7},
    )
    with pytest.raises(InputError, match=r"m\.gguf: (?!.*\.part).*expert"):
        convert(tmp_path / "m", tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "m.gguf"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "pytorch_model.bin",
            r"pytorch_model\.bin: pickled tensors are not read; load it with transformers",
        ),
        (
            "model-00001-of-00002.safetensors",
            r"00002\.safetensors: it is one of several files, and model\.safe",
        ),
        ("other.txt", r"m/model\.safetensors: is missing; tensors must"),
    ],
)
def test_files_that_are_there_instead_are_named(name: str, said: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    (tmp_path / "m/model.safetensors").rename(tmp_path / "m" / name)
    with pytest.raises(InputError, match=said):
        convert(tmp_path / "m", tmp_path / "m.gguf")


def test_templates_in_files_replace_those_of_the_tokenizer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    (tmp_path / "m/tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    (tmp_path / "m/chat_template.jinja").write_text("new")
    (tmp_path / "m/additional_chat_templates").mkdir()
    (tmp_path / "m/additional_chat_templates/tool_use.jinja").write_text("tools")
    convert(tmp_path / "m", tmp_path / "m.gguf")
    metadata = GGUF(tmp_path / "m.gguf").metadata
    assert metadata["tokenizer.chat_template"] == "new"
    assert metadata["tokenizer.chat_template.tool_use"] == "tools"


def test_an_end_that_only_the_map_of_special_tokens_has(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", eos_token_id=None)
    (tmp_path / "m/special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "</s>"}})
    )
    convert(tmp_path / "m", tmp_path / "m.gguf")
    assert GGUF(tmp_path / "m.gguf").metadata["tokenizer.ggml.eos_token_id"] == 2


SHORT_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG_ROPE = hugging_face.LONG | {"attention_factor": 0}
WRONG_ROPES: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_scaling": SHORT_YARN, "original_max_position_embeddings": 32}, "embeddings is 32; it must be 16"),
    ("llama", {"rope_parameters": SHORT_YARN, "original_max_position_embeddings": 32}, "is 32; it must be 16"),
    ("llama", {"rope_scaling": SHORT_YARN | {"rope_theta": 5e5}}, "rope_theta is 10000.0; it must be 500000.0"),
    ("llama", {"rope_scaling": SHORT_YARN | {"attention_factor": 0}}, "attention_factor is 0; it must be a number"),
    ("phi3", {"rope_scaling": LONG_ROPE}, "attention_factor is 0; it must be a number"),
    ("llama", {"rope_scaling": SHORT_YARN | {"original_max_position_embeddings": 16.5}}, "must be a whole number"),
    ("llama", {"rope_scaling": hugging_face.LLAMA_3 | {"low_freq_factor": 4.0}}, "below high_freq_factor"),
    ("llama", {"rope_scaling": hugging_face.LLAMA_3 | {"low_freq_factor": 5.0}}, "below high_freq_factor"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "words"), WRONG_ROPES)
def test_settings_of_rope_that_contradict_each_other_are_refused(
    kind: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config, _ = write_checkpoint(tmp_path / "m", kind)
    with pytest.raises(InputError, match=words):
        described(tmp_path / "m", config | changes)


@pytest.mark.parametrize("value", [None, 0, False])
def test_the_ramp_is_rounded_only_where_transformers_rounds_it(value: Any, tmp_path: Path) -> None:
    config, _ = write_checkpoint(tmp_path / "m")
    scaling = config | {"rope_scaling": SHORT_YARN | {"truncate": value}}
    off = config | {"rope_scaling": SHORT_YARN | {"truncate": False}}
    assert content(described(tmp_path / "m", scaling)) == content(described(tmp_path / "m", off))
    assert "rope_freqs.weight" in described(tmp_path / "m", scaling).computed_tensors


def test_a_text_config_that_contradicts_the_config_is_refused(tmp_path: Path) -> None:
    config, _ = write_checkpoint(tmp_path / "m")
    alike = content(described(tmp_path / "m", config | {"text_config": {"rope_theta": 10000.0}}))
    assert alike == content(described(tmp_path / "m", config))
    with pytest.raises(
        InputError, match=r"rope_theta is 10000\.0; it must be 5\.0, as in text_config"
    ):
        described(tmp_path / "m", config | {"text_config": {"rope_theta": 5.0}})


@pytest.mark.parametrize(
    "chat_template",
    [
        5,
        {"default": "x"},
        [{"name": "default"}],
        [{"template": "x"}],
        ["x"],
        [{"name": "tool-use", "template": "a"}, {"name": "tool_use", "template": "b"}],
    ],
)
def test_no_chat_template_is_dropped(chat_template: Any, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    about = json.dumps({"chat_template": chat_template})
    (tmp_path / "m/tokenizer_config.json").write_text(about)
    with pytest.raises(InputError, match=r"chat_template .*it must be a text or named texts"):
        convert(tmp_path / "m", tmp_path / "m.gguf")


# ---- what a class takes by itself


@pytest.mark.parametrize("kind", ["gpt-oss", "mistral3"])
def test_a_class_that_has_yarn_by_itself_needs_settings_of_rope(kind: str, tmp_path: Path) -> None:
    """transformers' NLL differs by 0.3 of the largest logit from plain rope, which was taken."""
    config, _ = write_checkpoint(tmp_path / "m", kind)
    bare_config = {k: v for k, v in config.items() if k not in ("rope_parameters", "rope_scaling")}
    with pytest.raises(InputError, match="rope_parameters is missing; it must be an object"):
        described(tmp_path / "m", bare_config | {"rope_theta": 10_000.0})


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("deepseek2", "norm_topk_prob"),
        ("deepseek2", "rope_interleave"),
        ("granitehybrid", "mamba_conv_bias"),
        ("falcon-h1", "mamba_conv_bias"),
        ("falcon", "parallel_attn"),
    ],
)
def test_a_null_that_transformers_takes_for_false_is_not_true(
    kind: str, key: str, tmp_path: Path
) -> None:
    config, _ = write_checkpoint(tmp_path / "m", kind)
    with pytest.raises(InputError, match=f"{key} is 'null'; it must be true or false"):
        described(tmp_path / "m", config | {key: None})


@pytest.mark.parametrize("kind", ["deepseek2", "deepseek2 lite", "qwen3next"])
def test_an_eps_that_transformers_does_not_take_everywhere_is_said(
    kind: str, tmp_path: Path
) -> None:
    config, _ = write_checkpoint(tmp_path / "m", kind)
    for eps, num_notes in ((1e-6, 0), (1e-5, 1)):
        (tmp_path / "m/config.json").write_text(json.dumps(config | {"rms_norm_eps": eps}))
        checkpoint = open_checkpoint(tmp_path / "m")
        describe_checkpoint(checkpoint)
        assert sum("transformers takes 1e-06" in n for n in checkpoint.config.notes) == num_notes


def test_a_type_of_rope_by_its_old_name_alone_is_refused_where_versions_differ(
    tmp_path: Path,
) -> None:
    """transformers 5 passes over it in classes whose layers have rope of their own, 4 does not."""
    config, _ = write_checkpoint(tmp_path / "m", "gemma3")
    scaling = {"type": "linear", "factor": 4.0}
    with pytest.raises(
        InputError, match=r"rope_scaling\.rope_type is missing; it must be 'linear'"
    ):
        described(tmp_path / "m", config | {"rope_scaling": scaling})
    described(tmp_path / "m", config | {"rope_scaling": scaling | {"rope_type": "linear"}})


def test_yarn_with_a_base_of_1_is_refused(tmp_path: Path) -> None:
    config, _ = write_checkpoint(tmp_path / "m", "llama")
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    with pytest.raises(InputError, match=r"rope_theta is 1\.0; it must be above 1"):
        described(tmp_path / "m", config | {"rope_theta": 1.0, "rope_scaling": rope})


@pytest.mark.parametrize("original", [1, 6])
def test_yarn_whose_ramp_ends_below_0_is_refused(original: int, tmp_path: Path) -> None:
    config, _ = write_checkpoint(tmp_path / "m", "llama")
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}
    with pytest.raises(InputError, match=rf"{original}\.0; it must be a whole number above 6"):
        described(tmp_path / "m", config | {"rope_scaling": rope})


def test_rope_by_types_of_layers_under_the_old_key_is_refused(tmp_path: Path) -> None:
    """transformers 5 reads it there as settings of one kind, and passes over what is within."""
    config, _ = write_checkpoint(tmp_path / "m", "gemma3")
    config.pop("rope_parameters", None)
    unscaled_rope = {"rope_type": "default", "rope_theta": 10_000.0}
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}
    rope = {"full_attention": scaled, "sliding_attention": unscaled_rope}
    with pytest.raises(InputError, match="it must be under rope_parameters, if by types"):
        described(tmp_path / "m", config | {"rope_scaling": rope})
    config.pop("rope_scaling", None)
    described(tmp_path / "m", config | {"rope_parameters": rope})
