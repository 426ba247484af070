"""Tests that end a run before its last step: when, with which sentence, and after a run was resumed."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from packtrain.cli.main import main
from packtrain.training.checkpoints import TrainingProgress, load_checkpoint
from packtrain.training.monitoring import metrics_file
from packtrain.training.train_settings import TrainSettings
from packtrain.training.training_loop import stop_reason
from tests.kill import sample_text
from tests.test_train import said, train_arguments, weight_bytes


def end_step(losses: list[float], norm: float = 1.0, **settings: float) -> int | None:
    """After how many of these losses the run ends."""
    train_settings, progress = TrainSettings(**settings), TrainingProgress()
    for number, loss in enumerate(losses, 1):
        progress = progress.after_step(1, 1.0).with_train_loss(loss, norm, train_settings.past)
        if stop_reason(train_settings, progress):
            return number
    return None


def test_no_test_ends_a_run_by_itself() -> None:
    assert end_step([1.0] * 1000, norm=0.0) is None


def test_the_loss_is_compared_with_that_of_some_steps_ago() -> None:
    losses = [8.0, 4.0, 2.0, 2.5, 2.01, 2.49, 2.0, 2.5]
    assert end_step(losses, past=2, delta=0.01) == 5
    assert end_step(losses, past=1, delta=0.01) is None
    assert end_step(losses, past=2, delta=1e-3) is None
    assert end_step(losses, past=4, delta=1e-3) == 7
    assert end_step(losses, past=7, delta=0.01) is None
    assert end_step([-4.0, -4.001], past=1, delta=1e-3) == 2


def test_steps_without_a_lower_loss_are_counted() -> None:
    losses = [3.0, 2.0, 2.5, 1.9, 1.9, 2.0, 2.1]
    assert end_step(losses, max_no_improvement=1) == 3
    assert end_step(losses, max_no_improvement=2) == 6
    assert end_step(losses, max_no_improvement=3) == 7
    assert end_step(losses, max_no_improvement=4) is None


def test_small_gradients_end_it() -> None:
    assert end_step([1.0], norm=1e-3, grad_tol=1e-3) == 1
    assert end_step([1.0], norm=2e-3, grad_tol=1e-3) is None


def test_a_step_that_was_skipped_does_not_count() -> None:
    assert (
        stop_reason(TrainSettings(grad_tol=1.0, past=1, max_no_improvement=1), TrainingProgress(9))
        is None
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(sample_text())
    return path


RUNS = {
    "past": (
        "--past 3 --delta 1e6",
        "in 3 steps the loss changed by less than 1e\\+06 of its value \\(--delta\\)",
    ),
    "unimproved": ("--max-no-improvement 2 --lr 0.9", "no better training loss than .* in 2 steps"),
    "gradient": ("--grad-tol 1e9", "the gradient norm is .*, at most --grad-tol 1e\\+09"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_ends_where_it_does_when_resumed(
    name: str, data: Path, tmp_path: Path, capsys
) -> None:
    """The result is saved and validated, and a run of two lives has the same bits; then none is left."""
    flags, sentence = RUNS[name]
    even = ["--lr-scheduler", "constant", "--warmup-ratio", "0", "--steps-per-eval", "1000"]
    full_model, parts = tmp_path / "whole.gguf", tmp_path / "parts.gguf"
    assert main(train_arguments(data, full_model, "--iters", "40", *even, *flags.split())) == 0
    text = "\n".join(said(capsys))
    assert re.search(f"stopped early: {sentence}", text)
    records = metrics_file.read(tmp_path / "whole.run/metrics.jsonl")[:-1]
    assert len(records) < 40 and "val_loss" in records[-1]
    num_steps = max(len(records) - 1, 1)
    assert main(train_arguments(data, parts, "--iters", str(num_steps), *even, *flags.split())) == 0
    resume = ["train", "-o", str(parts), "--resume", "--iters", "40"]
    assert main(resume) == 0
    assert weight_bytes(parts) == weight_bytes(full_model)
    checkpoints = [
        load_checkpoint(tmp_path / f"{run}.run/checkpoint.gguf", print)
        for run in ("whole", "parts")
    ]
    full_progress, parts_progress = (
        replace(f.progress, seconds=0.0) for f in checkpoints if f is not None
    )
    assert (full_progress.step, full_progress.recent, full_progress.lowest) == (
        parts_progress.step,
        parts_progress.recent,
        parts_progress.lowest,
    )
    capsys.readouterr()
    assert main(resume) == 0
    line = f"early stopping has ended training after step {len(records)}; finishing {parts}"
    assert line in said(capsys)
