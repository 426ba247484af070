"""Adapters beside a model compute what the merged one computes, in every kind of matrix; what cannot be is refused."""

from pathlib import Path

import numpy as np
import pytest

from packtrain.cli import evaluate, generate, merge
from packtrain.common.errors import InputError
from packtrain.dtypes import f32
from packtrain.gguf import GGUF, write_gguf
from packtrain.inference.generator import Generator
from packtrain.inference.kv_cache import Context, ContextError
from packtrain.models.adapter_file import Adapter, write_adapter
from packtrain.models.block_weights import BlockBuilder
from packtrain.models.lora import EMBEDDING
from packtrain.models.model_file import ModelFile, open_model
from packtrain.models.model_with_adapters import adapted, merge_only_weights, read_scaled
from packtrain.workflows.adapter_merge import MergeSettings
from packtrain.workflows.eval_data import EvaluateSettings
from packtrain.workflows.text_generation import GenerateSettings
from tests.adapters import random_adapter
from tests.architectures import random_model

Capture = pytest.CaptureFixture[str]
TOKENS = [1, 270, 265, 280, 263, 275, 289, 266, 262]


def logits(model: ModelFile) -> np.ndarray:
    return Generator.from_model(model, 16, f32).feed(TOKENS).astype(np.float64)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.workflows.eval_data.cache_root", lambda: tmp_path / "cache")


def check_beside(name: str, folder: Path) -> None:
    """Logits of two adapters beside a model are those of the merged file, and far from those of the model alone."""
    random_model(folder / "base.gguf", name)
    base = open_model(folder / "base.gguf")
    first_lora, second_lora = (random_adapter(folder / f"{i}.gguf", base, seed=i) for i in range(2))
    lora_specs = (f"{first_lora}:0.75", f"{second_lora}:-0.5")
    merge.run(MergeSettings(folder / "base.gguf", lora_specs, folder / "merged.gguf"))
    adapted_model = adapted(base, read_scaled(lora_specs, base.gguf))
    assert (EMBEDDING + ".lora_a" in adapted_model.adapter_values) == (not base.config.tied)
    got, expected = logits(adapted_model), logits(open_model(folder / "merged.gguf"))
    np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max())
    assert np.abs(got - logits(base)).max() > 0.1 * np.abs(expected).max()


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "phi3",
        "llama experts",
        "gemma2",
        "gemma3n",
        "gemma4",
        "gemma4 experts",
        "deepseek2",
    ],
)
def test_beside_the_base_is_as_good_as_merged(name: str, tmp_path: Path):
    check_beside(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [("llama experts", "ffn_gate_inp"), ("llama experts", "ffn_up_exps"), ("phi3", "attn_k")],
)
def test_an_addition_that_is_left_out_is_seen(name, left_out, tmp_path, monkeypatch):
    original_low = BlockBuilder.lora_of
    monkeypatch.setattr(
        BlockBuilder, "lora_of", lambda part, n: None if n == left_out else original_low(part, n)
    )
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_beside(name, tmp_path)


def test_files_of_adapters_have_the_factors_of_experts(tmp_path: Path) -> None:
    """llama.cpp adds B A x behind them; an expert whose factor is 0 has no adapter."""
    random_model(tmp_path / "base.gguf", "gemma4 experts")
    gguf = open_model(tmp_path / "base.gguf").gguf
    arrays = {n: gguf.array(n).copy() for n in gguf.entries}
    name = "blk.1.ffn_down_exps.weight"
    factors = arrays["blk.1.ffn_down_exps.scale"]
    factors[2] = 0.0
    write_gguf(tmp_path / "base.gguf", gguf.values, arrays)
    base = open_model(tmp_path / "base.gguf")
    path = random_adapter(tmp_path / "a.gguf", base)
    (adapter, _), *_ = read_scaled((path,), base.gguf)
    b, stored = adapter.lora_pairs[name][1], GGUF(path).array(f"{name}.lora_b")
    assert not b[2].any() and b[1].any()
    np.testing.assert_allclose(stored, b * factors[:, None, None], rtol=1e-6)
    router = "blk.1.ffn_gate_inp.weight"
    np.testing.assert_array_equal(
        adapter.lora_pairs[router][1], GGUF(path).array(f"{router}.lora_b")
    )


def test_what_llama_cpp_leaves_out_beside_is_known(tmp_path: Path) -> None:
    unsupported = {}
    for name in ("llama", "deepseek2 lite"):
        random_model(tmp_path / "base.gguf", name)
        base = open_model(tmp_path / "base.gguf")
        (adapter, _), *_ = read_scaled((random_adapter(tmp_path / "a.gguf", base),), base.gguf)
        unsupported[name] = merge_only_weights(adapter)
    assert unsupported == {
        "llama": [],
        "deepseek2 lite": ["attn_q", "attn_kv_a_mqa", "attn_k_b", "attn_v_b"],
    }


def test_generate_and_eval_take_adapters(tmp_path: Path, cache: None, capsys: Capture):
    random_model(tmp_path / "base.gguf", "llama")
    (tmp_path / "t.txt").write_text("the a b c the d e f " * 9)
    lora = random_adapter(tmp_path / "a.gguf", open_model(tmp_path / "base.gguf"))
    merge.run(MergeSettings(tmp_path / "base.gguf", (lora,), tmp_path / "merged.gguf"))
    capsys.readouterr()
    said = []
    for model, adapters in (("base", ()), ("base", (lora,)), ("merged", ())):
        file = tmp_path / f"{model}.gguf"
        generate.run(GenerateSettings(file, prompt="the", n_predict=8, temp=0.0, lora=adapters))
        evaluate.run(EvaluateSettings((file,), tmp_path / "t.txt", ctx=32, lora=adapters))
        said.append(capsys.readouterr().out.partition("perplexity")[0])
    assert said[0] != said[1] == said[2]


def test_what_works_merged_only_says_so(tmp_path: Path):
    random_model(tmp_path / "tied.gguf", "llama tied")
    random_model(tmp_path / "own.gguf", "llama")
    for file, name in (("tied", EMBEDDING), ("own", "output.weight")):
        model = open_model(tmp_path / f"{file}.gguf")
        rows, width = model.gguf.entries[name].shape
        a = (rows, 2) if name == EMBEDDING else (2, width)
        pair = (
            np.ones(a, np.float32),
            np.ones((width if name == EMBEDDING else rows, 2), np.float32),
        )
        write_adapter(tmp_path / "a.gguf", Adapter("llama", 1.0, {name: pair}), "a")
        with pytest.raises(InputError, match=f"changes {name}, which only works merged; use pack"):
            adapted(model, read_scaled((str(tmp_path / "a.gguf"),), model.gguf))


def test_each_sequence_has_its_own_scales(tmp_path):
    """Three sequences in one batch, without, with one and with both adapters, give the logits of fixed ones alone."""
    base = tmp_path / "m.gguf"
    random_model(base, "qwen2")
    file = open_model(base)
    paths = [random_adapter(tmp_path / f"{n}.gguf", file, seed=n) for n in range(2)]
    read = read_scaled(paths, file.gguf)
    chosen = [(0.0, 0.0), (1.0, 0.0), (0.5, -2.0)]
    tokens = [1, 40, 41, 42]
    expected = []
    for scales in chosen:
        fixed = adapted(
            file, [(adapter, by) for (adapter, _), by in zip(read, scales, strict=True) if by]
        )
        expected.append(Context(fixed, cells=64, cache="f32").decode(tokens)[0])
    context = Context(adapted(file, read, by_token=True), cells=64, sequences=3, cache="f32")
    context.adapters.set(range(3), chosen)
    got = context.decode(tokens * 3, [seq for seq in range(3) for _ in tokens])
    assert not np.allclose(expected[0], expected[1], atol=1e-3)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    state = context.save([2])
    context.adapters.set([0], [(0, 0)])
    context.restore(state, [0])
    assert tuple(context.adapters.scales[0]) == chosen[2]
    with pytest.raises(ContextError, match="1 scales of adapters are given; there are 2"):
        context.adapters.set([0], [[1]])
