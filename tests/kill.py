"""Kill a run at random moments and see that it resumes: python -m tests.kill [finetune] [--kills 50] [--seed 0]

Every life begins with --resume and ends by SIGKILL, while it starts, trains or saves. The run that is finished
at last must equal one that was left alone, in weights, moments and metrics. One life of five is killed while it ends:
what an earlier end wrote must be there still, or the new result, whole. The base that is tuned never changes.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from packtrain.gguf import GGUF
from packtrain.training.monitoring import metrics_file
from tests.architectures import random_model

TINY_FLAGS = [
    *("--dim", "32", "--layers", "1", "--heads", "2", "--kv-heads", "1", "--ffn", "48", "-c", "32"),
    *("--batch-size", "2", "--vocab-size", "320"),
]
TIMES = ("tokens_per_second", "positions_per_second", "seconds")
ENDLESS = 1_000_000
VALIDATED = "val_loss", "val_error", "val_accuracy", "val_accuracy_error"


def sample_text(count: int = 12_000) -> str:
    """Text with something to learn: sentences of a small grammar."""
    rng, text = random.Random(0), ""
    parts = (
        ("The cat", "A dog", "One bird", "My friend"),
        ("saw", "ate", "likes", "hid"),
        ("fish", "the moon", "bread", "a song"),
    )
    while len(text) < count:
        text += " ".join(map(rng.choice, parts)) + rng.choice((". ", "! ", ".\n"))
    return text


def sample_chats(count: int = 40) -> str:
    """Questions that have one answer each."""
    rng = random.Random(1)
    facts = {"sun": "hot", "ice": "cold", "night": "dark", "sea": "deep"}
    questions = [rng.choice(sorted(facts)) for _ in range(count)]
    return "\n".join(
        json.dumps({"prompt": f"what is the {q}", "completion": f"the {q} is {facts[q]}"})
        for q in questions
    )


@dataclass(frozen=True, slots=True)
class RunKind:
    """Runs of a command on files that `prepare` makes in a folder; their steps do not depend on how many there will be.

    results  what must be equal at last, `{}` for the name of the run
    """

    prepare: Callable[[Path], None]
    flags: Callable[[Path], list[str]]
    results: tuple[str, ...]

    def command(self, folder: Path, name: str, steps: int) -> list[str]:
        often = ["--save-every", "3", "--steps-per-eval", "25", "--val-batches", "1"]
        constant = ["--lr-scheduler", "constant", "--warmup-ratio", "0", "--resume"]
        output = ["-o", str(folder / f"{name}.gguf"), "--iters", str(steps)]
        return [sys.executable, "-m", "packtrain", *self.flags(folder), *output, *often, *constant]


def prepare_text(folder: Path) -> None:
    (folder / "text.txt").write_text(sample_text())


def prepare_base(folder: Path) -> None:
    random_model(folder / "f32.gguf", "llama tied")
    files = [str(folder / name) for name in ("f32.gguf", "base.gguf")]
    run_command([sys.executable, "-m", "packtrain", "quantize", *files, "Q8_0"])
    (folder / "chats.jsonl").write_text(sample_chats())


def train_flags(folder: Path) -> list[str]:
    return ["train", "--data", str(folder / "text.txt"), *TINY_FLAGS]


def tune_flags(folder: Path) -> list[str]:
    options = ["--batch-size", "1", "--ctx", "64", "--lora-rank", "2", "--lora-dropout", "0.1"]
    return ["finetune", str(folder / "base.gguf"), "--data", str(folder / "chats.jsonl"), *options]


RESULT_NAMES = ("{}.gguf", "{}.run/checkpoint.gguf")
RUN_KINDS = {
    "train": RunKind(prepare_text, train_flags, RESULT_NAMES),
    "finetune": RunKind(prepare_base, tune_flags, (*RESULT_NAMES, "{}.run/adapter.gguf")),
}


def survive_kills(
    folder: Path, kills: int, seed: int, run_kind: RunKind = RUN_KINDS["train"]
) -> int:
    """Steps of a run that was killed so often and still equals one left alone; raises AssertionError if it does not."""
    run_kind.prepare(folder)
    run_command(run_kind.command(folder, "warm", 1))
    start = time.monotonic()
    run_command(run_kind.command(folder, "again", 1))
    seconds = time.monotonic() - start
    input_files = {path: path.read_bytes() for path in folder.glob("*.*") if path.is_file()}
    rng, seen = random.Random(seed), folder / "killed.run/metrics.jsonl"
    for number in range(kills - kills // 5):
        life = start_process(run_kind.command(folder, "killed", ENDLESS))
        if number % 4 == 1:  # while it starts
            time.sleep(rng.uniform(0, 1) * seconds)
        else:  # while it trains and saves
            wait_for_more(seen, life)
            time.sleep(rng.uniform(0, 0.4))
        assert not kill_process(life)
    steps = max((record["step"] for record in metrics_file.read(seen)), default=0) + 10
    for name in ("killed", "alone"):
        run_command(run_kind.command(folder, name, steps))
    assert_equal_runs(folder, run_kind.results)
    for _ in range(kills // 5):  # while it ends
        steps += 1
        earlier = (folder / "killed.gguf").read_bytes()
        life = start_process(run_kind.command(folder, "killed", steps))
        time.sleep(rng.uniform(0.3, 1) * seconds)
        finished = kill_process(life)
        run_command(run_kind.command(folder, "alone", steps))
        current = (folder / "killed.gguf").read_bytes()
        new = [folder / f"{name}.gguf" for name in ("killed", "alone")]
        assert (not finished and current == earlier) or has_equal_tensors(*new)
    run_command(run_kind.command(folder, "killed", steps))
    assert_equal_runs(folder, run_kind.results, but=VALIDATED)  # measured where a run has its end
    assert all(path.read_bytes() == content for path, content in input_files.items())
    return int(steps)


def start_process(command: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def kill_process(life: "subprocess.Popen[str]") -> bool:
    """Kill it; whether it had come to a good end before. Raises AssertionError for a bad one."""
    code = life.poll()
    life.kill()
    said = life.communicate()[1]
    assert not code, said
    return code == 0


def wait_for_more(path: Path, life: "subprocess.Popen[str]") -> None:
    """Return once a file has been written and is not empty, or the process is gone."""
    previous_mtime = path.stat().st_mtime_ns if path.exists() else None
    while life.poll() is None:
        if path.exists() and path.stat().st_size and path.stat().st_mtime_ns != previous_mtime:
            return
        time.sleep(0.001)


def run_command(arguments: list[str]) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def assert_equal_runs(folder: Path, results: tuple[str, ...], but: Collection[str] = ()) -> None:
    """Raise AssertionError unless both runs have equal models, checkpoints and metrics, times and `but` aside."""
    for name in results:
        assert has_equal_tensors(*(folder / name.format(run) for run in ("alone", "killed"))), name
    steps = (without_times(folder / f"{run}.run/metrics.jsonl") for run in ("alone", "killed"))
    reference, resumed = (
        [{k: v for k, v in r.items() if k not in but} for r in records] for records in steps
    )
    assert reference == resumed


def has_equal_tensors(*paths: Path) -> bool:
    """Whether two GGUF files have equal tensors."""
    first, second = map(GGUF, paths)
    return first.entries.keys() == second.entries.keys() and all(
        first.array(name).tobytes() == second.array(name).tobytes() for name in first.entries
    )


def without_times(path: Path) -> list[dict[str, float]]:
    """All steps of a run, less what a clock says."""
    steps = (record for record in metrics_file.read(path) if record.get("event") != "end")
    return [{key: value for key, value in r.items() if key not in TIMES} for r in steps]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("kind", nargs="?", choices=RUN_KINDS, default="train")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        steps = survive_kills(Path(folder), args.kills, args.seed, RUN_KINDS[args.kind])
    print(f"survived {args.kills} kills; {steps} steps, weights and metrics equal bit for bit")


if __name__ == "__main__":
    main()
