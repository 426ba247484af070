"""What several processes are told by another model, and learn of pairs of answers; L-BFGS, with exchanges in a step."""

import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain.distributed import World
from packtrain.training import precomputed
from packtrain.training.monitoring import metrics_file
from tests.architectures import random_model
from tests.kill import sample_text
from tests.ranked import (
    COMMON_FLAGS,
    by_hand,
    last_errors,
    metric_values,
    run_checked,
    train_command,
)

KINDS = {
    "pairs": ["--data", "pairs.jsonl", "--loss", "dpo", "--sft-weight", "0.5", "--lr", "1e-4"],
    "teacher": ["--data", "texts.jsonl", "--teacher", "teacher.gguf", "--distill-temperature", "2"],
}
MEASURED = {
    "pairs": ("rewards_chosen", "rewards_rejected", "rewards_margin", "rewards_accuracy"),
    "teacher": (),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory, rng = tmp_path_factory.mktemp("told"), random.Random(1)
    said = [[rng.choice(("sun", "ice", "sea", "sky")) for _ in range(3)] for _ in range(50)]
    pairs = [{"prompt": f"say {s[0]}", "chosen": s[0], "rejected": " ".join(s * 3)} for s in said]
    texts = [{"prompt": f"say {s[0]}", "completion": " ".join(s)} for s in said]
    for name, records in (("pairs", pairs), ("texts", texts)):
        (directory / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    random_model(directory / "base.gguf", "llama tied")
    random_model(directory / "teacher.gguf", "llama tied", seed=5)
    random_model(directory / "other.gguf", "llama tied", seed=6)
    (directory / "text.txt").write_text(sample_text())
    return directory


def finetune_command(folder: Path, name: str, kind: str, *extra_flags: str) -> list[str]:
    flags = [
        str(folder / flag) if "." in flag and flag[0].isalpha() else flag for flag in KINDS[kind]
    ]
    common_flags = [
        "--batch-size",
        "2",
        "--val-split",
        "0.2",
        "--lora-rank",
        "2",
        "--merge",
        "none",
    ]
    schedule_flags = [
        "--steps-per-eval",
        "10",
        "--lr-scheduler",
        "constant",
        "--warmup-ratio",
        "0",
        *COMMON_FLAGS,
    ]
    args = [str(folder / "base.gguf"), *flags, "-o", str(folder / f"{name}.gguf")]
    return [
        sys.executable,
        "-m",
        "packtrain",
        "finetune",
        *args,
        *common_flags,
        *schedule_flags,
        *extra_flags,
    ]


@pytest.mark.torch
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_are_told_and_learn_what_one_does(folder: Path, kind: str) -> None:
    single_run, double_run = (f"{kind}{count}" for count in (1, 2))
    run_checked(finetune_command(folder, single_run, kind, "--iters", "26"))
    run_checked(finetune_command(folder, double_run, kind, "--iters", "26", "--nproc", "2"))
    for key in ("loss", "val_loss", "val_error", "val_accuracy", *MEASURED[kind]):
        a, b = metric_values(folder, single_run, key), metric_values(folder, double_run, key)
        assert len(a) == len(b) == (3 if key.startswith("val") else 26)
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=2e-6, err_msg=key)
    assert metric_values(folder, single_run)[-1] < metric_values(folder, single_run)[0]
    end = metrics_file.read(folder / f"{double_run}.run/metrics.jsonl")[-1]
    assert end["event"] == "end" and end["peak_bytes"] <= end["planned_bytes"]
    if kind == "pairs":
        check_resumed_pairs(folder, double_run)


def check_resumed_pairs(folder: Path, full_run: str) -> None:
    """A run of pairs in two parts, the second of which has lost what was told, has the same bits."""
    run_checked(
        finetune_command(folder, "parts", "pairs", "--iters", "24", "--nproc", "2", "--zero", "1")
    )
    damaged_path = folder / "parts.run/reference.npz"
    saved_values = np.load(damaged_path)["train"]
    damaged_path.write_bytes(b"damaged")
    run_checked(
        finetune_command(folder, "parts", "pairs", "--iters", "26", "--nproc", "2", "--resume")
    )
    assert metric_values(folder, full_run).tolist() == metric_values(folder, "parts").tolist()
    assert np.isfinite(saved_values).all() and np.array_equal(
        np.load(damaged_path)["train"], saved_values
    )


@pytest.mark.torch
def test_another_teacher_on_a_rank_is_found_before_it_is_read(folder: Path) -> None:
    other_teacher = ["--teacher", str(folder / "other.gguf")]
    first_error, second_error = last_errors(
        by_hand(finetune_command(folder, "odd", "teacher"), [], other_teacher), 110
    )
    assert first_error == second_error and first_error.startswith(
        "packtrain: error: rank 1 has --teacher "
    ), first_error
    assert not (folder / "odd.run").exists()


@pytest.mark.torch
def test_lbfgs_takes_the_steps_of_one_process(folder: Path) -> None:
    flags = ["--optimizer", "lbfgs", "--iters", "12", "--batch-size", "4", "--val-split", "0"]
    for name, rank_flags in (("one", []), ("two", ["--nproc", "2"]), ("again", ["--nproc", "2"])):
        run_checked(train_command(folder, name, *flags, *rank_flags))
    single_losses, double_losses, rerun_losses = (
        metric_values(folder, name) for name in ("one", "two", "again")
    )
    np.testing.assert_allclose(double_losses, single_losses, rtol=1e-5)
    assert (
        double_losses.tolist() == rerun_losses.tolist() and single_losses[-1] < single_losses[0] - 1
    )


# ---- without processes


def run_ranks(count: int, work: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `work` returns on each of so many ranks, which are threads here."""
    shared_values, thread_state = [None] * count, threading.local()
    barrier, results = threading.Barrier(count), [None] * count

    class ThreadWorld(World):
        def __init__(self, rank: int) -> None:
            self.rank, self.world_size = rank, count

        def gather(self, value: Any) -> list[Any]:
            shared_values[self.rank] = value
            barrier.wait(10)
            gathered = [*shared_values]
            barrier.wait(10)
            return gathered

        def from_first(self, value: Any) -> Any:
            return self.gather(value)[0]

    def run(rank: int) -> None:
        thread_state.world = ThreadWorld(rank)
        results[rank] = work(rank)

    monkeypatch.setattr(precomputed, "current_world", lambda: thread_state.world)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 5, 6])
def test_each_number_is_read_once_and_all_know_all(
    ranks: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[int]()

    def work(rank: int) -> list[int]:
        def one(i: int) -> list[int]:
            read.append(i)
            return [10 * i, 10 * i + 1]

        return [said for turn in precomputed.in_rank_order(count, one) for said in turn]

    results = run_ranks(ranks, work, monkeypatch)
    assert results == [[x for i in range(count) for x in (10 * i, 10 * i + 1)]] * ranks
    assert sorted(read) == [*range(count)]


def test_all_ranks_know_what_is_in_the_file_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precomputed, "SEND_NBYTES", 100)  # bytes
    expected = {"a": np.arange(99.0), "b": np.arange(60).reshape(20, 3), "c": np.zeros(0)}

    def work(rank: int) -> dict[str, np.ndarray]:
        path, recalled = (
            tmp_path / f"{rank}.npz",
            {n: np.zeros_like(v) for n, v in expected.items()},
        )
        precomputed.write_arrays(path, "mark", expected)
        precomputed.restore_arrays(path, "mark", recalled)
        return recalled

    for recalled in run_ranks(3, work, monkeypatch):
        assert all(np.array_equal(recalled[name], expected[name]) for name in expected)
    assert [path.name for path in tmp_path.iterdir()] == ["0.npz"]
