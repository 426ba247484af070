"""Learning from a teacher: the loss and its gradients, what the teacher says and where it is kept, runs, refusals."""

import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packtrain as pt
from packtrain import kernels
from packtrain.cli.main import main
from packtrain.devtools.check.check_cases import run_graph
from packtrain.engine import ops
from packtrain.engine.autodiff import differentiate
from packtrain.engine.graph import Graph
from packtrain.gguf import write_gguf
from packtrain.models import transformer
from packtrain.models.config import Config
from packtrain.models.distillation_loss import DistillationLoss
from packtrain.models.model_file import open_model
from packtrain.models.transformer import LossOutputs
from packtrain.training.monitoring import metrics_file
from packtrain.training.teacher_logits import TEACHER_FILE
from tests.architectures import CONFIGS, random_model
from tests.room import memory_limit
from tests.test_train import assert_resumes, said, signal_after

B, T, C, V = 2, 5, 8, 23
CONFIG = Config(V, 16, C, 1, 16, 2, 1)
SETTINGS = {
    "plain": DistillationLoss(0.3, 1.0, 4),
    "hot": DistillationLoss(0.6, 2.5, 4),
    "alone": DistillationLoss(1.0, 0.7, 3),
}


def example(distill: DistillationLoss) -> dict[str, np.ndarray]:
    """Values of the inputs; one position counts nothing."""
    rng = np.random.default_rng(1)
    targets = rng.integers(0, V, (B, T)).astype(np.int32)
    weights = rng.uniform(0.1, 1, (B, T)).astype(np.float32)
    weights[0, 0], targets[0, 0] = 0, -1
    teacher = rng.standard_normal((B * T, V)).astype(np.float32) * 2
    ids = np.argsort(-teacher, axis=-1)[:, : distill.top].astype(np.int32)
    logits = np.take_along_axis(teacher, ids, -1)
    teacher_ids = np.concatenate((np.maximum(targets, 0).reshape(-1, 1), ids), -1)
    parts = distill.row_weights(logits) * (weights.reshape(-1, 1) > 0)
    by_row = {"teacher_ids": teacher_ids.astype(np.int32), "teacher_parts": parts}
    by_position = {n: v.reshape(B, T, -1).swapaxes(1, 2).copy() for n, v in by_row.items()}
    x = rng.standard_normal((B, T, C)).astype(np.float32)
    head = rng.standard_normal((V, C)).astype(np.float32)
    return {"x": x, "head": head, "targets": targets, "weights": weights, **by_position} | {
        "ids": ids.reshape(B, T, -1),
        "logits": logits.reshape(B, T, -1),
    }


def graph(distill: DistillationLoss) -> tuple[pt.Tensor, list[pt.Tensor]]:
    x, head = pt.weight("x", (B, T, C)), pt.weight("token_embd.weight", (V, C))
    targets, counted = pt.input("targets", (B, T), pt.i32), pt.input("weights", (B, T))
    results = ops.linear_cross_entropy(x, head, targets, counted, chunk=4)
    base_loss = LossOutputs(*results[:3], [], x, targets, counted)
    return distill.loss(CONFIG, {"token_embd.weight": head}, base_loss, 4), [x, head]


def expected_loss(
    distill: DistillationLoss, arrays: dict[str, np.ndarray], x: np.ndarray, head: np.ndarray
) -> float:
    """The loss in f64, written out over the whole vocabulary."""
    z = x.astype(np.float64) @ head.astype(np.float64).T

    def likelihoods(z: np.ndarray) -> np.ndarray:
        return z - np.log(np.exp(z).sum(-1, keepdims=True))

    at = np.maximum(arrays["targets"], 0)[..., None]
    hard_losses = -np.take_along_axis(likelihoods(z), at, -1)[..., 0]
    p = np.exp(arrays["logits"].astype(np.float64) / distill.temperature)
    p /= p.sum(-1, keepdims=True)
    q = np.take_along_axis(likelihoods(z / distill.temperature), arrays["ids"], -1)
    soft_losses = -(p * q).sum(-1) * distill.temperature**2
    token_losses = (1 - distill.weight) * hard_losses + distill.weight * soft_losses
    return float((token_losses * arrays["weights"]).sum())


def inputs(arrays: dict[str, np.ndarray], names: set[str]) -> dict[str, np.ndarray]:
    return {n: v for n, v in {**arrays, "token_embd.weight": arrays["head"]}.items() if n in names}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_loss_and_its_slope(name: str) -> None:
    settings = SETTINGS[name]
    arrays, (loss, leaves) = example(settings), graph(settings)
    gradients = differentiate(loss, leaves)
    loss_graph = Graph({"loss": loss} | {t.label: d for t, d in gradients.items()})
    actual = run_graph(loss_graph, inputs(arrays, {leaf.label for leaf in loss_graph.leaves}))
    x, head = arrays["x"], arrays["head"]
    assert float(actual["loss"]) == pytest.approx(
        expected_loss(settings, arrays, x, head), rel=1e-5
    )
    for label, array in (("x", x), ("token_embd.weight", head)):
        for at in [*np.ndindex(array.shape)][::7]:
            step = np.zeros(array.shape)
            step[at] = 1e-5
            sides = [array + step, array - step]
            up, down = (
                expected_loss(settings, arrays, *((side, head) if label == "x" else (x, side)))
                for side in sides
            )
            assert actual[label][at] == pytest.approx((up - down) / 2e-5, abs=3e-6), (label, at)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_bias_of_the_head_counts_as_a_column_of_it_by_ones(name: str) -> None:
    """The same loss and gradients as with the bias as a column of the head, which ones in x multiply."""
    settings, arrays = SETTINGS[name], example(SETTINGS[name])
    bias = np.random.default_rng(2).standard_normal(V).astype(np.float32)
    widened = arrays | {
        "x": np.concatenate((arrays["x"], np.ones((B, T, 1), np.float32)), -1),
        "head": np.concatenate((arrays["head"], bias[:, None]), -1),
    }
    outputs = []
    for values, width, biased in ((arrays, C, True), (widened, C + 1, False)):
        x, head = pt.weight("x", (B, T, width)), pt.weight("token_embd.weight", (V, width))
        b = pt.weight("output.bias", (V,)) if biased else None
        targets, counted = pt.input("targets", (B, T), pt.i32), pt.input("weights", (B, T))
        results = ops.linear_cross_entropy(x, head, targets, counted, b, chunk=4)
        base_loss = LossOutputs(*results[:3], [], x, targets, counted)
        leaves = {"token_embd.weight": head} | ({} if b is None else {"output.bias": b})
        loss = settings.loss(CONFIG, leaves, base_loss, 4)
        slopes = differentiate(loss, [x, *leaves.values()])
        loss_graph = Graph({"loss": loss} | {t.label: d for t, d in slopes.items()})
        fed = inputs(values, {leaf.label for leaf in loss_graph.leaves})
        outputs.append(run_graph(loss_graph, fed | ({} if b is None else {"output.bias": bias})))
    biased_output, widened_output = outputs
    assert float(biased_output["loss"]) == pytest.approx(float(widened_output["loss"]), rel=1e-6)
    for actual, expected in (
        (biased_output["x"], widened_output["x"][..., :C]),
        (biased_output["token_embd.weight"], widened_output["token_embd.weight"][:, :C]),
        (biased_output["output.bias"], widened_output["token_embd.weight"][:, C]),
    ):
        np.testing.assert_allclose(actual, expected, atol=2e-6)


@pytest.mark.torch
@pytest.mark.parametrize("name", SETTINGS)
def test_pytorch_agrees(name: str) -> None:
    torch: Any = kernels.torch()
    settings = SETTINGS[name]
    arrays, (loss, leaves) = example(settings), graph(settings)
    gradients = differentiate(loss, leaves)
    loss_graph = Graph({"loss": loss} | {t.label: d for t, d in gradients.items()})
    actual = run_graph(loss_graph, inputs(arrays, {leaf.label for leaf in loss_graph.leaves}))
    x, head = (torch.tensor(arrays[n]).double().requires_grad_() for n in ("x", "head"))
    z, counted = x @ head.T, torch.tensor(arrays["weights"]).double()
    functional = torch.nn.functional
    targets = torch.tensor(arrays["targets"]).long().clamp(min=0)
    hard_losses = functional.cross_entropy(z.transpose(1, 2), targets, reduction="none")
    p = torch.zeros_like(z).scatter(
        -1,
        torch.tensor(arrays["ids"]).long(),
        functional.softmax(torch.tensor(arrays["logits"]).double() / settings.temperature, -1),
    )
    soft_losses = functional.cross_entropy(
        (z / settings.temperature).transpose(1, 2), p.transpose(1, 2), reduction="none"
    )
    token_losses = (
        1 - settings.weight
    ) * hard_losses + settings.weight * settings.temperature**2 * soft_losses
    total = (token_losses * counted).sum()
    total.backward()
    assert float(actual["loss"]) == pytest.approx(total.item(), rel=1e-5)
    np.testing.assert_allclose(actual["x"], x.grad.numpy(), atol=2e-5)
    np.testing.assert_allclose(actual["token_embd.weight"], head.grad.numpy(), atol=2e-5)


# ---- runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("distill")
    rng = random.Random(1)
    words = [[rng.choice(("sun", "ice", "sea", "sky")) for _ in range(3)] for _ in range(50)]
    lines = [{"prompt": f"say {w[0]}", "completion": " ".join(w)} for w in words]
    (directory / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for name in ("llama tied", "gemma2"):
        random_model(directory / f"{name}.gguf", name)
    random_model(directory / "teacher.gguf", "qwen2")
    return directory


def run_finetune(folder: Path, output: Path, *extra_flags: str, base: str = "llama tied") -> int:
    args = [str(folder / f"{base}.gguf"), "--data", str(folder / "data.jsonl"), "-o", str(output)]
    common_flags = ["--batch-size", "2", "--lr", "0.003", "--val-split", "0.2", "--no-tensorboard"]
    teacher = (
        ["--teacher", str(folder / "llama tied.gguf")] if "--teacher" not in extra_flags else []
    )
    return main(["finetune", *args, *common_flags, *teacher, *extra_flags])


def losses(output: Path) -> list[float]:
    path = output.with_suffix(".run") / "metrics.jsonl"
    return [r["loss"] for r in metrics_file.read(path) if "loss" in r]


def test_what_the_teacher_says_is_kept(folder: Path, tmp_path: Path, capsys: Any) -> None:
    """Its likeliest tokens are those of its logits; the file is read again, unless it is of something else."""
    output = tmp_path / "tuned.gguf"
    assert run_finetune(folder, output, "--iters", "2", "--distill-top", "5") == 0, said(capsys)
    path = output.with_suffix(".run") / TEACHER_FILE
    with np.load(path) as file:
        ids, top_logits = file["ids"], file["logits"]
    has_teacher = ids[:, 0] >= 0
    assert has_teacher.any() and ids.shape[1] == 5
    assert (np.diff(top_logits[has_teacher], axis=-1) <= 0).all()
    mtime_before = path.stat().st_mtime_ns
    assert run_finetune(folder, output, "--iters", "2", "--distill-top", "5", "--overwrite") == 0
    assert path.stat().st_mtime_ns == mtime_before
    assert run_finetune(folder, output, "--iters", "2", "--distill-top", "6", "--overwrite") == 0
    with np.load(path) as file:
        assert file["ids"].shape[1] == 6


def test_a_teacher_that_is_the_model_leaves_it_as_it_is(folder: Path, tmp_path: Path) -> None:
    """Alone and with all that it finds likely, its loss has no slope where the student says the same."""
    output = tmp_path / "tuned.gguf"
    flags = ["--iters", "1", "--distill-weight", "1", "--distill-top", "128"]
    assert run_finetune(folder, output, *flags) == 0
    record = next(iter(metrics_file.read(output.with_suffix(".run") / "metrics.jsonl")))
    other_output = tmp_path / "other.gguf"
    assert run_finetune(folder, other_output, "--iters", "1", "--distill-weight", "0.001") == 0
    plain_record = next(iter(metrics_file.read(other_output.with_suffix(".run") / "metrics.jsonl")))
    assert record["grad_norm"] < 0.5 * plain_record["grad_norm"]


def test_a_stopped_run_resumes_bit_for_bit(folder: Path, tmp_path: Path, capsys: Any) -> None:
    assert_resumes(partial(run_finetune, folder), losses, tmp_path, capsys)


def test_a_resumed_run_reads_no_more_with_the_teacher_than_it_sees(folder, tmp_path, capsys):
    output = tmp_path / "tuned.gguf"
    flags = ["--iters", "3", "--batch-size", "1", "--ctx", "64"]
    with signal_after(1):
        assert run_finetune(folder, output, *flags) == 130
    path = output.with_suffix(".run") / TEACHER_FILE
    with np.load(path) as file:
        saved_ids = file["ids"]
    assert (saved_ids[:, 0] < 0).any()
    assert run_finetune(folder, output, *flags, "--resume") == 0, said(capsys)
    with np.load(path) as file:
        assert np.array_equal(file["ids"], saved_ids)


def test_the_specification_learns_the_same(folder: Path, tmp_path: Path, capsys: Any) -> None:
    loss_curves = []
    for device in ("cpu", "numpy"):
        output = tmp_path / f"{device}.gguf"
        assert run_finetune(folder, output, "--iters", "2", "--device", device) == 0, said(capsys)
        loss_curves.append(losses(output))
    np.testing.assert_allclose(loss_curves[1], loss_curves[0], rtol=1e-4)


def test_a_teacher_that_lacks_tokens_or_positions_is_refused(folder, tmp_path, capsys, monkeypatch):
    model = open_model(folder / "teacher.gguf")
    arrays = {n: model.gguf.array(n) for n in transformer.weights(model.config)}
    arrays["token_embd.weight"] = arrays["token_embd.weight"][:-3].copy()
    changed = dict(model.gguf.values)
    for name in ("tokens", "scores", "token_type"):
        entry = changed[f"tokenizer.ggml.{name}"]
        changed[f"tokenizer.ggml.{name}"] = replace(entry, value=[*entry.value][:-3])
    size = changed["qwen2.vocab_size"]
    changed["qwen2.vocab_size"] = replace(size, value=size.value - 3)
    write_gguf(tmp_path / "less.gguf", changed, arrays)
    assert run_finetune(folder, tmp_path / "t.gguf", "--teacher", str(tmp_path / "less.gguf")) == 2
    count = len(arrays["token_embd.weight"])
    assert f"less.gguf has {count} tokens, and the data has token" in said(capsys)[-1]
    monkeypatch.setitem(CONFIGS, "gpt2", replace(CONFIGS["gpt2"], context_length=128))
    random_model(tmp_path / "gpt2.gguf", "gpt2")
    long_record = {"prompt": "say it", "completion": "sun " * 100}
    (tmp_path / "data.jsonl").write_text("\n".join([json.dumps(long_record)] * 9))
    flags = ["--teacher", str(tmp_path / "gpt2.gguf"), "--data", str(tmp_path / "data.jsonl")]
    assert run_finetune(folder, tmp_path / "t.gguf", *flags, "--ctx", "300") == 2
    last = said(capsys)[-1]
    assert "gpt2.gguf has learned 128 positions" in last and "give --ctx 128" in last
    assert run_finetune(folder, tmp_path / "t.gguf", *flags, "--ctx", "128", "--iters", "1") == 0


def test_packing_and_memory_do_not_change_the_loss(folder: Path, tmp_path: Path) -> None:
    loss_curves = []
    for name, flags in (
        ("a", []),
        ("b", ["--memory", memory_limit(600)]),
        ("c", ["--recompute", "blocks"]),
    ):
        output = tmp_path / f"{name}.gguf"
        assert run_finetune(folder, output, "--iters", "2", *flags) == 0
        loss_curves.append(losses(output))
    np.testing.assert_allclose(loss_curves[1], loss_curves[0], rtol=1e-5)
    np.testing.assert_allclose(loss_curves[2], loss_curves[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("base", "extra_flags", "message"),
    [
        ("llama tied", ["--loss", "dpo"], "--teacher has no effect with a loss of pairs"),
        ("gemma2", ["--teacher", "gemma2.gguf"], "caps its logits"),
        ("llama tied", ["--teacher", "missing.gguf"], "--teacher"),
        ("llama tied", ["--memory", "40MiB"], "--memory"),
    ],
)
def test_what_it_is_not_for_is_refused(base, extra_flags, message, folder, tmp_path, capsys):
    extra_flags = [str(folder / one) if one.endswith(".gguf") else one for one in extra_flags]
    assert run_finetune(folder, tmp_path / "tuned.gguf", *extra_flags, base=base) in (2, 3)
    assert any(message in line for line in said(capsys))


def test_settings_without_a_teacher_are_refused(folder, tmp_path, capsys):
    args = [str(folder / "llama tied.gguf"), "--data", str(folder / "data.jsonl")]
    output = ["-o", str(tmp_path / "tuned.gguf"), "--distill-weight", "0.7"]
    assert main(["finetune", *args, *output]) == 2
    assert "--distill-weight has no effect without --teacher" in said(capsys)[-1]


def test_another_vocabulary_is_refused_by_name(folder, tmp_path, capsys):
    """The first token that differs is named."""
    model = open_model(folder / "llama tied.gguf")
    changed = dict(model.gguf.values)
    tokens = changed["tokenizer.ggml.tokens"]
    changed_tokens = replace(tokens, value=[*tokens.value[:-1], b"another"])
    arrays = {n: model.gguf.array(n) for n in transformer.weights(model.config)}
    write_gguf(tmp_path / "other.gguf", changed | {"tokenizer.ggml.tokens": changed_tokens}, arrays)
    assert run_finetune(folder, tmp_path / "t.gguf", "--teacher", str(tmp_path / "other.gguf")) == 2
    last = said(capsys)[-1]
    assert "b'another'" in last and "a teacher needs the same" in last
