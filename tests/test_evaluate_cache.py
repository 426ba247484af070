"""packtrain eval through a KV cache: what its type costs; windows with a ring are exact."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packtrain as pt
from packtrain.cli.main import main
from packtrain.common.errors import InputError
from tests.architectures import random_model
from tests.kill import sample_chats
from tests.test_evaluate import WORDS


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.workflows.eval_data.cache_root", lambda: tmp_path / "cache")


def losses(model: Path, data: Path, **options: Any) -> np.ndarray:
    (token_losses,) = pt.evaluate(model, data, **options).losses.values()
    return token_losses


@pytest.mark.parametrize("kind", ["text", "conversations"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "llama experts", "deepseek2 unsplit"])
def test_through_a_cache_in_f32_losses_are_the_same(tmp_path: Path, name: str, kind: str):
    random_model(tmp_path / "m.gguf", name)
    data = tmp_path / ("t.txt" if kind == "text" else "t.jsonl")
    data.write_text(WORDS * 6 if kind == "text" else sample_chats(9))
    options = {"ctx": 33 if kind == "text" else None, "batch_size": 2}
    reference = losses(tmp_path / "m.gguf", data, **options)
    got = losses(tmp_path / "m.gguf", data, cache_type="f32", **options)
    assert got.shape == reference.shape and len(got) > 20
    np.testing.assert_allclose(got, reference, rtol=1e-4, atol=1e-4)


def test_a_quantized_cache_costs_what_it_rounds(tmp_path: Path):
    random_model(tmp_path / "m.gguf", "llama")
    (tmp_path / "t.txt").write_text(WORDS * 6)
    reference = losses(tmp_path / "m.gguf", tmp_path / "t.txt", ctx=64)
    mean_errors = [
        np.abs(
            losses(tmp_path / "m.gguf", tmp_path / "t.txt", ctx=64, cache_type=kind) - reference
        ).mean()
        for kind in ("f32", "f16", "q8_0")
    ]
    assert mean_errors[0] * 10 < mean_errors[1] < mean_errors[2] / 3 < 0.1


def test_a_ring_of_cells_loses_nothing(tmp_path: Path):
    random_model(tmp_path / "m.gguf", "gemma3")
    (tmp_path / "t.txt").write_text(WORDS * 30)
    options: dict[str, Any] = {"ctx": 700, "cache_type": "f16"}  # a ring has 9 + 32 + 512 cells
    ring = losses(tmp_path / "m.gguf", tmp_path / "t.txt", **options)
    full = losses(tmp_path / "m.gguf", tmp_path / "t.txt", swa_full=True, **options)
    assert len(ring) > 300 and np.array_equal(ring, full)


def test_what_is_said_and_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    random_model(tmp_path / "m.gguf", "gemma3")
    (tmp_path / "t.txt").write_text(WORDS * 6)
    args = ["eval", str(tmp_path / "m.gguf"), "--data", str(tmp_path / "t.txt"), "-c", "32"]
    assert main([*args, "--cache-type", "q8_0"]) == 0
    assert "as in llama-perplexity; read through a cache in q8_0" in capsys.readouterr().out
    assert main([*args, "--swa-full"]) == 2
    assert "--swa-full has no effect without --cache-type" in capsys.readouterr().err
    with pytest.raises(InputError, match="cache_type is q4_0; it must be one of f16, f32"):
        pt.evaluate(tmp_path / "m.gguf", tmp_path / "t.txt", cache_type="q4_0")
