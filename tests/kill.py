"""Kill a training run at random moments and see that it resumes: python -m tests.kill [--kills 50] [--seed 0]

Every life begins with --resume and ends by SIGKILL, while it starts, trains or saves. The run that is finished
at last must equal one that was left alone, in weights, moments and metrics.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from packtrain.gguf import GGUF
from packtrain.watch import metrics

TINY = [
    *("--dim", "32", "--layers", "1", "--heads", "2", "--kv-heads", "1", "--ffn", "48", "-c", "32"),
    *("--batch-size", "2", "--vocab-size", "320"),
]
TIMES = ("tokens_per_second", "seconds")
ENDLESS = 1_000_000


def words(count: int = 12_000) -> str:
    """Text with something to learn: sentences of a small grammar."""
    rng, made = random.Random(0), ""
    parts = (
        ("The cat", "A dog", "One bird", "My friend"),
        ("saw", "ate", "likes", "hid"),
        ("fish", "the moon", "bread", "a song"),
    )
    while len(made) < count:
        made += " ".join(map(rng.choice, parts)) + rng.choice((". ", "! ", ".\n"))
    return made


def command(data: Path, output: Path, steps: int) -> list[str]:
    """A run whose steps do not depend on how many there will be."""
    flags = ["train", "--data", str(data), "-o", str(output), *TINY, "--iters", str(steps)]
    often = ["--save-every", "3", "--steps-per-eval", "25", "--val-batches", "1"]
    constant = ["--lr-scheduler", "constant", "--warmup-ratio", "0"]
    return [sys.executable, "-m", "packtrain", *flags, *often, *constant, "--resume"]


def survive(folder: Path, kills: int, seed: int) -> int:
    """Steps of a run that was killed so often and still equals one left alone; raises AssertionError if it does not."""
    data, alone, killed = folder / "text.txt", folder / "alone.gguf", folder / "killed.gguf"
    data.write_text(words())
    run(command(data, folder / "warm.gguf", 1))
    began = time.monotonic()
    run(command(data, folder / "again.gguf", 1))
    start_seconds = time.monotonic() - began
    rng, seen = random.Random(seed), folder / "killed.run/metrics.jsonl"
    for number in range(kills):
        life = subprocess.Popen(
            command(data, killed, ENDLESS),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if number % 4 == 1:  # while it starts
            time.sleep(rng.uniform(0, 1) * start_seconds)
        else:  # while it trains and saves
            wait_for_more(seen, life)
            time.sleep(rng.uniform(0, 0.4))
        ended = life.poll()
        life.kill()
        said = life.communicate()[1]
        assert ended is None, said
    lines = metrics.read(seen)
    steps = lines[-1]["step"] + 10
    run(command(data, killed, steps))
    run(command(data, alone, steps))
    same(folder, "alone", "killed")
    return int(steps)


def wait_for_more(path: Path, life: "subprocess.Popen[str]") -> None:
    """Return once a file has grown or been begun anew, or the process is gone."""
    before = path.stat() if path.exists() else None
    while life.poll() is None:
        if path.exists() and (before is None or path.stat().st_mtime_ns != before.st_mtime_ns):
            return
        time.sleep(0.001)


def run(arguments: list[str]) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def same(folder: Path, a: str, b: str) -> None:
    """Raise AssertionError unless two runs have equal models, checkpoints and metrics, times aside."""
    for name in ("{}.gguf", "{}.run/checkpoint.gguf"):
        one, other = (GGUF(folder / name.format(run)) for run in (a, b))
        assert one.entries.keys() == other.entries.keys()
        for entry in one.entries:
            assert one.array(entry).tobytes() == other.array(entry).tobytes(), entry
    one, other = (without_times(folder / f"{run}.run/metrics.jsonl") for run in (a, b))
    assert one == other


def without_times(path: Path) -> list[dict[str, float]]:
    """All steps of a run, less what a clock says."""
    steps = (record for record in metrics.read(path) if record.get("event") != "end")
    return [{key: value for key, value in r.items() if key not in TIMES} for r in steps]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        steps = survive(Path(folder), given.kills, given.seed)
    print(f"survived {given.kills} kills; {steps} steps, weights and metrics equal bit for bit")


if __name__ == "__main__":
    main()
