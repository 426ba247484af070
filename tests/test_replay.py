"""Replay: the loss and its gradients, texts that the base writes, rows that end in them, runs that forget less."""

import json
import os
import random
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packtrain as pt
from packtrain.cli.main import main
from packtrain.devtools.check.check_cases import run_graph
from packtrain.engine import ops
from packtrain.engine.autodiff import differentiate
from packtrain.engine.graph import Graph
from packtrain.kernels.quant.quantized_arrays import dequantize
from packtrain.models import transformer
from packtrain.models.config import Config
from packtrain.models.model_file import open_model
from packtrain.models.replay_loss import CONSTANTS, IDS, MEANS, ReplayLoss
from packtrain.models.transformer import LossOutputs
from packtrain.planner.speed_probe import DEFAULT_RATES
from packtrain.planner.step_shape import BaseModel
from packtrain.training import replay_texts
from packtrain.training.monitoring import metrics_file
from packtrain.training.replay_texts import FILE, ReplayBatches
from tests.architectures import random_model
from tests.test_train import assert_resumes, said

B, T, C, V = 2, 6, 8, 23
CONFIG = Config(V, 16, C, 1, 16, 2, 1)
REPLAY = ReplayLoss(length=3, weight=0.7, num_texts=2, head_width=C)
STORIES = Path(__file__).parents[2] / "shared/data/models/stories260K/stories260K.gguf"


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(-1, keepdims=True)
    logs: np.ndarray = z - np.log(np.exp(z).sum(-1, keepdims=True))
    return logs


def example_inputs(biased: bool) -> dict[str, np.ndarray]:
    """Inputs of two rows whose last three targets are a text of the base, as ReplayBatches would make them."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((B, T, C)).astype(np.float32)
    head = rng.standard_normal((V, C)).astype(np.float32)
    bias = rng.standard_normal(V).astype(np.float32) * biased
    logp = log_softmax(rng.standard_normal((B, REPLAY.length, V)) * 2)
    p, targets = np.exp(logp), rng.integers(0, V, (B, T)).astype(np.int32)
    ids = targets[:, -REPLAY.length :]
    return {
        "x": x,
        "token_embd.weight": head,
        "output.bias": bias,
        "targets": targets,
        "weights": rng.uniform(0.1, 1, (B, T)).astype(np.float32),
        "logp": logp,
        IDS: ids,
        MEANS: (p @ head).astype(np.float32),
        CONSTANTS: ((p * logp).sum(-1) - p @ bias + bias[ids]).astype(np.float32),
    }


def expected_loss(inputs: dict[str, np.ndarray], x: np.ndarray) -> float:
    """The loss in f64, written out over the whole vocabulary."""
    head, n = inputs["token_embd.weight"].astype(np.float64), T - REPLAY.length
    logq = log_softmax(x.astype(np.float64) @ head.T + inputs["output.bias"])
    hard = -np.take_along_axis(logq, inputs["targets"][..., None], -1)[..., 0]
    divergence = (np.exp(inputs["logp"]) * (inputs["logp"] - logq[:, n:])).sum(-1)
    token_losses = np.concatenate((hard[:, :n], divergence), -1) * inputs["weights"]
    return float(token_losses.sum() * (1 + REPLAY.weight))


def replay_loss(time: int, biased: bool) -> tuple[pt.Tensor, pt.Tensor]:
    """The loss of two rows of `time` tokens, and x, from which it is computed."""
    x, head = pt.weight("x", (B, time, C)), pt.weight("token_embd.weight", (V, C))
    leaves = {"token_embd.weight": head}
    if biased:
        leaves["output.bias"] = pt.weight("output.bias", (V,))
    targets, counted = pt.input("targets", (B, time), pt.i32), pt.input("weights", (B, time))
    results = ops.linear_cross_entropy(
        x, head, targets, counted, leaves.get("output.bias"), chunk=4
    )
    base_loss = LossOutputs(results[0], results[1], results[2], [], x, targets, counted)
    return REPLAY.loss(CONFIG, leaves, base_loss, 4), x


def test_rows_shorter_than_a_text_end_in_a_part_of_it() -> None:
    """A search for a context that fits measures such rows."""
    time = REPLAY.length - 1
    loss, _ = replay_loss(time, biased=False)
    shapes = {leaf.label: leaf.shape for leaf in Graph({"loss": loss}).leaves}
    replay_shapes = {IDS: (B, time), CONSTANTS: (B, time), MEANS: (B, time, C)}
    assert {name: shapes[name] for name in replay_shapes} == replay_shapes
    assert REPLAY.numbers(time) == time * (C + 2)


@pytest.mark.parametrize("biased", [False, True])
def test_the_loss_and_its_slope(biased: bool) -> None:
    """By the definition, and by finite differences in float64."""
    tensors = example_inputs(biased)
    loss, x = replay_loss(T, biased)
    graph = Graph({"loss": loss, "slope": differentiate(loss, [x])[x]})
    names = {leaf.label for leaf in graph.leaves}
    got = run_graph(graph, {n: v for n, v in tensors.items() if n in names})
    assert float(got["loss"]) == pytest.approx(expected_loss(tensors, tensors["x"]), rel=1e-5)
    for at in [*np.ndindex(B, T, C)][::5]:
        step = np.zeros((B, T, C))
        step[at] = 1e-5
        up, down = (expected_loss(tensors, tensors["x"] + sign * step) for sign in (1, -1))
        assert got["slope"][at] == pytest.approx((up - down) / 2e-5, abs=3e-6), at


# ---- runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("replay")
    rng = random.Random(1)
    words = [[rng.choice(("sun", "ice", "sea", "sky")) for _ in range(3)] for _ in range(50)]
    lines = [{"prompt": f"say {w[0]}", "completion": " ".join(w)} for w in words]
    (root / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (root / "text.txt").write_text("sun and ice and sea and sky. " * 200)
    for name in ("llama tied", "gemma2", "qwen2"):
        random_model(root / f"{name}.gguf", name)
    return root


def run_finetune(
    folder: Path, output: Path, *flags: str, base: str = "llama tied", data: str = "data.jsonl"
) -> int:
    args = [str(folder / f"{base}.gguf"), "--data", str(folder / data), "-o", str(output)]
    default_flags = [
        "--batch-size",
        "2",
        "--lr",
        "0.003",
        "--no-tensorboard",
        "--check-answers",
        "0",
    ]
    return main(["finetune", *args, *default_flags, *flags])


def read_losses(output: Path) -> list[float]:
    path = output.with_suffix(".run") / "metrics.jsonl"
    return [r["loss"] for r in metrics_file.read(path) if "loss" in r]


def read_texts(output: Path) -> dict[str, np.ndarray]:
    with np.load(output.with_suffix(".run") / FILE) as file:
        return {name: file[name] for name in file}


@pytest.mark.parametrize("base", ["llama tied", "qwen2"])
def test_answers_are_learned_beside_texts_of_the_base(
    base: str, folder: Path, tmp_path: Path, capsys: Any
) -> None:
    """By default; each text is whole, and none holds an end. Its probabilities are the base's."""
    output = tmp_path / "tuned.gguf"
    assert run_finetune(folder, output, "--iters", "32", base=base) == 0, said(capsys)
    replay_texts = read_texts(output)
    assert replay_texts["tokens"].shape == (64, 129) and (replay_texts["tokens"] >= 0).all()
    base_file = open_model(folder / f"{base}.gguf")
    eos_ids = [*base_file.tokenizer().eog_ids]
    assert not np.isin(replay_texts["tokens"][:, 1:], eos_ids).any()
    assert len({row.tobytes() for row in replay_texts["tokens"]}) == 64
    context = pt.Context(folder / f"{base}.gguf", cells=128, cache="f32")
    logits = context.decode(replay_texts["tokens"][3, :20].tolist(), wanted=range(20))
    logp = log_softmax(logits.astype(np.float64))
    table = dequantize(
        base_file.gguf.array(transformer.head(transformer.weights(base_file.config)).label)
    )
    np.testing.assert_allclose(replay_texts["means"][3, :20], np.exp(logp) @ table, atol=2e-3)
    np.testing.assert_allclose(
        replay_texts["constants"][3, :20], (np.exp(logp) * logp).sum(-1), atol=0.01
    )


def test_step_1_has_no_divergence(folder: Path, tmp_path: Path) -> None:
    """An adapter begins as the base: the loss is that without texts. A token that counts 9 is one token."""
    first_losses, num_tokens = [], []
    for flags in (["--replay", "0"], ["--replay", "4", "--replay-weight", "9"]):
        assert (
            run_finetune(folder, tmp_path / "tuned.gguf", "--iters", "1", "--overwrite", *flags)
            == 0
        )
        first_losses.append(read_losses(tmp_path / "tuned.gguf")[0])
        num_tokens.append(metrics_file.read(tmp_path / "tuned.run" / "metrics.jsonl")[0]["tokens"])
    assert first_losses[1] == pytest.approx(first_losses[0], abs=2e-3)
    assert num_tokens[1] == num_tokens[0] + 2 * 128  # two rows


def test_rows_end_in_a_text_that_counts_as_much_as_the_weight_says(
    folder: Path, tmp_path: Path
) -> None:
    prepared_plan = pt.plan(
        pt.finetune, model=folder / "llama tied.gguf", data=folder / "data.jsonl",
        output=tmp_path / "t.gguf", replay=3, replay_weight=2.0, batch_size=2,
    )  # fmt: skip
    train = prepared_plan.job.train
    assert isinstance(train, ReplayBatches)
    train.text_arrays["tokens"][:] = np.arange(3)[:, None]
    for index in range(2 * len(train)):
        batch = train[index]
        for row in range(2):
            text, data = slice(-128, None), slice(None, -128)
            assert set(batch["tokens"][row, text]) == {(2 * index + row) % 3}
            assert np.array_equal(batch["pos"][row, text], np.arange(128))
            assert batch["seq"][row, text].min() > batch["seq"][row, data].max()
            assert batch["weights"][row, text].sum() == pytest.approx(
                2 * batch["weights"][row, data].sum(), rel=1e-5
            )


def test_a_plan_counts_the_time_in_which_the_base_writes(folder: Path, tmp_path: Path) -> None:
    paths = folder / "llama tied.gguf", folder / "data.jsonl"
    plans = [
        pt.plan(pt.finetune, *paths, output=tmp_path / "t.gguf", replay=n) for n in (0, 32, 64)
    ]
    zero_seconds, half_seconds, full_seconds = (plan.seconds_before_step_1 for plan in plans)
    assert zero_seconds == 0 < min(half_seconds, full_seconds)
    # by equal rates: those of a busy machine are measured anew for each plan
    half, full = (replay_texts.writing_seconds(plan.job, DEFAULT_RATES) for plan in plans[1:])
    assert full == pytest.approx(2 * half, rel=0.5)
    assert "before, in which the base writes texts for replay" in str(plans[2])
    assert "texts for replay" not in str(plans[0])
    assert json.loads(plans[2].json())["seconds_before_step_1"] == full_seconds


def test_a_stopped_run_resumes_bit_for_bit(folder: Path, tmp_path: Path, capsys: Any) -> None:
    assert_resumes(partial(run_finetune, folder), read_losses, tmp_path, capsys)


def test_texts_written_before_a_stop_are_kept(
    folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are written by the resumed run, as they would have been."""
    monkeypatch.setattr(replay_texts, "TEXTS_AT_ONCE", (16,))
    flags = "--iters", "20", "--replay", "40"
    assert run_finetune(folder, tmp_path / "whole.gguf", *flags) == 0
    write = replay_texts._ReplayWriter.generate

    def stop_at_the_second(self: Any, text_ids: np.ndarray) -> Any:
        if text_ids[0] == 16:
            os.kill(os.getpid(), signal.SIGINT)
        return write(self, text_ids)

    output = tmp_path / "stopped.gguf"
    with monkeypatch.context() as patch:
        patch.setattr(replay_texts._ReplayWriter, "generate", stop_at_the_second)
        assert run_finetune(folder, output, *flags) == 130
    assert (read_texts(output)["tokens"][:, 0] >= 0).tolist() == [True] * 32 + [False] * 8
    assert run_finetune(folder, output, *flags, "--resume") == 0, said(capsys)
    uninterrupted, resumed = read_texts(tmp_path / "whole.gguf"), read_texts(output)
    for name in ("tokens", "means", "constants"):
        assert np.array_equal(uninterrupted[name], resumed[name]), name


def test_a_short_run_writes_the_texts_that_it_reads_and_a_longer_one_the_rest(
    folder: Path, tmp_path: Path
) -> None:
    """Texts are written in full groups of 16."""
    long, short = tmp_path / "long.gguf", tmp_path / "short.gguf"
    order = "--lr-scheduler", "constant", "--warmup-ratio", "0"
    assert run_finetune(folder, long, "--iters", "12", *order) == 0
    assert run_finetune(folder, short, "--iters", "3", *order) == 0
    assert (read_texts(short)["tokens"][:, 0] >= 0).tolist() == [True] * 16 + [False] * 48
    assert run_finetune(folder, short, "--iters", "12", "--resume", *order) == 0
    assert (read_texts(short)["tokens"][:, 0] >= 0).sum() == 32
    assert read_losses(short) == read_losses(long)


@pytest.mark.parametrize(
    ("flags", "data"),
    [
        (["--replay", "0"], "data.jsonl"),
        (["--full", "--lr", "1e-4"], "data.jsonl"),
        (["--teacher", "llama tied.gguf"], "data.jsonl"),
        ([], "text.txt"),
    ],
    ids=["0", "full", "teacher", "text"],
)
def test_no_texts_are_written_where_none_count(
    flags: list[str], data: str, folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "tuned.gguf"
    flags = [str(folder / flag) if flag.endswith(".gguf") else flag for flag in flags]
    assert run_finetune(folder, output, "--iters", "1", *flags, data=data) == 0
    assert not (output.with_suffix(".run") / FILE).exists()


@pytest.mark.parametrize(
    ("base", "flags", "message"),
    [
        ("gemma2", ["--replay", "8"], "gemma2.gguf caps its logits"),
        ("llama tied", ["--replay", "8", "--teacher", "llama tied.gguf"], "--replay 8: --teacher"),
        ("llama tied", ["--replay", "8", "--loss", "dpo"], "--replay 8: --loss dpo"),
        ("llama tied", ["--replay", "8", "--full"], "--replay 8: with --full all weights change"),
        ("llama tied", ["--replay", "0", "--replay-weight", "2"], "has no effect with --replay 0"),
    ],
)
def test_what_it_is_not_for_is_refused(
    base: str, flags: list[str], message: str, folder: Path, tmp_path: Path, capsys: Any
) -> None:
    flags = [str(folder / flag) if flag.endswith(".gguf") else flag for flag in flags]
    data = "data.jsonl"
    if "dpo" in flags:
        (folder / "pairs.jsonl").write_text(
            "\n".join([json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"})] * 30)
        )
        data = "pairs.jsonl"
    assert run_finetune(folder, tmp_path / "tuned.gguf", *flags, base=base, data=data) == 2
    assert any(message in line for line in said(capsys)), message


@pytest.mark.shared
def test_a_tuned_model_forgets_less(folder: Path, tmp_path: Path) -> None:
    """Perplexity of text like the base's own grows by less than a third of what it does without."""
    text = tmp_path / "text.txt"
    text.write_text(
        "Once upon a time there was a little girl named Lily. She liked to play in the park. " * 12
    )
    grown = []
    for count in ("0", "64"):
        output = tmp_path / f"{count}.gguf"
        args = ["finetune", str(STORIES), "--data", str(folder / "data.jsonl"), "-o", str(output)]
        flags = ["--replay", count, "--iters", "40", "--check-answers", "0"]
        assert main([*args, *flags]) == 0
        after, before = (pt.evaluate(model, data=text).loss().value for model in (output, STORIES))
        grown.append(after - before)
    assert grown[1] < grown[0] / 3, grown


def test_marks_of_files_in_a_run_folder_keep_their_words() -> None:
    """Files that 0.1 wrote are found again: other words would silently compute them anew."""
    assert ReplayLoss(64, 1.0, 64, 128).mark == "Replay(length=64, weight=1.0, texts=64, width=128)"
    base = BaseModel((("a", pt.f32),), ("x",), 3)
    assert base.mark == (
        "Base(types=(('a', f32),), frozen=('x',), last=3, strict=False, masters=f32)"
    )
