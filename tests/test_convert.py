"""Hugging Face's checkpoints become GGUF files that compute the same; what is not sound is refused in a line."""

import contextlib
import json
import random
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from packtrain.cli.main import main
from packtrain.common.errors import InputError
from packtrain.conversion.hugging_face import convert
from packtrain.conversion.hugging_face.tokenizer_steps import read_steps
from packtrain.conversion.hugging_face.vocabulary import UNUSED_TYPE
from packtrain.data.tokenizer import CONTROL, USER_DEFINED, Tokenizer, split_rules
from packtrain.gguf import GGUF
from packtrain.inference.generator import Generator
from packtrain.kernels.quant import quantized_arrays
from packtrain.models.model_file import open_model
from tests import hugging_face
from tests.hugging_face import (
    internlm2,
    sentencepiece_model,
    write_checkpoint,
    write_safetensors,
)

TOKENS = np.random.default_rng(5).integers(3, 300, 24)
TOLERANCE = 1e-4  # of the largest logit
TO_SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}


def convert_folder(folder: Path, kind: str = "llama", dtype: str = "auto", **changes: Any) -> GGUF:
    write_checkpoint(folder / "model", kind, **changes)
    convert(folder / "model", folder / "model.gguf", dtype)
    return GGUF(folder / "model.gguf")


def test_the_vocabulary_of_gemma4_keeps_its_merges(tmp_path: Path) -> None:
    """Bytes are spelled as <0x0A>, lines are split, and tokens of thoughts and calls can be seen."""
    write_checkpoint(tmp_path / "model", "gemma4")
    (tmp_path / "model/tokenizer.model").unlink()
    merges = ["h e", "l l", "he ll", "\u2581 w", "o r", "\u2581 \u2581", "\n \n"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{b:02X}>" for b in range(256))]
    tokens += [*"helowrd,\u2581\n", *(pair.replace(" ", "") for pair in merges)]
    model = {"type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "merges": merges}
    model["vocab"] = {text: id for id, text in enumerate(tokens)}
    added = [*enumerate(tokens[:4]), *enumerate(("<|turn>", "<turn|>", "<|channel>"), len(tokens))]
    listed = [hugging_face.added(id, text) for id, text in added]
    fast = {"model": model, "added_tokens": listed, "normalizer": TO_SPACE}
    (tmp_path / "model/tokenizer.json").write_text(json.dumps(fast))
    about = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": False}
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps(about))
    convert(tmp_path / "model", tmp_path / "model.gguf")
    file = GGUF(tmp_path / "model.gguf")
    assert file.metadata["tokenizer.ggml.model"] == "gemma4"
    assert file.metadata["tokenizer.ggml.add_bos_token"] is True  # llama.cpp knows no other
    kinds = file.metadata["tokenizer.ggml.token_type"].tolist()[len(tokens) : len(tokens) + 3]
    assert kinds == [CONTROL, CONTROL, USER_DEFINED]
    tokenizer, expected = open_model(tmp_path / "model.gguf").tokenizer(), {
        "hello  world\n\nhe": [272, 263, 268, 273, 274, 262, 266, 276, 270],
        "a\u00e9 hell,\n": [101, 199, 173, 268, 272, 267, 269],
        "<|turn>hello<turn|>\n w": [277, 272, 263, 278, 269, 273],
    }  # fmt: skip
    for text, ids in expected.items():
        assert [id for id in tokenizer.encode(text, special=True) if id != 2] == ids


# ---- the model -------------------------------------------------------------------------------------------------


def logits(path: Path, tokens: np.ndarray) -> np.ndarray:
    """Logits after each token, through the cache."""
    generator = Generator.from_model(open_model(path), len(tokens))
    return np.stack([generator.feed([int(t)]).copy() for t in tokens])


@pytest.mark.parametrize("kind", hugging_face.KINDS)
def test_a_converted_model_computes_what_the_checkpoint_does(kind: str, tmp_path: Path) -> None:
    config, tensors = write_checkpoint(tmp_path / "model", kind)
    convert(tmp_path / "model", tmp_path / "model.gguf")
    expected = hugging_face.logits(config, tensors, TOKENS)
    got = logits(tmp_path / "model.gguf", TOKENS)
    assert np.abs(got - expected).max() <= TOLERANCE * np.abs(expected).max()


def test_types_of_tensors(tmp_path: Path) -> None:
    """Vectors and routers stay f32, rows that are no whole blocks become f16."""
    write_checkpoint(tmp_path / "model", "mixtral", intermediate_size=72)
    kinds = {}
    for dtype in ("auto", "f16", "bf16", "q8_0"):
        convert(tmp_path / "model", tmp_path / "model.gguf", dtype)
        file = GGUF(tmp_path / "model.gguf")
        names = "attn_norm", "ffn_gate_inp", "attn_q", "ffn_down_exps"
        kinds[dtype] = [str(file.entries[f"blk.0.{name}.weight"].dtype) for name in names]
    assert kinds == {
        "auto": ["f32"] * 4,
        "f16": ["f32", "f32", "f16", "f16"],
        "bf16": ["f32", "f32", "bf16", "bf16"],
        "q8_0": ["f32", "f32", "q8_0", "f16"],
    }
    assert file.entries["blk.1.ffn_down_exps.weight"].shape == (4, 64, 72)
    assert file.metadata["general.file_type"] == 7
    assert (file.metadata["llama.expert_count"], file.metadata["llama.expert_used_count"]) == (4, 2)


@pytest.mark.parametrize("kind", ["granitehybrid", "falcon-h1", "qwen3next"])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "q8_0"])
def test_what_scans_read_stays_f32(kind: str, dtype: str, tmp_path: Path) -> None:
    """llama.cpp stops at a convolution's filters, decays or skips of another type."""
    entries = convert_folder(tmp_path, kind, dtype).entries.values()
    read = [e for e in entries if e.name.endswith(("ssm_conv1d.weight", "ssm_a", "ssm_d", ".bias"))]
    assert len(read) > 3
    assert {str(e.dtype) for e in read} == {"f32"}
    assert dtype in {str(e.dtype) for e in entries}


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_halves_are_kept_bit_for_bit(kind: str, tmp_path: Path) -> None:
    _, tensors = write_checkpoint(tmp_path / "model", "qwen3")
    write_safetensors(tmp_path / "model/model.safetensors", tensors, kind)
    convert(tmp_path / "model", tmp_path / "model.gguf")
    file = GGUF(tmp_path / "model.gguf")
    name = "blk.1.attn_q.weight"
    assert str(file.entries[name].dtype) == kind.lower()
    write_safetensors(tmp_path / "half.safetensors", tensors, kind)
    value = tensors["model.layers.1.self_attn.q_proj.weight"]
    halves = value.astype("<f2").view("<u2") if kind == "F16" else (value.view("<u4") >> 16)
    np.testing.assert_array_equal(file.array(name).view("<u2").reshape(value.shape), halves)


def test_biases_of_zeros_are_left_out(tmp_path: Path) -> None:
    original = convert_folder(tmp_path)
    change_tensors(lambda t: t.update({BIAS: np.zeros(64, np.float32)}))(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "same.gguf")
    assert (tmp_path / "same.gguf").read_bytes() == original.path.read_bytes()


def test_a_gpt2_of_before_has_no_prefix_and_masks(tmp_path: Path) -> None:
    original = convert_folder(tmp_path, "gpt2")
    _, tensors = write_checkpoint(tmp_path / "model", "gpt2")
    old = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    old["h.0.attn.bias"] = np.ones((1, 1, 64, 64), np.float32)
    write_safetensors(tmp_path / "model/model.safetensors", old)
    convert(tmp_path / "model", tmp_path / "same.gguf")
    assert (tmp_path / "same.gguf").read_bytes() == original.path.read_bytes()


def test_an_internlm2_of_the_weights_of_a_llama_has_its_tensors(tmp_path: Path) -> None:
    """Its checkpoints have queries, keys and values in one matrix, in groups: two queries, their key, their value."""
    original = convert_folder(tmp_path)
    config, tensors = write_checkpoint(tmp_path / "model")
    config, repacked = internlm2(config, tensors)
    config["rope_scaling"] = {"type": "dynamic", "factor": 2.0}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    write_safetensors(tmp_path / "model/model.safetensors", repacked)
    convert(tmp_path / "model", tmp_path / "same.gguf")
    model_file = GGUF(tmp_path / "same.gguf")
    assert model_file.metadata["general.architecture"] == "internlm2"
    assert model_file.entries.keys() == original.entries.keys()
    assert all(
        np.array_equal(model_file.array(name), original.array(name)) for name in original.entries
    )


def test_pieces_of_internlm2_that_stand_for_nothing_are_unused(tmp_path: Path) -> None:
    """As in llama.cpp's converter; one that is a token of turns by now is none of them."""
    config, tensors = write_checkpoint(tmp_path / "model")
    config, repacked = internlm2(config, tensors)
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    write_safetensors(tmp_path / "model/model.safetensors", repacked)
    blank = "[UNUSED_TOKEN_1]", "[UNUSED_TOKEN_145]"
    (tmp_path / "model/tokenizer.model").write_bytes(sentencepiece_model(symbols=blank))
    about = {"added_tokens_decoder": {"4": {"content": "<|im_end|>", "special": True}}}
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps(about))
    convert(tmp_path / "model", tmp_path / "model.gguf")
    metadata = GGUF(tmp_path / "model.gguf").metadata
    tokens, kinds = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
    assert list(tokens[3:5]) == [b"[UNUSED_TOKEN_1]", b"<|im_end|>"]
    assert list(kinds[3:5]) == [UNUSED_TYPE, CONTROL]


@pytest.mark.parametrize("leads", [True, False])
def test_a_space_in_front_is_as_in_the_sentencepiece_model(leads: bool, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    proto = sentencepiece_model(leads)
    (tmp_path / "model/tokenizer.model").write_bytes(proto)
    convert(tmp_path / "model", tmp_path / "model.gguf")
    reference = sentencepiece.SentencePieceProcessor(model_proto=proto)
    tokenizer = Tokenizer(GGUF(tmp_path / "model.gguf").metadata)
    assert tokenizer.encode("bal cem", bos=False, eos=False) == reference.encode("bal cem")


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    original = convert_folder(tmp_path)
    _, tensors = write_checkpoint(tmp_path / "shards")
    (tmp_path / "shards/model.safetensors").unlink()
    names, places = list(tensors), {}
    for i, part in enumerate((names[:7], names[7:])):
        file = f"model-{i}.safetensors"
        write_safetensors(tmp_path / "shards" / file, {name: tensors[name] for name in part})
        places |= dict.fromkeys(part, file)
    index = tmp_path / "shards/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    convert(tmp_path / "shards", tmp_path / "shards.gguf")
    got = GGUF(tmp_path / "shards.gguf")
    assert list(got.entries) == list(original.entries)
    for name in got.entries:
        np.testing.assert_array_equal(got.array(name), original.array(name))


def test_a_language_model_that_sees_is_converted_without_its_eyes(tmp_path: Path) -> None:
    config, tensors = write_checkpoint(tmp_path / "model", "gemma3")
    kinds = ["Gemma3ForConditionalGeneration"]
    text = {"architectures": kinds, "text_config": {**config, "architectures": None}}
    del text["text_config"]["architectures"]
    (tmp_path / "model/config.json").write_text(json.dumps(text))
    seeing = {f"language_model.{name}": value for name, value in tensors.items()}
    seeing["vision_tower.weight"] = np.ones(3, np.float32)
    write_safetensors(tmp_path / "model/model.safetensors", seeing)
    convert(tmp_path / "model", tmp_path / "model.gguf")
    assert "token_embd.weight" in GGUF(tmp_path / "model.gguf").entries


def test_no_tensor_is_in_memory_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows go through by parts; turned ones by whole heads, to the same bytes."""
    write_checkpoint(tmp_path / "model", intermediate_size=4096)
    convert(tmp_path / "model", tmp_path / "whole.gguf", "bf16")
    monkeypatch.setattr("packtrain.conversion.hugging_face.tensor_names.PART", 1 << 11)
    tracemalloc.start()
    convert(tmp_path / "model", tmp_path / "model.gguf", "bf16")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 4096 * 64 / 2  # half of a matrix
    assert (tmp_path / "model.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


# ---- the vocabulary --------------------------------------------------------------------------------------------


def test_ids_are_sentencepieces(tmp_path: Path) -> None:
    tokenizer = Tokenizer(convert_folder(tmp_path).metadata)
    model = sentencepiece.SentencePieceProcessor(model_proto=hugging_face.sentencepiece_model())
    for text in ("bal cem  dis", "hor\nBAL é", ""):
        assert tokenizer.encode(text, bos=False) == model.encode(text)
    assert tokenizer.vocab_size == hugging_face.V
    assert (tokenizer.bos, tokenizer.eos) == (1, 2)


def test_scores_come_from_merges_where_there_is_no_sentencepiece_model(tmp_path: Path) -> None:
    """A tokenizer.json made of the model's own pieces and merges gives the same ids."""
    model = sentencepiece.SentencePieceProcessor(model_proto=hugging_face.sentencepiece_model())
    vocabulary = {model.id_to_piece(id): id for id in range(model.get_piece_size())}
    merges = []
    for piece in sorted(vocabulary, key=lambda p: -model.get_score(vocabulary[p])):
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        merges += [c for c in cuts if all(part in vocabulary for part in c)]
    fast = {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, TO_SPACE]},
        "model": {"type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "vocab": vocabulary,
                  "merges": [" ".join(pair) for pair in merges]},
        "added_tokens": [hugging_face.added(id, text) for id, text in enumerate(("<unk>", "<s>", "</s>"))],
    }  # fmt: skip
    write_checkpoint(tmp_path / "model")
    (tmp_path / "model/tokenizer.model").unlink()
    (tmp_path / "model/tokenizer.json").write_text(json.dumps(fast))
    convert(tmp_path / "model", tmp_path / "model.gguf")
    tokenizer = Tokenizer(GGUF(tmp_path / "model.gguf").metadata)
    for text in ("bal cem  dis", "hor\nBAL é"):
        assert tokenizer.encode(text, bos=False) == model.encode(text)


def with_bpe(folder: Path, kind: str = "qwen2", **changes: Any) -> Path:
    """A checkpoint with a byte-level vocabulary."""
    write_checkpoint(folder, kind)
    (folder / "tokenizer.model").unlink()
    fast = hugging_face.bpe_tokenizer(split_rules.LLAMA_3_STEP, ignore_merges=True) | changes
    (folder / "tokenizer.json").write_text(json.dumps(fast))
    about = {
        "bos_token": {"content": "<|begin|>"}, "eos_token": "<|eot_id|>", "add_eos_token": False,
        "chat_template": [{"name": "default", "template": "plain"}, {"name": "tool-use", "template": "tools"}],
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def test_a_byte_level_vocabulary(tmp_path: Path) -> None:
    convert(with_bpe(tmp_path / "model"), tmp_path / "model.gguf")
    metadata = GGUF(tmp_path / "model.gguf").metadata
    tokenizer = Tokenizer(metadata)
    ids = tokenizer.encode("hello wor<|eot_id|><tool>")
    texts = [tokenizer.tokens[id].decode() for id in ids]
    assert texts == ["<|begin|>", "hell", "o", "\u0120w", "or", "<|eot_id|>", "<tool>"]
    assert (tokenizer.bos, tokenizer.eos, tokenizer.add_eos) == (261, 262, False)
    assert metadata["tokenizer.ggml.pre"] == "llama-bpe"
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["tokenizer.chat_template"] == "plain"
    assert metadata["tokenizer.chat_template.tool_use"] == "tools"
    assert tokenizer.tokens[hugging_face.V - 1] == b"[PAD319]"


@pytest.mark.parametrize("kind", ["glm4", "glm4moe"])
def test_a_turn_of_a_glm_ends_where_the_users_begins(kind: str, tmp_path: Path) -> None:
    """No file of the checkpoint says so: llama.cpp's converter knows it."""
    folder = with_bpe(tmp_path / "model", kind)
    change_config(eos_token_id=262)(folder)
    fast = json.loads((folder / "tokenizer.json").read_text())
    fast["added_tokens"] += [
        hugging_face.added(264 + i, text)
        for i, text in enumerate(("<|user|>", "<|observation|>", "<|endoftext|>"))
    ]
    (folder / "tokenizer.json").write_text(json.dumps(fast))
    convert(folder, tmp_path / "model.gguf")
    tokenizer = Tokenizer(GGUF(tmp_path / "model.gguf").metadata)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.unk, tokenizer.eot) == (261, 262, 266, 264)
    assert {262, 264, 266} <= tokenizer.eog_ids and (265 in tokenizer.eog_ids) == (
        kind == "glm4moe"
    )


def test_an_end_of_a_glm_that_finds_no_key_is_said(tmp_path: Path) -> None:
    """GLM-4.5 has both keys already: one is where the user's turn begins, one where an observation does."""
    folder = with_bpe(tmp_path / "model", "glm4moe")
    change_config(eos_token_id=262)(folder)
    fast = json.loads((folder / "tokenizer.json").read_text())
    fast["added_tokens"] += [
        hugging_face.added(264 + i, text) for i, text in enumerate(("<|user|>", "<|observation|>"))
    ]
    (folder / "tokenizer.json").write_text(json.dumps(fast))
    (folder / "generation_config.json").write_text('{"eos_token_id": [262, 264, 265, 100]}')
    notes: list[str] = []
    convert(folder, tmp_path / "model.gguf", report=notes.append)
    metadata = GGUF(tmp_path / "model.gguf").metadata
    assert metadata["tokenizer.ggml.eom_token_id"] == 265
    assert [note for note in notes if "answers do not end at [100] of eos_token_id" in note]


def test_user_defined_pieces_are_found_whole(tmp_path: Path) -> None:
    """A tokenizer.model says which they are, as sentencepiece reads it; llama.cpp's converter takes them for words."""
    write_checkpoint(tmp_path / "model")
    raw = sentencepiece_model(symbols=("[tool]",))
    (tmp_path / "model/tokenizer.model").write_bytes(raw)
    convert(tmp_path / "model", tmp_path / "model.gguf")
    model = sentencepiece.SentencePieceProcessor(model_proto=raw)
    tokenizer = Tokenizer(GGUF(tmp_path / "model.gguf").metadata)
    id = model.piece_to_id("[tool]")
    assert tokenizer.token_types[id] == USER_DEFINED
    assert tokenizer.encode("bal[tool]", bos=False) == model.encode("bal[tool]")
    assert tokenizer.encode("bal[tool]", bos=False)[-1] == id


def test_an_end_of_documents_is_not_that_of_turns(tmp_path: Path) -> None:
    folder = with_bpe(tmp_path / "model")
    change_config(eod_token_id=263)(folder)
    convert(folder, tmp_path / "model.gguf")
    tokenizer = Tokenizer(GGUF(tmp_path / "model.gguf").metadata)
    assert (tokenizer.eos, tokenizer.eot) == (263, 262)


BYTES, PLAIN_BYTES = ({"type": "ByteLevel", "use_regex": cut} for cut in (True, False))


def cut_by(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}


STEPS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [BYTES],
    "smollm": [{"type": "Digits", "individual_digits": True}, BYTES],
    "qwen2": [cut_by(split_rules.QWEN_2_STEP), PLAIN_BYTES],
    "tekken": [cut_by(split_rules.TEKKEN_STEP), PLAIN_BYTES],
    "gpt-4o": [cut_by(split_rules.GPT_4O_STEP), PLAIN_BYTES],
    "falcon": [
        {"type": "Punctuation", "behavior": "Contiguous"}, BYTES, {"type": "Digits", "individual_digits": False},
        cut_by("[0-9][0-9][0-9]"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_the_steps_of_a_tokenizer_have_a_name(name: str, tmp_path: Path) -> None:
    cuts = {"type": "Sequence", "pretokenizers": STEPS[name]}
    model = {"type": "BPE", "vocab": {}, "merges": [], "ignore_merges": name == "tekken"}
    assert read_steps(tmp_path, {"pre_tokenizer": cuts, "model": model}).pre == name


# ---- what is refused -------------------------------------------------------------------------------------------


def change_config(**changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def change_to(kind: str, **changes: Any) -> Callable[[Path], object]:
    """A checkpoint of another kind, its config changed so."""
    return lambda folder: write_checkpoint(folder, kind, **changes)


def change_tensors(changed: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        tensors = hugging_face.tensors_of(hugging_face.config_of("llama"))
        changed(tensors)
        write_safetensors(folder / "model.safetensors", tensors)

    return change


def change_header(old: bytes, new: bytes) -> Callable[[Path], object]:
    """Other bytes, as many, in the header of the tensors' file."""
    assert len(old) == len(new)

    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        raw = path.read_bytes()
        assert old in raw
        path.write_bytes(raw.replace(old, new, 1))

    return change


def truncate_weights(nbytes: int) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:nbytes])

    return change


def point_outside(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "../other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def without_vocabulary(folder: Path) -> None:
    (folder / "tokenizer.model").unlink()


def other_steps(folder: Path) -> None:
    shutil.rmtree(folder)
    with_bpe(folder, pre_tokenizer=BYTES | {"type": "Whitespace"})


NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
BIAS = "model.layers.0.self_attn.o_proj.bias"
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: cannot be read: no such file"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "this must be a JSON object"),
    "unknown class": (change_config(architectures=["BertModel"]), "BertModel cannot be converted; supported are .*Ll"),
    "no class": (change_config(architectures=None), "architectures must name the model's class"),
    "quantized": (change_config(quantization_config={"bits": 4}), "only weights in f32, f16 or bf16"),
    "activation": (change_config(hidden_act="relu"), "hidden_act is 'relu'; it must be 'silu' or 'swish'"),
    "scaling": (change_config(rope_scaling={"type": "dynamic"}), "rope_scaling.type is 'dynamic'; it must be"),
    "no factor": (change_config(rope_scaling={"type": "linear"}), "rope_scaling.factor is missing; it must be a num"),
    "size": (change_config(hidden_size=-1), "hidden_size is -1; it must be a whole number from 1"),
    "heads": (change_config(num_attention_heads=5), "num_attention_heads is 5; it must be a divisor of hidden_size"),
    "more blocks": (change_config(num_hidden_layers=3), "tensor model.layers.2.input_layernorm.weight is missing"),
    "fewer blocks": (change_config(num_hidden_layers=1), "is not part of the model that config.json describes"),
    "missing": (change_tensors(lambda t: t.pop(NORM)), f"tensor {NORM} is missing; its shape is \\[64\\]"),
    "bias": (
        change_tensors(lambda t: t.update({BIAS: np.ones(64, np.float32)})),
        f"tensor {BIAS} is not part of the model",
    ),
    "unknown": (change_tensors(lambda t: t.update(more=t[NORM])), "tensor more is not part of the model"),
    "shape": (
        change_tensors(lambda t: t.update({NORM: t[NORM][:-1]})),
        f"{NORM} has shape \\[63\\]; by config.json it must be \\[64\\]",
    ),
    "not a number": (change_tensors(lambda t: t[EMBEDDING].fill(np.nan)), "has values that are not finite"),
    "type": (change_header(b'"F32"', b'"I32"'), "is of type I32; it must be F32, F16 or BF16"),
    "other type": (change_header(b'"F32"', b'"X32"'), "dtype is 'X32'; it must be one of F64"),
    "offset": (change_header(b"[0, ", b"[9, "), "bytes 9 to 81920 of .* cannot hold F32"),
    "negative": (change_header(b"[320, 64]", b"[32, -64]"), "shape and data_offsets must be lists of sizes"),
    "no header": (truncate_weights(4), "4 bytes are not a safetensors file"),
    "half a header": (truncate_weights(100), "its header should have .* bytes, and the file has 100"),
    "half a file": (truncate_weights(200_000), "of .* cannot hold F32"),
    "header": (change_header(b'{"model', b'["model'), "its header is not JSON"),
    "no tensors": (lambda f: (f / "model.safetensors").unlink(), "tensors must be in safetensors files"),
    "outside": (point_outside, "'../other.safetensors' is not a file of this folder"),
    "no vocabulary": (without_vocabulary, "there is no tokenizer.model and no tokenizer.json"),
    "bad vocabulary": (lambda f: (f / "tokenizer.model").write_bytes(b"?" * 99), "this is not a SentencePiece model"),
    "half a character": (
        lambda f: (f / "tokenizer_config.json").write_text('{"chat_template": "\\ud800"}'),
        "tokenizer_config.json: this is not JSON: 'utf-8' codec can't encode",
    ),
    "odd template": (
        lambda f: (f / "chat_template.jinja").write_bytes(b"\xff"), "chat_template.jinja: this is not UTF-8 text"
    ),
    "shares": (change_to("qwen3moe", norm_topk_prob=False), "norm_topk_prob is False; it must be True"),
    "streams": (change_to("gemma3n", altup_num_inputs=3), "altup_num_inputs is 3; it must be 4"),
    "sharing": (change_to("gemma3n", num_kv_shared_layers=3), "num_kv_shared_layers is 3; it must be 2"),
    "sparse gates": (
        change_to("gemma3n", activation_sparsity_pattern=[0.9] * 22), "must be 0.95 for the first 10 blocks",
    ),
    "widths": (change_to("gemma3n", intermediate_size=[96] * 21 + [64]), "must be the same for all blocks"),
    "dense blocks": (change_to("qwen3moe", mlp_only_layers=[0]), "mlp_only_layers is \\[0\\]; it must be \\[\\]"),
    "llama3 in qwen2": (
        change_to("qwen2", rope_scaling=hugging_face.LLAMA_3),
        "rope_scaling.type is 'llama3'; it must be default or linear or yarn",
    ),
    "steps": (other_steps, "pre_tokenizer is Whitespace, which a GGUF vocabulary does not have"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_sound_is_refused_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, line = REFUSED[name]
    write_checkpoint(tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(InputError, match=line):
        convert(tmp_path / "model", tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()
    assert main(["convert", str(tmp_path / "model")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_json_of_other_kinds_is_refused_or_passed_over(tmp_path: Path) -> None:
    """Any value of the tokenizer's files may be of any kind."""
    folder, rng = with_bpe(tmp_path / "model"), random.Random(1)
    for _ in range(60):
        path = folder / rng.choice(("config.json", "tokenizer.json", "tokenizer_config.json"))
        text = path.read_text()
        document = json.loads(text)
        at: Any = document
        while isinstance(at, dict | list) and at:
            parent, key = at, rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
            at = at[key] if rng.random() < 0.7 else None
        parent[key] = rng.choice((None, -1, 2**63, 0.5, "x", [], [1], {}, {"a": 1}, [{}]))
        path.write_text(json.dumps(document))
        with contextlib.suppress(InputError):
            convert(folder, tmp_path / "model.gguf")
        path.write_text(text)


def test_values_beyond_f16_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    change_tensors(lambda t: t[EMBEDDING].fill(70_000))(tmp_path / "model")
    with pytest.raises(InputError, match="up to 7e\\+04, beyond f16; write bf16 or f32"):
        convert(tmp_path / "model", tmp_path / "model.gguf", "f16")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "tiny-1.5")
    assert main(["convert", str(tmp_path / "tiny-1.5"), "--type", "q8_0"]) == 0
    path = tmp_path / "tiny-1.5.gguf"
    size = f"{path.stat().st_size:,}"
    assert capsys.readouterr().out == f"{path}: 21 tensors (16 q8_0, 5 f32), {size} bytes\n"
    assert GGUF(path).metadata["general.name"] == "tiny-1.5"
    assert main(["convert", str(tmp_path / "tiny-1.5")]) == 2
    assert "exists; give another name, or --overwrite to replace it" in capsys.readouterr().err
    for source_file in (tmp_path / "tiny-1.5").iterdir():
        command = ["convert", str(tmp_path / "tiny-1.5"), "-o", str(source_file), "--overwrite"]
        original = source_file.read_bytes()
        assert main(command) == 2 and source_file.read_bytes() == original
        assert f"{source_file} is one of the files that are read" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "tiny-1.5"), "--overwrite"]) == 0
    assert quantized_arrays.dequantize(GGUF(path).array("token_embd.weight")).shape == (
        hugging_face.V,
        64,
    )


def test_experts_in_mxfp4_keep_their_blocks(tmp_path: Path) -> None:
    """As OpenAI's checkpoints have them: two neighbours a byte, scales apart, rows of gate and up in turn."""
    rng, folder = np.random.default_rng(0), tmp_path / "checkpoint"
    changes = {"hidden_size": 64, "quantization_config": {"quant_method": "mxfp4"}}
    config, tensors = write_checkpoint(folder, "gpt-oss", **changes)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values, packed, unpacked = np.concatenate((values, -values)), {}, dict(tensors)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        e, inputs, outputs = tensors[name].shape
        pairs = rng.integers(0, 256, (e, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(122, 126, pairs.shape[:-1], np.uint8)
        packed |= {f"{name}_blocks": pairs, f"{name}_scales": scales}
        decoded = values[np.stack((pairs & 15, pairs >> 4), -1)].reshape(e, outputs, -1, 32)
        wide = decoded * 2.0 ** (scales[..., None].astype(float) - 127)
        unpacked[name] = wide.reshape(e, outputs, inputs).swapaxes(1, 2)
        del tensors[name]
    write_safetensors(folder / "model.safetensors", tensors | packed)
    convert(folder, tmp_path / "m.gguf", "f32")
    kinds = {n: str(e.dtype) for n, e in GGUF(tmp_path / "m.gguf").entries.items()}
    assert {n for n in kinds if kinds[n] != "f32"} == {
        n for n in kinds if n.endswith("exps.weight")
    }
    got = logits(tmp_path / "m.gguf", TOKENS)
    expected = hugging_face.logits(config, unpacked, TOKENS)
    assert np.abs(got - expected).max() <= TOLERANCE * np.abs(expected).max()
