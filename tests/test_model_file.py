"""Model files: what is saved opens as it was, in every type; whatever does not fit together gets its line."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain.common.errors import InputError
from packtrain.dtypes import BLOCK_TYPES
from packtrain.gguf import GGUF, DeferredTensor, GGUFError, MetadataValue, write_gguf
from packtrain.models.arch import ARCHITECTURES
from packtrain.models.config import Config
from packtrain.models.gguf_keys import CHANGING, EPS_KEY, RMS_EPS_KEY, SHARED_KEYS
from packtrain.models.model_file import open_model, save_model
from packtrain.models.model_metadata import WINDOWS, model_metadata
from packtrain.models.per_block_metadata import KV, WINDOW_WIDTHS
from tests.architectures import CONFIGS, TOKENS, vocabulary
from tests.models import seeded_weights

SHARED = Path(__file__).parent.parent.parent / "shared/data"
STORIES = SHARED / "models/stories260K/stories260K.gguf"
needs_shared = pytest.mark.shared

CONFIG = Config(len(TOKENS), 32, 24, 2, 36, 4, 2, rope_freq_base=5e4, rms_eps=1e-6)


def save(path: Path, config: Config = CONFIG, **options: Any) -> dict[str, np.ndarray]:
    """A model of random values in a file; gives the values."""
    weights = seeded_weights(config)
    save_model(path, config, vocabulary(), weights.__getitem__, name="small", **options)
    return weights


# ---- in and out


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_saved_opens_as_it_was(tmp_path: Path, tied: bool) -> None:
    config = replace(CONFIG, tied=tied)
    weights = save(
        tmp_path / "m.gguf", config, extra={"general.author": MetadataValue("string", "me")}
    )
    model = open_model(tmp_path / "m.gguf")
    assert model.config == config
    assert list(model.weight_names) == list(weights) == list(model.gguf.entries)
    assert all(np.array_equal(model.weight(name), weights[name]) for name in weights)
    assert model.tokenizer().decode(model.tokenizer().encode("the cat")) == "the cat"
    keys = model.gguf.metadata
    assert (keys["general.file_type"], keys["general.author"]) == (0, "me")
    assert (keys["general.name"], keys["general.type"]) == ("small", "model")


def test_f32_is_mapped_and_not_copied(tmp_path: Path) -> None:
    save(tmp_path / "m.gguf")
    model = open_model(tmp_path / "m.gguf")
    assert all(not model.weight(name).flags.owndata for name in model.weight_names)
    assert np.shares_memory(model.weight("output_norm.weight"), model.weight("output_norm.weight"))


@pytest.mark.parametrize(("dtype", "number", "bits"), [("f16", 1, 11), ("bf16", 32, 8)])
def test_halves_are_rounded_to_nearest(tmp_path: Path, dtype: str, number: int, bits: int) -> None:
    weights = save(tmp_path / "m.gguf", dtype=dtype)
    model = open_model(tmp_path / "m.gguf")
    assert model.gguf.metadata["general.file_type"] == number
    for name, value in weights.items():
        stored = model.weight(name)
        assert stored.dtype == np.float32
        if value.ndim == 1:
            assert str(model.gguf.entries[name].dtype) == "f32" and np.array_equal(stored, value)
            continue
        assert str(model.gguf.entries[name].dtype) == dtype
        unit = 2.0 ** (np.floor(np.log2(np.abs(value))) + 1 - bits)  # of the last place kept
        unit = np.maximum(unit, 2.0**-24 if dtype == "f16" else 0)  # the least f16 there is
        assert (np.abs(stored.astype(np.float64) - value) <= unit / 2).all()


def test_bf16_ties_go_to_even_and_nan_stays(tmp_path: Path) -> None:
    bits = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x3F817FFF, 0xFF800000, 0x7FFFFFFF], np.uint32
    )
    weights = seeded_weights(CONFIG)
    weights["token_embd.weight"][0, :6] = bits.view(np.float32)
    save_model(
        tmp_path / "m.gguf",
        CONFIG,
        vocabulary(),
        weights.__getitem__,
        name="small",
        dtype="bf16",
    )
    stored = open_model(tmp_path / "m.gguf").weight("token_embd.weight")[0, :6]
    expected = [0x3F800000, 0x3F820000, 0x3F810000, 0x3F810000, 0xFF800000]
    assert stored[:5].view(np.uint32).tolist() == expected
    assert np.isnan(stored[5])


def test_f16_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    weights = seeded_weights(CONFIG)
    weights["blk.1.ffn_up.weight"][0, 0] = 70_000
    (tmp_path / "m.gguf").write_bytes(b"before")
    with pytest.raises(InputError, match=r"blk\.1\.ffn_up\.weight has values up to 7e\+04, beyond"):
        save_model(
            tmp_path / "m.gguf",
            CONFIG,
            vocabulary(),
            weights.__getitem__,
            name="small",
            dtype="f16",
        )
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"before"]


def test_weights_are_asked_for_one_by_one_in_order(tmp_path: Path) -> None:
    arrays, requested_names = seeded_weights(CONFIG), []

    def weights(name: str) -> np.ndarray:
        requested_names.append(name)
        return arrays[name]

    save_model(tmp_path / "m.gguf", CONFIG, vocabulary(), weights, name="small", dtype="f16")
    assert requested_names == list(arrays)


def test_a_weight_of_another_shape_or_vocabulary_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"token_embd.weight: float32\[2\] was given for"):
        save_model(
            tmp_path / "m.gguf", CONFIG, vocabulary(), lambda _: np.zeros(2, "f4"), name="small"
        )
    smaller = replace(CONFIG, vocab_size=7)
    with pytest.raises(InputError, match="has 290 tokens, the model 7; both must be equal"):
        save(tmp_path / "m.gguf", smaller)


def test_a_deferred_tensor_must_be_as_announced(tmp_path: Path) -> None:
    deferred = DeferredTensor(BLOCK_TYPES["q8_0"], (2, 32), lambda: [np.zeros((2, 33), np.uint8)])
    with pytest.raises(GGUFError, match="t: 66 bytes were written, 68 announced"):
        write_gguf(tmp_path / "m.gguf", {}, {"t": deferred})


@needs_shared
def test_a_real_model_opens_and_is_saved_again(tmp_path: Path) -> None:
    model = open_model(STORIES)
    assert model.config == Config(512, 2048, 64, 5, 172, 8, 4, tied=False)
    keys = model.gguf.values
    words = {key: value for key, value in keys.items() if key.startswith("tokenizer.")}
    save_model(tmp_path / "m.gguf", model.config, words, model.weight, name="again")
    resaved = open_model(tmp_path / "m.gguf")
    assert resaved.config == model.config
    assert resaved.tokenizer().tokens == model.tokenizer().tokens
    assert all(resaved.weight(n).tobytes() == model.weight(n).tobytes() for n in model.weight_names)


# ---- what is refused

Change = Callable[[dict[str, MetadataValue], dict[str, Any]], object]


def key(name: str, kind: str, value: Any) -> Change:
    return lambda keys, tensors: keys.update({name: MetadataValue(kind, value)})


def set_keys(*entries: tuple[str, str, Any]) -> Change:
    return lambda keys, tensors: keys.update(
        {n: MetadataValue(kind, value) for n, kind, value in entries}
    )


def no_key(name: str) -> Change:
    return lambda keys, tensors: keys.pop(name)


def tensor(name: str, value: Any) -> Change:
    return lambda keys, tensors: tensors.update({name: value})


def no_tensor(name: str) -> Change:
    return lambda keys, tensors: tensors.pop(name)


def packed_zeros(rows: int, width: int) -> np.ndarray:
    return np.zeros((rows, width // 128), BLOCK_TYPES["q1_0"].numpy)


BAD: dict[str, Change] = {
    "general.architecture is 'bert', which needs attention in both directions; supported are llama, llama4":
        key("general.architecture", "string", "bert"),
    "general.architecture is 'none'; supported are llama, llama4": key("general.architecture", "string", "none"),
    "general.architecture is None; supported": no_key("general.architecture"),
    "llama.context_length is missing; it must be a whole number from 1": no_key("llama.context_length"),
    "llama.context_length is 0; it must be": key("llama.context_length", "u32", 0),
    "llama.block_count is -2; it must be": key("llama.block_count", "i32", -2),
    "llama.block_count is 9000; it must be less than the number of tensors": key("llama.block_count", "u32", 9000),
    "llama.embedding_length is 24.0; it must be": key("llama.embedding_length", "f32", 24),
    "llama.embedding_length is True; it must be": key("llama.embedding_length", "bool", True),
    "llama.feed_forward_length is array([36, 40]": key("llama.feed_forward_length", "u32", [36, 40]),
    "llama.feed_forward_length is 9223372036854775808; it": key("llama.feed_forward_length", "u64", 1 << 63),
    "weight has shape [36, 24]; by the metadata it must be [40, 24]": key("llama.feed_forward_length", "u32", 40),
    "llama.attention.head_count is 5; it must be a divisor": key("llama.attention.head_count", "u32", 5),
    "llama.attention.head_count is 8; it must be a divisor": key("llama.attention.head_count", "u32", 8),
    "llama.attention.head_count_kv is 3; it must be a divisor of": key("llama.attention.head_count_kv", "u32", 3),
    "llama.rope.dimension_count is 4; it must be the width of a head, 6": key("llama.rope.dimension_count", "u32", 4),
    "llama.attention.key_length is 7; it must be even": key("llama.attention.key_length", "u32", 7),
    "llama.attention.value_length is 8; it must be the width of keys, 6": key("llama.attention.value_length", "u32", 8),
    "llama.rope.scaling.type is 'ntk'; it must be none or linear": key("llama.rope.scaling.type", "string", "ntk"),
    "llama.rope.scaling.yarn_beta_fast is 8.0; it must be 32.0 or": key("llama.rope.scaling.yarn_beta_fast", "f32", 8),
    "llama.attention.head_count is 40; it must be a divisor": key("llama.attention.head_count", "u32", 40),
    "llama.rope.scaling.factor is 0.5; it must be 1 or more": set_keys(
        ("llama.rope.scaling.type", "string", "yarn"), ("llama.rope.scaling.factor", "f32", 0.5)
    ),
    "llama.rope.freq_base is 1.0; it must be above 1 with yarn": set_keys(
        ("llama.rope.scaling.type", "string", "yarn"), ("llama.rope.freq_base", "f32", 1)
    ),
    "llama.expert_used_count is missing; it must": key("llama.expert_count", "u32", 8),
    "llama.attention.scale is 0.5; it must be 0.0 or left out": key("llama.attention.scale", "f32", 0.5),
    "llama.router_logit_softcapping is 30.0; it must be left out":
        key("llama.router_logit_softcapping", "f32", 30),
    "llama.hidden_activation is 'gelu'; it must be left out": key("llama.hidden_activation", "string", "gelu"),
    "llama.logit_scale is 2.0; it must be left out": key("llama.logit_scale", "f32", 2),
    "llama.rope.freq_base is -1.0; it must be a number above 0": key("llama.rope.freq_base", "f32", -1),
    "layer_norm_rms_epsilon is nan; it must be": key("llama.attention.layer_norm_rms_epsilon", "f32", np.nan),
    "layer_norm_rms_epsilon is missing; it must be": no_key("llama.attention.layer_norm_rms_epsilon"),
    "llama.vocab_size is 299; it must be 290, the rows": key("llama.vocab_size", "u32", 299),
    "there is no array tokenizer.ggml.tokens": no_key("tokenizer.ggml.tokens"),
    "tokenizer.ggml.tokens has 1 tokens and token_embd.weight 290 rows": key("tokenizer.ggml.tokens", "string", ["a"]),
    "there is no tensor token_embd.weight; a model needs its weights": no_tensor("token_embd.weight"),
    "token_embd.weight has shape [24]; it must be [vocabulary, width]": tensor("token_embd.weight", np.zeros(24, "f4")),
    "tensor blk.1.attn_k.weight is missing; its shape is [12, 24]": no_tensor("blk.1.attn_k.weight"),
    "blk.0.ffn_up.weight has shape [24, 36]; by": tensor("blk.0.ffn_up.weight", np.zeros((24, 36), "f4")),
    "output.weight has shape [289, 24]; by": tensor("output.weight", np.zeros((289, 24), "f4")),
    "tensor rope_factors_long.weight is not part of a llama of 2": tensor("rope_factors_long.weight", np.ones(3, "f4")),
    "rope_freqs.weight has shape [4]; by the metadata it must be [3]": tensor("rope_freqs.weight", np.ones(4, "f4")),
    "tensor blk.1.attn_q.bias is missing; its shape is [24]": tensor("blk.0.attn_q.bias", np.ones(24, "f4")),
    "tensor blk.2.attn_norm.weight is not part": tensor("blk.2.attn_norm.weight", np.ones(24, "f4")),
    "output_norm.weight is of type f64; only f32, f16, bf16, q4_0": tensor("output_norm.weight", np.ones(24)),
}  # fmt: skip


# keys of gguf-py without effect on what the architectures here compute, or read elsewhere
IDLE_KEYS = """vocab_size context_length embedding_length block_count feed_forward_length features_length
    tensor_data_layout pooling_type decoder_start_token_id decoder_block_count activation_sparsity_scale
    altup.active_idx altup.num_inputs {dense}_feat_in {dense}_feat_out classifier.output_labels
    posnet.embedding_length posnet.block_count convnext.embedding_length convnext.block_count"""


def test_every_key_of_gguf_py_is_read_refused_or_without_effect() -> None:
    constants = pytest.importorskip("gguf.constants")
    groups = [group for group in vars(constants.Keys).values() if isinstance(group, type)]
    values = [value for group in groups for value in vars(group).values() if isinstance(value, str)]
    keys = {v.removeprefix("{arch}.") for v in values if v.startswith("{arch}.")}
    read = {*SHARED_KEYS, RMS_EPS_KEY, EPS_KEY}.union(
        *(a.key_defaults for a in ARCHITECTURES.values())
    )
    unknown = {k for k in keys - read - {*IDLE_KEYS.split()} if not k.startswith(CHANGING)}
    assert len(keys) > 100 and not unknown


@pytest.mark.parametrize("line", BAD)
def test_a_bad_model_gets_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.gguf"
    keys, tensors = (
        model_metadata(CONFIG, "small") | vocabulary(),
        dict[str, Any](seeded_weights(CONFIG)),
    )
    BAD[line](keys, tensors)
    write_gguf(path, keys, tensors)
    with pytest.raises(InputError) as error:
        open_model(path)
    assert line in str(error.value) and str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


GEMMA_4 = {
    "sliding_window_pattern is array([1., 0., 1., 0.], dtype=float32); it":
        {WINDOWS: MetadataValue("f32", [1, 0, 1, 0])},
    "sliding_window_pattern is array([ True]); it must be 4 times": {WINDOWS: MetadataValue("bool", [True])},
    "head_count_kv is array([3, 1, 3, 1], dtype=int32); it must be a": {KV: MetadataValue("i32", [3, 1, 3, 1])},
    "key_length_swa is 63; it must be even": dict.fromkeys(WINDOW_WIDTHS, MetadataValue("u32", 63)),
}  # fmt: skip


@pytest.mark.parametrize("line", GEMMA_4)
def test_a_wrong_size_of_some_blocks_is_the_one_named(tmp_path: Path, line: str) -> None:
    config, path = CONFIGS["gemma4"], tmp_path / "bad.gguf"
    changed_keys = {f"gemma4.{key}": value for key, value in GEMMA_4[line].items()}
    keys = model_metadata(config, "small") | vocabulary() | changed_keys
    write_gguf(path, keys, dict[str, Any](seeded_weights(config)))
    with pytest.raises(InputError, match=re.escape(f"{path}: gemma4.attention.{line}")):
        open_model(path)


def test_gemma3n_shares_as_llama_cpp_has_it(tmp_path: Path) -> None:
    """Whatever its key says; the last blocks with keys of their own must be one with a window and one without."""
    config, path = CONFIGS["gemma3n shared"], tmp_path / "m.gguf"
    keys = model_metadata(config, "small") | vocabulary()
    keys["gemma3n.attention.shared_kv_layers"] = MetadataValue("u32", 7)
    write_gguf(path, keys, dict[str, Any](seeded_weights(config)))
    assert open_model(path).config == config
    keys["gemma3n.attention.sliding_window_pattern"] = MetadataValue(
        "bool", [True] * config.block_count
    )
    write_gguf(path, keys, dict[str, Any](seeded_weights(config)))
    with pytest.raises(InputError, match="such that block 18 has a window and block 19 has none"):
        open_model(path)


def test_a_type_that_cannot_be_read_is_named_with_its_tensor(tmp_path: Path) -> None:
    config = replace(CONFIG, embedding_length=256)
    keys, tensors = (
        model_metadata(config, "small") | vocabulary(),
        dict[str, Any](seeded_weights(config)),
    )
    tensors["blk.0.attn_q.weight"] = packed_zeros(256, 256)
    write_gguf(tmp_path / "m.gguf", keys, tensors)
    with pytest.raises(InputError, match=r"blk\.0\.attn_q\.weight is of type q1_0; only f32, f16"):
        open_model(tmp_path / "m.gguf")


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.gguf: cannot be read: no such file"):
        open_model(tmp_path / "none.gguf")
    with pytest.raises(InputError, match="cannot be read: is a directory"):
        open_model(tmp_path)


def test_a_vocabulary_that_cannot_be_used_names_its_file(tmp_path: Path) -> None:
    words = vocabulary() | {"tokenizer.ggml.model": MetadataValue("string", "mine")}
    path = tmp_path / "m.gguf"
    save_model(path, CONFIG, words, seeded_weights(CONFIG).__getitem__, name="small")
    with pytest.raises(InputError) as error:
        open_model(path).tokenizer()
    assert str(error.value).startswith(f"{path}: tokenizer.ggml.model is 'mine'")
    assert GGUF(path).metadata["tokenizer.ggml.model"] == "mine"
