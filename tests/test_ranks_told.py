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
from tests.kill import words
from tests.ranked import FEW, by_hand, done, errors, losses, train

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
    made, rng = tmp_path_factory.mktemp("told"), random.Random(1)
    said = [[rng.choice(("sun", "ice", "sea", "sky")) for _ in range(3)] for _ in range(50)]
    pairs = [{"prompt": f"say {s[0]}", "chosen": s[0], "rejected": " ".join(s * 3)} for s in said]
    texts = [{"prompt": f"say {s[0]}", "completion": " ".join(s)} for s in said]
    for name, records in (("pairs", pairs), ("texts", texts)):
        (made / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    random_model(made / "base.gguf", "llama tied")
    random_model(made / "teacher.gguf", "llama tied", seed=5)
    random_model(made / "other.gguf", "llama tied", seed=6)
    (made / "text.txt").write_text(words())
    return made


def tune(folder: Path, name: str, kind: str, *more: str) -> list[str]:
    flags = [str(folder / one) if "." in one and one[0].isalpha() else one for one in KINDS[kind]]
    usual = ["--batch-size", "2", "--val-split", "0.2", "--lora-rank", "2", "--merge", "none"]
    often = ["--steps-per-eval", "10", "--lr-scheduler", "constant", "--warmup-ratio", "0", *FEW]
    given = [str(folder / "base.gguf"), *flags, "-o", str(folder / f"{name}.gguf")]
    return [sys.executable, "-m", "packtrain", "finetune", *given, *usual, *often, *more]


@pytest.mark.torch
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_are_told_and_learn_what_one_does(folder: Path, kind: str) -> None:
    one, two = (f"{kind}{count}" for count in (1, 2))
    done(tune(folder, one, kind, "--iters", "26"))
    done(tune(folder, two, kind, "--iters", "26", "--nproc", "2"))
    for key in ("loss", "val_loss", "val_error", "val_accuracy", *MEASURED[kind]):
        a, b = losses(folder, one, key), losses(folder, two, key)
        assert len(a) == len(b) == (3 if key.startswith("val") else 26)
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=2e-6, err_msg=key)
    assert losses(folder, one)[-1] < losses(folder, one)[0]
    end = metrics_file.read(folder / f"{two}.run/metrics.jsonl")[-1]
    assert end["event"] == "end" and end["peak_bytes"] <= end["planned_bytes"]
    if kind == "pairs":
        goes_on(folder, two)


def goes_on(folder: Path, whole: str) -> None:
    """A run of pairs in two parts, the second of which has lost what was told, has the same bits."""
    done(tune(folder, "parts", "pairs", "--iters", "24", "--nproc", "2", "--zero", "1"))
    lost = folder / "parts.run/reference.npz"
    before = np.load(lost)["train"]
    lost.write_bytes(b"damaged")
    done(tune(folder, "parts", "pairs", "--iters", "26", "--nproc", "2", "--resume"))
    assert losses(folder, whole).tolist() == losses(folder, "parts").tolist()
    assert np.isfinite(before).all() and np.array_equal(np.load(lost)["train"], before)


@pytest.mark.torch
def test_another_teacher_on_a_rank_is_found_before_it_is_read(folder: Path) -> None:
    other = ["--teacher", str(folder / "other.gguf")]
    first, second = errors(by_hand(tune(folder, "odd", "teacher"), [], other), 110)
    assert first == second and first.startswith("packtrain: error: rank 1 has --teacher "), first
    assert not (folder / "odd.run").exists()


@pytest.mark.torch
def test_lbfgs_takes_the_steps_of_one_process(folder: Path) -> None:
    asked = ["--optimizer", "lbfgs", "--iters", "12", "--batch-size", "4", "--val-split", "0"]
    for name, more in (("one", []), ("two", ["--nproc", "2"]), ("again", ["--nproc", "2"])):
        done(train(folder, name, *asked, *more))
    one, two, again = (losses(folder, name) for name in ("one", "two", "again"))
    np.testing.assert_allclose(two, one, rtol=1e-5)
    assert two.tolist() == again.tolist() and one[-1] < one[0] - 1


# ---- without processes


def together(count: int, work: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `work` returns on each of so many ranks, which are threads here."""
    given, own = [None] * count, threading.local()
    meet, results = threading.Barrier(count), [None] * count

    class Thread(World):
        def __init__(self, rank: int) -> None:
            self.rank, self.size = rank, count

        def gather(self, value: Any) -> list[Any]:
            given[self.rank] = value
            meet.wait(10)
            found = [*given]
            meet.wait(10)
            return found

        def from_first(self, value: Any) -> Any:
            return self.gather(value)[0]

    def run(rank: int) -> None:
        own.world = Thread(rank)
        results[rank] = work(rank)

    monkeypatch.setattr(precomputed, "here", lambda: own.world)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(20)
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

        return [said for turn in precomputed.in_turn(count, one) for said in turn]

    found = together(ranks, work, monkeypatch)
    assert found == [[x for i in range(count) for x in (10 * i, 10 * i + 1)]] * ranks
    assert sorted(read) == [*range(count)]


def test_all_ranks_know_what_is_in_the_file_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precomputed, "PART", 100)  # bytes
    wanted = {"a": np.arange(99.0), "b": np.arange(60).reshape(20, 3), "c": np.zeros(0)}

    def work(rank: int) -> dict[str, np.ndarray]:
        path, known = tmp_path / f"{rank}.npz", {n: np.zeros_like(v) for n, v in wanted.items()}
        precomputed.write(path, "mark", wanted)
        precomputed.recall(path, "mark", known)
        return known

    for known in together(3, work, monkeypatch):
        assert all(np.array_equal(known[name], wanted[name]) for name in wanted)
    assert [path.name for path in tmp_path.iterdir()] == ["0.npz"]
