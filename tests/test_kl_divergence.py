"""eval --kl-base: how far predictions are from a reference's, against independent NumPy models on whole windows."""

from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from packtrain.cli import evaluate
from packtrain.common.errors import InputError
from packtrain.gguf import GGUF, MetadataValue, write_gguf
from packtrain.models.model_file import open_model
from packtrain.training.perplexity_windows import PerplexityWindows, read_single_text
from packtrain.workflows.evaluation import EvaluateSettings
from tests.architectures import random_model
from tests.kill import sample_chats
from tests.numpy_models import Model as Independent

TEXT = "the cat the hat a bad head\nan added deed, the face of a cafe. " * 8


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A model, another one with its vocabulary, and a text."""
    random_model(tmp_path / "base.gguf", "llama")
    random_model(tmp_path / "other.gguf", "llama", seed=5)
    (tmp_path / "t.txt").write_text(TEXT)
    return tmp_path / "base.gguf", tmp_path / "other.gguf", tmp_path / "t.txt"


def logprobs(path: Path, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Log-probabilities at the scored positions of a batch of one window, (N, V)."""
    model, num_scored = open_model(path), batch["targets"].shape[1]
    weights = {name: model.weight(name) for name in model.weight_names}
    independent = Independent(model.gguf.metadata, weights, batch["tokens"].shape[1] + 1)
    logits = independent.logits(batch["tokens"][0])[-num_scored:].astype(float)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("context", [32, 96])
def test_the_divergence_is_that_of_all_probabilities(files, context):
    base, other, text = files
    result = pt.evaluate(other, text, kl_base=base, ctx=context)
    (divergence,) = result.divergences.values()
    tokenizer = open_model(base).tokenizer()
    windows = PerplexityWindows(read_single_text(text, None, tokenizer), tokenizer.bos, 1, context)
    batches = [windows[i] for i in range(len(windows))]
    pairs = [(logprobs(base, batch), logprobs(other, batch)) for batch in batches]
    kl = np.concatenate([(np.exp(p) * (p - q)).sum(axis=1) for p, q in pairs])
    same_top = np.concatenate([p.argmax(axis=1) == q.argmax(axis=1) for p, q in pairs])
    assert divergence.kl == pytest.approx(kl, abs=1e-4) and len(kl) == len(divergence.kl) > 100
    assert divergence.mean_kl.value == pytest.approx(kl.mean(), rel=1e-3)
    assert divergence.same_top.value == pytest.approx(same_top.mean(), abs=0.02)
    (losses,) = result.losses.values()
    assert divergence.losses == pytest.approx(losses, abs=1e-4)
    base_loss = pt.evaluate(base, text, ctx=context).loss()
    ratio = result.loss().exponential.value / base_loss.exponential.value
    assert divergence.perplexity_ratio.value == pytest.approx(ratio, rel=1e-3)


def test_a_model_has_no_divergence_from_itself(files, capsys):
    base, _, text = files
    assert evaluate.run(EvaluateSettings((base,), text, kl_base=base, ctx=32)) == 0
    printed = capsys.readouterr().out
    assert "KL divergence 0.000000 ± 0.000000 nats" in printed
    assert "same likeliest token 100.00 ± 0.00 %" in printed


def test_what_cannot_be_compared_is_refused(files, tmp_path):
    base, other, text = files
    file = GGUF(base)
    tokens = [*file.metadata["tokenizer.ggml.tokens"]]
    tokens[50], tokens[51] = tokens[51], tokens[50]
    values = file.values | {"tokenizer.ggml.tokens": MetadataValue("string", tokens)}
    write_gguf(tmp_path / "swapped.gguf", values, {name: file.array(name) for name in file.entries})
    with pytest.raises(InputError, match="vocabular"):
        pt.evaluate(other, text, kl_base=tmp_path / "swapped.gguf", ctx=32)
    (tmp_path / "chats.jsonl").write_text(sample_chats())
    with pytest.raises(InputError, match=r"kl.base needs one text"):
        pt.evaluate(base, tmp_path / "chats.jsonl", kl_base=base, chat_template="chatml")
    for options in ({"cache_type": "q8_0"}, {"all_positions": True}):
        with pytest.raises(InputError, match=r"kl.base has no effect with"):
            pt.evaluate(base, text, kl_base=base, **options)
