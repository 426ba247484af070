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
from packtrain.workflows.eval_data import EvaluateSettings
from packtrain.workflows.saved_logits import encode_row
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
    saved = {"save_logits": tmp_path / "saved"}
    for options in ({"model": base, "data": tmp_path / "chats.jsonl"}, {"all_positions": True}):
        with pytest.raises(InputError, match=r"save.logits needs one text"):
            evaluated = {"model": base, "data": text, "chat_template": "chatml"} | options
            pt.evaluate(**evaluated, **saved)
    for options, words in (({"compare": True}, "several"), ({"kl_base": base}, "reads")):
        with pytest.raises(InputError, match=f"save.logits has no effect with .*{words}"):
            pt.evaluate(base, text, lora=("a",), **saved, **options)
    with pytest.raises(InputError, match="predictions of one model; name one"):
        pt.evaluate([base, other], text, **saved)
    assert not saved["save_logits"].exists()


def test_the_divergence_on_conversations_and_through_a_cache(files, tmp_path):
    """The losses are those of eval without --kl-base, read through the same cache."""
    base, other, text = files
    (tmp_path / "chats.jsonl").write_text(sample_chats())
    for options in ({"chat_template": "chatml"}, {"chat_template": "chatml", "cache_type": "q8_0"}):
        result = pt.evaluate(other, tmp_path / "chats.jsonl", kl_base=base, **options)
        (divergence,), (losses,) = result.divergences.values(), result.losses.values()
        assert len(divergence.kl) == len(losses) > 20
        assert sorted(divergence.losses) == pytest.approx(sorted(losses), abs=1e-4)
        assert divergence.mean_kl.value > 0.1
    itself = pt.evaluate(base, text, kl_base=base, ctx=32, cache_type="q8_0")
    (divergence,) = itself.divergences.values()
    assert 0 < divergence.mean_kl.value < 0.01  # what the cache loses
    all_positions = pt.evaluate(other, text, kl_base=base, ctx=32, all_positions=True)
    (divergence,), (losses,) = all_positions.divergences.values(), all_positions.losses.values()
    assert len(divergence.kl) == len(losses) > 1.8 * len(itself.losses[str(base)])


# ---- saved logits, in the format of llama-perplexity


def read_saved(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return head, token ids (W, T) and log-probabilities (N, V), as perplexity.cpp reads them."""
    data = path.read_bytes()
    assert data[:8] == b"_logits_"
    head = np.frombuffer(data, np.int32, 3, 8)
    context, vocab_size, windows = head.tolist()
    ids = np.frombuffer(data, np.int32, context * windows, 20)
    row_length = 2 * ((vocab_size + 1) // 2) + 4
    codes = np.frombuffer(data, np.uint16, -1, 20 + ids.nbytes).reshape(-1, row_length)
    scale, smallest = np.ascontiguousarray(codes[:, :4]).view(np.float32)[:, :2].T[..., None]
    return head, ids.reshape(windows, context), scale * codes[:, 4 : 4 + vocab_size] + smallest


@pytest.mark.parametrize("context", [32, 95])
def test_saved_logits_are_llama_perplexitys(files, tmp_path, context):
    base, _, text = files
    pt.evaluate(base, text, ctx=context, save_logits=tmp_path / "saved")
    head, ids, saved = read_saved(tmp_path / "saved")
    tokenizer = open_model(base).tokenizer()
    all_ids = read_single_text(text, None, tokenizer)
    windows = PerplexityWindows(all_ids, tokenizer.bos, 1, context)
    assert head.tolist() == [context, tokenizer.vocab_size, len(windows)]
    assert ids.flatten().tolist() == all_ids[: ids.size].tolist()
    expected = np.concatenate([logprobs(base, windows[i]) for i in range(len(windows))])
    floor = expected.max(axis=1, keepdims=True) - 16
    steps = (expected.max(axis=1) - np.maximum(expected, floor).min(axis=1)) / 65535
    assert np.abs(saved - np.maximum(expected, floor)).max() < steps.max() + 1e-4
    assert np.mean(np.diff(np.sort(saved[0])) > 0) > 0.5  # not all on one code


@pytest.mark.parametrize("vocab_size", [5, 6])
@pytest.mark.parametrize("spread", [0.0, 3.0, 40.0])
def test_codes_of_a_row(vocab_size, spread):
    logits = np.linspace(-spread, 0, vocab_size)
    logprobs = logits - np.log(np.exp(logits).sum())
    row = encode_row(logprobs)
    assert row.dtype == np.uint16 and len(row) == 10
    scale, smallest = row[:4].view(np.float32)
    assert smallest == pytest.approx(max(logprobs.min(), logprobs.max() - 16), rel=1e-6)
    decoded = scale * row[4 : 4 + vocab_size] + smallest
    assert decoded == pytest.approx(logprobs.clip(smallest), abs=1.3e-4)
    assert row[3 + vocab_size] == (65535 if spread else 0)


def test_a_divergence_from_saved_logits_is_that_of_perplexity_cpp(files, tmp_path):
    """Its sum: tokens below e^-16 do not count, and the base's loss is that of the file."""
    base, other, text = files
    pt.evaluate(base, text, ctx=32, save_logits=tmp_path / "saved")
    result = pt.evaluate(other, text, ctx=32, kl_base=tmp_path / "saved")
    (divergence,) = result.divergences.values()
    _, ids, log_p = read_saved(tmp_path / "saved")
    tokenizer = open_model(base).tokenizer()
    windows = PerplexityWindows(read_single_text(text, None, tokenizer), tokenizer.bos, 1, 32)
    log_q = np.concatenate([logprobs(other, windows[i]) for i in range(len(windows))])
    terms = np.exp(log_p) * (log_p - log_q) * (log_p > -16)
    assert divergence.kl == pytest.approx(terms.sum(axis=1), abs=1e-4)
    targets = ids[:, 17:].flatten()
    assert divergence.reference_losses == pytest.approx(
        -log_p[range(len(log_p)), targets], abs=1e-6
    )
    direct = pt.evaluate(other, text, ctx=32, kl_base=base).divergences[str(other)]
    assert divergence.mean_kl.value == pytest.approx(direct.mean_kl.value, rel=1e-3)
    assert (divergence.has_same_top == direct.has_same_top).mean() > 0.99


def test_a_file_of_fewer_windows_is_compared_as_far_as_it_goes(files, tmp_path):
    """As llama-perplexity writes with --chunks."""
    base, other, text = files
    pt.evaluate(base, text, ctx=32, save_logits=tmp_path / "saved")
    head, ids, _ = read_saved(tmp_path / "saved")
    data, num_scored = (tmp_path / "saved").read_bytes(), 3 * 15
    row_nbytes = 2 * (4 + head[1] + head[1] % 2)
    start = 20 + ids.nbytes
    short = (
        data[:16]
        + np.int32(3).tobytes()
        + ids[:3].tobytes()
        + data[start:][: num_scored * row_nbytes]
    )
    (tmp_path / "short").write_bytes(short)
    shorter, all_of = (
        pt.evaluate(other, text, ctx=32, kl_base=tmp_path / name).divergences[str(other)]
        for name in ("short", "saved")
    )
    assert shorter.kl.tolist() == all_of.kl[:num_scored].tolist() and len(all_of.kl) > num_scored


def test_saved_logits_that_do_not_fit_are_refused(files, tmp_path):
    base, other, text = files
    saved = tmp_path / "saved"
    pt.evaluate(base, text, ctx=32, save_logits=saved)
    with pytest.raises(InputError, match=r"windows of .* have 32 tokens; ctx 32 reads"):
        pt.evaluate(other, text, ctx=64, kl_base=saved)
    (tmp_path / "u.txt").write_text(TEXT[3:])
    with pytest.raises(InputError, match="written for another text or vocabulary"):
        pt.evaluate(other, tmp_path / "u.txt", ctx=32, kl_base=saved)
    for data, words in (
        (saved.read_bytes()[:-2], "other than its head says"),
        (saved.read_bytes()[:16], "other than its head says"),
        (saved.read_bytes()[:12] + np.int32(7).tobytes() + saved.read_bytes()[16:], "other than"),
        (b"_logits_" + np.array([-1, -1, -1], "<i4").tobytes(), "other than its head says"),
    ):
        (tmp_path / "cut").write_bytes(data)
        with pytest.raises(InputError, match=words):
            pt.evaluate(other, text, ctx=32, kl_base=tmp_path / "cut")
    with pytest.raises(InputError, match=r"kl.base"):
        pt.evaluate(other, text, ctx=32, kl_base=tmp_path / "none")
