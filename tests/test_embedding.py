"""Embeddings: pooled outputs of the last norm, the same in any company; what the command prints and refuses."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from packtrain.cli.main import main
from packtrain.common.errors import InputError, Interrupted
from packtrain.common.events import TaskCallbacks
from packtrain.gguf import GGUF, MetadataValue, write_gguf
from packtrain.inference.embeddings import batches, normalize_vector
from packtrain.models.model_file import open_model
from packtrain.workflows.text_embeddings import EmbedSettings, embed
from tests.architectures import random_model
from tests.numpy_models import Model

TEXTS = ["the cat", "a", "the dog sees the cat and the bird " * 3, "dogs"]
POOLINGS = ["mean", "cls", "last"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("embedding") / "a.gguf"
    random_model(path, "llama")
    return path


def expected(path: Path, text: str, pooling: str) -> np.ndarray:
    """By the forward pass of the tests, in float64."""
    model = open_model(path)
    tensors = {name: model.weight(name) for name in model.weight_names}
    ids = np.array(model.tokenizer().encode(text))
    rows = Model(model.gguf.metadata, tensors, len(ids)).hidden(ids)
    return {"mean": rows.mean(0), "cls": rows[0], "last": rows[-1]}[pooling]


@pytest.mark.parametrize("pooling", POOLINGS)
def test_they_are_pooled_outputs_of_the_last_norm(path: Path, pooling: str):
    got = pt.embed(path, TEXTS, pooling=pooling, normalize=False, cache_type="f32")
    reference = np.stack([expected(path, text, pooling) for text in TEXTS])
    assert got.dtype == np.float32 and got.shape == reference.shape
    np.testing.assert_allclose(got, reference, rtol=1e-4, atol=1e-4 * np.abs(reference).max())


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "llama experts"])
def test_a_text_has_the_same_alone_and_in_a_batch(tmp_path: Path, name: str, pooling: str):
    random_model(tmp_path / "a.gguf", name)
    options = {"pooling": pooling, "cache_type": "f32"}
    batched = pt.embed(tmp_path / "a.gguf", TEXTS, **options)
    individual = [pt.embed(tmp_path / "a.gguf", [text], **options)[0] for text in TEXTS]
    np.testing.assert_allclose(batched, np.stack(individual), rtol=0, atol=2e-6)


def test_more_texts_than_one_batch_takes(path: Path):
    texts = [chr(97 + n % 26) * (n % 40 + 1) for n in range(150)]
    got, indices = pt.embed(path, texts, cache_type="f32"), [0, 62, 63, 149]
    reference = pt.embed(path, [texts[n] for n in indices], cache_type="f32")
    np.testing.assert_allclose(got[indices], reference, rtol=0, atol=2e-6)
    assert [*map(len, batches([3, 4, 5, 9, 1], 9, 2))] == [2, 1, 1, 1]
    assert [*map(len, batches([1] * 7, 9, 3))] == [3, 3, 1]


def test_norms_are_those_of_llama_embedding():
    v = np.array([3, -4, 0], np.float32)
    expected_by_norm = {-1: v, 0: v * 8190, 1: v / 7, 2: v / 5, 3: v / 91 ** (1 / 3)}
    for norm, values in expected_by_norm.items():
        np.testing.assert_allclose(normalize_vector(v, norm), values, rtol=1e-6)
    assert not normalize_vector(np.zeros(3, np.float32), 2).any()


@pytest.mark.parametrize(("stored", "pooling"), [(1, "mean"), (2, "cls"), (3, "last"), (0, "mean")])
def test_the_file_says_how_it_pools(path: Path, tmp_path: Path, stored: int, pooling: str):
    marked = with_pooling(path, tmp_path, stored)
    assert np.array_equal(pt.embed(marked, TEXTS), pt.embed(path, TEXTS, pooling=pooling))
    other = pt.embed(marked, TEXTS, pooling="cls" if pooling == "mean" else "mean")
    assert not np.allclose(pt.embed(marked, TEXTS), other)


def with_pooling(path: Path, folder: Path, stored: int) -> Path:
    gguf = GGUF(path)
    keys = gguf.values | {"llama.pooling_type": MetadataValue("u32", stored)}
    write_gguf(folder / "b.gguf", keys, {name: gguf.array(name) for name in gguf.entries})
    return folder / "b.gguf"


def test_a_file_that_ranks_is_refused(path: Path, tmp_path: Path):
    marked = with_pooling(path, tmp_path, 4)
    with pytest.raises(InputError, match=r"llama\.pooling_type is 4, which is not supported"):
        pt.embed(marked, TEXTS)
    assert pt.embed(marked, TEXTS, pooling="mean").shape == (4, 256)


def test_the_command_prints_arrays_or_what_openai_does(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "texts").write_text("the dog\nbirds\n")
    args = ["embed", str(path), "-p", "the cat", "-f", str(tmp_path / "texts")]
    assert main(args) == 0
    arrays, said = capsys.readouterr()
    reference = pt.embed(path, ["the cat", "the dog", "birds"])
    assert np.array_equal(np.array(json.loads(arrays), np.float32), reference)
    assert "3 texts of" in said and "256 values each, pooling mean" in said
    assert main([*args, "--embd-output-format", "json+"]) == 0
    response = json.loads(capsys.readouterr().out)
    assert [entry["index"] for entry in response["data"]] == [0, 1, 2]
    assert response["data"][1]["embedding"] == json.loads(arrays)[1]
    assert response["usage"]["total_tokens"] == sum(
        embed(EmbedSettings(path, prompt=("the cat", "the dog", "birds")), TaskCallbacks()).tokens
    )
    np.testing.assert_allclose(response["cosineSimilarity"], reference @ reference.T, atol=2e-6)
    assert main([*args, "--embd-output-format", "json", "--embd-normalize", "-1"]) == 0
    plain_response = json.loads(capsys.readouterr().out)
    assert "cosineSimilarity" not in plain_response
    raw = pt.embed(path, ["the cat", "the dog", "birds"], normalize=False)[0]
    assert np.array_equal(np.array(plain_response["data"][0]["embedding"], np.float32), raw)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "there is no text to embed; give some with --prompt or --file"),
        ({"prompt": ("a", "\ud800")}, "--prompt: the text is not UTF-8"),
        ({"prompt": ("a", "a b c d e f g"), "ctx": 5}, "text 2 has .* tokens and the context 5; give a shorter one"),
        ({"prompt": ("a",), "cache_type": "q8_0"}, ""),
    ],
)  # fmt: skip
def test_what_is_refused(path: Path, options: dict, said: str):
    settings = replace(EmbedSettings(path), **options)
    if not said:
        assert embed(settings, TaskCallbacks()).vectors.shape == (1, 256)
        return
    with pytest.raises(InputError, match=said):
        embed(settings, TaskCallbacks())


def test_a_stopped_run_gives_no_result(path: Path):
    callbacks = TaskCallbacks()
    callbacks.cancel.set()
    with pytest.raises(Interrupted, match="stopped after 0 of 4 texts, without a result"):
        embed(EmbedSettings(path, prompt=tuple(TEXTS)), callbacks)


def test_a_model_with_damaged_weights_has_no_embeddings(path: Path, tmp_path: Path):
    file, bad = GGUF(path), tmp_path / "bad.gguf"
    arrays = {name: file.array(name).copy() for name in file.entries}
    arrays["output_norm.weight"][0] = np.nan
    write_gguf(bad, file.values, arrays)
    with pytest.raises(InputError, match="the embeddings are not finite; weights of the model"):
        pt.embed(bad, ["a"])
